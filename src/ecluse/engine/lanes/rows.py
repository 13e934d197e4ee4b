"""The rows of the lanes: lanes that flows declare, and lanes made at run time, one per credential (and model), beneath
a declared one. A change is announced to the workers of all replicas by a notification."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta

import structlog

from ecluse.db.connect import Connection, Pool
from ecluse.db.query import Row, as_json, fetch_column, fetch_rows
from ecluse.engine.lanes.caps import IN_FORCE
from ecluse.engine.model.flow import Lane, Stage

log = structlog.get_logger(__name__)

RETIRED_FOR = timedelta(hours=1)  # before a lane is removed: longer than any transaction that dispatches

# A call of any weight may start as soon as one permit is free. So that the vendor's bucket is not overdrawn, the burst
# in force is lowered by the weight of the lane's heaviest call. A lane made at run time takes this weight and its
# breaker from its base.
WANTED = """
WITH wanted AS MATERIALIZED (
    SELECT w.name, w.tenant, w.max_in_flight, w.max_per_key, w.per_second, w.burst,
           coalesce(w.heaviest, b.heaviest, 1) AS heaviest, coalesce(w.break_after, b.break_after) AS break_after
    FROM jsonb_to_recordset(%(lanes)s::jsonb) AS w(
        name text, tenant text, max_in_flight integer, max_per_key integer, per_second double precision, burst integer,
        heaviest integer, break_after integer)
    LEFT JOIN lanes b ON w.heaviest IS NULL AND b.name = split_part(w.name, '/', 1))"""
INSERT = f"""
{WANTED}
INSERT INTO lanes (name, tenant_id, max_in_flight, max_per_key, per_second, burst, break_after, declared_max_in_flight,
                   declared_max_per_key, declared_per_second, declared_burst, heaviest)
SELECT name, tenant, max_in_flight, max_per_key, per_second, greatest(1, burst - heaviest + 1), break_after,
       max_in_flight, max_per_key, per_second, burst, heaviest
FROM wanted w WHERE NOT EXISTS (SELECT 1 FROM lanes l WHERE l.name = w.name) ORDER BY name
ON CONFLICT (name) DO NOTHING RETURNING pg_notify('ecluse_lanes', id::text)
"""  # noqa: S608 - our own names
# Only rows that change: a replica that hangs in a claim holds the row's lock, and must not block others.
CHANGE = f"""
{WANTED},
changed AS MATERIALIZED (
    SELECT w.*, l.id FROM wanted w JOIN lanes l ON l.name = w.name
    WHERE l.retired_at IS NOT NULL
       OR (l.tenant_id, l.declared_max_in_flight, l.declared_max_per_key, l.declared_per_second, l.declared_burst,
           l.heaviest, l.break_after)
          IS DISTINCT FROM (w.tenant, w.max_in_flight, w.max_per_key, w.per_second, w.burst, w.heaviest, w.break_after)
    ORDER BY l.id FOR NO KEY UPDATE OF l)
UPDATE lanes l SET tenant_id = n.tenant, declared_max_in_flight = n.max_in_flight, declared_max_per_key = n.max_per_key,
    declared_per_second = n.per_second, declared_burst = n.burst, heaviest = n.heaviest, break_after = n.break_after,
    retired_at = NULL, {IN_FORCE.format(declared="n.", heaviest="n.heaviest", set="l.set_")}
FROM changed n WHERE l.id = n.id RETURNING pg_notify('ecluse_lanes', l.id::text)
"""  # noqa: S608 - our own names
# The lanes beneath a declared lane take its breaker and its heaviest weight.
FOLLOW = """
WITH changed AS MATERIALIZED (
    SELECT l.id, b.heaviest, b.break_after FROM lanes l JOIN lanes b ON b.name = l.base
    WHERE b.name = ANY(%s) AND l.id <> b.id AND (l.heaviest, l.break_after) IS DISTINCT FROM (b.heaviest, b.break_after)
    ORDER BY l.id FOR NO KEY UPDATE OF l)
UPDATE lanes l SET heaviest = n.heaviest, break_after = n.break_after,
    burst = greatest(1, coalesce(l.set_burst, l.declared_burst) - n.heaviest + 1)
