"""The claim: one statement picks waiting items fairly, writes one `claims` row per (run, stage) and points the items at
it. Fencing, counting and ending a run then touch those rows, not every item.

Lanes share the free worker slots, tenants take turns within a lane, and within a tenant the order is `order_at`, then
id. Only lanes with waiting items are read or locked, a bounded number per claim, in turn (`WaitingLanes`). The
statement also enforces the caps of a lane: calls in flight, calls per key, rate. Items of a run that is being ended are
skipped (its row is locked). The claim never waits for a lock."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine.model.item import ClaimedItem, Item

# How far ahead of its start an item may be claimed: enough to hide the round trip, short enough for priorities, holds
# and ends of runs to take effect.
AHEAD_SECONDS = 0.1

# Lanes of one claim statement, whose cost grows with lanes times items. If items wait in more lanes, the next claim
# continues with the lanes after these.
LANES_AT_ONCE = 16
# A loose index scan: one step per lane, whatever the number of items.
WAITING_LANES = """
WITH RECURSIVE waiting AS (
    (SELECT i.lane_id, 1 AS place FROM items i WHERE i.claim_id IS NULL AND i.lane_id > %(after)s
     ORDER BY i.lane_id LIMIT 1)
    UNION ALL
    SELECT i.lane_id, w.place + 1 FROM waiting w CROSS JOIN LATERAL (
        SELECT i.lane_id FROM items i WHERE i.claim_id IS NULL AND i.lane_id > w.lane_id
        ORDER BY i.lane_id LIMIT 1) i
    WHERE w.place < %(most)s)
SELECT w.lane_id, l.capped FROM waiting w LEFT JOIN LATERAL (
    SELECT num_nulls(l.max_in_flight, l.max_per_key, l.per_second, l.break_after) < 4 AS capped
    FROM lanes l CROSS JOIN LATERAL (
        SELECT FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL AND i.due_at <= (SELECT ecluse_now())
        LIMIT 1) i
    WHERE l.id = w.lane_id AND l.base = ANY(%(bases)s) AND l.paused_at IS NULL
      AND (l.held_until IS NULL OR l.held_until <= (SELECT ecluse_now()))
      AND l.next_free_at <= (SELECT ecluse_now()) + %(ahead)s * interval '1 second' OFFSET 0) l ON true
