"""The gate of a stage: wait until its items are finished, bounded in every direction.

The message is a hint, the table is the truth: on every wake-up the gate reads the counts and decides from them alone,
so that a lost, doubled or early message does no harm, and any replica can go on where another died. A stall (no
progress for three poll intervals) opens a further round for failed items while rounds remain; it never ends a gate, nor
extends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from psycopg.rows import class_row

from ecluse.base.ids import item_event_id
from ecluse.db.connect import Connection
from ecluse.engine.model.flow import Run, Stage
from ecluse.engine.runs import lifecycle, run_log
from ecluse.engine.runs.fan_out import event_of
from ecluse.engine.runs.units import Counted

STALL_POLLS = 3
FIRST_PAUSE = timedelta(seconds=1)


@dataclass(frozen=True)
class StageProgress:
    """One poll of a stage: counts from the database only, at the database's own time."""

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
        return self.now - self.progress_at >= STALL_POLLS * stage.poll


@dataclass(frozen=True)
class GateEnded:
    cause: Literal["done", "timeout"]


@dataclass(frozen=True)
class Redispatch:
    round: int


@dataclass(frozen=True)
class Wait:
    seconds: float


def decide(look: StageProgress, stage: Stage) -> GateEnded | Redispatch | Wait:
    rounds_left = look.round < stage.rounds
    may_heal = look.failed - look.failed_for_good if rounds_left else 0
    if look.fanned_out and look.finished == look.expected and not may_heal:
        return GateEnded("done")
    if look.now >= look.deadline_at and not look.clock_stopped:
        return GateEnded("timeout")
    quiet = look.now - look.progress_at
    if may_heal and look.stalled(stage) and look.fanned_out and not look.clock_stopped:
        return Redispatch(look.round + 1)
    # Pauses grow with the age of the gate from one second to the poll interval; a hint ends a pause early.
    pause = min(max(FIRST_PAUSE, (look.now - look.started_at) / 10), stage.poll)
    until = [pause] if look.clock_stopped else [pause, look.deadline_at - look.now]
    if may_heal and look.fanned_out and not look.clock_stopped:
        until.append(max(STALL_POLLS * stage.poll - quiet, timedelta(0)))
    return Wait(max(min(until).total_seconds(), 0.01))


def next_round_at(look: StageProgress, stage: Stage) -> datetime | None:
    """Return when the gate opens another round for failed items, unless there is progress before. None: it opens none,
    or the instant is unknown because the stage's clock is stopped."""
    at = look.progress_at + STALL_POLLS * stage.poll
    may_heal = look.fanned_out and look.round < stage.rounds and look.failed > look.failed_for_good
    return at if may_heal and not look.clock_stopped and at < look.deadline_at else None


LOOK = """
WITH counts AS (
    SELECT coalesce(sum(succeeded), 0) AS succeeded, coalesce(sum(ignored), 0) AS ignored,
           coalesce(sum(failed), 0) AS failed, coalesce(sum(in_flight), 0) AS in_flight
    FROM claims WHERE run_id = %(run)s AND stage = %(stage)s),
clock AS MATERIALIZED (SELECT ecluse_now() AS now),
seen AS (
    UPDATE stages s SET progress = c.succeeded + c.ignored, progress_at = clock.now FROM counts c, clock
    WHERE s.run_id = %(run)s AND s.stage = %(stage)s AND s.progress <> c.succeeded + c.ignored AND s.ended_at IS NULL
    RETURNING s.progress_at)
SELECT clock.now, s.started_at, s.deadline_at, coalesce((SELECT progress_at FROM seen), s.progress_at) AS progress_at,
       s.fanned_out_at IS NOT NULL AS fanned_out, s.round, s.expected,
       c.succeeded::int, c.ignored::int, c.failed::int, c.in_flight::int,
       CASE WHEN c.failed = 0 OR s.round >= %(rounds)s THEN 0 ELSE (
            SELECT count(*) FROM items i WHERE i.run_id = s.run_id AND i.stage = s.stage AND i.status = 'failed'
            AND i.permanent)::int END AS failed_for_good,
       r.ended_at IS NOT NULL AS run_ended, clock_stopped(s.run_id, s.stage)
FROM stages s JOIN runs r ON r.id = s.run_id, counts c, clock WHERE s.run_id = %(run)s AND s.stage = %(stage)s
"""

