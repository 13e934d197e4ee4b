"""The gate of a stage: wait until its items are finished, for at most the stage's `max_wait`.

The message is a hint, the table is the truth: on every wake-up the gate reads the counts and decides from them alone,
so that a lost, doubled or early message does no harm, and any replica can continue where another died. A stall (no
progress for three poll intervals) opens a further round for failed items while rounds remain; it neither ends nor
extends a gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from ecluse.base.ids import item_event_id
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_one, fetch_row, fetch_rows
from ecluse.engine.model import counters
from ecluse.engine.model.flow import Run, Stage
from ecluse.engine.runs import lifecycle, run_log
from ecluse.engine.runs.items import COUNTS, fail_waiting
from ecluse.engine.runs.stages import event_of
from ecluse.engine.runs.units import Counted

STALL_POLLS = 3
FIRST_PAUSE = timedelta(seconds=1)
# The parent run shows the progress of its child runs as its gate counted it last, so the gate polls often.
UNITS_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class StageProgress:
    """The state of a stage at one poll: counts read from the database, at the database's own time. `failed_for_good`
    counts the failed items (included in `failed`) that a further round would not help."""

    now: datetime
    started_at: datetime
    deadline_at: datetime
    progress_at: datetime
    fanned_out: bool
    round: int
    expected: int
    succeeded: int
    ignored: int
    failed: int
    failed_for_good: int
    in_flight: int
    run_ended: bool = False
    clock_stopped: bool = False  # a lane that the stage needs is paused, and the stage's time with it

    @property
    def finished(self) -> int:
        return self.succeeded + self.ignored + self.failed

    @property
    def waiting(self) -> int:
        return self.expected - self.finished - self.in_flight

    def stalled(self, stage: Stage) -> bool:
        """Return True if there was no progress for STALL_POLLS poll intervals."""
        return self.now - self.progress_at >= STALL_POLLS * stage.poll

    def may_heal(self, stage: Stage) -> bool:
        """Return True if some failed items may succeed, and the stage has a further round for them."""
        return self.fanned_out and self.round < stage.rounds and self.failed > self.failed_for_good


@dataclass(frozen=True)
class GateEnded:
    """Decision: the gate ends, because all items are finished or its time is over."""

    cause: Literal["done", "timeout"]


@dataclass(frozen=True)
class Redispatch:
    """Decision: the gate opens the round `round` for failed items that may succeed."""

    round: int


@dataclass(frozen=True)
class Wait:
    """Decision: the gate polls again after `seconds`, or earlier if it is woken."""

    seconds: float


def decide(progress: StageProgress, stage: Stage) -> GateEnded | Redispatch | Wait:
    """Decide from the counts of this poll whether the gate of the stage ends, opens another round, or waits, and for
    how long."""
    if progress.fanned_out and progress.finished == progress.expected and not progress.may_heal(stage):
        return GateEnded("done")
    # Pauses grow with the age of the gate from one second to the poll interval; a message ends a pause early.
    until = [min(max(FIRST_PAUSE, (progress.now - progress.started_at) / 10), stage.poll)]
    if not progress.clock_stopped:
        if progress.now >= progress.deadline_at:
            return GateEnded("timeout")
        until.append(progress.deadline_at - progress.now)
        if progress.may_heal(stage):
            if progress.stalled(stage):
                return Redispatch(progress.round + 1)
            until.append(progress.progress_at + STALL_POLLS * stage.poll - progress.now)
    return Wait(max(min(until).total_seconds(), 0.01))


def next_round_at(progress: StageProgress, stage: Stage) -> datetime | None:
    """Return the instant at which the gate opens another round for failed items if there is no progress before. None:
    it opens none, or the instant is unknown because the stage's clock is stopped."""
    at = progress.progress_at + STALL_POLLS * stage.poll
    return at if progress.may_heal(stage) and not progress.clock_stopped and at < progress.deadline_at else None


def topic(stage: str) -> str:
    """Return the topic of the messages that wake the gate of the stage."""
    return f"gate:{stage}"


# Called at every poll of a gate with the progress and the decision.
Seen = Callable[[Connection, Run, StageProgress, GateEnded | Redispatch | Wait], Awaitable[None]]


class Units(Protocol):
    """The units of a stage whose work is done by other runs: `count` reads their progress, `again` repeats the failed
    ones. `again` is called before the round is marked as opened, possibly twice, so it must be idempotent."""

    async def count(self, connection: Connection, run: Run) -> Counted: ...

    async def again(self, connection: Connection, run: Run, round_: int) -> None: ...


COUNT_ITEMS = f"""
    SELECT s.expected, n.*, NULL::int AS units, NULL::int AS units_failed,
           CASE WHEN n.failed = 0 OR s.round >= %(rounds)s THEN 0 ELSE (
               SELECT count(*) FROM items i WHERE i.run_id = s.run_id AND i.stage = s.stage AND i.status = 'failed'
               AND i.permanent)::int END AS failed_for_good
    FROM stages s CROSS JOIN LATERAL {COUNTS} n WHERE s.run_id = %(run)s AND s.stage = %(stage)s"""  # noqa: S608
