"""One target of a run in full: its items with every attempt, its writes at vendors, its log lines, the runs started for
it, and why it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ecluse.base.errors import NotFound
from ecluse.base.ids import retry_id
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_column, fetch_one
from ecluse.insight.run_queries import EXPECTED, WILL_FAIL_WHY, check_tenant
from ecluse.insight.waiting import why_items

MOST = 200  # items, attempts, writes, log lines and runs, of each kind

OUTCOME = f"""
SELECT o.run_id, o.target, o.outcome, o.error_code, o.reason, o.effect_may_exist, {WILL_FAIL_WHY} AS will_fail
FROM outcomes o LEFT JOIN ({EXPECTED} AND target = %(target)s) e ON e.target = o.target
WHERE o.run_id = %(run)s AND o.target = %(target)s
"""  # noqa: S608 - our own words
ITEM_FACTS = """id, event_id, stage, key, target, lane, status, in_flight, permanent, round, executions, crashes,
       error_code, error, due_at, finished_at"""
LARGEST_LISTED = 10_000  # bytes of a result
# Larger results stay in the database. What is large as stored is not unpacked; smaller results are, also in each row
# that an offset skips: a cursor skips none.
LISTED_ITEMS = f"""(
    SELECT tenant_id, run_id, {ITEM_FACTS}, pg_column_size(result) AS result_bytes,
           CASE WHEN pg_column_size(result) <= {LARGEST_LISTED} AND octet_length(result::text) <= {LARGEST_LISTED}
                THEN result END AS result
    FROM run_items)"""  # noqa: S608 - our own names
ITEM = f"SELECT {ITEM_FACTS}, result FROM run_items WHERE run_id = %(run)s AND id = %(item)s"  # noqa: S608
# Items that serve the whole run have no target; their key may be one.
ITEMS = f"""
SELECT {ITEM_FACTS}, result
FROM run_items WHERE run_id = %(run)s AND (target = %(target)s OR target = '' AND key = %(target)s)
ORDER BY stage, key LIMIT %(most)s
"""  # noqa: S608 - our own names
ATTEMPTS = """
SELECT item_id, event_id, round, execution, at, replica_id, error_code, error, http_status, ambiguous, maybe_paid,
       outage, retry_at
FROM attempts WHERE item_id = ANY(%(items)s) ORDER BY id LIMIT %(most)s
"""
EFFECTS = """
SELECT id::text, stage, key, round, class AS kind, state, wanted, before, result, error, sends, first_send_at,
       last_send_at, settled_at
FROM effects WHERE run_id = %(run)s AND target = %(target)s ORDER BY stage, key, round LIMIT %(most)s
"""
LOG = """
SELECT id, at, level, run_log_message(message, count, targets) AS message, event_id, data, count, targets, last_at
FROM run_log WHERE run_id = %(run)s AND (%(target)s = ANY(targets) OR event_id = ANY(%(events)s))
ORDER BY id LIMIT %(most)s
"""
RUNS = """
SELECT r.id, r.flow, r.status, r.state, r.selected, r.successful, r.failed, r.ignored, r.created_at, r.ended_at
FROM run_waiters w JOIN runs r ON r.id = w.run_id
WHERE w.waiter_run_id = %(run)s AND w.target = %(target)s ORDER BY r.id DESC LIMIT %(most)s
"""
WAITING = """
SELECT i.id FROM items i WHERE i.id = ANY(%(items)s) AND i.claim_id IS NULL
UNION ALL
SELECT i.id FROM run_waiters w JOIN items i ON i.run_id = w.run_id AND i.claim_id IS NULL
WHERE w.waiter_run_id = %(run)s AND w.target = %(target)s LIMIT %(most)s
"""


async def show_target(connection: Connection, tenant: str, run_id: int, target: str) -> Row:
    """Return the outcome of a target of a run, with its items and their attempts, writes, log lines, the runs started
    for it and why it waits, at most MOST of each. Raise NotFound if the tenant has no such run, or the run no such
    target."""
    await check_tenant(connection, tenant, run_id)
    given: dict[str, Any] = {"run": run_id, "target": target, "most": MOST}
    found = await fetch_one(connection, dict, OUTCOME, given)
    if found is None:
        raise NotFound(f"There is no target {storable(target, 50)} in run {run_id}.")
    items = await fetch_all(connection, dict, ITEMS, given)
    given |= {"items": [item["id"] for item in items], "events": _events(items)}
    waiting = await fetch_column(connection, WAITING, given) if found["outcome"] is None else []
    return {
        **found,
        "items": await _with_attempts(connection, items, given),
        "effects": await fetch_all(connection, dict, EFFECTS, given),
        "log": await fetch_all(connection, dict, LOG, given),
        "runs": await fetch_all(connection, dict, RUNS, given),
        "waiting": [asdict(one) for one in await why_items(connection, waiting)],
    }


async def show_item(connection: Connection, tenant: str, run_id: int, item: int) -> Row:
    """Return an item with its whole result and its first attempts. Raise NotFound if the tenant has no such run, or the
    run no such item."""
    await check_tenant(connection, tenant, run_id)
    found = await fetch_all(connection, dict, ITEM, {"run": run_id, "item": item})
    if not found:
        raise NotFound(f"There is no item {item} in run {run_id}.")
    (shown,) = await _with_attempts(connection, found, {"items": [item], "most": MOST})
    return shown


def _events(items: Sequence[Row]) -> list[str]:
    """Return the event ids of the items: of each item one per round, from the first to the current one."""
    found = []
    for item in items:
        first = item["event_id"].removesuffix(f"-retry-{item['round']}") if item["round"] else item["event_id"]
        found += [retry_id(first, one) for one in range(item["round"] + 1)]
    return found


async def _with_attempts(connection: Connection, items: list[Row], given: Row) -> list[Row]:
    attempts: dict[int, list[Row]] = {}
    for one in await fetch_all(connection, dict, ATTEMPTS, given):
        attempts.setdefault(one.pop("item_id"), []).append(one)
    return [{**item, "attempts": attempts.get(item["id"], [])} for item in items]
