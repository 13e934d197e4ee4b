"""Queries about automation schedules and runs, for API and command line.

They answer the questions of operators: why nothing was triggered (whether the schedule is active, its next due times,
its slots and their reasons, whether the last run is stale); the progress of a run (phase, stages, what each fiche still
lacks); why it ended as partial.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_row
from ecluse.engine import next_fires, show_schedule
from ecluse.flows.fiches.cache import states
from ecluse.insight import run_queries as engine
from ecluse.insight.redrive_chains import redrives_of, standing

RunStatus = Literal["running", "completed", "partial", "failed"]
RunFilter = Literal["running", "completed", "partial", "failed", "cancelled"]
FicheStatus = Literal["open", "successful", "failed", "ignored"]

LAST_RUNS = 10
NEXT_FIRES = 5

# The list of schedules, with what depends on the longest time that a run may take.
SCHEDULES = """(
    SELECT l.*, stale_at, coalesce(ecluse_now() > stale_at, false) AS is_stale
    FROM automation_schedule_list l CROSS JOIN LATERAL (
        SELECT l.running_since + l.clock_stood + %(longest)s AS stale_at) s)"""
SHOW = f"SELECT *, ecluse_now() AS now FROM {SCHEDULES} t WHERE id = %(id)s AND tenant_id = %(tenant)s"  # noqa: S608
ASIDE = ("window_start", "window_end", "running_since", "clock_stood", "now")  # not part of an answer
# Deleted schedules are included: their runs can still be read.
KNOWN = "SELECT 1 FROM automation_schedules WHERE id = %s AND tenant_id = %s"
KNOWN_RUN = "SELECT 1 FROM runs WHERE id = %s AND flow = 'automation' AND tenant_id = %s"
COLUMNS = """id, tenant_id, schedule_id, status, state, phase, selected, total_fiches, successful_fiches, failed_fiches,
    cancelled_fiches, ignored_fiches, transcriptions_run, audits_run, error_code, error_message, end_cause, ended_by,
    event_id, parent_run_id, created_at, started_at, completed_at, duration_ms"""
LAST = f"""
SELECT {COLUMNS} FROM automation_runs WHERE tenant_id = %s AND schedule_id = %s ORDER BY id DESC LIMIT {LAST_RUNS}
"""  # noqa: S608 - our own names
RUN = f"""
SELECT {COLUMNS}, config_snapshot, result_summary, error_details, ecluse_now() AS now, clock_stood(a.id) AS clock_stood,
       correlation_id
FROM automation_runs a CROSS JOIN LATERAL (SELECT r.correlation_id FROM runs r WHERE r.id = a.id) r
WHERE a.id = %s AND a.tenant_id = %s
"""  # noqa: S608 - our own names
# A cancelled run is found as cancelled only.
HAS_STATUS = "CASE t.state WHEN 'cancelled' THEN 'cancelled' ELSE t.status END = %(status)s"
LOGS = """
SELECT id, "timestamp", level, message, metadata, event_id, count, targets, last_at FROM automation_logs
WHERE run_id = %(run)s ORDER BY "timestamp" {order}, id {order} LIMIT %(limit)s OFFSET %(offset)s
"""
FICHES = f"""
WITH page AS MATERIALIZED (
    SELECT * FROM outcomes
    WHERE run_id = %(run)s AND (%(status)s::text IS NULL OR coalesce(outcome, 'open') = %(status)s)
    ORDER BY target LIMIT %(limit)s OFFSET %(offset)s),
expected AS MATERIALIZED (
    {engine.EXPECTED} AND target BETWEEN (SELECT min(target) FROM page) AND (SELECT max(target) FROM page))
SELECT o.target AS fiche_id, coalesce(o.outcome, 'open') AS status, CASE o.outcome WHEN 'failed' THEN o.reason END AS
    error, CASE o.outcome WHEN 'ignored' THEN o.reason END AS ignore_reason, o.error_code, f.recordings_count,
    f.transcription_run_id, t.status AS transcription_status,
    {engine.WILL_FAIL_WHY} AS will_fail
FROM page o LEFT JOIN automation_run_fiches f ON f.run_id = o.run_id AND f.fiche_id = o.target
LEFT JOIN runs t ON t.id = f.transcription_run_id
LEFT JOIN expected e ON e.target = o.target ORDER BY o.target
"""  # noqa: S608 - our own words
AUDITS = """
SELECT fiche_id, count(*)::int AS total, (count(*) FILTER (WHERE status = 'completed'))::int AS completed,
       (count(*) FILTER (WHERE status = 'failed'))::int AS failed
