"""Breaker counts of the lanes: consecutive failures are counted over all replicas in the lane's row, and a lane with
too many of them is held. Only these statements change a lane's row because of a call's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

import structlog

from ecluse.base.text import count_of, span
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine.model.breaker import NO_FAILURES, TRIGGERED, Breaker, CallResult, FailureStreak, tally

log = structlog.get_logger(__name__)

STANDING = """
SELECT id, failures, trips, failing_since, failing, break_after,
       failures >= break_after AND held_until > ecluse_now() AS broken, name, ecluse_now()
FROM lanes WHERE id = ANY(%s) AND break_after IS NOT NULL ORDER BY id FOR NO KEY UPDATE
"""
PUT = """
WITH put AS (
    UPDATE lanes SET failures = %(failures)s, trips = %(trips)s, failing_since = %(since)s, failing = %(items)s,
        last_failure = %(error)s
    WHERE id = %(lane)s RETURNING id)
SELECT pg_notify('ecluse_lanes', id::text) FROM put
"""
HOLD = """
WITH held AS (
    UPDATE lanes SET held_until = %(until)s, held_reason = %(reason)s
    WHERE id = %(lane)s AND (held_until IS NULL OR held_until < %(until)s) RETURNING id)
SELECT pg_notify('ecluse_lanes', id::text) FROM held
"""


class Change(NamedTuple):
    """A change of a breaker, to be logged to runs: it has opened for the first time in a streak of failures, or has
    closed. `others`: the message for tenants other than `tenant`, whose call the vendor has answered."""

    lane: str
    level: Literal["info", "error"]
    message: str
    tenant: str | None = None
    others: str | None = None


async def record_results(
    connection: Connection, results: Sequence[CallResult], breakers: Mapping[int, Breaker]
) -> list[Change]:
    """Add these results to the failure streaks of their lanes, and hold the lanes with too many failures. `breakers`:
    the breakers of the lanes, by lane id. Return the changes of breakers that are to be logged to runs. Results of a
    lane whose breaker is open already are left out."""
    changes = []
    async with connection.transaction():
        rows = await fetch_rows(connection, STANDING, ([one.lane_id for one in results],))
        for lane_id, failures, trips, since, failing, most, broken, lane, now in rows:
            mine = [one for one in results if one.lane_id == lane_id]
            before = FailureStreak(failures, trips, since, frozenset(failing)) if failures else NO_FAILURES
            streak, too_long = tally(before, mine, most)
            if broken or streak == before:  # open already: these calls were in flight together with the last one
                continue
            last = next((one for one in reversed(mine) if one.counts), None)
            facts = {"lane": lane_id, **streak._asdict(), "items": list(streak.items)}
            await connection.execute(PUT, {**facts, "error": last.error if streak.failures and last else None})
            if too_long and last is not None:
                pause = breakers[lane_id].pause_after(before.trips)
                many, closed = f"{TRIGGERED}: more than {count_of(most, 'time')} in a row", f"closed for {span(pause)}"
                reason = f"{many} {last.error}; {closed}"
                await connection.execute(HOLD, {"lane": lane_id, "until": now + pause, "reason": reason})
                if before.trips:
                    log.warning("lanes: circuit breaker, probe failed", lane=lane, reason=reason)
                else:
                    log.error("lanes: circuit breaker triggered", lane=lane, reason=reason)
                    message, others = reason, f"{many} an error; {closed}"
                    if last.outage:
                        others = down(lane, streak.since or now, now + pause)
                        message = f"{others}: {last.error}"
                    changes.append(Change(lane, "error", message, last.tenant, others))
            elif before.trips and not streak.failures:
                took = timedelta(seconds=round((now - (before.since or now)).total_seconds()))
                message = f"Lane {lane}: the vendor answers again after {took}"
                log.warning("lanes: circuit breaker closed", lane=lane, after=str(took))
                changes.append(Change(lane, "info", message))
    return changes


def down(lane: str, since: datetime, probe_at: datetime) -> str:
    """Return the log message of runs about a vendor that has been down since `since`; `probe_at`: the instant of the
    next probe."""
    return (
        f"{TRIGGERED}: lane {lane}: vendor down since {since.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z, next probe"
        f" {probe_at.astimezone(UTC):%H:%M:%S}Z; until then nothing is sent and no attempt is used up"
    )