# Lock order: claims before items.
LOCK_CLAIMS = "SELECT 1 FROM claims WHERE run_id = %s AND stage = %s ORDER BY id FOR NO KEY UPDATE"

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

# Items in flight at the deadline may finish, but are not retried.
LAST_CHANCE = """
UPDATE items SET permanent = true, error_code = %(code)s, error = %(error)s || coalesce(': ' || error, '')
WHERE run_id = %(run)s AND stage = %(stage)s AND status = 'open'
"""

# At the deadline, close unclaimed items, so that no worker starts them after the gate has given up on them.
CLOSE_WAITING = """
WITH late AS (
    SELECT id, lane_id FROM items WHERE run_id = %(run)s AND stage = %(stage)s AND claim_id IS NULL
    ORDER BY id FOR UPDATE),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT 'gate', %(run)s, %(stage)s, lane_id, count(*), count(*), ecluse_now() FROM late GROUP BY lane_id
    RETURNING id, lane_id)
UPDATE items i SET claim_id = c.id, status = 'failed', permanent = true, error_code = %(code)s,
    error = %(error)s || coalesce(': lane ' || l.name || ' was paused: ' || l.paused_reason, ': ' || i.error, ''),
    finished_at = ecluse_now()
FROM late JOIN claim c ON c.lane_id = late.lane_id JOIN lanes l ON l.id = late.lane_id WHERE i.id = late.id
"""


async def look(connection: Connection, run: Run, stage: Stage) -> StageProgress:
    async with connection.cursor(row_factory=class_row(StageProgress)) as cursor:
        await cursor.execute(LOOK, {"run": run.id, "stage": stage.name, "rounds": stage.rounds})
        found = await cursor.fetchone()
    if found is None:
        raise LookupError(f"run {run.id} has no stage {stage.name}: fan out before waiting at its gate")
    return found


# Items in backoff are not due, and not counted.
UNCLAIMED = """
SELECT count(*) FROM items WHERE run_id = %s AND stage = %s AND claim_id IS NULL AND due_at <= ecluse_now()
"""


async def unclaimed(connection: Connection, run: Run, stage: Stage) -> int:
    row = await (await connection.execute(UNCLAIMED, (run.id, stage.name))).fetchone()
    return int(row[0]) if row else 0


# A stage beside the run's other stages, without items of its own: it waits for the runs that do its work.
OPEN_UNITS = """
INSERT INTO stages (run_id, stage, budget, rounds, started_at, fanned_out_at, deadline_at, progress_at, units)
SELECT id, %(stage)s, %(budget)s, %(rounds)s, now, now, now + %(max_wait)s, now, 0
FROM (SELECT id, ecluse_now() AS now FROM runs WHERE id = %(run)s AND ended_at IS NULL FOR SHARE) run
ON CONFLICT DO NOTHING
"""
LOOK_AT_UNITS = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
seen AS (
    UPDATE stages SET progress = %(done)s, units = %(expected)s, units_failed = %(failed)s, progress_at =
        CASE WHEN (progress, units) <> (%(done)s, %(expected)s) THEN clock.now ELSE progress_at END FROM clock
    WHERE run_id = %(run)s AND stage = %(stage)s AND ended_at IS NULL
      AND (progress, units, units_failed) IS DISTINCT FROM (%(done)s, %(expected)s, %(failed)s)
    RETURNING progress_at)
SELECT clock.now, s.started_at, s.deadline_at, coalesce((SELECT progress_at FROM seen), s.progress_at) AS progress_at,
       true AS fanned_out, s.round, %(expected)s AS expected, %(done)s AS succeeded, 0 AS ignored, %(failed)s AS failed,
       CASE WHEN s.round >= %(rounds)s THEN 0 ELSE %(for_good)s END AS failed_for_good,
       %(expected)s - %(done)s - %(failed)s AS in_flight, r.ended_at IS NOT NULL AS run_ended,
       clock_stopped(s.run_id, s.stage)
