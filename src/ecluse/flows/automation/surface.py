"""Automation in the API, the command line and the pages: schedules, their runs, the outcome of each fiche. Requests are
checked before a run is inserted, so that nothing is started by mistake."""

from __future__ import annotations

from typing import Annotated, Any

from ecluse.access.commands import Command
from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Deleted, Filter, Limit, Offset, Order, number, with_ids_as_text
from ecluse.db.query import Row
from ecluse.engine import Flow, Started
from ecluse.flows.automation import diagnostic, queries, schedules, shapes, start
from ecluse.flows.automation.plan import Changes, Plan
from ecluse.flows.automation.queries import FicheStatus, RunFilter
from ecluse.insight.run_queries import count_log

surface = Surface("automation")

SCHEDULES, RUNS = "/api/automation/schedules", "/api/automation/runs"
SCHEDULE, RUN = f"{SCHEDULES}/{{schedule_id}}", f"{RUNS}/{{run_id}}"
ABOUT = "schedule:{schedule_id}"
READ, WRITE = "automation.read", "automation.write"
ScheduleNumber = Annotated[int, Noun("automation schedule")]
RunNumber = Annotated[int, Noun("automation run")]
# Short names of the fields that are given every day.
OPTIONS = {
    "type": "schedule_type",
    "at": "time_of_day",
    "cron": "cron_expression",
    "tz": "timezone",
    "mode": "fiche_selection.mode",
    "range": "fiche_selection.date_range",
    "start-date": "fiche_selection.start_date",
    "end-date": "fiche_selection.end_date",
    "fiches": "fiche_selection.fiche_ids",
    "groupe": "fiche_selection.groupes",
    "max-fiches": "fiche_selection.max_fiches",
}


class RunStatusFilter(Filters):
    status: Annotated[RunFilter | None, Where(queries.HAS_STATUS)] = None


class RunFilters(RunStatusFilter):
    schedule_id: Annotated[Filter, Where("t.schedule_id = %(schedule_id)s::bigint")] = None


ALL_SCHEDULES = Listing("schedules", shapes.AutomationScheduleRow, queries.SCHEDULES, READ, order=("name",))
ALL_RUNS = Listing("runs", shapes.AutomationRunRow, "automation_runs", READ, filters=RunFilters)
OF_SCHEDULE = Listing(
    *("runs", shapes.AutomationRunRow, "automation_runs", READ), filters=RunStatusFilter, within=("schedule_id",)
)
FICHE_IDS = Listing(
    *("fiche_ids", shapes.FicheIdRow, "automation_schedule_fiche_ids", READ), order=("place",), within=("schedule_id",)
)
RUN_COLUMNS = ("id", "schedule_id", "status", "started_at", "selected", "successful_fiches", "failed_fiches")


async def longest(look: Look) -> Row:
    """Return the parameter of the list of schedules: the time after which an open run is stale."""
    return {"longest": look.state.automation.config.longest}


async def known_schedule(look: Look, schedule_id: Any) -> None:
    """Raise NotFound if `schedule_id` is given and the tenant never had such a schedule."""
    if schedule_id is not None:
        wanted = number("automation schedule", str(schedule_id))
        await queries.require_schedule(look.connection, look.tenant, wanted)


surface.listing(
    SCHEDULES,
    ALL_SCHEDULES,
    check=longest,
    list_automation_schedules="List schedules by name, with their due times and the status of their last runs.",
    command=Command(
        "automation schedules list",
        columns=("id", "schedule_type", "name", "next_due_at", "last_run_status", "is_stale", "error"),
        empty="no schedules yet: `ecluse schedules create automation --name … --range yesterday`",
    ),
)
surface.listing(
    RUNS,
    ALL_RUNS,
    check=known_schedule,
    list_automation_runs="List runs, the newest first. With a status filter, cancelled runs are found by"
    " `status=cancelled` only.",
    command=Command(
        "automation runs list", columns=RUN_COLUMNS, empty="no runs yet: start one with `ecluse schedules run ID`"
    ),
)
surface.listing(
    f"{SCHEDULE}/fiche-ids",
    FICHE_IDS,
    check=known_schedule,
    list_fiche_ids_of_schedule="List the fiche ids of a schedule of mode manual, in the order given.",
    command=Command("automation schedules fiche-ids", empty="the schedule names no fiches"),
)
surface.listing(
    f"{SCHEDULE}/runs",
    OF_SCHEDULE,
    check=known_schedule,
    list_runs_of_schedule="List the runs of a schedule, the newest first; of a deleted schedule, too.",
)