"""

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
WITHIN_CAPS = """
-- A call starts as soon as one permit is free, whatever its weight, and the next call waits for as many permits as its
-- weight: heavy calls are not passed over. The lane's burst is lowered by what the heaviest call may take too early.
mine AS MATERIALIZED (SELECT * FROM (
    SELECT g.*, g.base + (sum(g.weight) OVER (PARTITION BY g.lane_id ORDER BY g.order_at, g.id) - g.weight) * g.spacing
               AS start_at
    FROM (
        SELECT p.*, CASE WHEN p.spacing IS NULL THEN 1 ELSE
                 (%(weights)s::int[])[array_position(%(work)s, p.flow || '/' || p.stage)] END AS weight,
               row_number() OVER (PARTITION BY p.lane_id, p.tenant_id ORDER BY p.order_at, p.id) AS place
        FROM (
            SELECT p.*, a.event_key, a.correlation_id, coalesce(b.n, 0)
                   + row_number() OVER (PARTITION BY p.lane_id, p.group_key ORDER BY p.order_at, p.id) AS in_group
            FROM picked p JOIN alive a ON a.id = p.run_id
            LEFT JOIN busy b ON b.lane_id = p.lane_id AND b.group_key = p.group_key) p
        WHERE p.max_per_key IS NULL OR p.group_key IS NULL OR p.in_group <= p.max_per_key) g
    WHERE g.place <= g.most) m
    WHERE m.start_at IS NULL OR m.start_at <= (SELECT now FROM clock) + %(ahead)s * interval '1 second'
),"""

# Lanes without caps, rates or breakers: all that is picked may start at once. A lane that has got one since this
# replica read it is left out until the replica has read it again.
UNCAPPED_LANES = """
ours AS MATERIALIZED (
    SELECT * FROM lanes WHERE id = ANY(%(lanes)s)
    AND num_nulls(max_in_flight, max_per_key, per_second, break_after) = 4),"""
ALL_PICKED = """
mine AS MATERIALIZED (
    SELECT p.id, p.run_id, p.stage, p.lane_id, a.event_key, a.correlation_id, NULL::timestamptz AS start_at
    FROM picked p JOIN alive a ON a.id = p.run_id),"""

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
    SELECT l.id, l.base AS vendor, l.max_per_key, l.spacing, p.base, least(
               %(room)s,
               -- after a breaker's pause, a single call probes the vendor
               least(l.max_in_flight, CASE WHEN l.failures >= l.break_after THEN 1 END)
               - CASE WHEN num_nonnulls(l.max_in_flight, l.break_after) > 0 THEN (
                   SELECT coalesce(sum(c.in_flight), 0) FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0) END,
               floor(extract(epoch FROM now - p.base + %(ahead)s * interval '1 second') * l.per_second) + 1
           )::int AS room,
           (SELECT array_agg(b.group_key) FROM busy b WHERE b.lane_id = l.id AND b.n >= l.max_per_key) AS full_keys,
           random() AS luck
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
-- what is known of the lane goes along from here on: each later join would compare all lanes with all items
due AS MATERIALIZED (
    -- LIMIT, not EXISTS: the planner would turn EXISTS into a join that reads all waiting items
    SELECT w.tenant_id, coalesce(h.slots, %(slots)s) AS slots, l.id AS lane_id, l.vendor, l.room, l.max_per_key,
           l.spacing, l.base, l.full_keys, l.luck
    FROM waiting w JOIN lane l ON l.id = w.lane_id
    LEFT JOIN unnest(%(vendors)s::text[], %(tenants)s::text[], %(slots_left)s::int[]) AS h(vendor, tenant_id, slots)
        ON h.vendor = l.vendor AND h.tenant_id = w.tenant_id
    CROSS JOIN LATERAL (
        SELECT FROM items i WHERE i.lane_id = w.lane_id AND i.tenant_id = w.tenant_id AND i.claim_id IS NULL
        AND i.due_at <= (SELECT now FROM clock) LIMIT 1) i
    WHERE coalesce(h.slots, %(slots)s) > 0
),
-- split the room evenly; hand out the remainder randomly, so that no round-robin state is needed
lane_share AS (
    SELECT d.*, least(d.room, %(room)s / d.lanes + (d.place <= %(room)s %% d.lanes)::int) AS most
    FROM (SELECT *, dense_rank() OVER (ORDER BY luck, lane_id) AS place,
                 (SELECT count(DISTINCT lane_id) FROM due) AS lanes FROM due) d
),
share AS MATERIALIZED (
    SELECT x.lane_id, x.tenant_id, x.max_per_key, x.spacing, x.base, x.full_keys, least(
               x.lane_most / x.tenants + (x.place <= x.lane_most %% x.tenants)::int,
               x.slots / x.lanes + (x.lane_place <= x.slots %% x.lanes)::int)::int AS most
    FROM (SELECT lane_id, tenant_id, slots, max_per_key, spacing, base, full_keys, most AS lane_most,
                 count(*) OVER (PARTITION BY lane_id) AS tenants,
                 row_number() OVER (PARTITION BY lane_id ORDER BY random()) AS place,
                 count(*) OVER (PARTITION BY vendor, tenant_id) AS lanes,
                 row_number() OVER (PARTITION BY vendor, tenant_id ORDER BY random()) AS lane_place
          FROM lane_share WHERE most > 0) x
),
picked AS MATERIALIZED (
    -- where groups have a cap, pick more than will be claimed: full groups may be first in the queue
    SELECT i.*, s.most, s.max_per_key, s.spacing, s.base FROM share s CROSS JOIN LATERAL (
        SELECT i.id, i.run_id, i.tenant_id, i.flow, i.stage, i.lane_id, i.group_key, i.order_at FROM items i
        WHERE i.lane_id = s.lane_id AND i.tenant_id = s.tenant_id AND i.claim_id IS NULL
          AND i.due_at <= (SELECT now FROM clock) AND i.flow || '/' || i.stage = ANY(%(work)s)
          AND i.suspicion BETWEEN %(least)s AND %(most)s AND NOT i.permanent
          AND (s.full_keys IS NULL OR i.group_key IS NULL OR i.group_key <> ALL (s.full_keys))
        ORDER BY i.order_at, i.id LIMIT CASE WHEN s.max_per_key IS NULL THEN s.most ELSE s.most * 5 END
        FOR UPDATE SKIP LOCKED) i
),
alive AS MATERIALIZED (
    SELECT r.id, r.event_key, r.correlation_id FROM (SELECT DISTINCT run_id FROM picked) p CROSS JOIN LATERAL (
        SELECT id, event_key, correlation_id FROM runs WHERE id = p.run_id AND ended_at IS NULL AND NOT ending
        FOR SHARE SKIP LOCKED) r
),
{mine}{turn}
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
          m.event_key, m.correlation_id, i.lane_id, c.id, c.fence, m.start_at, i.suspicion, i.solo_deaths
"""
CLAIM_CAPPED = CLAIM.format(ours=LOCKED_LANES, mine=WITHIN_CAPS, turn=TAKE_TURN)
CLAIM_FREE = CLAIM.format(ours=UNCAPPED_LANES, mine=ALL_PICKED, turn="")


