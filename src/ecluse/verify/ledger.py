"""Comparison of the effects with the vendors' own ledger (I-03 to I-06), which knows records and idempotency keys, but
no runs or items.

Our writes carry the effect's id, a UUID, as their Idempotency-Key; a call over several records carries that of one of
them. A write with any other key is a third party's, and so is one without a key that names its client (X-Client: a
test, or a person, playing a third party); a write with neither can only be ours.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen
from uuid import UUID

from ecluse.verify.report import About, Report, Violation

PAGE = 10_000
WRITES = ("POST", "PUT", "PATCH", "DELETE")
# Seconds. Instants of two processes on one host agree at least this well.
TOLERANCE = 0.05
# Seconds. A value read from a vendor may be this old when it is recorded.
READ_AGE = 5.0
DEFINITELY_NOT = ("planned", "rejected", "not_applied", "conflict")

EFFECTS = """
SELECT id, run_id, item_id, target, key, class, state, wanted, sends, first_send_at, settled_at,
       last_send_at + quiet AS quiet_until
FROM effects ORDER BY run_id, item_id, round
"""


class Unreadable(Exception):
    """The ledger cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of the ledger, as docs/sandbox.md describes it; instants are seconds since the epoch. A key that is a
    UUID is normalised to one spelling."""

    seq: int
    at: float
    vendor: str
    kind: str
    method: str
    path: str
    key: str | None
    client: str | None
    ref: str | None
    call_seq: int | None
    status: int | None
    value: Any
    before: Any
    retry_after: float | None
    done_at: float | None


class Ledger:
    """The entries of a ledger, indexed by key and by record; `applied` has the entries of kind `effect`. `begins`: the
    instant since which it has every entry; -inf if that is not known."""

    def __init__(self, lines: Iterable[Line], begins: float = float("-inf")) -> None:
        self.lines, self.begins = list(lines), begins
        self.applied = [line for line in self.lines if line.kind == "effect"]
        self.by_key: dict[str | None, list[Line]] = defaultdict(list)
        self.by_ref: dict[str | None, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
        for line in self.lines:
            self.by_key[line.key].append(line)
        for line in self.applied:
            self.by_ref[line.ref][line.vendor].append(line)

    def applied_with(self, key: str) -> list[Line]:
        """Return the effects that were applied under this key."""
        return [line for line in self.by_key.get(key, ()) if line.kind == "effect"]

    def about(self, keys: Iterable[str | None], refs: Iterable[str | None], seqs: Collection[int]) -> list[Line]:
        """Return the lines with one of these keys, the lines applied to these records, and the lines with these
        numbers."""
        with_key = [line for key in keys if key for line in self.by_key.get(key, ())]
        of_ref = [line for ref in refs if ref for history in self.by_ref.get(ref, {}).values() for line in history]
        these = [line for line in self.lines if line.seq in seqs]
        return list({line.seq: line for line in with_key + of_ref + these}.values())

    def held(self, ref: str, until: float, since: float) -> list[Any]:
        """Return every value that the record `ref` had from `since` to `until`, as far as the ledger knows."""
        values = []
        for history in self.by_ref.get(ref, {}).values():
            before = [line.value for line in history if line.at <= since]
            values += before[-1:] or [history[0].before]
            values += [line.value for line in history if since < line.at <= until]
        return values

    def overwritten(self, line: Line, until: float) -> bool:
        """Return True if another write changed the record after this one, up to `until`."""
        history = self.by_ref[line.ref][line.vendor]
        return any(other.seq > line.seq and other.key != line.key and other.at <= until for other in history)


def read(url: str) -> Ledger:
    """Read the whole ledger of the sandbox at this URL; raise Unreadable if it cannot be fetched or parsed."""
    lines: list[Line] = []
    while True:
        query = urlencode({"after": lines[-1].seq if lines else 0, "limit": PAGE})
        address = f"{url.rstrip('/')}/_sandbox/ledger?{query}"
        try:
            with urlopen(address, timeout=30) as answer:  # noqa: S310 - the operator's own address
                found = json.load(answer)
                page = [_line(entry) for entry in found["entries"]]
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise Unreadable(f"no ledger at {url} ({error})") from error
        lines += page
        if len(page) < PAGE:
            return Ledger(lines, found.get("since", float("-inf")))


def _line(entry: dict[str, Any]) -> Line:
    known = {name: entry[name] for name in Line.__slots__}
    return Line(**known | {"key": as_effect_id(entry["key"]) or entry["key"]})


def as_effect_id(key: str | None) -> str | None:
    """Return the key as a UUID in canonical spelling, as ids of effects are stored; None if it is not a UUID."""
    try:
        return None if key is None else str(UUID(key))
    except ValueError:
        return None


def agrees(value: Any, wanted: Any) -> bool:
    """Return True if the vendor's value is the wanted one. It may have more fields, or be the value of the only wanted
    field, without its name. An `amount` is in minor units, the vendor's price is text with two decimals."""
    if not isinstance(wanted, dict):
        return bool(value == wanted)
    if isinstance(value, dict):
        return all(name in value and value[name] == each for name, each in wanted.items())
    if wanted.keys() == {"amount"}:
        return bool(value == f"{wanted['amount'] // 100}.{wanted['amount'] % 100:02d}")
    return list(wanted.values()) == [value]


