"""Taking work: one statement picks waiting items fairly, writes one `claims` row per (run, stage) and points the items
at it. Fencing, counting and ending a run then touch those rows, not every item.

Lanes share the free hands, tenants take turns within a lane, and within a tenant the order is `due_at`, then id. Items
of a run that is being ended are left alone (its row is not to be had). Nothing here waits for anybody's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from ecluse.db.connect import Connection, Pool
from ecluse.engine.flow import Item

# How far ahead of its start an item may be claimed: enough to hide the round trip, short enough for priorities,
# holds and endings to keep their effect.
AHEAD_SECONDS = 0.1

CLAIM = """
WITH RECURSIVE clock AS MATERIALIZED (SELECT ecluse_now() AS now),
lane AS MATERIALIZED (
    SELECT l.id, l.max_per_key, p.spacing, p.base, least(
               %(room)s,
               l.max_in_flight - (SELECT coalesce(sum(c.in_flight), 0) FROM claims c
                                  WHERE c.lane_id = l.id AND c.in_flight > 0),
               floor(extract(epoch FROM now - p.base + %(ahead)s * interval '1 second') * l.per_second) + 1
           )::int AS room
    FROM clock, lanes l, LATERAL (
        SELECT s.spacing, greatest(l.next_free_at, now - (l.burst - 1) * s.spacing) AS base
        FROM (SELECT interval '1 second' / l.per_second AS spacing) s) p
    WHERE l.id = ANY(%(lanes)s) AND (l.held_until IS NULL OR l.held_until <= now)
),
-- a loose index scan: the distinct tenants that wait in each lane, without reading their items
turn AS (
    SELECT l.id AS lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL
                             ORDER BY i.tenant_id LIMIT 1) AS tenant_id
    FROM lane l WHERE l.room > 0
    UNION ALL
    SELECT t.lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = t.lane_id AND i.claim_id IS NULL
                       AND i.tenant_id > t.tenant_id ORDER BY i.tenant_id LIMIT 1)
    FROM turn t WHERE t.tenant_id IS NOT NULL
),
share AS (
    SELECT t.lane_id, t.tenant_id, ceil(least(l.room, ceil(%(room)s::numeric / n.lanes))
                                        / count(*) OVER (PARTITION BY t.lane_id))::int AS most
    FROM turn t JOIN lane l ON l.id = t.lane_id,
         (SELECT count(DISTINCT lane_id) AS lanes FROM turn WHERE tenant_id IS NOT NULL) n
    WHERE t.tenant_id IS NOT NULL
),
picked AS MATERIALIZED (
    SELECT i.* FROM share s JOIN lane l ON l.id = s.lane_id CROSS JOIN LATERAL (
        SELECT i.id, i.run_id, i.stage, i.lane_id, i.group_key, i.due_at FROM items i
        WHERE i.lane_id = s.lane_id AND i.tenant_id = s.tenant_id AND i.claim_id IS NULL
          AND i.due_at <= (SELECT now FROM clock)
          AND (l.max_per_key IS NULL OR i.group_key IS NULL OR l.max_per_key > (
               SELECT count(*) FROM items g WHERE g.lane_id = i.lane_id AND g.group_key = i.group_key
               AND g.claim_id IS NOT NULL AND g.status = 'open'))
        ORDER BY i.due_at, i.id LIMIT s.most FOR UPDATE SKIP LOCKED) i
),
alive AS MATERIALIZED (
    SELECT id FROM runs WHERE id IN (SELECT run_id FROM picked) AND ended_at IS NULL ORDER BY id FOR SHARE SKIP LOCKED
),
mine AS MATERIALIZED (
    SELECT * FROM (
        SELECT p.*, l.room, l.max_per_key, l.base, l.spacing,
               row_number() OVER (PARTITION BY p.lane_id ORDER BY p.due_at, p.id) AS place,
               row_number() OVER (PARTITION BY p.lane_id, p.group_key ORDER BY p.due_at, p.id)
                 + (SELECT count(*) FROM items g WHERE l.max_per_key IS NOT NULL AND g.lane_id = p.lane_id
                    AND g.group_key = p.group_key AND g.claim_id IS NOT NULL AND g.status = 'open') AS in_group
        FROM picked p JOIN alive a ON a.id = p.run_id JOIN lane l ON l.id = p.lane_id) x
    WHERE place <= room AND (max_per_key IS NULL OR group_key IS NULL OR in_group <= max_per_key)
),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at)
    SELECT %(replica)s, run_id, stage, lane_id, count(*), now FROM mine, clock GROUP BY run_id, stage, lane_id, now
    RETURNING id, fence, run_id, stage, lane_id
),
paced AS (
    UPDATE lanes l SET next_free_at = m.base + m.n * m.spacing
    FROM (SELECT lane_id, base, spacing, count(*) AS n FROM mine WHERE spacing IS NOT NULL GROUP BY 1, 2, 3) m
    WHERE l.id = m.lane_id
)
UPDATE items i SET claim_id = c.id
FROM mine m JOIN claim c ON c.run_id = m.run_id AND c.stage = m.stage AND c.lane_id = m.lane_id
     JOIN runs r ON r.id = m.run_id
WHERE i.id = m.id
RETURNING i.id, i.run_id, i.tenant_id, r.flow, i.stage, i.key, i.target, i.payload, i.round, i.executions,
          c.id, c.fence, m.base + (m.place - 1) * m.spacing AS start_at
"""

LOCK_CAPPED = "SELECT id FROM lanes WHERE id = ANY(%s) FOR NO KEY UPDATE SKIP LOCKED"


class Taken(NamedTuple):
    item: Item
    claim_id: int
    fence: int
    start_at: datetime | None


async def claim(pool: Pool, *, replica: str, free: Sequence[int], capped: Sequence[int], room: int) -> list[Taken]:
    """At most about `room` items from the lanes `free` of caps and from the `capped` ones."""
    async with pool.connection() as connection:
        taken = await _take(connection, replica, free, room) if free else []
        if capped and len(taken) < room:
            # Two statements: what is in flight must be read after the lane is ours, with a fresh snapshot.
            async with connection.transaction():
                held = [row[0] for row in await (await connection.execute(LOCK_CAPPED, (list(capped),))).fetchall()]
                taken += await _take(connection, replica, held, room - len(taken)) if held else []
    return taken


async def _take(connection: Connection, replica: str, lanes: Sequence[int], room: int) -> list[Taken]:
    cursor = await connection.execute(
        CLAIM, {"replica": replica, "lanes": list(lanes), "room": room, "ahead": AHEAD_SECONDS}, prepare=True
    )
    return [Taken(Item._make(row[:-3]), *row[-3:]) for row in await cursor.fetchall()]