class Claimant(NamedTuple):
    """The replica that claims, and the work it can do: `work` names its stages as "flow/stage", so that an older
    program does not claim items of newer stages; `weights` has the permits that a call of each stage takes. Suspects
    (`suspects.py`) are claimed apart from other items: `least` and `most` bound the suspicion of the items to claim,
    `apart` says how they are run."""

    replica: str
    work: list[str]
    weights: list[int]
    least: int = 0
    most: int = 0
    apart: Literal["group", "alone"] | None = None


class Window(NamedTuple):
    """The ids of lanes to claim from: `capped` lanes have something that must hold over all replicas (caps, a rate, a
    breaker), `uncapped` ones do not. `is_all`: items wait in no other lane."""

    capped: list[int]
    uncapped: list[int]
    is_all: bool


class WaitingLanes:
    """Finds open lanes in which an item is due, among those made from the declared lanes `bases`. Each search returns
    up to LANES_AT_ONCE lanes and continues where the previous one ended."""

    def __init__(self, bases: Sequence[str]) -> None:
        self._bases = list(bases)
        self._after = 0  # id of the last lane of the previous window

    async def windows(self, connection: Connection) -> AsyncGenerator[Window]:
        """Yield windows until each lane with waiting items has been in one. Lanes from which nothing can be claimed now
        are left out, so a window may be empty."""
        seen: set[int] = set()
        is_all = False
        while not is_all:
            begun = self._after
            rows = await self._scan(connection, begun, LANES_AT_ONCE)
            if begun and (left := LANES_AT_ONCE - len(rows)):
                rows += [row for row in await self._scan(connection, 0, left) if row[0] <= begun]
            is_all = len(rows) < LANES_AT_ONCE
            self._after = 0 if is_all else rows[-1][0]
            new = [row for row in rows if row[0] not in seen]
            if not new:
                return
            seen.update(lane for lane, _ in new)
            capped, uncapped = ([lane for lane, capped in new if capped is wanted] for wanted in (True, False))
            yield Window(capped, uncapped, is_all)

    async def _scan(self, connection: Connection, after: int, most: int) -> list[tuple[int, bool | None]]:
        """Return up to `most` lanes with waiting items and ids above `after`, ordered by id. Each has a flag: True if
        it has caps, False if not, None if nothing can be claimed from it now."""
        given = {"after": after, "most": most, "bases": self._bases, "ahead": AHEAD_SECONDS}
        return await fetch_rows(connection, WAITING_LANES, given, prepare=True)


class SlotsLeft(NamedTuple):
    """The number of worker slots that a tenant may still take with calls through the lanes of one base: `slots_left`
    for the pairs of `vendors` (bases) and `tenants` that hold slots already, `slots` for all other pairs."""

    slots: int
    vendors: list[str]
    tenants: list[str]
    slots_left: list[int]


async def claim_items(
    connection: Connection, claimant: Claimant, lanes: list[int], room: int, *, capped: bool, left: SlotsLeft
) -> list[ClaimedItem]:
    """Claim at most `room` items from the lanes with these ids, and of no tenant more than it has slots left. `capped`:
    the lanes have caps, a rate or a breaker that must hold over all replicas; lanes from which another replica is
    claiming at the moment are then skipped."""
    parameters = {**claimant._asdict(), **left._asdict(), "lanes": lanes, "room": room, "ahead": AHEAD_SECONDS}
    rows = await fetch_rows(connection, CLAIM_CAPPED if capped else CLAIM_FREE, parameters, prepare=True)
    return [ClaimedItem(Item._make(row[:-5]), *row[-5:]) for row in rows]