def records(effect: dict[str, Any]) -> tuple[str, ...]:
    """Return the names that the record of an effect may have at the vendor."""
    return (effect["key"], effect["target"])


def attributed(ledger: Ledger, effects: list[dict[str, Any]], *, moved: bool) -> Ledger:
    """Return the ledger with each line of a call over several records under the key of its own effect, because such a
    call carries the key of one record, or none. The effect of a line is the latest one that wanted this value for that
    record and was in flight at that time; a line without such an effect loses its key, and is an orphan. `moved`: the
    database's clock was moved, so that instants are not compared."""
    absolute = [effect for effect in effects if effect["class"] == "C2" and effect["sends"]]
    known = {str(effect["id"]): records(effect) for effect in absolute}
    sent: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for effect in absolute:
        for name in set(records(effect)):
            sent[name].append(effect)

    def fits(line: Line, effect: dict[str, Any]) -> bool:
        since, until = effect["first_send_at"].timestamp() - TOLERANCE, effect["quiet_until"].timestamp()
        return agrees(line.value, effect["wanted"]) and (moved or since <= line.at <= until + TOLERANCE)

    records_of = Counter(line.call_seq for line in ledger.applied)

    def named(line: Line) -> Line:
        if line.kind != "effect" or line.ref is None:
            return line
        if line.client is not None if line.key is None else line.key not in known:
            return line  # another party's
        if line.key is not None and (records_of[line.call_seq] == 1 or line.ref in known[line.key]):
            return line
        fitting = [effect for effect in sent.get(line.ref, ()) if fits(line, effect)]
        latest = max(fitting, key=lambda effect: effect["first_send_at"], default=None)
        return replace(line, key=None if latest is None else str(latest["id"]))

    return Ledger(map(named, ledger.lines))


def check(
    effects: list[dict[str, Any]],
    ledger: Ledger | None,
    cut: datetime,
    report: Report,
    *,
    moved: bool,
    since: float = float("-inf"),
) -> None:
    """Check I-03 to I-06. `ledger`: None if only the tables can be checked. `cut`: the instant of the snapshot; later
    entries are left out of I-05 and I-06. `moved`: the database's clock was moved, so that instants cannot be compared.
    `since`: before this instant, retention may have deleted intents."""
    report.checked["ledger_effects"] = len(ledger.applied) if ledger is not None else 0
    if ledger is None:
        report.notes.append("no ledger given: I-03, I-06 and I-14 were not checked, I-04 and I-05 only by the tables")
        ledger = Ledger([])
    else:
        if not moved:
            _note_begin(ledger, effects, report)
        ledger = attributed(ledger, effects, moved=moved)
        report.checked["I-04"] += sum(effect["state"] == "applied" for effect in effects)
        report.checked["I-05"] += sum(effect["state"] in DEFINITELY_NOT for effect in effects)
        for effect in effects:
            i_04_no_false_success(effect, ledger, report, moved=moved)
    before_cut = Ledger(line for line in ledger.lines if line.at <= cut.timestamp())
    report.checked["I-03"] = sum(bool(ledger.applied_with(str(effect["id"]))) for effect in effects)
    for effect in effects:
        i_03_no_effect_twice(effect, ledger, report)
        i_05_no_false_failure(effect, before_cut, report, moved=moved)
    i_06_no_orphan_effect(effects, before_cut, report, moved=moved, since=since)


def _violation(invariant: str, effect: dict[str, Any], message: str) -> Violation:
    """Return a violation about an effect."""
    about = About(effect["run_id"], effect["target"], effect["item_id"], str(effect["id"]), effect["key"])
    return Violation(invariant, f"effect {effect['id']} ({effect['class']} {effect['key']})", message, about=about)


def _note_begin(ledger: Ledger, effects: list[dict[str, Any]], report: Report) -> None:
    """Note in the report how many effects were sent before the ledger begins: it was emptied or reset since."""
    sent = [one["first_send_at"].timestamp() for one in effects if one["first_send_at"] is not None]
    if early := sum(at < ledger.begins - TOLERANCE for at in sent):
        begins = datetime.fromtimestamp(ledger.begins, UTC)
        report.notes.append(
            f"the ledger begins at {begins:%Y-%m-%d %H:%M:%S}Z, and {early} of {len(sent)} effects were sent before: "
            "what it lacks of them counts as a violation"
        )