COUNT_UNITS = """
    SELECT expected, succeeded, 0 AS ignored, failed, expected - succeeded - failed AS in_flight, expected AS units,
           failed AS units_failed, failed_for_good
    FROM (VALUES (%(expected)s::int, %(succeeded)s::int, %(failed)s::int, %(failed_for_good)s::int))
        AS u(expected, succeeded, failed, failed_for_good)"""
# Stores the counts, and when they changed last, with the stage.
PROGRESS = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
n AS MATERIALIZED ({counted}),
seen AS (
    UPDATE stages s SET progress = n.succeeded + n.ignored, units = n.units, units_failed = n.units_failed,
        progress_at = CASE WHEN (s.progress, s.units) IS DISTINCT FROM (n.succeeded + n.ignored, n.units)
                           THEN clock.now ELSE s.progress_at END
    FROM n, clock WHERE s.run_id = %(run)s AND s.stage = %(stage)s AND s.ended_at IS NULL
      AND (s.progress, s.units, s.units_failed) IS DISTINCT FROM (n.succeeded + n.ignored, n.units, n.units_failed)
    RETURNING s.progress_at)
SELECT clock.now, s.started_at, s.deadline_at, coalesce((SELECT progress_at FROM seen), s.progress_at) AS progress_at,
       s.fanned_out_at IS NOT NULL AS fanned_out, s.round, n.expected, n.succeeded, n.ignored, n.failed,
       n.failed_for_good, n.in_flight, r.ended_at IS NOT NULL AS run_ended, clock_stopped(s.run_id, s.stage)
FROM stages s JOIN runs r ON r.id = s.run_id, n, clock WHERE s.run_id = %(run)s AND s.stage = %(stage)s
"""
# Items in backoff are not due, and not counted.
UNCLAIMED = """
SELECT count(*), string_agg(DISTINCT 'lane ' || l.name || ' is paused: ' || l.paused_reason, '; ')
FROM items i LEFT JOIN lanes l ON l.id = i.lane_id
WHERE i.run_id = %s AND i.stage = %s AND i.claim_id IS NULL AND i.due_at <= ecluse_now()
"""

# Reopen failed items that are not permanent, and move them from `failed` to `released` in the counts of their claims.
# Not while a write of the item is in doubt: a new round sends under a new key, and the vendor would apply both.
REOPEN = """
WITH again AS (
    SELECT id, claim_id FROM items i WHERE run_id = %(run)s AND stage = %(stage)s AND status = 'failed'
       AND NOT permanent AND NOT EXISTS (SELECT 1 FROM effects e WHERE e.run_id = %(run)s AND e.item_id = i.id
                                         AND e.state IN ('sending', 'unknown'))
    ORDER BY id FOR UPDATE),
counted AS (
    UPDATE claims c SET failed = c.failed - n.n, released = c.released + n.n
    FROM (SELECT claim_id, count(*) AS n FROM again GROUP BY 1) n WHERE c.id = n.claim_id),
opened AS (
    UPDATE items i SET status = 'open', claim_id = NULL, round = %(round)s, executions = 0, due_at = ecluse_now(),
        finished_at = NULL, result = NULL
    FROM again WHERE i.id = again.id RETURNING i.key)
