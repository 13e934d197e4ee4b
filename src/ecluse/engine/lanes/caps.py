"""Caps of a lane that an operator sets while workers run. They replace the caps declared by the flows until they are
cleared, and hold on every replica as soon as it is notified. The claim (`work/claim.py`) enforces caps and rates,
`registry.py` the rate of further calls."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row

log = structlog.get_logger(__name__)

CAPS = ("max_in_flight", "max_per_key", "per_second", "burst")
# Assignments of the caps in force. {set} and {declared} are the prefixes of the columns with the caps that an operator
# has set and that the flows declare. The rate is computed as in `rates.py`.
IN_FORCE = """max_in_flight = coalesce({set}max_in_flight, {declared}max_in_flight),
    max_per_key = coalesce({set}max_per_key, {declared}max_per_key),
    per_second = least(coalesce({set}per_second, {declared}per_second), l.vendor_per_second) * coalesce(l.slowed_to, 1),
    burst = greatest(1, coalesce({set}burst, {declared}burst) - {heaviest} + 1)"""
SET = f"""
UPDATE lanes l SET {", ".join(f"set_{cap} = n.{cap}" for cap in CAPS)},
    {IN_FORCE.format(set="n.", declared="l.declared_", heaviest="l.heaviest")}
FROM (VALUES (%(max_in_flight)s::integer, %(max_per_key)s::integer, %(per_second)s::double precision,
              %(burst)s::integer)) AS n(max_in_flight, max_per_key, per_second, burst)
WHERE l.name = %(name)s RETURNING pg_notify('ecluse_lanes', l.id::text)
"""  # noqa: S608 - our own names
STORED = f"SELECT {', '.join(f'set_{cap}' for cap in CAPS)} FROM lanes WHERE name = %s FOR NO KEY UPDATE"  # noqa: S608


async def set_caps(connection: Connection, name: str, changes: Mapping[str, float | None], *, by: str) -> None:
    """Set the caps named in `changes` (a subset of CAPS), in the caller's transaction; None clears a cap, and the
    flows' declaration holds again. Raise NotFound if there is no such lane."""
    row = await fetch_row(connection, STORED, (name,))
    if row is None:
        raise NotFound(f"There is no lane {name!r}.")
    wanted = {**dict(zip(CAPS, row, strict=True)), **changes}
    await connection.execute(SET, {**wanted, "name": name})
    log.warning("lanes: caps changed", lane=name, by=by, **changes)