def i_03_no_effect_twice(effect: dict[str, Any], ledger: Ledger, report: Report) -> None:
    """Check that a keyed write (C1) is applied at most once, and that an absolute write (C2) changes its record at most
    once. A repeated write after a third party had restored the exact former value is allowed, because the program
    cannot notice that."""
    applied = ledger.applied_with(str(effect["id"]))
    if effect["class"] == "C1":
        if len(applied) > 1:
            report.violations.append(_violation("I-03", effect, f"applied {len(applied)} times"))
        return
    changes = [line for line in applied if line.value != line.before]
    again = [line for line in changes[1:] if (line.before, line.value) != (changes[0].before, changes[0].value)]
    if again:
        message = f"changed the record {len(changes)} times, and not from the same value: {changes[0].before!r}, then "
        message += ", ".join(repr(line.before) for line in again)
        report.violations.append(_violation("I-03", effect, message))


def i_04_no_false_success(effect: dict[str, Any], ledger: Ledger, report: Report, *, moved: bool) -> None:
    """Check that an effect recorded as applied was applied, or that its record had the wanted value at that time."""
    if effect["state"] != "applied":
        return
    own, wanted = ledger.applied_with(str(effect["id"])), effect["wanted"]
    if any(agrees(line.value, wanted) for line in own):
        return
    if effect["class"] == "C2":  # enough that the record had the wanted value, whichever client wrote it
        until = float("inf") if moved else effect["settled_at"].timestamp() + TOLERANCE
        since = float("-inf") if moved else until - READ_AGE
        held = [value for name in set(records(effect)) for value in ledger.held(name, until, since)]
        # The ledger has no writes to the record, so its value is unknown here: that we read the wanted one is possible.
        if any(agrees(value, wanted) for value in held) or (not held and effect["sends"] == 0):
            return
        had = f"the record had {held[-1]!r}" if held else "the ledger has no entry for that record"
    else:
        had = f"the ledger has {own[-1].value!r}" if own else "the ledger has no effect with its key"
    report.violations.append(_violation("I-04", effect, f"applied, wanted {wanted!r}, but {had}"))


def i_05_no_false_failure(effect: dict[str, Any], ledger: Ledger, report: Report, *, moved: bool) -> None:
    """Check that an effect settled as not applied was not applied. A write that a third party had overwritten before we
    read the record back does not count."""
    if effect["state"] not in DEFINITELY_NOT:
        return
    settled_at = None if moved else effect["settled_at"]
    looked_at = float("inf") if settled_at is None else settled_at.timestamp() + TOLERANCE
    applied = ledger.applied_with(str(effect["id"]))
    if effect["class"] == "C2":
        applied = [line for line in applied if not ledger.overwritten(line, looked_at)]
    if applied:
        message = f"{effect['state']}, but the vendor applied it ({applied[-1].ref}: {applied[-1].value!r})"
        report.violations.append(_violation("I-05", effect, message))


def i_06_no_orphan_effect(
    effects: list[dict[str, Any]], ledger: Ledger, report: Report, *, moved: bool, since: float
) -> None:
    """Check that every write of ours in the ledger has an intent that was recorded before it, and that no write was
    received more often than it was sent. `moved` and `since` as in `check`."""
    by_id = {str(effect["id"]): effect for effect in effects}
    for line in ledger.applied:
        deleted = line.at < since and line.key not in by_id
        if not deleted and (wrong := _orphan(line, by_id, moved=moved)) is not None:
            about = About(effect_id=line.key, ref=line.ref)
            report.violations.append(Violation("I-06", f"ledger line {line.seq} ({line.ref})", wrong, about=about))
    writes = (
        line
        for line in ledger.lines
        if line.kind == "call" and line.method in WRITES and (line.at >= since or line.key in by_id)
    )
    calls = Counter(line.key for line in writes if line.key is not None and as_effect_id(line.key))
    for key, count in calls.items():
        sends = by_id[key]["sends"] if key in by_id else 0
        if count > sends and (key in by_id or not ledger.applied_with(key)):
            message = f"the vendor was called {count} times, but {sends} sends are recorded"
            report.violations.append(Violation("I-06", f"effect {key}", message, about=About(effect_id=key)))
    report.checked["I-06"] = len(ledger.applied) + len(calls)


def _orphan(line: Line, by_id: dict[str, dict[str, Any]], *, moved: bool) -> str | None:
    """Return the problem of an applied write without a proper intent, as text; None if it has one or is not ours."""
    if line.key is None:
        return "applied without a key" if line.method in WRITES and line.client is None else None
    if as_effect_id(line.key) is None:
        return None
    effect = by_id.get(line.key)
    if effect is None:
        return "applied, but no intent is recorded"
    if effect["first_send_at"] is None or effect["sends"] == 0:
        return f"applied, but effect {line.key} was never sent"
    late = effect["first_send_at"].timestamp() - line.at
    return f"applied {late * 1000:.0f} ms before its intent was recorded" if late > TOLERANCE and not moved else None
