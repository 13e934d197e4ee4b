"""The claim: one statement picks waiting items fairly, writes one `claims` row per (run, stage) and points the items
at it. Fencing, counting and ending a run then touch those rows, not every item.

Lanes share the free worker slots, tenants take turns within a lane, and within a tenant the order is `order_at`, then
id. The caps of a lane (calls in flight, calls per key, rate) are decided here, too. Items of a run that is being ended
are skipped (its row is locked). The claim never waits for a lock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine.model.item import ClaimedItem, Item

# How far ahead of its start an item may be claimed: enough to hide the round trip, short enough for priorities, holds
# and ends of runs to take effect.
AHEAD_SECONDS = 0.1

# Caps hold over all replicas only if the claim sees every call in flight in the lanes that it locks. Its snapshot is as
# old as the statement: if another claim has taken a turn since, the locked row has a higher `turn` than the snapshot,
# and nothing is claimed from that lane. A lane that another replica is claiming from is skipped.
LOCKED_LANES = """
ours AS MATERIALIZED (
    SELECT held.* FROM (SELECT * FROM lanes WHERE id = ANY(%(lanes)s) FOR NO KEY UPDATE SKIP LOCKED) held
    JOIN lanes seen ON seen.id = held.id AND seen.turn = held.turn),"""
TAKE_TURN = """
turn AS (
    UPDATE lanes l SET turn = l.turn + 1, next_free_at = coalesce(x.base + m.permits * x.spacing, l.next_free_at)
    FROM (SELECT lane_id, sum(weight) AS permits FROM mine GROUP BY 1) m JOIN lane x ON x.id = m.lane_id
    WHERE l.id = m.lane_id
      AND (num_nonnulls(l.max_in_flight, l.max_per_key, l.spacing) > 0 OR l.failures >= l.break_after)),"""
ALL_LANES = """
ours AS MATERIALIZED (SELECT * FROM lanes WHERE id = ANY(%(lanes)s)),"""

CLAIM = """
WITH RECURSIVE clock AS MATERIALIZED (SELECT ecluse_now() AS now),{ours}
-- per group with a cap: the items in flight
busy AS MATERIALIZED (
    SELECT l.id AS lane_id, b.group_key, b.n FROM ours l CROSS JOIN LATERAL (
        SELECT i.group_key, count(*) AS n FROM claims c JOIN items i ON i.claim_id = c.id
        WHERE c.lane_id = l.id AND c.in_flight > 0 AND i.group_key IS NOT NULL AND i.status = 'open' GROUP BY 1) b
    WHERE l.max_per_key IS NOT NULL
),
lane AS MATERIALIZED (
    SELECT l.id, l.max_per_key, l.spacing, p.base, least(
               %(room)s,
               -- after a breaker's pause, a single call probes the vendor
               least(l.max_in_flight, CASE WHEN l.failures >= l.break_after THEN 1 END)
               - CASE WHEN num_nonnulls(l.max_in_flight, l.break_after) > 0 THEN (
                   SELECT coalesce(sum(c.in_flight), 0) FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0) END,
               floor(extract(epoch FROM now - p.base + %(ahead)s * interval '1 second') * l.per_second) + 1
           )::int AS room,
           (SELECT array_agg(b.group_key) FROM busy b WHERE b.lane_id = l.id AND b.n >= l.max_per_key) AS full_keys
    FROM clock, ours l, LATERAL (
        -- NULL without a rate: next_free_at is -infinity there, and intervals are finite before PostgreSQL 17
        SELECT CASE WHEN l.spacing IS NOT NULL THEN greatest(l.next_free_at, now - (l.burst - 1) * l.spacing) END
            AS base) p
    WHERE l.paused_at IS NULL AND (l.held_until IS NULL OR l.held_until <= now)
      -- a replica already marked dead claims nothing, even if it does not know yet
      AND EXISTS (SELECT 1 FROM replicas WHERE id = %(replica)s AND state = 'live')
),
-- a loose index scan: the distinct tenants that wait in each lane, without reading their items
waiting AS (
    SELECT l.id AS lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL
                             ORDER BY i.tenant_id LIMIT 1) AS tenant_id
    FROM lane l WHERE l.room > 0
    UNION ALL
    SELECT w.lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = w.lane_id AND i.claim_id IS NULL
                       AND i.tenant_id > w.tenant_id ORDER BY i.tenant_id LIMIT 1)
    FROM waiting w WHERE w.tenant_id IS NOT NULL
),
due AS MATERIALIZED (
    -- LIMIT, not EXISTS: the planner would turn EXISTS into a join that reads all waiting items
    SELECT w.lane_id, w.tenant_id FROM waiting w CROSS JOIN LATERAL (
        SELECT FROM items i WHERE i.lane_id = w.lane_id AND i.tenant_id = w.tenant_id AND i.claim_id IS NULL
        AND i.due_at <= (SELECT now FROM clock) LIMIT 1) i
),
-- split the room evenly; hand out the remainder randomly, so that no round-robin state is needed
lane_share AS (
    SELECT x.lane_id, least(l.room, %(room)s / x.lanes + (x.place <= %(room)s %% x.lanes)::int) AS most
    FROM (SELECT lane_id, count(*) OVER () AS lanes, row_number() OVER (ORDER BY random()) AS place
          FROM due GROUP BY lane_id) x JOIN lane l ON l.id = x.lane_id
),
share AS MATERIALIZED (
    SELECT x.lane_id, x.tenant_id, (x.most / x.tenants + (x.place <= x.most %% x.tenants)::int)::int AS most
    FROM (SELECT w.lane_id, w.tenant_id, s.most, count(*) OVER (PARTITION BY w.lane_id) AS tenants,
                 row_number() OVER (PARTITION BY w.lane_id ORDER BY random()) AS place
          FROM due w JOIN lane_share s ON s.lane_id = w.lane_id) x
),
picked AS MATERIALIZED (
    -- where groups have a cap, pick more than will be claimed: full groups may be first in the queue
    SELECT i.*, s.most FROM share s JOIN lane l ON l.id = s.lane_id CROSS JOIN LATERAL (
        SELECT i.id, i.run_id, i.tenant_id, i.flow, i.stage, i.lane_id, i.group_key, i.order_at FROM items i
        WHERE i.lane_id = s.lane_id AND i.tenant_id = s.tenant_id AND i.claim_id IS NULL
          AND i.due_at <= (SELECT now FROM clock) AND i.flow || '/' || i.stage = ANY(%(work)s)
          AND i.suspicion BETWEEN %(least)s AND %(most)s AND NOT i.permanent
          AND (l.full_keys IS NULL OR i.group_key IS NULL OR i.group_key <> ALL (l.full_keys))
        ORDER BY i.order_at, i.id LIMIT CASE WHEN l.max_per_key IS NULL THEN s.most ELSE s.most * 5 END
        FOR UPDATE SKIP LOCKED) i
),
alive AS MATERIALIZED (
    SELECT r.id, r.event_key, r.correlation_id FROM (SELECT DISTINCT run_id FROM picked) p CROSS JOIN LATERAL (
        SELECT id, event_key, correlation_id FROM runs WHERE id = p.run_id AND ended_at IS NULL AND NOT ending
        FOR SHARE SKIP LOCKED) r
),
-- A call starts as soon as one permit is free, whatever its weight, and the next call waits for as many permits as its
-- weight: heavy calls are not passed over. The lane's burst is lowered by what the heaviest call may take too early.
mine AS MATERIALIZED (SELECT * FROM (
    SELECT g.*, l.base + (sum(g.weight) OVER (PARTITION BY g.lane_id ORDER BY g.order_at, g.id) - g.weight) * l.spacing
               AS start_at
    FROM (
        SELECT p.*, CASE WHEN k.spacing IS NULL THEN 1 ELSE
                 (%(weights)s::int[])[array_position(%(work)s, p.flow || '/' || p.stage)] END AS weight,
               row_number() OVER (PARTITION BY p.lane_id, p.tenant_id ORDER BY p.order_at, p.id) AS place
        FROM (
            SELECT p.*, a.event_key, a.correlation_id, coalesce(b.n, 0)
                   + row_number() OVER (PARTITION BY p.lane_id, p.group_key ORDER BY p.order_at, p.id) AS in_group
            FROM picked p JOIN alive a ON a.id = p.run_id
            LEFT JOIN busy b ON b.lane_id = p.lane_id AND b.group_key = p.group_key) p
        JOIN lane k ON k.id = p.lane_id
        WHERE k.max_per_key IS NULL OR p.group_key IS NULL OR p.in_group <= k.max_per_key) g
    JOIN lane l ON l.id = g.lane_id WHERE g.place <= g.most) m
    WHERE m.start_at IS NULL OR m.start_at <= (SELECT now FROM clock) + %(ahead)s * interval '1 second'
),{turn}
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at, apart)
    SELECT %(replica)s, run_id, stage, lane_id, count(*), now, %(apart)s::text FROM mine, clock
    GROUP BY run_id, stage, lane_id, now
    RETURNING id, fence, run_id, stage, lane_id
)
UPDATE items i SET claim_id = c.id
FROM mine m JOIN claim c ON c.run_id = m.run_id AND c.stage = m.stage AND c.lane_id = m.lane_id
WHERE i.id = m.id
RETURNING i.id, i.run_id, i.tenant_id, i.flow, i.stage, i.key, i.target, i.payload, i.round, i.executions, i.crashes,
          m.event_key, m.correlation_id, c.id, c.fence, m.start_at, i.lane_id, i.suspicion, i.solo_deaths