@surface.operation(
    "POST",
    SCHEDULES,
    needs=WRITE,
    answer=shapes.ChangedAutomationSchedule,
    status=201,
    action="automation_schedule.create",
    subject="schedule:{id}",
    refuses=("NAME_TAKEN", "NO_SECRET_KEY", "LIMIT_REACHED", "NO_CONNECTION"),
    command=Command(
        "schedules create automation",
        options=OPTIONS,
        example="ecluse schedules create automation --name nightly --type DAILY --at 06:30 --tz Europe/Paris"
        " --range yesterday",
    ),
)
async def create_automation_schedule(act: Act, body: Plan) -> Row:
    """Create a schedule; only due times from now on are fired. Fields are accepted in snake_case and in camelCase. The
    response holds the secret that signs its webhook, if it has one; it is not shown again."""
    await act.require_room("schedules")
    async with act.room_kept("mail_addresses", bool(body.notify_emails)):
        made = await schedules.create(act.connection, _flow(act), act.tenant, body)
    act.answers(201, webhook_secret=made["webhook_secret"])
    return {**await _in_full(act, made["id"]), "webhook_secret": None}


@surface.read(SCHEDULE, needs=READ, answer=shapes.AutomationSchedule, command=Command("automation schedules show"))
async def show_automation_schedule(look: Look, schedule_id: ScheduleNumber) -> Row:
    """Show a schedule with its last runs, the outcomes of its latest due times, and its next due times."""
    return await _in_full(look, schedule_id)


@surface.operation(
    "PATCH",
    SCHEDULE,
    needs=WRITE,
    answer=shapes.ChangedAutomationSchedule,
    action="automation_schedule.update",
    subject=ABOUT,
    refuses=("NAME_TAKEN", "NO_SECRET_KEY", "LIMIT_REACHED", "NO_CONNECTION"),
    command=Command("schedules update automation", options=OPTIONS),
)
async def change_automation_schedule(act: Act, schedule_id: ScheduleNumber, body: Changes) -> Row:
    """Change a schedule: only the given fields change. Open runs keep the settings they began with. Setting a
    `webhook_url` on a schedule without a signing secret creates one, which is in this response only."""
    async with act.room_kept("mail_addresses", "notify_emails" in body.model_fields_set):
        changed = await schedules.update(act.connection, _flow(act), act.tenant, schedule_id, body)
    act.answers(200, webhook_secret=changed["webhook_secret"])
    return {**await _in_full(act, schedule_id), "webhook_secret": None}


@surface.operation(
    "POST",
    f"{SCHEDULE}/rotate-secret",
    needs=WRITE,
    answer=shapes.ChangedAutomationSchedule,
    action="automation_schedule.rotate-secret",
    subject=ABOUT,
    refuses=("NO_WEBHOOK", "NO_SECRET_KEY"),
    command=Command("schedules rotate-secret"),
)
async def rotate_schedule_secret(act: Act, schedule_id: ScheduleNumber) -> Row:
    """Create a new secret for the signatures of the schedule's webhook, or the first one if the webhook was not signed
    yet. For a day the old secret signs as well, so that the receiver can change over."""
    row = await schedules.rotate_secret(act.connection, act.tenant, schedule_id, secrets=act.state.secrets)
    act.answers(200, webhook_secret=row["webhook_secret"])
    return {**await _in_full(act, schedule_id), "webhook_secret": None}