FROM audits WHERE automation_run_id = %s AND fiche_id = ANY(%s) GROUP BY fiche_id
"""


async def show_schedule_in_full(connection: Connection, tenant: str, schedule_id: int, longest: timedelta) -> Row:
    """Return a schedule with its last runs, its latest slots and its next fires. Raise NotFound if the tenant has no
    such schedule. `longest`: the time after which an open run is stale."""
    given = {"tenant": tenant, "id": schedule_id, "longest": longest}
    row = await fetch_one(connection, dict, SHOW, given)
    if row is None:
        raise NotFound(f"There is no automation schedule {schedule_id}.")
    fires = next_fires(row, row["now"], NEXT_FIRES) if row["is_active"] else []
    slots = (await show_schedule(connection, tenant, schedule_id))["slots"]
    runs = await fetch_all(connection, dict, LAST, (tenant, schedule_id))
    shown = {name: value for name, value in with_fiche_ids(row).items() if name not in ASIDE}
    return {**shown, "next_fires": fires, "slots": slots, "runs": runs}


def with_fiche_ids(row: Row) -> Row:
    """Return a row of `automation_schedule_list` with the selection in full: the ids themselves, not their number."""
    selection = {**row["fiche_selection"], "fiche_ids": row["fiche_ids"]}
    del selection["fiche_ids_given"]
    return {name: value for name, value in row.items() if name != "fiche_ids"} | {"fiche_selection": selection}


def staleness(running_since: datetime | None, now: datetime, longest: timedelta) -> Row:
    """Return whether a run is stale, and the instant at which it becomes stale: `longest` after `running_since`, which
    is None for a run that is not running and so never stale."""
    if running_since is None:
        return {"is_stale": False, "stale_at": None}
    return {"is_stale": now - running_since > longest, "stale_at": running_since + longest}


async def require_schedule(connection: Connection, tenant: str, schedule_id: int) -> None:
    """Raise NotFound if the tenant never had such a schedule; a deleted one is accepted."""
    if await fetch_row(connection, KNOWN, (schedule_id, tenant)) is None:
        raise NotFound(f"There is no automation schedule {schedule_id}.")


async def show_run(connection: Connection, tenant: str, run_id: int, longest: timedelta) -> Row:
    """Return a run in full: its plan as of the start, which fiches were picked and why the others were not, the days
    that the CRM did not list, the progress of each stage, and its redrives. Raise NotFound if the tenant has no such
    automation run. `longest`: the time after which an open run is stale."""
    row = await fetch_one(connection, dict, RUN, (run_id, tenant))
    if row is None:
        raise _unknown(run_id)
    now, snapshot, details = row.pop("now"), row.pop("config_snapshot"), row["error_details"] or {}
    longest += row.pop("clock_stood")
    going = None if row["completed_at"] is not None else row["started_at"]
    if "specific_audit_configs" in snapshot:
        snapshot["specific_audit_configs"] = [str(one) for one in snapshot["specific_audit_configs"]]
    redrives = (await redrives_of(connection, [run_id])).get(run_id, [])
    stands = await standing(connection, [run_id] if redrives else [])
    return {
        **row,
        "redrives": [str(one) for one in redrives],
        "after_redrives": stands.get(run_id),
        **staleness(going, now, longest),
        "config_snapshot": snapshot,
        "selection_summary": snapshot.get("selection_summary"),
        "audit_configs": snapshot.get("audit_configs"),
        "budget_warning": snapshot.get("budget_warning"),
        "api_errors": details.get("apiErrors", []),
        "selection_incomplete": details.get("selection_incomplete"),
        "missing_days": details.get("missing_days", []),
        "stages": (await engine.stages_of(connection, [run_id])).get(run_id, []),
        "will_fail": await engine.will_fail(connection, run_id),
    }


async def list_logs(
    connection: Connection, tenant: str, run_id: int, *, newest_first: bool = False, limit: int, offset: int
) -> list[Row]:
    """Return a page of a run's log lines, the oldest first unless `newest_first`. Raise NotFound if the tenant has no
    such automation run."""
    await _known_run(connection, tenant, run_id)
    statement = LOGS.format(order="DESC" if newest_first else "ASC")
    return await fetch_all(connection, dict, statement, {"run": run_id, "limit": limit, "offset": offset})


async def list_fiches(
    connection: Connection,
    tenant: str,
    run_id: int,
    *,
    status: FicheStatus | None = None,
    limit: int,
    offset: int,
) -> list[Row]:
    """Return a page of a run's fiches, by id: the outcome, or whether the fiche is known to fail, and the state of its
    details, transcripts and audits. `status`: only fiches with this outcome. Raise NotFound if the tenant has no such
    automation run."""
    await _known_run(connection, tenant, run_id)
    given = {"run": run_id, "status": status, "limit": limit, "offset": offset}
    rows = await fetch_all(connection, dict, FICHES, given)
    ids = [row["fiche_id"] for row in rows]
    known = await states(connection, tenant, ids)
    audits = {one.pop("fiche_id"): one for one in await fetch_all(connection, dict, AUDITS, (run_id, ids))}
    for row in rows:
        state = known.get(row["fiche_id"])
        row["details"] = state.details if state else "missing"
        row["recordings"] = {
            "total": state.total_recordings if state else 0,
            "transcribed": state.transcribed if state else 0,
        }
        row["audits"] = audits.get(row["fiche_id"], {"total": 0, "completed": 0, "failed": 0})
    return rows


async def _known_run(connection: Connection, tenant: str, run_id: int) -> None:
    """Raise NotFound if the tenant has no such automation run."""
    if await fetch_row(connection, KNOWN_RUN, (run_id, tenant)) is None:
        raise _unknown(run_id)


def _unknown(run_id: int) -> NotFound:
    return NotFound(f"There is no automation run {run_id}.")
