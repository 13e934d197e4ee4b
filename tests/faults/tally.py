"""The account of a world after its faults: the vendor's ledger against what was wanted and what the outcomes say.

Counted here from the ledger and plain rows, beside the auditor (`ecluse.verify`) and without its code: two witnesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.subjects import Entry, Subject

Ask = Callable[..., list[dict[str, Any]]]

# Whatever a replica wrote after it had been declared dead. (Who settled an effect is not on record, who sent it is.)
LATE = """
WITH dead AS (SELECT id, ended_at FROM replicas WHERE state = 'dead'),
its AS (SELECT c.id AS claim_id, c.taken_at, d.* FROM dead d JOIN claims c ON c.replica_id = d.id)
SELECT 'claim' AS what, claim_id::text AS which, taken_at AS at, id AS replica, ended_at FROM its
WHERE taken_at > ended_at
UNION ALL
SELECT 'attempt', a.event_id, a.at, d.id, d.ended_at FROM dead d JOIN attempts a ON a.replica_id = d.id
WHERE a.at > d.ended_at
UNION ALL
SELECT 'result', i.id::text, i.finished_at, its.id, its.ended_at FROM its JOIN items i ON i.claim_id = its.claim_id
WHERE i.finished_at > its.ended_at
UNION ALL
SELECT 'send', e.id::text, e.last_send_at, its.id, its.ended_at FROM its JOIN effects e ON e.claim_id = its.claim_id
WHERE e.last_send_at > its.ended_at
"""
NOTED = """
SELECT CASE i.stage WHEN 'audit' THEN 'audit of ' || i.target ELSE 'transcript of ' || i.key END AS name, count(*) AS n
FROM attempts a JOIN items i ON i.id = a.item_id WHERE a.maybe_paid GROUP BY 1
"""
COUNTS = ("status", "selected", "successful", "failed", "ignored")
RUNS = "SELECT id, event_key, status, selected, successful, failed, ignored, ended_at FROM runs"
SHOWN = 8


@dataclass
class Tally:
    runs: int = 0
    targets: int = 0
    wanted: int = 0
    applied: int = 0
    sends: int = 0
    paid_twice: int = 0  # payments beyond the first of each
    unknown: int = 0  # outcomes that had to say "it may have happened"
    faults: Mapping[str, int] = field(default_factory=dict)  # calls that the vendor spoilt, by kind
    unended: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    false_outcomes: list[str] = field(default_factory=list)
    late_writes: list[str] = field(default_factory=list)
    verify: Any = "clean"

    def problems(self) -> list[str]:
        """One line per finding, none if all is well."""
        found = [
            f"{word}: {len(lines)}, e.g. {'; '.join(lines[:SHOWN])}"
            for word in ("unended", "lost", "doubled", "false_outcomes", "late_writes")
            if (lines := getattr(self, word))
        ]
        if self.verify != "clean":
            found.append(f"verify: {str(self.verify)[:3000]}")
        return found


def take(subject: Subject, started: Mapping[str, Sequence[str]], ask: Ask, ledger: Sequence[Entry]) -> Tally:
    """`started` are the targets of each run by its event key; `ledger` is the vendor's, whole."""
    rows = {row["event_key"]: row for row in ask(RUNS)}
    runs = {rows[key]["id"]: targets for key, targets in started.items() if key in rows}
    outcomes = {
        (row["run_id"], row["target"]): row
        for row in ask("SELECT run_id, target, outcome, error_code, effect_may_exist FROM outcomes")
    }
    effects = ask("SELECT id::text AS id, run_id, stage, target, state, sends FROM effects")
    applied = [entry for entry in ledger if entry["kind"] == subject.kind]
    tally = Tally(
        runs=len(started),
        targets=sum(map(len, started.values())),
        wanted=sum(len(subject.wanted(target)) for targets in started.values() for target in targets),
        applied=len({subject.effect(entry) for entry in applied}),
        sends=sum(row["sends"] for row in effects),
        unknown=sum(row["effect_may_exist"] for row in outcomes.values()),
        faults=Counter(entry["fault"] for entry in ledger if entry["kind"] == "call" and entry["fault"]),
    )
    tally.unended = [key for key in started if key not in rows or rows[key]["ended_at"] is None]
    tally.paid_twice = _beyond_the_first(subject, applied).total() if subject.kind == "paid" else 0
    if subject.kind == "paid":
        noted = {row["name"]: row["n"] for row in ask(NOTED)}
        tally.doubled = list(_unnoted(subject, applied, noted))
    else:
        tally.doubled = list(_doubled(subject, applied))
    tally.lost = list(_lost(subject, runs, outcomes, applied))
    for key, targets in started.items():
        if key not in tally.unended:
            tally.false_outcomes += _unlike(subject, rows[key], targets, outcomes)
    tally.false_outcomes += _contradicted(subject, runs, outcomes, effects, applied)
    tally.late_writes = [
        f"{row['what']} {row['which']} of {row['replica']} at {row['at']}, which was dead since {row['ended_at']}"
        for row in ask(LATE)
    ]
    return tally