@surface.operation("DELETE", SCHEDULE, needs=WRITE, answer=Deleted, action="automation_schedule.delete", subject=ABOUT)
async def delete_automation_schedule(act: Act, schedule_id: ScheduleNumber) -> Row:
    """Delete a schedule: it starts no more runs, and is not listed. Its runs can be read as before; an open run
    finishes."""
    await schedules.delete(act.connection, act.tenant, schedule_id)
    return {"id": schedule_id, "deleted": True}


@surface.operation(
    "POST",
    "/api/automation/trigger",
    needs=WRITE,
    answer=shapes.Triggered,
    action="automation_schedule.trigger",
    subject="schedule:{body.schedule_id}",
    refuses=("SCHEDULE_INACTIVE", "BUDGET_EXCEEDED", "NO_CONNECTION"),
)
async def trigger_automation(act: Act, body: shapes.Trigger) -> Row:
    """Run a schedule now, even if other runs of it are open, possibly over other fiches than it selects. If a list is
    longer than `max_fiches`, only the first `max_fiches` are taken, with a note in `warnings`."""
    wanted, override = number("automation schedule", body.schedule_id), body.override_fiche_selection
    config = act.state.automation.config
    fired = await start.fire(act.connection, _flow(act), act.tenant, wanted, override, config, act.request_id)
    return _started(fired.started, fired.warnings)


@surface.read(RUN, needs=READ, answer=shapes.AutomationRun, command=Command("automation runs show"))
async def show_automation_run(look: Look, run_id: RunNumber) -> Row:
    """Show a run in full: its progress, the settings it runs with, which fiches were picked and why the others were
    not."""
    return await queries.show_run(look.connection, look.tenant, run_id, look.state.automation.config.longest)


@surface.read(f"{RUN}/logs", needs=READ, answer=shapes.AutomationLogPage, command=Command("automation runs logs"))
async def list_automation_logs(
    look: Look, run_id: RunNumber, order: Order = "asc", limit: Limit = 50, offset: Offset = 0
) -> Row:
    """List the log of a run, the oldest line first, or the newest (`order=desc`)."""
    cut = {"limit": limit, "offset": offset}
    rows = await queries.list_logs(look.connection, look.tenant, run_id, newest_first=order == "desc", **cut)
    return {"logs": with_ids_as_text(rows), "total": await count_log(look.connection, run_id), **cut}


@surface.read(
    f"{RUN}/fiches",
    needs=READ,
    answer=shapes.AutomationFichePage,
    command=Command(
        "automation runs fiches", columns=("fiche_id", "status", "error_code", "error", "ignore_reason", "details")
    ),
)
async def list_automation_fiches(
    look: Look, run_id: RunNumber, status: FicheStatus | None = None, limit: Limit = 50, offset: Offset = 0
) -> Row:
    """List the fiches of a run, by id, each with its outcome or, while it is open, the state of its details,
    transcripts and audits."""
    cut = {"limit": limit, "offset": offset}
    rows = await queries.list_fiches(look.connection, look.tenant, run_id, status=status, **cut)
    return {"fiches": with_ids_as_text(rows), **cut}


@surface.read(
    "/api/automation/diagnostic", needs=READ, answer=shapes.Diagnostic, command=Command("automation diagnose")
)
async def diagnose_automation(look: Look) -> Row:
    """Check whether everything that automation needs is in place, with hints for each problem."""
    lanes = {stage.lane.name for name in ("automation", "transcription") for stage in look.kit.flow(name).stages}
    found = await diagnostic.look(look.connection, look.state.automation, look.tenant, lanes)
    with_ids_as_text(found["schedules"]["worst"])
    return found


async def _in_full(look: Look, schedule_id: int) -> Row:
    longest = look.state.automation.config.longest
    row = await queries.show_schedule_in_full(look.connection, look.tenant, schedule_id, longest)
    for part in ("slots", "runs"):
        with_ids_as_text(row[part])
    return row


def _flow(look: Look) -> Flow:
    return look.kit.flow(schedules.FLOW)


def _started(started: Started, warnings: list[str]) -> Row:
    run = started.run
    return {"success": True, "run_id": str(run.id), "event_ids": [run.event_key], "warnings": warnings}
