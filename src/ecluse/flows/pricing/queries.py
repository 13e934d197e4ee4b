"""Rule runs as they are shown."""

from __future__ import annotations

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_rows, fetch_value
from ecluse.flows.pricing.states import COUNTS

DEAD_LETTERS = """
(SELECT d.*, r.project_id FROM rule_targets d JOIN rule_runs r ON r.id = d.rule_run_id WHERE d.status = 'FAILED')
"""
SHOW = "SELECT * FROM rule_runs WHERE tenant_id = %s AND id = %s"
ERRORS = """
SELECT error_code, count(*) FROM rule_targets WHERE rule_run_id = %s AND status = 'FAILED' GROUP BY 1 ORDER BY 2 DESC, 1
"""
NOT_ROLLED_BACK = """
SELECT count(*) FROM rule_targets WHERE rule_run_id = %s AND status = 'APPLIED' AND rollback_error_code IS NOT NULL
"""
EXECUTIONS = """
SELECT x.run_id::text, x.kind, x.number, e.status, e.error_message AS error, e.created_at, e.ended_at
FROM rule_executions x LEFT JOIN runs e ON e.id = x.run_id WHERE x.rule_run_id = %s ORDER BY x.run_id DESC LIMIT 100
"""


async def require_run(connection: Connection, tenant: str, run: int) -> Row:
    """Return the row of a rule run; raise NotFound if there is none."""
    if (found := await fetch_one(connection, dict, SHOW, (tenant, run))) is None:
        raise NotFound(f"There is no rule run {run}.")
    return found


async def show_run(connection: Connection, tenant: str, run: int) -> Row:
    """Return a rule run with the counts of its targets and its executions, the latest first."""
    return {
        **await require_run(connection, tenant, run),
        "counts": dict(await fetch_rows(connection, COUNTS, (run,))),
        "errors": dict(await fetch_rows(connection, ERRORS, (run,))),
        "not_rolled_back": await fetch_value(connection, NOT_ROLLED_BACK, (run,)),
        "executions": await fetch_all(connection, dict, EXECUTIONS, (run,)),
    }
