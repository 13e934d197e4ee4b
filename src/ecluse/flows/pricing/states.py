"""The states of rule runs and of their targets, and the only place that changes them. A change locks the rows, compares
their states with the tables below, and writes them with their history; if one row may not go where it should, nothing
is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import NamedTuple

from ecluse.base.errors import Conflict, NotFound
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_rows, fetch_value
from ecluse.engine import State, StatusMap

PREVIEW, QUEUED, APPLYING, APPLIED = "PREVIEW", "QUEUED", "APPLYING", "APPLIED"
PARTIAL, FAILED, ROLLED_BACK = "PARTIAL", "FAILED", "ROLLED_BACK"

RUNS = StatusMap(
    meaning={
        PREVIEW: State.DRAFT,
        QUEUED: State.QUEUED,
        APPLYING: State.RUNNING,
        APPLIED: State.SUCCEEDED,
        PARTIAL: State.PARTIAL,
        FAILED: State.FAILED,
        ROLLED_BACK: State.REVERTED,
    },
    moves={
        PREVIEW: frozenset({QUEUED}),
        QUEUED: frozenset({APPLYING}),
        APPLYING: frozenset({APPLIED, PARTIAL, FAILED}),
        PARTIAL: frozenset({APPLYING, ROLLED_BACK}),
        FAILED: frozenset({APPLYING}),
        APPLIED: frozenset({ROLLED_BACK}),
    },
    initial=PREVIEW,
)
TARGETS = StatusMap(
    meaning={status: state for status, state in RUNS.meaning.items() if status != PARTIAL},
    moves={
        PREVIEW: frozenset({QUEUED}),
        QUEUED: frozenset({APPLYING}),
        APPLYING: frozenset({APPLIED, QUEUED, FAILED}),
        FAILED: frozenset({QUEUED}),
        APPLIED: frozenset({ROLLED_BACK}),
    },
    initial=PREVIEW,
)
UNFINISHED = (QUEUED, APPLYING)
NOT_ATTEMPTED = "NOT_ATTEMPTED"  # the error code of targets that were never sent

MOVE_RUNS = """
UPDATE rule_runs r SET status = m.status, round = m.round,
    queued_at = CASE m.status WHEN 'QUEUED' THEN now ELSE queued_at END,
    started_at = CASE m.status WHEN 'APPLYING' THEN coalesce(started_at, now) ELSE started_at END,
    finished_at = CASE WHEN m.status = 'APPLYING' THEN NULL WHEN m.status IN ('APPLIED', 'PARTIAL', 'FAILED') THEN now
                       ELSE finished_at END,
    rolled_back_at = CASE m.status WHEN 'ROLLED_BACK' THEN now END
FROM jsonb_to_recordset(%s::jsonb) AS m(id bigint, status text, round integer), (SELECT ecluse_now() AS now) clock
WHERE r.id = m.id
"""
# `attempts` counts the retries of a round: a manual one starts over.
MOVE_TARGETS = """
UPDATE rule_targets t SET status = m.status, round = m.round, error_code = m.error_code, error = m.error,
    next_attempt_at = m.next_attempt_at,
    attempts = CASE WHEN m.round > t.round THEN 0 ELSE coalesce(m.attempts, t.attempts) END,
    applied_at = CASE WHEN m.status IN ('APPLIED', 'ROLLED_BACK') THEN coalesce(t.applied_at, now) END,
    begun_at = CASE WHEN m.attempts IS NOT NULL OR m.status = 'APPLIED' THEN coalesce(t.begun_at, now)
                    WHEN m.round = t.round THEN t.begun_at END
FROM jsonb_to_recordset(%s::jsonb) AS m(id bigint, status text, round integer, error_code text, error text,
    next_attempt_at timestamptz, attempts integer), (SELECT ecluse_now() AS now) clock
WHERE t.id = m.id
"""
HISTORY = """
INSERT INTO rule_history (tenant_id, rule_run_id, rule_target_id, from_status, to_status, round, actor, source,
                          correlation_id, at)
SELECT r.tenant_id, r.id, h.target, h.former, h.following, h.round, %(actor)s, %(source)s,
       coalesce(%(correlation_id)s, r.correlation_id), clock.now
FROM (SELECT ecluse_now() AS now) clock CROSS JOIN ROWS FROM (jsonb_to_recordset(%(rows)s::jsonb)
    AS (run bigint, target bigint, former text, following text, round integer)) WITH ORDINALITY
    AS h(run, target, former, following, round, place)