def _beyond_the_first(subject: Subject, applied: Sequence[Entry]) -> Counter[str]:
    return Counter(subject.effect(entry) for entry in applied) - Counter({subject.effect(entry) for entry in applied})


def _unnoted(subject: Subject, applied: Sequence[Entry], noted: Mapping[str, int]) -> Iterator[str]:
    """Yield what was paid for more often than is recorded: a call whose worker died or whose answer was lost is paid
    for again, and each repetition that may have been paid is recorded."""
    for name, times in _beyond_the_first(subject, applied).items():
        if times > noted.get(name, 0):
            yield f"{name} paid for {times} times too often, but {noted.get(name, 0)} are on record"


def _doubled(subject: Subject, applied: Sequence[Entry]) -> Iterator[str]:
    """An absolute write repeated without changing anything does no harm; a second change or creation does."""
    changes = Counter(subject.effect(entry) for entry in applied if entry["value"] != entry["before"])
    yield from (f"{name} x{times}" for name, times in changes.items() if times > 1)
    created = Counter(entry["key"] for entry in applied if entry["key"] and entry["before"] is None)
    yield from (f"key {key} x{times}" for key, times in created.items() if times > 1)


def _lost(
    subject: Subject,
    runs: Mapping[int, Sequence[str]],
    outcomes: Mapping[tuple[int, str], Mapping[str, Any]],
    applied: Sequence[Entry],
) -> Iterator[str]:
    there = {subject.effect(entry) for entry in applied}
    for run, targets in runs.items():
        for target in targets:
            outcome = outcomes.get((run, target))
            if outcome is None:
                yield f"target {target} of run {run}"
            elif outcome["outcome"] == "successful":
                yield from (f"{name} (run {run})" for name in sorted(subject.wanted(target) - there))


def _unlike(
    subject: Subject,
    row: Mapping[str, Any],
    targets: Sequence[str],
    outcomes: Mapping[tuple[int, str], Mapping[str, Any]],
) -> Iterator[str]:
    """Targets that came out otherwise than in a run without faults."""
    expected = subject.expected(len(targets))
    if all(row[name] == expected[name] for name in COUNTS):
        return
    others = [word for word in ("failed", "ignored", "successful") if row[word] > int(str(expected[word]))]
    named = [
        f"run {row['id']}: {target} is {one['outcome']} ({one['error_code']}"
        f"{', effect may exist' if one['effect_may_exist'] else ''})"
        for target in targets
        if (one := outcomes.get((row["id"], target))) and one["outcome"] in others
    ]
    surplus = sum(row[word] - int(str(expected[word])) for word in others)
    yield from named[: max(1, surplus)] or [f"run {row['id']}: {dict(row)}, not {expected}"]


def _contradicted(
    subject: Subject,
    runs: Mapping[int, Sequence[str]],
    outcomes: Mapping[tuple[int, str], Mapping[str, Any]],
    effects: Sequence[Mapping[str, Any]],
    applied: Sequence[Entry],
) -> Iterator[str]:
    """What the database says of an effect, and the ledger does not confirm."""
    name, of_entry = ("target", "ref") if subject.shared_calls else ("id", "key")
    there = {entry[of_entry] for entry in applied}
    for row in effects:
        outcome = outcomes.get((row["run_id"], row["target"]))
        flagged = outcome is not None and outcome["effect_may_exist"]
        if (row["state"] == "applied") != (row[name] in there) and not flagged:
            is_there = "is" if row[name] in there else "is not"
            what = f"effect {row['id']} ({row['stage']} of {row['target']})"
            yield f"{what} is {row['state']}, and {is_there} in the ledger"
    wanted = {name for targets in runs.values() for target in targets for name in subject.wanted(target)}
    yield from (f"{name} was not wanted" for name in sorted({subject.effect(entry) for entry in applied} - wanted))
