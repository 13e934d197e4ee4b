"""Pages of jobs: the list, and one job with its attempts and its log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import read_page
from ecluse.access.wire import Filter, Offset, reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_rows
from ecluse.flows.jobs.attempts import JobStatus
from ecluse.flows.jobs.job_surface import JOBS, READ, read_job
from ecluse.flows.jobs.schedule_surface import SCHEDULES
from ecluse.web import live, render
from ecluse.web.actions import Button, buttons
from ecluse.web.authentication import Page
from ecluse.web.live import Context
from ecluse.web.shops import Column

HOME = "/ui/jobs"
ROWS, MOST = 25, 200  # jobs on a page; schedules in its filter
CHUNKS, LONGEST_LOG = 50, 20_000  # parts, and characters, of the log of an attempt
STATES = {"pending": "skipped", "running": "running", "succeeded": "succeeded", "failed": "failed"}  # colours

routes = APIRouter(route_class=Page, include_in_schema=False)
LIST = live.Page("jobs_live.html")
ONE = live.Page("job_live.html", ("title", "header", "attempts", "log"))
NAMES = """
SELECT j.id, s.name, s.deleted_at IS NOT NULL AS deleted FROM job_schedules j JOIN schedules s ON s.id = j.schedule_id
WHERE j.tenant_id = %s AND j.id = ANY(%s)
"""
PLACES = """
SELECT v.name AS server, h.name AS host FROM job_servers v, job_hosts h
WHERE v.tenant_id = %(tenant)s AND v.id = %(server)s AND h.tenant_id = %(tenant)s AND h.id = %(host)s
"""
OWN_IDS = "SELECT schedule_id, id FROM job_schedules WHERE tenant_id = %s AND schedule_id = ANY(%s)"
# The end of the log of each attempt.
LOG = """
SELECT attempt, right(string_agg(text, '' ORDER BY start), %s) AS text, min(start) > 0 AS cut FROM (
    SELECT l.*, row_number() OVER (PARTITION BY attempt ORDER BY start DESC) AS place FROM job_log_list l
    WHERE tenant_id = %s AND job_id = %s) AS parts
