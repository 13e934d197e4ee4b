"""Why is it waiting? For every waiting item of a run a cause and, where one can be told, the instant of its start.

Computed on read, from the item, its lane and who is there to work; nothing is written while an item waits. A position
counts who is due and goes before, as the claim would take them: tenants in turn, each in its own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from psycopg.rows import class_row

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.engine.claim import ALONE
from ecluse.engine.lanes import TRIGGERED

MOST_COUNTED = 20_000  # of those in line in a lane

Cause = Literal["paused", "held", "retry", "suspect", "no worker", "in flight", "per key", "throttled", "queued"]


@dataclass(frozen=True)
class Waiting:
    item_id: int
    key: str
    stage: str
    cause: Cause
    detail: str
    position: int | None  # how many go before it; None: it is not in line yet, or too far behind to be counted
    expected_at: datetime | None


@dataclass(frozen=True)
class Facts:
    """All that bears upon one item's start, at one instant."""

    now: datetime
    id: int
    key: str
    stage: str
    due_at: datetime
    executions: int
    crashes: int
    error_code: str | None
    error: str | None
    position: int | None
    counted: int  # of those in line, how many were looked at
    lane: str
    paused_reason: str | None
    paused_by: str | None
    held_until: datetime | None
    held_reason: str | None
    spacing: timedelta | None
    next_free_at: datetime | None
    max_in_flight: int | None
    in_flight: int
    probing: bool  # after a breaker's pause: one call at a time
    key_full: bool
    max_per_key: int | None
    workers: int
    hands: int
    busy: int
    pace: float | None  # items of this stage and run per second, of late


FACTS = """
WITH RECURSIVE clock AS MATERIALIZED (SELECT ecluse_now() AS now),
mine AS MATERIALIZED (
    SELECT i.* FROM items i WHERE i.run_id = %(run)s AND i.claim_id IS NULL
    ORDER BY i.order_at, i.id LIMIT %(limit)s OFFSET %(offset)s),
lane AS MATERIALIZED (
    SELECT l.*, (SELECT coalesce(sum(c.in_flight), 0) FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0)::int
               AS in_flight,
           ARRAY(SELECT i.group_key FROM claims c JOIN items i ON i.claim_id = c.id
                 WHERE c.lane_id = l.id AND c.in_flight > 0 AND i.group_key IS NOT NULL AND i.status = 'open'
                 GROUP BY 1 HAVING count(*) >= l.max_per_key) AS full_keys
    FROM lanes l WHERE l.id IN (SELECT lane_id FROM mine)),
-- the tenants that wait in each lane, as the claim finds them; of each, the head of its line
waiting AS (
    SELECT l.id AS lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL
                             ORDER BY i.tenant_id LIMIT 1) AS tenant_id FROM lane l
    UNION ALL
    SELECT w.lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = w.lane_id AND i.claim_id IS NULL
                       AND i.tenant_id > w.tenant_id ORDER BY i.tenant_id LIMIT 1)
    FROM waiting w WHERE w.tenant_id IS NOT NULL),
due AS MATERIALIZED (
    SELECT i.id, w.lane_id, w.tenant_id, row_number() OVER (PARTITION BY w.lane_id, w.tenant_id
                                                            ORDER BY i.order_at, i.id) - 1 AS ahead
    FROM clock, (SELECT *, count(*) OVER (PARTITION BY lane_id) AS tenants FROM waiting WHERE tenant_id IS NOT NULL) w,
    LATERAL (SELECT id, order_at, due_at FROM items
             WHERE lane_id = w.lane_id AND tenant_id = w.tenant_id AND claim_id IS NULL
             ORDER BY order_at, id LIMIT greatest(1, %(most)s / w.tenants)) i WHERE i.due_at <= now),
line AS MATERIALIZED (SELECT lane_id, tenant_id, count(*) AS n FROM due GROUP BY 1, 2),
crew AS MATERIALIZED (
    SELECT s.flow, s.stage, count(r.id)::int AS workers, coalesce(sum(r.hands), 0)::int AS hands,
           coalesce(sum(c.busy), 0)::int AS busy,
           (SELECT sum(p.taken - p.released - p.in_flight)
                   / nullif(extract(epoch FROM now - min(p.taken_at)), 0)
            FROM claims p WHERE p.run_id = %(run)s AND p.stage = s.stage AND p.taken_at > now - interval '1 minute')
               AS pace
    FROM clock, (SELECT DISTINCT flow, stage FROM mine) s
    LEFT JOIN replicas r ON r.state = 'live' AND s.flow || '/' || s.stage = ANY(r.work)
    LEFT JOIN LATERAL (SELECT sum(in_flight) AS busy FROM claims WHERE replica_id = r.id AND in_flight > 0) c ON true
    GROUP BY s.flow, s.stage, now)
SELECT now, m.id, m.key, m.stage, m.due_at, m.executions, m.crashes, m.error_code, m.error,
       (d.ahead + (SELECT coalesce(sum(least(o.n, d.ahead + 1)), 0) FROM line o
                   WHERE o.lane_id = m.lane_id AND o.tenant_id <> m.tenant_id))::int AS position,
       (SELECT coalesce(sum(n), 0) FROM line o WHERE o.lane_id = m.lane_id)::int AS counted,
       l.name AS lane, l.paused_reason, l.paused_by, CASE WHEN l.held_until > now THEN l.held_until END AS held_until,
       l.held_reason, l.spacing, greatest(l.next_free_at, now) AS next_free_at, l.max_in_flight, l.in_flight,
       coalesce(l.failures >= l.break_after, false) AS probing, coalesce(m.group_key = ANY(l.full_keys), false)
           AS key_full,
       l.max_per_key, w.workers, w.hands, w.busy, w.pace::float
FROM clock, mine m JOIN lane l ON l.id = m.lane_id JOIN crew w ON w.flow = m.flow AND w.stage = m.stage
LEFT JOIN due d ON d.id = m.id ORDER BY m.order_at, m.id
"""


