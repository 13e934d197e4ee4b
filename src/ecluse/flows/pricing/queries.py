"""Rule runs as they are shown."""

from __future__ import annotations

from collections import Counter

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_rows
from ecluse.flows.pricing.states import APPLIED, FAILED
from ecluse.insight.waiting import why_run

DEAD_LETTERS = """
(SELECT d.*, r.project_id FROM rule_targets d JOIN rule_runs r ON r.id = d.rule_run_id WHERE d.status = 'FAILED')
"""
SHOW = "SELECT * FROM rule_runs WHERE tenant_id = %s AND id = %s"
COUNTS = """
SELECT status, error_code, count(*), count(rollback_error_code) FROM rule_targets WHERE rule_run_id = %s
GROUP BY status, error_code ORDER BY 3 DESC, 2
"""
EXECUTIONS = """
SELECT x.run_id::text, x.kind, x.number, e.status, coalesce(e.error_message, f.error) AS error, e.created_at, e.ended_at
FROM rule_executions x LEFT JOIN runs e ON e.id = x.run_id LEFT JOIN LATERAL (
    SELECT format('%%s (%%s times): %%s', error_code, count(*), min(error)) AS error FROM items
    WHERE run_id = e.id AND e.ended_at IS NOT NULL AND status = 'failed'
    GROUP BY error_code ORDER BY count(*) DESC LIMIT 1) f ON true
WHERE x.rule_run_id = %s ORDER BY x.run_id DESC LIMIT 100
"""


async def require_run(connection: Connection, tenant: str, run: int, *, lock: bool = False) -> Row:
    """Return the row of a rule run; raise NotFound if there is none. `lock`: keep it locked until the end of the
    transaction."""
    statement = SHOW + (" FOR NO KEY UPDATE" if lock else "")
    if (found := await fetch_one(connection, dict, statement, (tenant, run))) is None:
        raise NotFound(f"There is no rule run {run}.")
    return found


async def show_run(connection: Connection, tenant: str, run: int) -> Row:
    """Return a rule run with the counts of its targets, its executions, the latest first, and what the open one waits
    for."""
    found, counts = await require_run(connection, tenant, run), Counter[str]()
    counted = await fetch_rows(connection, COUNTS, (run,))
    for status, _, targets, _ in counted:
        counts[status] += targets
    executions = await fetch_all(connection, dict, EXECUTIONS, (run,))
    open_ = next((int(one["run_id"]) for one in executions if one["created_at"] and not one["ended_at"]), None)
    return {
        **found,
        "counts": dict(counts),
        "errors": {code: targets for status, code, targets, _ in counted if status == FAILED},
        "not_rolled_back": sum(unrestored for status, *_, unrestored in counted if status == APPLIED),
        "executions": executions,
        "waiting": (await why_run(connection, tenant, open_)).summary if open_ else None,
    }
