"""Pauses of lanes by operators. Optionally the clock of the stages that need the lane is stopped until the lane is
resumed; their deadlines then move by the length of the stop."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

import structlog

from ecluse.base.errors import NotFound
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_column, fetch_value
from ecluse.engine.lanes.lane_log import log_to_runs

log = structlog.get_logger(__name__)

# Runs without a workflow have no gate and are left out: their stages end when their items do.
NEEDING = """
SELECT n.run_id, r.tenant_id, r.flow, n.stage, count(*)::int AS waiting, s.deadline_at
FROM lanes l JOIN stage_lanes n ON n.lane_id = l.id JOIN stages s ON s.run_id = n.run_id AND s.stage = n.stage
JOIN runs r ON r.id = n.run_id AND r.ended_at IS NULL AND r.orchestrated
WHERE l.name = %s GROUP BY 1, 2, 3, 4, 6 ORDER BY s.deadline_at, n.run_id
"""
# The row lock serializes pauses and resumes of a lane.
PAUSED_FOR = "SELECT paused_reason FROM lanes WHERE name = %(name)s FOR NO KEY UPDATE"
# Pausing a lane again for the same reason keeps the start of its pause.
PAUSE = """
UPDATE lanes SET paused_at = CASE WHEN paused_reason = %(reason)s THEN paused_at ELSE ecluse_now() END,
    paused_by = %(by)s, paused_reason = %(reason)s,
    clock_stopped_at = coalesce(clock_stopped_at, CASE WHEN %(stop_clock)s THEN ecluse_now() END)
WHERE name = %(name)s RETURNING pg_notify('ecluse_lanes', id::text)
"""
# A stage may need two lanes whose pauses overlap: the overlap moves its deadline only once.
MOVE = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
stood AS MATERIALIZED (
    SELECT DISTINCT s.run_id, s.stage, now, now - greatest(l.clock_stopped_at, s.started_at, s.clock_moved_at) AS by
    FROM clock, lanes l JOIN stage_lanes n ON n.lane_id = l.id
    JOIN stages s ON s.run_id = n.run_id AND s.stage = n.stage
    WHERE l.name = %(name)s AND l.clock_stopped_at IS NOT NULL),
moved AS (
    UPDATE stages s SET deadline_at = s.deadline_at + t.by, progress_at = least(t.now, s.progress_at + t.by),
        clock_stopped = s.clock_stopped + t.by, clock_moved_at = t.now
    FROM stood t WHERE s.run_id = t.run_id AND s.stage = t.stage AND s.ended_at IS NULL
    RETURNING s.run_id, s.stage, s.deadline_at, t.by)
SELECT m.run_id, r.tenant_id, r.flow, m.stage, m.deadline_at, m.by
FROM moved m JOIN runs r ON r.id = m.run_id AND r.ended_at IS NULL AND r.orchestrated ORDER BY m.deadline_at, m.run_id
"""
RESUME = """
UPDATE lanes SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, clock_stopped_at = NULL
WHERE name = %(name)s RETURNING pg_notify('ecluse_lanes', id::text)
"""


class StageNeedingLane(NamedTuple):
    """A stage of an open run that needs a lane. `waiting`: the number of items that wait in the lane, of this run or of
    runs that it waits for."""

    run_id: int
    tenant_id: str
    flow: str
    stage: str
    waiting: int
    deadline_at: datetime


class MovedDeadline(NamedTuple):
    """A stage whose clock was stopped, with its new deadline; `by`: the time by which the deadline was moved."""

    run_id: int
    tenant_id: str
    flow: str
    stage: str
    deadline_at: datetime
    by: timedelta


async def needing(connection: Connection, name: str) -> list[StageNeedingLane]:
    """Return the stages of open runs that have items waiting in the lane, or wait for runs that have, the earliest
    deadline first. Runs without a workflow are left out. Raise NotFound if there is no such lane."""
    await _known(connection, name)
    return await fetch_all(connection, StageNeedingLane, NEEDING, (name,))


async def pause(connection: Connection, name: str, *, reason: str, by: str, stop_clock: bool = False) -> None:
    """Pause the lane: no replica starts an item of it until an operator resumes it. `stop_clock`: no stage that needs
    it times out until then; a clock that is already stopped stays stopped. A new reason is logged to the runs that need
    the lane. Raise NotFound if there is no such lane."""
    await _known(connection, name)
    given = {"name": name, "reason": storable(reason), "by": by, "stop_clock": stop_clock}
    async with connection.transaction():
        before = await fetch_value(connection, PAUSED_FOR, given)
        await connection.execute(PAUSE, given)
        if before != given["reason"]:
            await log_to_runs(connection, name, "warning", f"Lane {name} was paused: {reason}")
    log.warning("lanes: paused", lane=name, reason=reason, by=by, stop_clock=stop_clock)


async def resume(connection: Connection, name: str, *, reason: str, by: str) -> list[MovedDeadline] | None:
    """Resume the lane and return the stages whose deadlines moved; None if it was not paused. A hold by the vendor
    (Retry-After) or by a breaker stays. Raise NotFound if there is no such lane."""
    await _known(connection, name)
    given = {"name": name}
    async with connection.transaction():
        if await fetch_value(connection, PAUSED_FOR, given) is None:
            return None
        moved = await fetch_all(connection, MovedDeadline, MOVE, given)
        await connection.execute(RESUME, given)
        await log_to_runs(connection, name, "warning", f"Lane {name} was resumed: {reason}")
    log.warning("lanes: resumed", lane=name, reason=reason, by=by, deadlines_moved=len(moved))
    return moved


async def _known(connection: Connection, name: str) -> None:
    """Raise NotFound, which lists the declared lanes, if there is no lane of this name."""
    if not await fetch_value(connection, "SELECT count(*) FROM lanes WHERE name = %s", (name,)):
        names = await fetch_column(connection, "SELECT name FROM lanes WHERE name = base ORDER BY name")
        raise NotFound(f"There is no lane {name!r} (known: {', '.join(names) or 'none'}).")