async def why(connection: Connection, tenant: str | None, run_id: int, *, limit: int, offset: int = 0) -> list[Waiting]:
    """The waiting items of a run, in their order. `tenant` None is any, and is told all there is to know of a lane."""
    cursor = await connection.execute(
        "SELECT 1 FROM runs WHERE id = %s AND (%s::text IS NULL OR tenant_id = %s)", (run_id, tenant, tenant)
    )
    if await cursor.fetchone() is None:
        raise NotFound(f"there is no run {run_id}")
    async with connection.cursor(row_factory=class_row(Facts)) as facts:
        await facts.execute(FACTS, {"run": run_id, "limit": limit, "offset": offset, "most": MOST_COUNTED})
        return [
            Waiting(one.id, one.key, one.stage, *explain(one, shared=tenant is not None), one.position, expected(one))
            for one in await facts.fetchall()
        ]


def explain(item: Facts, *, shared: bool = False) -> tuple[Cause, str]:
    """The one thing without which it could start sooner; of several, the one that lasts. A lane is everybody's: where
    the answer is `shared` with one tenant, it names no operator and quotes no vendor on another one's call."""
    due_later = item.due_at > item.now
    if item.paused_reason is not None:
        by = "" if shared else f" by {item.paused_by}"
        return "paused", f"lane {item.lane} was paused{by}: {item.paused_reason}"
    if item.held_until is not None and item.held_until >= item.due_at:
        broken = (item.held_reason or "").startswith(TRIGGERED)
        why = item.held_reason if not shared else "its breaker is open" if broken else "after the vendor's word"
        return "held", f"lane {item.lane} is held until {instant(item.held_until)}: {why}"
    if due_later and item.error_code is not None:
        last = f"{item.error_code}: {item.error}"
        return "retry", f"execution {item.executions + 1} at {instant(item.due_at)}, after {last}"
    if due_later:
        return "retry", f"not before {instant(item.due_at)}"
    if item.workers == 0:
        return "no worker", f"no live worker can do {item.stage}: start one whose flows have it"
    if item.crashes:
        how = "alone" if item.crashes >= ALONE else "apart from others"
        return "suspect", f"{item.crashes} workers died with it in hand: it is run {how}"
    ahead = f"at least {item.counted} before it" if item.position is None else f"{item.position} before it"
    if item.probing:
        return "held", f"lane {item.lane} tries one call at a time after its breaker's pause; {ahead}"
    if item.max_in_flight is not None and item.in_flight >= item.max_in_flight:
        return "in flight", f"lane {item.lane} has its {item.max_in_flight} calls in flight; {ahead}"
    if item.key_full:
        return "per key", f"{item.max_per_key} of its group are in flight, which is its cap in lane {item.lane}"
    if item.spacing is not None:
        per_minute = 60 / item.spacing.total_seconds()
        return "throttled", f"lane {item.lane} starts {per_minute:.4g} calls a minute; {ahead}"
    if item.busy >= item.hands:
        return "queued", f"all {item.hands} hands of {item.workers} workers are busy; {ahead}"
    return "queued", f"about to be taken up; {ahead}"


def expected(item: Facts) -> datetime | None:
    """None: nobody can tell."""
    if item.paused_reason is not None or item.workers == 0 or item.crashes or item.probing:
        return None
    if item.position is None and item.due_at <= item.now:
        return None
    start = max(item.now, item.due_at, item.held_until or item.now)
    position = item.position or 0
    if item.spacing is not None and item.next_free_at is not None:
        return max(start, item.next_free_at) + position * item.spacing
    if start > item.now or (position == 0 and item.busy < item.hands):
        return start
    return item.now + timedelta(seconds=position / item.pace) if item.pace else None


def instant(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
