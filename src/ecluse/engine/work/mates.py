"""The claim of a batch: items of a `BatchWrite` that wait in the group of a claimed item (the leader) are claimed as
its mates, and written in its call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine.model.item import ClaimedItem, Item

# The leader's claim has the permit and counts as the call; the claim of the mates has no lane, so that the caps count
# calls. Only one leader of a group gets mates: an operator may have raised the cap per key. Suspects get no mates, and
# are no mates.
JOIN = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now FROM replicas WHERE id = %(replica)s AND state = 'live'),
leader AS MATERIALIZED (
    SELECT DISTINCT ON (i.run_id, i.stage, i.lane_id, i.group_key)
           i.id, i.run_id, i.stage, i.lane_id, i.group_key, t.most
    FROM unnest(%(items)s::bigint[], %(claims)s::bigint[], %(fences)s::int[], %(most)s::int[])
        AS t(id, claim_id, fence, most)
    JOIN items i ON i.id = t.id AND i.claim_id = t.claim_id AND i.group_key IS NOT NULL
    JOIN claims c ON c.id = t.claim_id AND c.fence = t.fence
    ORDER BY i.run_id, i.stage, i.lane_id, i.group_key, i.id),
alive AS MATERIALIZED (
    SELECT r.id, r.event_key, r.correlation_id FROM (SELECT DISTINCT run_id FROM leader) l CROSS JOIN LATERAL (
        SELECT id, event_key, correlation_id FROM runs WHERE id = l.run_id AND ended_at IS NULL AND NOT ending
        FOR SHARE SKIP LOCKED) r),
mine AS MATERIALIZED (
    SELECT i.id, l.id AS leader, l.run_id, l.stage, a.event_key, a.correlation_id, now
    FROM clock, leader l JOIN alive a ON a.id = l.run_id CROSS JOIN LATERAL (
        SELECT i.id FROM items i
        WHERE i.run_id = l.run_id AND i.stage = l.stage AND i.group_key = l.group_key AND i.lane_id = l.lane_id
          AND i.claim_id IS NULL AND i.due_at <= now AND i.suspicion = 0 AND NOT i.permanent
        ORDER BY i.order_at, i.id LIMIT l.most - 1 FOR UPDATE SKIP LOCKED) i),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, taken, taken_at)
    SELECT %(replica)s, run_id, stage, count(*), now FROM mine GROUP BY run_id, stage, now
    RETURNING id, fence, run_id, stage)
UPDATE items i SET claim_id = c.id
FROM mine m JOIN claim c ON c.run_id = m.run_id AND c.stage = m.stage
WHERE i.id = m.id
RETURNING m.leader, c.id, c.fence, i.id, i.run_id, i.tenant_id, i.flow, i.stage, i.key, i.target, i.payload, i.round,
          i.executions, i.crashes, m.event_key, m.correlation_id, i.lane_id
"""


async def join_mates(
    connection: Connection, replica: str, leaders: Sequence[ClaimedItem], most: Mapping[tuple[str, str], int]
) -> list[ClaimedItem]:
    """Claim the mates of these items; return the items with their mates. `most`: the largest batch of each stage that
    has a `BatchWrite`, by (flow, stage)."""
    batched = [one for one in leaders if (one.item.flow, one.item.stage) in most] if most else []
    if not batched:
        return list(leaders)
    parameters = {
        "replica": replica,
        "items": [one.item.id for one in batched],
        "claims": [one.claim_id for one in batched],
        "fences": [one.fence for one in batched],
        "most": [most[one.item.flow, one.item.stage] for one in batched],
    }
    joined: dict[int, list[ClaimedItem]] = defaultdict(list)
    by_id = {one.item.id: one for one in batched}
    for leader, claim_id, fence, *item in await fetch_rows(connection, JOIN, parameters, prepare=True):
        mate = by_id[leader]._replace(item=Item._make(item), claim_id=claim_id, fence=fence)
        joined[leader].append(mate)
    return [one._replace(mates=tuple(sorted(joined[one.item.id], key=lambda mate: mate.item.key))) for one in leaders]