WHERE place <= %s GROUP BY attempt ORDER BY attempt DESC
"""
COLUMNS = (
    Column("name", "Job"),
    Column("status", "Status"),
    Column("type", "Type"),
    Column("tries", "Attempts", figure=True),
    Column("errorCode", "Error"),
    Column("dueAt", "Due"),
    Column("createdAt", "Created"),
    Column("endedAt", "Ended"),
)


class ListFilters(BaseModel):
    """Filters and offset of the list of jobs."""

    schedule: Filter = None
    status: JobStatus | None = None
    offset: Offset = 0


FiltersOfList = Annotated[ListFilters, Query()]


@routes.get(HOME, openapi_extra=needs(READ))
async def show_jobs(request: Request, wanted: FiltersOfList) -> Response:
    shown, caller = await _jobs(request, wanted), caller_of(request)
    known = await reads_of(request)(lambda c: read_page(c, caller, SCHEDULES, {}, limit=MOST))
    schedules = {one["id"]: one["name"] for one in known["schedules"]}
    if shown["of_schedule"]:
        schedules.setdefault(wanted.schedule, shown["of_schedule"])
    return render.page(
        request,
        "jobs.html",
        regions=LIST.regions(request, **shown),
        statuses=list(STATES),
        schedules=sorted(schedules.items(), key=lambda one: one[1]),
        **shown,
    )


@routes.get(f"{HOME}/live", openapi_extra=needs(READ))
async def follow_jobs(request: Request, wanted: FiltersOfList) -> Response:
    return live.stream(
        request, READ, LIST, lambda: _jobs(request, wanted), lambda message: live.said(message, "job_id") is not None
    )


@routes.get(f"{HOME}/{{job_id}}", openapi_extra=needs(READ))
async def show_one(request: Request, job_id: str) -> Response:
    shown = await _job(request, job_id)
    return render.page(request, "job.html", regions=ONE.regions(request, **shown), **shown)


@routes.get(f"{HOME}/{{job_id}}/live", openapi_extra=needs(READ))
async def follow_one(request: Request, job_id: str) -> Response:
    await _job(request, job_id)  # raises NotFound
    return live.stream(
        request, READ, ONE, lambda: _job(request, job_id), lambda message: live.said(message, "job_id") == job_id
    )


async def listed(connection: Connection, request: Request, wanted: ListFilters, limit: int) -> list[Row]:
    """Return up to `limit` jobs that match the filters, newest first, as rows of a table."""
    caller, given = caller_of(request), {"scheduleId": wanted.schedule, "status": wanted.status}
    rows: list[Row] = (await read_page(connection, caller, JOBS, given, limit=limit, offset=wanted.offset))["jobs"]
    named = await names(connection, caller.tenant, [row["scheduleId"] for row in rows])
    for row in rows:
        row["name"], row["href"] = named[row["scheduleId"]]["name"], f"{HOME}/{row['id']}"
        row["state"], row["tries"] = STATES[row["status"]], f"{row['attempts']} of {row['maxAttempts']}"
    return rows


async def names(connection: Connection, tenant: str, ids: Sequence[str]) -> dict[str, Row]:
    """Return the name of each of these job schedules, and whether it was deleted, by id."""
    return {one["id"]: one for one in await fetch_all(connection, dict, NAMES, (tenant, list(ids)))}


async def pages_of_schedules(connection: Connection, tenant: str, ids: Sequence[int]) -> dict[int, str]:
    """Return the addresses of the pages of these schedules among the pages of jobs, by the id that all flows share."""
    return {row: f"{HOME}/schedules/{own}" for row, own in await fetch_rows(connection, OWN_IDS, (tenant, list(ids)))}


async def _jobs(request: Request, wanted: ListFilters) -> Context:
    async def ask(connection: Connection) -> tuple[list[Row], str | None]:
        rows = await listed(connection, request, wanted, ROWS + 1)
        given = [wanted.schedule] if wanted.schedule else []
        found = await names(connection, caller_of(request).tenant, given)
        return rows, next((one["name"] for one in found.values()), None)

    rows, of_schedule = await reads_of(request)(ask)
    return {
        "wanted": wanted,
        "rows": rows[:ROWS],
        "columns": COLUMNS,
        "of_schedule": of_schedule,
        "more": len(rows) > ROWS,
        "size": ROWS,
        "busy": any(row["endedAt"] is None for row in rows),
        "over": False,
    }


async def _job(request: Request, job_id: str) -> Context:
    tenant = caller_of(request).tenant

    async def ask(connection: Connection) -> Context:
        job = await read_job(connection, tenant, job_id, request.app.state.leasing.longest_pending)
        (schedule,) = (await names(connection, tenant, [job["scheduleId"]])).values()
        places = {"tenant": tenant, "server": job["serverInstanceId"], "host": job["hostId"]}
        (place,) = await fetch_all(connection, dict, PLACES, places)
        logs = await fetch_all(connection, dict, LOG, (LONGEST_LOG, tenant, job_id, CHUNKS))
        return {"job": job, "schedule": schedule, **place, "logs": logs}

    shown = await reads_of(request)(ask)
    job = shown["job"]
    return {
        **shown,
        "title": f"{shown['schedule']['name']} {job['status']} · Ecluse",
        "states": STATES,
        "buttons": _buttons(request, job),
        "busy": job["endedAt"] is None,
        "over": job["endedAt"] is not None,
    }


def _buttons(request: Request, job: Row) -> list[Button]:
    one, back = {"job_id": job["id"]}, f"{HOME}/{job['id']}"
    if job["endedAt"] is None:
        return buttons(request, ("cancel_job", one), back=back) if job["cancelRequestedAt"] is None else []
    return buttons(request, ("retry_job", one), back=back) if job["status"] == "failed" else []
