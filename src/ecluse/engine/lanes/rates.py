"""The rate of a lane in force: the rate that flows declare or an operator has set, at most the rate that the vendor's
own budget allows, times a temporary factor. All replicas follow it, because the claim reads it from the lane's row."""

from __future__ import annotations

from datetime import timedelta

import structlog

from ecluse.base.errors import Conflict, NotFound
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_column, fetch_row
from ecluse.engine.model.throttle import VendorPace

log = structlog.get_logger(__name__)

HALF, QUIET = 0.5, timedelta(minutes=5)
WORTH_WRITING = 0.1  # relative change of the vendor's pace; smaller ones would be written at every call

# {set}, {declared}: as in `caps.IN_FORCE`.
PER_SECOND = "least(coalesce({set}per_second, {declared}per_second), {vendor}) * coalesce({slowed_to}, 1)"
_ROW = {"set": "l.set_", "declared": "l.declared_", "vendor": "l.vendor_per_second", "slowed_to": "l.slowed_to"}
# Permits that the vendor's bucket cannot pay for are withdrawn, by moving the instant of the next permit.
FOLLOW = f"""
WITH told AS MATERIALIZED (
    SELECT now, %(per_second)s::double precision AS per_second, now - %(credit)s * interval '1 second' AS free_at
    FROM (SELECT ecluse_now() AS now) clock)
UPDATE lanes l SET vendor_per_second = told.per_second, next_free_at = greatest(l.next_free_at, told.free_at),
    per_second = {PER_SECOND.format(**{**_ROW, "vendor": "told.per_second"})}
FROM told WHERE l.id = %(lane)s
  AND (l.vendor_per_second IS NULL OR abs(told.per_second / l.vendor_per_second - 1) > {WORTH_WRITING}
       OR told.free_at > greatest(l.next_free_at, now - (l.burst - 1) * l.spacing))
RETURNING pg_notify('ecluse_lanes', l.id::text)
"""  # noqa: S608 - our own names
SLOW = f"""
UPDATE lanes l SET slowed_to = %(to)s, slowed_until = ecluse_now() + %(quiet)s, slowed_reason = %(reason)s,
    per_second = {PER_SECOND.format(**{**_ROW, "slowed_to": "%(to)s::double precision"})}
WHERE l.name = %(name)s AND l.per_second IS NOT NULL RETURNING pg_notify('ecluse_lanes', l.id::text), l.per_second
"""  # noqa: S608 - our own names
RESTORE = f"""
UPDATE lanes l SET slowed_to = NULL, slowed_until = NULL, slowed_reason = NULL,
    per_second = {PER_SECOND.format(**{**_ROW, "slowed_to": "NULL::double precision"})}
WHERE l.slowed_to IS NOT NULL AND (l.name = %(name)s OR %(name)s::text IS NULL AND l.slowed_until <= ecluse_now())
RETURNING l.name, pg_notify('ecluse_lanes', l.id::text)
"""  # noqa: S608 - our own names


async def follow_vendor(connection: Connection, lane_id: int, pace: VendorPace) -> None:
    """Limit the rate and the next permits of the lane to the pace that its vendor's budget allows. Nothing is written
    while the pace changes by at most a tenth and no permit has to be moved."""
    await connection.execute(FOLLOW, {"lane": lane_id, **pace._asdict()})


async def slow_lane(
    connection: Connection, name: str, *, reason: str, to: float = HALF, quiet: timedelta = QUIET
) -> None:
    """Lower the lane's rate to the share `to` of it, until `quiet` has passed since the last call of this function, or
    `restore_lane` is called. Raise NotFound if there is no such lane, Conflict if it has no rate."""
    given = {"name": name, "to": to, "quiet": quiet, "reason": storable(reason)}
    if (slowed := await fetch_row(connection, SLOW, given)) is None:
        if await fetch_column(connection, "SELECT 1 FROM lanes WHERE name = %s", (name,)):
            raise Conflict(f"Lane {name} has no rate that could be lowered: set one (calls a second) first.")
        raise NotFound(f"There is no lane {name!r}.")
    log.warning("lanes: slowed", lane=name, per_second=slowed[1], reason=reason)


async def restore_lane(connection: Connection, name: str) -> bool:
    """Restore the whole rate of the lane. Return False if it was not slowed."""
    return bool(await _restore(connection, name))


async def restore_quiet_lanes(pool: Pool) -> None:
    """Restore the whole rate of the lanes that were slowed and whose `quiet` time has passed. A periodic job."""
    async with pool.connection() as connection:
        await _restore(connection, None)


async def _restore(connection: Connection, name: str | None) -> list[str]:
    restored = await fetch_column(connection, RESTORE, {"name": name})
    for lane in restored:
        log.warning("lanes: whole rate again", lane=lane)
    return restored
