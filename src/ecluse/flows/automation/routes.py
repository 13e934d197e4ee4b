"""HTTP routes of automation: schedules, their runs and the outcome of each fiche. Requests are checked before a run is
inserted, so that nothing is started by mistake."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, Request, Response
from pydantic_core import to_jsonable_python

from ecluse.access import door, idempotency
from ecluse.access.changes import change, record
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import as_json, request_id
from ecluse.access.idempotency import Answer
from ecluse.access.wire import Filter, Limit, Offset, Order, id_as_text, kit_of, number, reads_of, with_ids_as_text
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine import Flow, Started
from ecluse.flows.automation import diagnostic, queries, schedules, shapes, start
from ecluse.flows.automation.diagnostic import Setup
from ecluse.flows.automation.plan import Changes, Plan
from ecluse.flows.automation.queries import FicheStatus, RunFilter
from ecluse.insight import run_queries as engine

routes = door.routes("automation")

SCHEDULES, RUNS = "/api/automation/schedules", "/api/automation/runs"


def setup_of(request: Request) -> Setup:
    setup: Setup = request.app.state.automation
    return setup


@routes.get(SCHEDULES, openapi_extra=needs("automation.read"), response_model=shapes.SchedulePage)
async def list_schedules(request: Request, limit: Limit = 50, offset: Offset = 0) -> Response:
    """List schedules by name, with their due times and the status of their last runs."""
    tenant, longest = caller_of(request).tenant, setup_of(request).config.longest
    rows = await reads_of(request)(lambda c: queries.list_schedules(c, tenant, longest, limit=limit, offset=offset))
    return as_json({"schedules": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.post(
    SCHEDULES,
    openapi_extra=needs("automation.write", refuses=(*idempotency.REFUSES, "NAME_TAKEN", "NO_SECRET_KEY")),
    status_code=201,
    response_model=shapes.ChangedSchedule,
)
async def create_schedule(request: Request, body: Plan) -> Response:
    """Add a schedule. It is due for times from now on. Fields are accepted in snake_case and in camelCase. The response
    holds the secret that its webhook is signed with, if it has one; it is not shown again."""
    tenant = caller_of(request).tenant

    async def ask(connection: Connection) -> Answer:
        made = await schedules.create(connection, _flow(request), tenant, body, **_means(request))
        await record(connection, request, "automation_schedule.create", f"schedule:{made['id']}")
        told = to_jsonable_python(await _in_full(connection, request, made["id"]))
        return Answer(201, {**told, "webhook_secret": None}, once={"webhook_secret": made["webhook_secret"]})

    return await idempotency.once(request, kit_of(request).pool, ask)


@routes.get(
    f"{SCHEDULES}/{{schedule_id}}", openapi_extra=needs("automation.read"), response_model=shapes.ScheduleInFull
)
async def show_schedule(request: Request, schedule_id: str) -> Response:
    """Show a schedule with its last runs, the outcomes of its latest due times, and its next due times."""
    wanted = number("automation schedule", schedule_id)
    return as_json(await reads_of(request)(lambda c: _in_full(c, request, wanted)))


@routes.patch(
    f"{SCHEDULES}/{{schedule_id}}",
    openapi_extra=needs("automation.write", refuses=("NAME_TAKEN", "NO_SECRET_KEY")),
    response_model=shapes.ChangedSchedule,
)
async def change_schedule(request: Request, schedule_id: str, body: Changes) -> Response:
    """Change the given fields only. Runs under way go on as they began. Setting a `webhook_url` on a schedule without a
    signing secret creates one, which is in this response only."""
    tenant, wanted = caller_of(request).tenant, number("automation schedule", schedule_id)
    async with change(request, "automation_schedule.update", f"schedule:{wanted}") as connection:
        changed = await schedules.update(connection, _flow(request), tenant, wanted, body, **_means(request))
        shown = await _in_full(connection, request, wanted)
    return as_json({**shown, "webhook_secret": changed["webhook_secret"]})


@routes.post(
    f"{SCHEDULES}/{{schedule_id}}/rotate-secret",
    openapi_extra=needs("automation.write", refuses=("NO_WEBHOOK", "NO_SECRET_KEY")),
    response_model=shapes.ChangedSchedule,
)
async def rotate_schedule_secret(request: Request, schedule_id: str) -> Response:
    """Create a new secret for the signatures of the schedule's webhook, or the first one if the webhook was not signed
    yet. For a day the old secret signs as well, so that the receiver can change over."""
    tenant, wanted = caller_of(request).tenant, number("automation schedule", schedule_id)
    async with change(request, "automation_schedule.rotate-secret", f"schedule:{wanted}") as connection:
        row = await schedules.rotate_secret(connection, tenant, wanted, secrets=request.app.state.secrets)
        shown = await _in_full(connection, request, wanted)
    return as_json({**shown, "webhook_secret": row["webhook_secret"]})


@routes.delete(
    f"{SCHEDULES}/{{schedule_id}}", openapi_extra=needs("automation.write"), response_model=shapes.DeletedSchedule
)
async def delete_schedule(request: Request, schedule_id: str) -> Response:
    """Delete a schedule. It is not due any more, and not listed. Its runs can be read as before; a run under way
    finishes."""
    tenant, wanted = caller_of(request).tenant, number("automation schedule", schedule_id)
    async with change(request, "automation_schedule.delete", f"schedule:{wanted}") as connection:
        await schedules.delete(connection, tenant, wanted)
    return as_json({"id": schedule_id, "deleted": True})


@routes.get(
    f"{SCHEDULES}/{{schedule_id}}/runs", openapi_extra=needs("automation.read"), response_model=shapes.AutomationRunPage
)
async def list_runs_of_schedule(
    request: Request, schedule_id: str, status: RunFilter | None = None, limit: Limit = 50, offset: Offset = 0
) -> Response:
    """List the runs of a schedule, the newest first; of a deleted schedule, too."""
    return await _runs(request, number("automation schedule", schedule_id), status, limit, offset)


@routes.post(
    "/api/automation/trigger",
    openapi_extra=needs("automation.write", refuses=(*idempotency.REFUSES, "SCHEDULE_INACTIVE")),
    response_model=shapes.Triggered,
)
async def trigger(request: Request, body: shapes.Trigger) -> Response:
    """Run a schedule now, whatever else is running, perhaps over other fiches than it selects. Of a list that is longer
    than `max_fiches`, only the first `max_fiches` are taken, and `warnings` says so."""
    tenant, schedule_id = caller_of(request).tenant, number("automation schedule", body.schedule_id)
    override, config = body.override_fiche_selection, setup_of(request).config

    async def ask(connection: Connection) -> Answer:
        started = await start.start(
            connection, _flow(request), tenant, schedule_id, override, correlation_id=request_id(request)
        )
        await record(connection, request, "automation_schedule.trigger", f"schedule:{schedule_id}")
        found = await start.warnings(connection, tenant, schedule_id, override, config)
        return Answer(200, _started(started, found))

    return await idempotency.once(request, kit_of(request).pool, ask)


@routes.get(RUNS, openapi_extra=needs("automation.read"), response_model=shapes.AutomationRunPage)
async def list_automation_runs(
    request: Request,
    schedule_id: Filter = None,
    status: RunFilter | None = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> Response:
    """List runs, the newest first. With a status filter, cancelled runs are found by `status=cancelled` only."""
    wanted = None if schedule_id is None else number("automation schedule", schedule_id)
    return await _runs(request, wanted, status, limit, offset)


@routes.get(f"{RUNS}/{{run_id}}", openapi_extra=needs("automation.read"), response_model=shapes.AutomationRunInFull)
async def show_automation_run(request: Request, run_id: str) -> Response:
    """Show a run in full: its progress, the settings it runs with, which fiches were picked and why the others were
    not."""
    tenant, wanted = caller_of(request).tenant, number("automation run", run_id)
    longest = setup_of(request).config.longest
    return as_json(id_as_text(await reads_of(request)(lambda c: queries.show_run(c, tenant, wanted, longest))))


@routes.get(f"{RUNS}/{{run_id}}/logs", openapi_extra=needs("automation.read"), response_model=shapes.AutomationLogPage)
async def list_automation_logs(
    request: Request, run_id: str, order: Order = "asc", limit: Limit = 50, offset: Offset = 0
) -> Response:
    """List the log of a run, the oldest line first, or the newest (`order=desc`)."""
    tenant, wanted = caller_of(request).tenant, number("automation run", run_id)

    async def ask(connection: Connection) -> Row:
        newest = order == "desc"
        rows = await queries.list_logs(connection, tenant, wanted, newest_first=newest, limit=limit, offset=offset)
        return {"logs": with_ids_as_text(rows), "total": await engine.count_log(connection, wanted)}

    return as_json({**await reads_of(request)(ask), "limit": limit, "offset": offset})


@routes.get(
    f"{RUNS}/{{run_id}}/fiches", openapi_extra=needs("automation.read"), response_model=shapes.AutomationFichePage
)
async def list_automation_fiches(
    request: Request, run_id: str, status: FicheStatus | None = None, limit: Limit = 50, offset: Offset = 0
) -> Response:
    """List the outcomes of a run's fiches, by id; of an open fiche, what it still lacks."""
    tenant, wanted = caller_of(request).tenant, number("automation run", run_id)
    rows = await reads_of(request)(
        lambda c: queries.list_fiches(c, tenant, wanted, status=status, limit=limit, offset=offset)
    )
    return as_json({"fiches": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.get(
    f"{RUNS}/{{run_id}}/redrive",
    openapi_extra=needs("automation.read", refuses=("RUN_NOT_ENDED", "SCHEDULE_GONE")),
    response_model=shapes.RedrivePreview,
)
async def preview_redrive(request: Request, run_id: str, include_cancelled: bool = False) -> Response:
    """Preview a redrive: how many fiches it would take, and which of them cannot succeed as they are. Nothing is
    started."""
    tenant, wanted = caller_of(request).tenant, number("automation run", run_id)
    preview = await reads_of(request)(
        lambda c: start.preview_redrive(c, tenant, wanted, include_cancelled=include_cancelled)
    )
    return as_json(preview)


@routes.post(
    f"{RUNS}/{{run_id}}/redrive",
    openapi_extra=needs(
        "automation.write",
        refuses=(
            *idempotency.REFUSES,
            "RUN_NOT_ENDED",
            "SCHEDULE_GONE",
            "SCHEDULE_INACTIVE",
            "NOTHING_FAILED",
            "ONLY_CANCELLED",
            "ONLY_HOPELESS",
        ),
    ),
    response_model=shapes.Redriven,
)
async def redrive(
    request: Request,
    run_id: str,
    body: Annotated[
        shapes.Redrive | None, Body(examples=[{"includeCancelled": False, "leaveOutHopeless": True}])
    ] = None,
) -> Response:
    """Start a run over the fiches that failed in this one, linked to it. While that run is open, a repeated request
    returns it."""
    tenant, wanted = caller_of(request).tenant, number("automation run", run_id)
    options = (body or shapes.Redrive()).model_dump()

    async def ask(connection: Connection) -> Answer:
        started = await start.redrive(
            connection, _flow(request), tenant, wanted, **options, correlation_id=request_id(request)
        )
        if not started.deduplicated:
            await record(connection, request, "automation_run.redrive", f"run:{wanted}")
        link = {"parent_run_id": str(wanted), "deduplicated": started.deduplicated}
        return Answer(200, {**_started(started, []), **link})

    return await idempotency.once(request, kit_of(request).pool, ask)


@routes.get("/api/automation/diagnostic", openapi_extra=needs("automation.read"), response_model=shapes.Diagnostic)
async def diagnose(request: Request) -> Response:
    """Check whether everything is in place that automation needs, and say what to do if not."""
    tenant, kit, setup = caller_of(request).tenant, kit_of(request), setup_of(request)
    lanes = {stage.lane.name for name in ("automation", "transcription") for stage in kit.flow(name).stages}
    found = await reads_of(request)(lambda c: diagnostic.look(c, setup, tenant, lanes))
    with_ids_as_text(found["schedules"]["worst"])
    return as_json(found)


async def _in_full(connection: Connection, request: Request, schedule_id: int) -> Row:
    tenant, longest = caller_of(request).tenant, setup_of(request).config.longest
    row = await queries.show_schedule_in_full(connection, tenant, schedule_id, longest)
    for part in ("slots", "runs"):
        with_ids_as_text(row[part])
    return id_as_text(row)


async def _runs(
    request: Request, schedule_id: int | None, status: RunFilter | None, limit: int, offset: int
) -> Response:
    tenant = caller_of(request).tenant
    rows = await reads_of(request)(
        lambda c: queries.list_runs(c, tenant, schedule_id=schedule_id, status=status, limit=limit, offset=offset)
    )
    return as_json({"runs": with_ids_as_text(rows), "limit": limit, "offset": offset})


def _flow(request: Request) -> Flow:
    return kit_of(request).flow(schedules.FLOW)


def _means(request: Request) -> dict[str, Any]:
    return {"secrets": request.app.state.secrets, "guard": request.app.state.guard}


def _started(started: Started, warnings: list[str]) -> Row:
    run = started.run
    return {"success": True, "run_id": str(run.id), "event_ids": [run.event_key], "warnings": warnings}