"""
CLAIM_FREE, CLAIM_CAPPED = CLAIM.format(ours=ALL_LANES, turn=""), CLAIM.format(ours=LOCKED_LANES, turn=TAKE_TURN)


class Claimant(NamedTuple):
    """The replica that claims, and the work it can do: `work` names the stages as "flow/stage", so that an older
    program does not claim items of newer stages; `weights` has the weight of a call of each. Suspects (`suspects.py`)
    are claimed apart from other items: `least` and `most` bound their suspicion, `apart` says how they are run."""

    replica: str
    work: list[str]
    weights: list[int]
    least: int = 0
    most: int = 0
    apart: Literal["group", "alone"] | None = None


async def claim_items(
    connection: Connection, claimant: Claimant, lanes: list[int], room: int, *, capped: bool
) -> list[ClaimedItem]:
    """Claim at most `room` items from the lanes with these ids. `capped`: the lanes have caps, a rate or a breaker that
    must hold over all replicas; lanes from which another replica is claiming are then left out."""
    parameters = {**claimant._asdict(), "lanes": lanes, "room": room, "ahead": AHEAD_SECONDS}
    rows = await fetch_rows(connection, CLAIM_CAPPED if capped else CLAIM_FREE, parameters, prepare=True)
    return [ClaimedItem(Item._make(row[:-6]), *row[-6:]) for row in rows]
