"""One target: what became of it in a run, each piece of work on it with its failed executions, its effects at vendors,
what the log says of it and why it waits. And in which runs a target was selected."""

from __future__ import annotations

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one
from ecluse.insight.run_queries import EXPECTED, WILL_FAIL_WHY, check_tenant
from ecluse.insight.waiting import why_items

MOST = 200  # rows of each kind

OUTCOME = f"""
WITH e AS MATERIALIZED ({EXPECTED} AND target = %(target)s)
SELECT o.target, o.outcome, o.error_code, o.reason, o.effect_may_exist, {WILL_FAIL_WHY} AS will_fail
FROM outcomes o LEFT JOIN e ON true WHERE o.run_id = %(run)s AND o.target = %(target)s
"""  # noqa: S608 - our own words
# The work on a target is that of the run, and all work of the runs that it waits for because of this target.
ITEMS = """
WITH others AS MATERIALIZED (
    SELECT w.run_id FROM run_waiters w WHERE w.waiter_run_id = %(run)s AND w.target = %(target)s)
SELECT i.id, i.run_id, i.flow, i.stage, i.key, l.name AS lane, i.status, i.executions, i.crashes, i.error_code, i.error,
       i.status = 'open' AND i.claim_id IS NOT NULL AS in_flight, i.claim_id IS NULL AS waits, i.due_at, i.finished_at
FROM items i JOIN lanes l ON l.id = i.lane_id
WHERE (i.run_id = %(run)s AND %(target)s IN (i.target, i.key)) OR i.run_id IN (SELECT run_id FROM others)
ORDER BY i.run_id, i.id LIMIT %(most)s
"""
ATTEMPTS = """
SELECT a.item_id, a.at, a.replica_id, a.error_code, a.error, a.ambiguous, a.retry_at, a.http_status
FROM attempts a WHERE a.item_id = ANY(%(items)s) ORDER BY a.id LIMIT %(most)s
"""
EFFECTS = """
SELECT e.stage, e.key, e.state, e.sends, e.wanted, e.error, e.last_send_at
FROM effects e WHERE e.run_id = %(run)s AND e.target = %(target)s ORDER BY e.first_send_at NULLS LAST LIMIT %(most)s
"""
LOG = """
SELECT at, level, run_log_message(message, count, targets) AS message, data FROM run_log
WHERE (run_id = %(run)s AND targets @> ARRAY[%(target)s])
   OR run_id IN (SELECT w.run_id FROM run_waiters w WHERE w.waiter_run_id = %(run)s AND w.target = %(target)s)
ORDER BY id DESC LIMIT %(most)s
"""
FOUND = """
SELECT o.run_id, o.target, o.outcome, o.error_code, o.reason, r.flow, r.status, r.state, r.parent_run_id, r.schedule_id,
       r.redrive_of, r.created_at, s.name AS schedule
FROM outcomes o JOIN runs r ON r.id = o.run_id AND r.tenant_id = %(tenant)s
LEFT JOIN schedules s ON s.id = r.schedule_id
WHERE o.target = %(target)s ORDER BY o.run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""


async def show_target(connection: Connection, tenant: str, run_id: int, target: str) -> Row:
    await check_tenant(connection, tenant, run_id)
    asked = {"run": run_id, "target": target, "most": MOST}
    outcome = await fetch_one(connection, dict, OUTCOME, asked)
    if outcome is None:
        raise NotFound(f"there is no such target in run {run_id}")
    items = await fetch_all(connection, dict, ITEMS, asked)
    ids = [item["id"] for item in items]
    return {
        "outcome": outcome,
        "items": items,
        "attempts": await fetch_all(connection, dict, ATTEMPTS, {"items": ids, "most": MOST}),
        "effects": await fetch_all(connection, dict, EFFECTS, asked),
        "log": await fetch_all(connection, dict, LOG, asked),
        "waits": await why_items(connection, [item["id"] for item in items if item["waits"]], shared=True),
    }


async def find_target(connection: Connection, tenant: str, target: str, *, limit: int, offset: int) -> list[Row]:
    """Return the runs that selected this target and what became of it there, the newest run first."""
    given = {"tenant": tenant, "target": target, "limit": limit, "offset": offset}
    return await fetch_all(connection, dict, FOUND, given)