JOIN rule_runs r ON r.id = h.run ORDER BY h.place
"""
LOCK = """
SELECT id, status, round, {run}, {target} FROM {table}
WHERE id = ANY(%(ids)s) AND (%(run)s::bigint IS NULL OR {run} = %(run)s) ORDER BY id FOR NO KEY UPDATE
"""
MOVED = {
    "rule run": (RUNS, LOCK.format(table="rule_runs", run="id", target="null"), MOVE_RUNS),
    "target": (TARGETS, LOCK.format(table="rule_targets", run="rule_run_id", target="id"), MOVE_TARGETS),
}
COUNTS = "SELECT status, count(*) FROM rule_targets WHERE rule_run_id = %s GROUP BY status"


@dataclass(frozen=True, slots=True)
class By:
    """Who asked for a change, as the history keeps it. Without a correlation id, it is that of the run."""

    actor: str
    source: str
    correlation_id: str | None = None


WORKER, SCHEDULER = By("Worker", "engine"), By("Scheduler", "schedule")


class Move(NamedTuple):
    """A change of a run or a target through all states of `path`, in one transaction: a target that was never sent goes
    through APPLYING to FAILED. Of a worker's retry: `next_attempt_at`, and `attempts`, the retries of this round with
    it."""

    id: int
    path: Sequence[str]
    error_code: str | None = None
    error: str | None = None
    next_attempt_at: datetime | None = None
    attempts: int | None = None


class Hop(NamedTuple):
    """One row of the history; `target` None: of the run itself, `former` None: its creation."""

    run: int
    target: int | None
    former: str | None
    following: str
    round: int


async def move_runs(connection: Connection, wanted: Mapping[int, str], by: By) -> None:
    """Change the statuses of rule runs, given by id; all or, with NotFound or ForbiddenTransition, none."""
    await _move(connection, "rule run", [Move(run, (status,)) for run, status in wanted.items()], by)


async def move_targets(connection: Connection, moves: Iterable[Move], by: By, *, run: int | None = None) -> None:
    """Change the statuses of targets, of run `run` if given; all or, with NotFound or ForbiddenTransition, none."""
    await _move(connection, "target", moves, by, run)


async def _move(connection: Connection, noun: str, moves: Iterable[Move], by: By, run: int | None = None) -> None:
    """Make these moves. A manual retry, from PARTIAL or FAILED, begins the next round of a run and of its targets."""
    states, lock, write = MOVED[noun]
    wanted = {one.id: one for one in moves}
    locked = await fetch_rows(connection, lock, {"ids": list(wanted), "run": run})
    if strangers := sorted(set(wanted) - {row[0] for row in locked}):
        raise NotFound(f"There is no {noun} {strangers[0]}" + ("." if run is None else f" of rule run {run}."))
    rows: list[Row] = []
    hops: list[Hop] = []
    for number, former, round_, of_run, target in locked:
        move = wanted[number]
        for following in move.path:
            states.check(former, following, f"{noun} {number}")
            round_ += former in (PARTIAL, FAILED) and following in UNFINISHED
            hops.append(Hop(of_run, target, former, following, round_))
            former = following
        error = None if move.error is None else storable(move.error)
        rows.append({**move._asdict(), "status": former, "round": round_, "error": error})
    await connection.execute(write, (as_json(rows),))
    await record(connection, hops, by)


async def record(connection: Connection, hops: Sequence[Hop], by: By) -> None:
    """Write the history of changes, in their order."""
    await connection.execute(HISTORY, {**asdict(by), "rows": as_json([hop._asdict() for hop in hops])})


def status_by_counts(counts: Mapping[str, int]) -> str:
    """Return the status of a run whose execution is over, from the number of its targets by status. What was applied
    and then rolled back by choice counts as applied."""
    applied = counts.get(APPLIED, 0) + counts.get(ROLLED_BACK, 0)
    if not counts.get(FAILED, 0):
        return APPLIED
    return PARTIAL if applied else FAILED


def contradiction(status: str, counts: Mapping[str, int]) -> str | None:
    """Return what is wrong with a run of this status, whose targets have these statuses; None if nothing is."""
    if status == APPLIED and any(counts.get(one, 0) for one in (FAILED, *UNFINISHED)):
        return "Run marked APPLIED but has failed targets"
    if status in (PARTIAL, FAILED, ROLLED_BACK) and any(counts.get(one, 0) for one in UNFINISHED):
        return f"Run marked {status} but has unfinished targets"
    return None


async def validate_run_state(connection: Connection, run: int) -> None:
    """Raise Conflict if the status of a run and the statuses of its targets contradict each other."""
    if (status := await fetch_value(connection, "SELECT status FROM rule_runs WHERE id = %s", (run,))) is None:
        raise NotFound(f"There is no rule run {run}.")
    counts = dict(await fetch_rows(connection, COUNTS, (run,)))
    if (wrong := contradiction(status, counts)) is not None:
        raise Conflict(f"{wrong} (rule run {run}: {', '.join(f'{n} {one}' for one, n in sorted(counts.items()))})")
