"""Pages of job schedules (the list; one schedule with its due times and jobs), and of hosts, servers and agents."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Request, Response

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import read_page
from ecluse.access.wire import camel, kit_of, reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.flows.jobs.job_surface import OF_AGENTS, OF_HOSTS, OF_SERVERS, READ
from ecluse.flows.jobs.schedule_surface import SCHEDULES, SLOTS
from ecluse.flows.jobs.schedules import show
from ecluse.web import jobs, live, render
from ecluse.web.actions import Button, buttons
from ecluse.web.authentication import Page
from ecluse.web.live import Context
from ecluse.web.schedules import Ahead, OffsetOfList, ahead
from ecluse.web.shops import Column

HOME, SERVERS = "/ui/jobs/schedules", "/ui/jobs/servers"
ROWS, FIRES, SLOTS_SHOWN, JOBS_SHOWN, MOST = 25, 10, 10, 10, 200  # on a page; MOST: servers, and agents

routes = APIRouter(route_class=Page, include_in_schema=False)
ONE = live.Page("job_schedule_live.html")
STATES = {**jobs.STATES, "scheduler_failed": "failed"}  # colours
OF_SLOTS = {"fired": "succeeded", "skipped": "skipped", "missed": "partial", "failed": "failed"}
COLUMNS = (
    Column("name", "Schedule"),
    Column("status", "Last job"),
    Column("words", "Due"),
    Column("jobType", "Type"),
    Column("nextRunAt", "Next"),
    Column("lastRunStatus", "Last result"),
    Column("runCount", "Jobs", figure=True),
)
OF_SERVER = (Column("name", "Server"), Column("host", "Host"), Column("id", "Id"), Column("createdAt", "Created"))
OF_HOST = (Column("name", "Host"), Column("id", "Id"), Column("createdAt", "Created"))
OF_AGENT = (
    Column("host", "Agent of host"),
    Column("status", "State"),
    Column("onlineSince", "Online since"),
    Column("seen", "Last seen"),
    Column("running", "Running", figure=True),
    Column("version", "Version"),
    Column("hostname", "Machine"),
    Column("platform", "Platform"),
)


@routes.get(HOME, openapi_extra=needs(READ))
async def show_schedules(request: Request, filters: OffsetOfList) -> Response:
    caller, now = caller_of(request), kit_of(request).clock.now()
    rows: list[Row] = (
        await reads_of(request)(lambda c: read_page(c, caller, SCHEDULES, {}, limit=ROWS + 1, offset=filters.offset))
    )["schedules"]
    for row in rows:
        row["href"], row["words"] = f"{HOME}/{row['id']}", f"{_ahead(row, now, 0).words} ({row['timezone']})"
        # A due time for which no job could be made is worth more attention than the job before it.
        failed = row["lastRunStatus"] if row["lastRunStatus"] == "scheduler_failed" else None
        row["status"] = "paused" if not row["enabled"] else failed or row["lastJobStatus"] or "no job yet"
        row["state"] = STATES.get(row["status"], "skipped")
        row["buttons"] = _buttons(request, row, HOME)
    new = buttons(request, ("create_job_schedule", {}))
    shown: Context = {"rows": rows[:ROWS], "more": len(rows) > ROWS, "new": new}
    return render.page(request, "job_schedules.html", columns=COLUMNS, wanted=filters, size=ROWS, **shown)


@routes.get(f"{HOME}/{{job_schedule_id}}", openapi_extra=needs(READ))
async def show_one(request: Request, job_schedule_id: str) -> Response:
    shown = await _schedule(request, job_schedule_id)
    return render.page(request, "job_schedule.html", regions=ONE.regions(request, **shown), **shown)


@routes.get(f"{HOME}/{{job_schedule_id}}/live", openapi_extra=needs(READ))
async def follow_one(request: Request, job_schedule_id: str) -> Response:
    await _schedule(request, job_schedule_id)  # raises NotFound
    return live.stream(
        request,
        READ,
        ONE,
        lambda: _schedule(request, job_schedule_id),
        lambda message: live.said(message, "schedule_id") == job_schedule_id,
    )


@routes.get(SERVERS, openapi_extra=needs(READ))
async def show_servers(request: Request) -> Response:
    caller, now = caller_of(request), kit_of(request).clock.now()

    async def ask(connection: Connection) -> Context:
        listings = (OF_AGENTS, OF_SERVERS, OF_HOSTS)
        pages = [await read_page(connection, caller, one, {}, limit=MOST) for one in listings]
        return {one.name: page[one.name] for one, page in zip(listings, pages, strict=True)}

    shown = await reads_of(request)(ask)
    for one in shown["agents"]:
        one["status"] = "revoked" if one["revokedAt"] else "online" if one["online"] else "offline"
        one["state"] = {"online": "succeeded", "offline": "failed", "revoked": "skipped"}[one["status"]]
        one["seen"] = render.ago(one["lastSeenAt"], now)
        one["onlineSince"] = one["onlineSince"] if one["online"] else None
        wanted = [("revoke_job_agent", {"agent_id": one["id"]})] if one["revokedAt"] is None else []
        one["buttons"] = buttons(request, *wanted, back=SERVERS)
    for one in shown["servers"]:
        named = {"server_id": one["id"]}
        one["buttons"] = buttons(request, ("create_job_schedule", {}), server_instance_id=one["id"])
        one["buttons"] += buttons(request, ("change_job_server", named), ("delete_job_server", named), back=SERVERS)
    for one in shown["hosts"]:
        named = {"host_id": one["id"]}
        one["buttons"] = buttons(request, ("create_job_server", {}), back=SERVERS, **named)
        one["buttons"] += buttons(request, ("create_enrolment_token", named), ("delete_job_host", named), back=SERVERS)
    shown["new"] = buttons(request, ("create_job_host", {}), back=SERVERS)
    return render.page(request, "job_servers.html", of_agent=OF_AGENT, of_server=OF_SERVER, of_host=OF_HOST, **shown)


async def _schedule(request: Request, job_schedule_id: str) -> Context:
    caller, now = caller_of(request), kit_of(request).clock.now()

    async def ask(connection: Connection) -> Context:
        row = camel(await show(connection, caller.tenant, job_schedule_id))
        slots = await read_page(connection, caller, SLOTS, {"job_schedule_id": job_schedule_id}, limit=SLOTS_SHOWN)
        wanted = jobs.ListFilters(schedule=job_schedule_id)
        servers = await read_page(connection, caller, OF_SERVERS, {}, limit=MOST)
        return {
            "schedule": row,
            "server": next((one for one in servers["servers"] if one["id"] == row["serverInstanceId"]), None),
            "slots": slots["slots"],
            "jobs": await jobs.listed(connection, request, wanted, JOBS_SHOWN),
        }

    shown = await reads_of(request)(ask)
    row = shown["schedule"]
    return {
        **shown,
        "ahead": _ahead(row, now, FIRES),
        "columns": jobs.COLUMNS,
        "states": STATES,
        "of_slots": OF_SLOTS,
        "buttons": _buttons(request, row, f"{HOME}/{row['id']}"),
        "busy": any(one["endedAt"] is None for one in shown["jobs"]),
        "over": False,
    }


def _ahead(row: Row, now: datetime, count: int) -> Ahead:
    window = {"window_start": row["executionWindowStart"], "window_end": row["executionWindowEnd"]}
    return ahead({**row, **window, "cron": row["cronExpression"]}, now, count)


def _buttons(request: Request, row: Row, back: str) -> list[Button]:
    one = {"job_schedule_id": row["id"]}
    switch = "pause_job_schedule" if row["enabled"] else "resume_job_schedule"
    names = ("run_job_schedule", switch, "change_job_schedule", "delete_job_schedule")
    return buttons(request, *((name, one) for name in names), back=back)