FROM stages s JOIN runs r ON r.id = s.run_id, clock WHERE s.run_id = %(run)s AND s.stage = %(stage)s
"""


async def open_units(connection: Connection, run: Run, stage: Stage) -> None:
    limits = {"budget": stage.retry.executions, "rounds": stage.rounds, "max_wait": stage.max_wait}
    given = {"run": run.id, "stage": stage.name, **limits}
    opened = await connection.execute(OPEN_UNITS, given)
    if not opened.rowcount and await lifecycle.has_ended(connection, run.id):
        raise lifecycle.RunEnded


async def look_at_units(connection: Connection, run: Run, stage: Stage, counted: Counted) -> StageProgress:
    given = {
        "run": run.id,
        "stage": stage.name,
        "rounds": stage.rounds,
        "expected": counted.expected,
        "done": counted.succeeded,
        "failed": counted.failed,
        "for_good": counted.failed_for_good,
    }
    async with connection.cursor(row_factory=class_row(StageProgress)) as cursor:
        await cursor.execute(LOOK_AT_UNITS, given)
        found = await cursor.fetchone()
    if found is None:
        raise LookupError(f"run {run.id} has no stage {stage.name}: open it before waiting at its gate")
    return found


async def announce_round(connection: Connection, run: Run, stage: Stage, at: datetime | None) -> None:
    """Store when the next round opens, for `insight/waiting.py`, which explains why a run waits. None: as things stand,
    no further round."""
    await connection.execute(
        "UPDATE stages SET next_round_at = %(at)s::timestamptz"
        " WHERE run_id = %(run)s AND stage = %(stage)s AND next_round_at IS DISTINCT FROM %(at)s::timestamptz",
        {"run": run.id, "stage": stage.name, "at": at},
    )


async def next_round(connection: Connection, run: Run, stage: Stage, round_: int) -> bool:
    """Mark the round as opened. Return False if it was opened before (this is a replay) or the run has ended."""
    alive = await connection.execute("SELECT 1 FROM runs WHERE id = %s AND ended_at IS NULL FOR SHARE", (run.id,))
    if await alive.fetchone() is None:
        return False
    cursor = await connection.execute(
        "UPDATE stages SET round = %(round)s, progress_at = ecluse_now(), next_round_at = NULL"
        " WHERE run_id = %(run)s AND stage = %(stage)s AND round < %(round)s",
        {"run": run.id, "stage": stage.name, "round": round_},
    )
    return cursor.rowcount > 0


async def redispatch(connection: Connection, run: Run, stage: Stage, round_: int) -> int:
    async with connection.transaction():
        if not await next_round(connection, run, stage, round_):
            return 0
        await connection.execute(LOCK_CLAIMS, (run.id, stage.name))
        row = await (await connection.execute(REOPEN, {"run": run.id, "stage": stage.name, "round": round_})).fetchone()
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
    async with connection.transaction():
        if cause == "timeout":
            late = {"run": run.id, "stage": stage.name, "code": "INCOMPLETE", "error": stage.incomplete}
            await connection.execute(LOCK_CLAIMS, (run.id, stage.name))
            await connection.execute(CLOSE_WAITING, late)
            await connection.execute(LAST_CHANCE, late)
        cursor = await connection.execute(
            "UPDATE stages SET ended_at = ecluse_now(), end_cause = %s WHERE run_id = %s AND stage = %s"
            " AND ended_at IS NULL RETURNING extract(epoch FROM ended_at - started_at), coalesce(units, expected)",
            (cause, run.id, stage.name),
        )
        row = await cursor.fetchone()
        if row:
            level: Literal["info", "warning"] = "info" if cause == "done" else "warning"
            await run_log.write(connection, run.id, f"gate {stage.name}: {cause}", level=level)
    if row:
        run.trace.done(f"{stage.gate or stage.name}-gate", float(row[0]), cause=cause, items=row[1])