SELECT count(*), (array_agg(key ORDER BY key))[1:3], pg_notify('ecluse_work', '') FROM opened
"""

# At the deadline, waiting items fail, so that no worker starts them after the gate has given up on them. Items in
# flight may finish, but are not retried.
LAST_CHANCE = """
UPDATE items SET permanent = true, error_code = %(code)s, error = %(error)s || coalesce(': ' || error, '')
WHERE run_id = %(run)s AND stage = %(stage)s AND status = 'open'
"""


async def poll(
    connection: Connection, run: Run, stage: Stage, first: bool, seen: Seen | None, units: Units | None
) -> tuple[Literal["wait", "done", "timeout", "run ended"], float]:
    """Poll the stage: read its progress, decide, and carry the decision out. Return the state of the gate, and the
    seconds until the next poll (0 if it has ended). `first`: this is the first poll of the gate, which logs that it
    waits; `seen`: called before the decision is carried out; `units`: counted instead of items."""
    counted = None if units is None else await units.count(connection, run)
    progress = await read_progress(connection, run, stage, counted)
    counters.gate_looks[run.flow, stage.name] += 1
    if progress.run_ended:
        return "run ended", 0.0
    decision = decide(progress, stage)
    if seen is not None:
        await seen(connection, run, progress, decision)
    if progress.fanned_out and progress.waiting and progress.stalled(stage):
        await _warn_if_unclaimed(connection, run, stage, progress.progress_at)
    match decision:
        case GateEnded(cause):
            await end(connection, run, stage, cause)
            return cause, 0.0
        case Redispatch(round_):
            if units is None:
                await redispatch(connection, run, stage, round_)
            else:
                await units.again(connection, run, round_)
                async with connection.transaction():
                    await _next_round(connection, run, stage, round_)
            return "wait", FIRST_PAUSE.total_seconds()
        case Wait(seconds):
            await _announce_round(connection, run, stage, next_round_at(progress, stage))
            if first:
                name = f"{stage.gate or stage.name} gate"
                what = f"{name} (polling DB for {stage.signal})" if stage.signal else name
                run.trace.waiting(what, items=progress.expected, deadline=progress.deadline_at.isoformat())
            return "wait", seconds if units is None else min(seconds, UNITS_POLL_SECONDS)


async def read_progress(connection: Connection, run: Run, stage: Stage, units: Counted | None) -> StageProgress:
    """Count the items of the stage, or take the counts of its `units`; store the counts with the stage, and return its
    progress. Raise LookupError if the run has no such stage."""
    statement = PROGRESS.format(counted=COUNT_ITEMS if units is None else COUNT_UNITS)
    given = {"run": run.id, "stage": stage.name, "rounds": stage.rounds, **({} if units is None else asdict(units))}
    found = await fetch_one(connection, StageProgress, statement, given)
    if found is None:
        raise LookupError(f"run {run.id} has no stage {stage.name}: open it before waiting at its gate")
    return found


async def _warn_if_unclaimed(connection: Connection, run: Run, stage: Stage, since: datetime) -> None:
    """Warn once, in the run's log and as a trace, if no worker has claimed the due items of a stage that has been
    stalled since `since`. The warning names the paused lanes among the lanes of these items."""
    ((unclaimed, pauses),) = await fetch_rows(connection, UNCLAIMED, (run.id, stage.name))
    if unclaimed:
        message = f"gate {stage.name}: stalled, {pauses or f'no worker has claimed {run.flow}/{stage.name}'}"
        facts: dict[str, Any] = {"unclaimed": unclaimed, "since": since.isoformat()}
        if await run_log.write(connection, run.id, message, level="warning", once=message, **facts):
            run.trace.warn(message, **facts)


async def _announce_round(connection: Connection, run: Run, stage: Stage, at: datetime | None) -> None:
    """Store when the next round opens (None: no further round), for `insight/waiting.py`, which explains why a run
    waits."""
    await connection.execute(
        "UPDATE stages SET next_round_at = %(at)s::timestamptz"
        " WHERE run_id = %(run)s AND stage = %(stage)s AND next_round_at IS DISTINCT FROM %(at)s::timestamptz",
        {"run": run.id, "stage": stage.name, "at": at},
    )


async def _next_round(connection: Connection, run: Run, stage: Stage, round_: int) -> bool:
    """Mark the round as opened. Return False if it was opened before (this is a replay) or the run has ended."""
    if not await lifecycle.lock_open(connection, [run.id]):
        return False
    cursor = await connection.execute(
        "UPDATE stages SET round = %(round)s, progress_at = ecluse_now(), next_round_at = NULL"
        " WHERE run_id = %(run)s AND stage = %(stage)s AND round < %(round)s",
        {"run": run.id, "stage": stage.name, "round": round_},
    )
    return cursor.rowcount > 0


async def redispatch(connection: Connection, run: Run, stage: Stage, round_: int) -> int:
    """Open the round: reopen the failed items that may succeed, and log it. Return the number of items; 0 if the round
    was opened before (this is a replay) or the run has ended. Items whose write is in doubt stay failed."""
    async with connection.transaction():
        if not await _next_round(connection, run, stage, round_):
            return 0
        await lifecycle.lock_claims(connection, [run.id], stage.name)
        row = await fetch_row(connection, REOPEN, {"run": run.id, "stage": stage.name, "round": round_})
        count, keys = (row[0], row[1] or []) if row else (0, [])
        sample = [item_event_id(run.flow, run.id, stage.name, key, round_) for key in keys]
        await run_log.write(
            connection,
            run.id,
            f"FAN-OUT: {event_of(run, stage)} x{count} (round {round_})",
            level="warning",
            items=count,
            event_ids=sample,
        )
    run.trace.fan_out(event_of(run, stage), count, sample, round=round_)
    return count


async def end(connection: Connection, run: Run, stage: Stage, cause: Literal["done", "timeout"]) -> None:
    """Mark the stage as ended, and log it once. At a timeout its waiting items fail; items in flight may finish, but
    are not retried."""
    async with connection.transaction():
        if cause == "timeout":
            code, error = "INCOMPLETE", stage.incomplete
            await lifecycle.lock_claims(connection, [run.id], stage.name)
            await fail_waiting(connection, [run.id], stage.name, code, error, by="gate")
            late = {"run": run.id, "stage": stage.name, "code": code, "error": error}
            await connection.execute(LAST_CHANCE, late)
        row = await fetch_row(
            connection,
            "UPDATE stages SET ended_at = ecluse_now(), end_cause = %s WHERE run_id = %s AND stage = %s"
            " AND ended_at IS NULL RETURNING extract(epoch FROM ended_at - started_at), coalesce(units, expected)",
            (cause, run.id, stage.name),
        )
        if row:
            level: Literal["info", "warning"] = "info" if cause == "done" else "warning"
            await run_log.write(connection, run.id, f"gate {stage.name}: {cause}", level=level)
    if row:
        run.trace.done(f"{stage.gate or stage.name}-gate", float(row[0]), cause=cause, items=row[1])
