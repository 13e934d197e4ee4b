"""Automation schedules and runs as rows, for tests that look at them without anybody working on them."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from ecluse.bootstrap import load_flows
from ecluse.flows.automation import schedules
from ecluse.flows.automation.plan import Plan
from ecluse.settings import Settings
from ecluse.vendors.guarded import GuardedHttp

PLAN = {
    "name": "nightly",
    "schedule_type": "DAILY",
    "time_of_day": "06:30",
    "timezone": "Europe/Paris",
    "fiche_selection": {"mode": "date_range", "date_range": "yesterday"},
}
END = """
UPDATE runs SET status = %(status)s, state = %(state)s, selected = %(selected)s, successful = %(successful)s,
    failed = %(failed)s, ignored = %(ignored)s, end_cause = 'normal', ended_at = ecluse_now() WHERE id = %(run)s
"""


(FLOW,) = [flow for flow in load_flows(Settings()) if flow.name == "automation"]


async def new_schedule(connection: AsyncConnection[Any], tenant: str = "default", **given: Any) -> dict[str, Any]:
    plan = Plan.model_validate({**PLAN, **given})
    return await schedules.create(connection, FLOW, tenant, plan, secrets=None, guard=GuardedHttp(()))


async def end_run(connection: AsyncConnection[Any], run_id: int, **outcomes: str) -> None:
    """What became of each fiche: `f7="failed"`. The run's status follows."""
    found = [(fiche.removeprefix("f"), outcome) for fiche, outcome in outcomes.items()]
    count = {word: sum(outcome == word for _, outcome in found) for word in ("successful", "failed", "ignored")}
    status = "completed" if not count["failed"] else "partial" if count["successful"] else "failed"
    state = {"completed": "succeeded", "partial": "partial", "failed": "failed"}[status]
    async with connection.transaction():
        for fiche, outcome in found:
            why = None if outcome == "successful" else f"{fiche} was {outcome}"
            code = None if outcome == "successful" else outcome.upper()
            await connection.execute(
                "INSERT INTO outcomes (run_id, target, outcome, error_code, reason) VALUES (%s, %s, %s, %s, %s)",
                (run_id, fiche, outcome, code, why),
            )
        given = {"run": run_id, "status": status, "state": state, "selected": len(found), **count}
        await connection.execute(END, given)