FROM changed n WHERE l.id = n.id RETURNING pg_notify('ecluse_lanes', l.id::text)
"""
IDS = "SELECT name, id FROM lanes WHERE name = ANY(%s)"
# Of the stored lanes: those with another owner than is wanted. A lane without an owner may get one.
FOREIGN = """
SELECT l.name FROM lanes l JOIN unnest(%s::text[], %s::text[]) AS w(name, tenant) ON w.name = l.name
WHERE l.tenant_id <> coalesce(w.tenant, '') ORDER BY 1
"""
RETIRE = "UPDATE lanes SET retired_at = ecluse_now() WHERE name = ANY(%s) AND name <> base AND retired_at IS NULL"
UNUSED = """
SELECT id FROM lanes l WHERE retired_at < ecluse_now() - %s
  AND NOT EXISTS (SELECT 1 FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL)
  AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.lane_id = l.id)
"""
REMOVE = f"DELETE FROM lanes WHERE id = ANY(ARRAY({UNUSED} FOR UPDATE SKIP LOCKED)) RETURNING name"  # noqa: S608


async def put_declared(connection: Connection, stages: Iterable[Stage]) -> None:
    """Insert the lanes of these stages, or store their caps, rates and breakers where they have changed; lanes made
    beneath them take over the breaker and the heaviest weight."""
    lanes: dict[str, Row] = {}
    for stage in stages:
        breaker, row = stage.lane.breaker, lanes.setdefault(stage.lane.name, _row(stage.lane))
        row["break_after"] = breaker.failures if breaker else None
        row["heaviest"] = max(stage.weight, row.get("heaviest", 1))
    await _put(connection, [lanes[name] for name in sorted(lanes)])
    await connection.execute(FOLLOW, (list(lanes),))


async def put_lanes(connection: Connection, lanes: Iterable[Lane]) -> dict[str, int]:
    """Insert these lanes, or store their caps where they have changed, in the caller's transaction; return their ids by
    name. Each must be beneath a declared lane (else ValueError), from which it takes its breaker; a retired lane is in
    use again. Caps that an operator has set stay in force. Raise ValueError if a stored lane belongs to another
    tenant."""
    wanted = {lane.name: lane for lane in lanes}
    if declared := [lane.name for lane in wanted.values() if lane.name == lane.base]:
        raise ValueError(f"lanes {', '.join(declared)}: the name of a lane made at run time has a slash")
    owners = [list(wanted), [lane.tenant for lane in wanted.values()]]
    if wanted and (foreign := await fetch_column(connection, FOREIGN, owners)):
        raise ValueError(f"lanes: {', '.join(foreign)} belongs to another tenant")
    ids: dict[str, int] = {}
    while missing := [_row(lane) for name, lane in sorted(wanted.items()) if name not in ids]:
        await _put(connection, missing)
        ids |= dict(await fetch_rows(connection, IDS, ([row["name"] for row in missing],)))
    return ids


async def retire_lanes(connection: Connection, names: Collection[str]) -> None:
    """Mark lanes made at run time as no longer wanted: each is removed once no item uses it. Items that wait in them
    are still executed. Declared lanes among `names` are left out."""
    await connection.execute(RETIRE, (list(names),))


async def remove_unused(pool: Pool, retired_for: timedelta = RETIRED_FOR) -> list[str]:
    """Remove the lanes that were retired at least `retired_for` ago and that no item uses; return their names. A
    finished item uses its lane for as long as its claim is stored. A periodic job."""
    async with pool.connection() as connection:
        removed = await fetch_column(connection, REMOVE, (retired_for,))
    if removed:
        log.info("lanes: unused ones removed", lanes=len(removed))
    return removed


async def _put(connection: Connection, rows: list[Row]) -> None:
    for statement in (INSERT, CHANGE):
        await connection.execute(statement, {"lanes": as_json(rows)})


def _row(lane: Lane) -> Row:
    caps = ("name", "tenant", "max_in_flight", "max_per_key", "per_second", "burst")
    return {cap: getattr(lane, cap) for cap in caps}
