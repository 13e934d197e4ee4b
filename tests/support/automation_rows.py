"""Automation schedules and runs as rows, for tests that read them while no worker changes them."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from ecluse.bootstrap import load_flows
from ecluse.engine import Choice, Started, load_run, redrive
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
    failed = %(failed)s, ignored = %(ignored)s, cancelled = %(cancelled)s, end_cause = %(cause)s, ended_by = %(by)s,
    ended_at = ecluse_now() WHERE id = %(run)s
"""


# A recording of a fiche has no URL, in the run that transcribes it for this one.
WITHOUT_URL = """
WITH child AS (
    INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, parent_run_id)
    SELECT 'default', 'transcription', 'child-' || %(run)s || '-' || %(fiche)s, false, 'running', 'running',
           ecluse_now(), %(run)s RETURNING id),
lane AS (INSERT INTO lanes (name) VALUES ('rows of ' || %(run)s || '-' || %(fiche)s) RETURNING id),
waiter AS (INSERT INTO run_waiters (run_id, waiter_run_id, target) SELECT id, %(run)s, %(fiche)s FROM child),
plan AS (
    INSERT INTO transcription_runs (run_id, tenant_id, fiche_id, total_recordings)
    SELECT id, 'default', %(fiche)s, 3 FROM child),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT 'r', child.id, 'known', lane.id, 1, 1, ecluse_now() FROM child, lane RETURNING id, run_id, lane_id)
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, order_at, claim_id, status, permanent,
                   error_code, error, finished_at)
SELECT 'default', run_id, 'transcription', 'known', call, call, lane_id, ecluse_now(), ecluse_now(), id, 'failed', true,
       'NO_URL', 'The CRM has no URL for this recording.', ecluse_now()
FROM claim, (SELECT %(fiche)s || '-2' AS call) c
"""
NO_URL = "1 of 3 recordings has no URL in the CRM"


(FLOW,) = [flow for flow in load_flows(Settings()) if flow.name == "automation"]


async def new_schedule(connection: AsyncConnection[Any], tenant: str = "default", **given: Any) -> dict[str, Any]:
    plan = Plan.model_validate({**PLAN, **given})
    return await schedules.create(connection, FLOW, tenant, plan, secrets=None, guard=GuardedHttp(()))


async def redriven(connection: AsyncConnection[Any], run_id: int, **choice: Any) -> Started:
    return await redrive(connection, FLOW, await load_run(connection, run_id), Choice(**choice))


async def end_run(connection: AsyncConnection[Any], run_id: int, **outcomes: str) -> None:
    """What became of each fiche: `f7="failed"`, or with a code: `f7="failed/BUSY"`. The run's status follows; if one
    was `cancelled`, so was the run."""
    found = [(fiche.removeprefix("f"), *outcome.split("/")) for fiche, outcome in outcomes.items()]
    words = ("successful", "failed", "ignored", "cancelled")
    count = {word: sum(outcome == word for _, outcome, *_ in found) for word in words}
    count["failed"] += count["cancelled"]
    status = "completed" if not count["failed"] else "partial" if count["successful"] else "failed"
    state = {"completed": "succeeded", "partial": "partial", "failed": "failed"}[status]
    how = {"cause": "normal", "by": None}
    if count["cancelled"]:
        state, how = "cancelled", {"cause": "operator", "by": "laptop"}
    async with connection.transaction():
        for fiche, outcome, *given in found:
            why = None if outcome == "successful" else f"{fiche} was {outcome}"
            code = None if outcome == "successful" else [*given, outcome.upper()][0]
            await connection.execute(
                "INSERT INTO outcomes (run_id, target, outcome, error_code, reason) VALUES (%s, %s, %s, %s, %s)",
                (run_id, fiche, "failed" if outcome == "cancelled" else outcome, code, why),
            )
        end = {"run": run_id, "status": status, "state": state, "selected": len(found), **count, **how}
        await connection.execute(END, end)
