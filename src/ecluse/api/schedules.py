"""Routes of schedules of every flow: their due times, their plans, and the decision on each due time."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Query

from ecluse.access.commands import Command
from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Filter, SlotRow, with_ids_as_text
from ecluse.api import flows
from ecluse.api.schedule_shapes import (
    ChangedSchedule,
    ChangedScheduleInFull,
    FiredRun,
    PreviewedTimetable,
    RunNow,
    ScheduleBody,
    ScheduleInFull,
    ScheduleRow,
    Timetable,
)
from ecluse.base.errors import NotFound
from ecluse.base.timetable import timetable
from ecluse.db.query import Row, fetch_all, fetch_row
from ecluse.engine import (
    Flow,
    NewSchedule,
    change_planned,
    create_planned,
    delete_planned,
    enable_schedule,
    load_schedule,
    next_fires,
    plans_of,
    show_schedule,
)

surface = Surface("schedules")
SCHEDULE = Resource(surface, "/api/schedules/{schedule_id}", "schedules", "schedule", "schedules", ScheduleInFull)
READ = "schedules.read"
NEXT_FIRES = 5
ScheduleNumber = Annotated[int, Noun("schedule")]
Count = Annotated[int, Query(ge=1, le=100)]
KNOWN = "SELECT flow FROM schedules WHERE id = %s AND tenant_id = %s"
SHOWN = "SELECT * FROM schedule_list WHERE id = %s"

OPTIONS = {"tz": "timezone"}


class ScheduleFilters(Filters):
    flow: Filter = None
    enabled: bool | None = None
    q: Annotated[
        Filter, Where("starts_with(lower(t.name), lower(%(q)s))"), Query(description="The name begins with this.")
    ] = None


SCHEDULES = Listing(
    *("schedules", ScheduleRow, "schedule_list", READ),
    filters=ScheduleFilters,
    order=("name", "id"),
    where="t.flow <> ALL(%(hidden)s)",
)
SLOTS = Listing("slots", SlotRow, "schedule_slots", READ, order=("-due_at",), within=("schedule_id",))


async def hidden(look: Look) -> Row:
    return {"hidden": flows.hidden(look.caller)}


async def require_schedule(look: Look, schedule_id: int) -> None:
    """Raise NotFound if the tenant has no such schedule (a deleted one is accepted: its slots stay), Refused if the
    caller may not read its flow."""
    row = await fetch_row(look.connection, KNOWN, (schedule_id, look.tenant))
    if row is None:
        raise NotFound(f"There is no schedule {schedule_id}.")
    flows.permit(look.caller, row[0], "read")


SCHEDULE.lists(
    SCHEDULES,
    check=hidden,
    list_schedules="List the schedules of every flow by name, with their next due times.",
    columns=("id", "flow", "name", "cron", "timezone", "next_due_at", "last_run_state", "error"),
    empty="no schedules yet: `ecluse schedules create FLOW --name … --cron …`",
)
surface.listing(
    f"{SCHEDULE.one}/slots",
    SLOTS,
    check=require_schedule,
    list_slots="List the due times of a schedule with the decision on each, the newest first. The list of a deleted"
    " schedule stays.",
    command=Command("schedules slots", empty="no due time has been decided yet"),
)


@SCHEDULE.shows()
async def show_schedule_of_flow(look: Look, schedule_id: ScheduleNumber) -> Row:
    """Show a schedule with its plan, its next due times and the decisions on the latest ones."""
    await _readable(look, schedule_id)
    return await _in_full(look, schedule_id)


@SCHEDULE.creates(
    refuses=["NAME_TAKEN", "NO_SECRET_KEY", "FLOW_NOT_LOADED", "LIMIT_REACHED", "NO_CONNECTION"],
    answer=ChangedScheduleInFull,
    arguments=("flow",),
    options=OPTIONS,
    example="ecluse schedules create hello --name nightly --cron '30 2 * * *' --tz Europe/Paris",
)
async def create_schedule(act: Act, body: ScheduleBody) -> Row:
    """Create a schedule of a flow. Its due times before now are not run."""
    flow = flows.named(act, body.flow)
    flows.permit(act.caller, flow.name, "write")
    plans = plans_of(flow)
    plan = plans.parsed(flow, body.plan)
    await act.require_room("schedules")
    columns = body.model_dump(exclude={"flow", "plan"})
    async with act.room_kept("mail_addresses", plans.names_addresses(body.plan)):
        made = await create_planned(act.connection, NewSchedule(flow, **columns, tenant_id=act.tenant), plan)
    act.answers(201, once=made.once)
    return {**await _in_full(act, made.id), "once": {}}


@SCHEDULE.changes(
    action="update",
    refuses=["NAME_TAKEN", "NO_SECRET_KEY", "FLOW_NOT_LOADED", "LIMIT_REACHED", "NO_CONNECTION"],
    answer=ChangedScheduleInFull,
    options=OPTIONS,
)
async def change_schedule(act: Act, schedule_id: ScheduleNumber, body: ChangedSchedule) -> Row:
    """Change a schedule: only the given fields change. Open runs keep the settings they began with."""
    flow, _ = await _of_caller(act, schedule_id)
    columns = body.changes("cron", "window_start", "window_end")
    instead, plans = columns.pop("plan", {}), plans_of(flow)
    async with act.room_kept("mail_addresses", plans.names_addresses(instead)):
        once = await change_planned(
            act.connection, flow, act.tenant, schedule_id, lambda _, plan: (columns, plans.changed(flow, plan, instead))
        )
    act.answers(200, once=once)
    return {**await _in_full(act, schedule_id), "once": {}}


@SCHEDULE.deletes(refuses=["FLOW_NOT_LOADED"])
async def delete_schedule(act: Act, schedule_id: ScheduleNumber) -> Row:
    """Delete a schedule. Its runs and slots stay, its name is free again; an open run finishes."""
    flow, _ = await _of_caller(act, schedule_id)
    await delete_planned(act.connection, plans_of(flow), act.tenant, schedule_id, flow=flow)
    return {"id": schedule_id, "deleted": True}


@SCHEDULE.does("enable", refuses=["FLOW_NOT_LOADED", "NO_CONNECTION"])
async def enable_schedule_of_flow(act: Act, schedule_id: ScheduleNumber) -> Row:
    """Enable a schedule. Due times that passed while it was disabled are not caught up on."""
    return await _switch(act, schedule_id, enabled=True)


@SCHEDULE.does("disable", refuses=["FLOW_NOT_LOADED"])
async def disable_schedule_of_flow(act: Act, schedule_id: ScheduleNumber) -> Row:
    """Disable a schedule. Its open runs go on."""
    return await _switch(act, schedule_id, enabled=False)


@SCHEDULE.does(
    "run",
    refuses=["SCHEDULE_INACTIVE", "FLOW_NOT_LOADED", "BUDGET_EXCEEDED", "NO_CONNECTION"],
    answer=FiredRun,
    status=201,
    follows="run_id",
)
async def run_schedule(
    act: Act, schedule_id: ScheduleNumber, body: Annotated[RunNow | None, Body(examples=[{"plan": None}])] = None
) -> Row:
    """Start a run of a schedule now, even if other runs of it are open. Its due times are not affected."""
    flow, row = await _of_caller(act, schedule_id)
    instead = None if body is None else body.plan
    fired = await plans_of(flow).fire(act.connection, flow, row, instead, act.request_id)
    run = fired.started.run
    return {"run_id": str(run.id), "event_key": run.event_key, "warnings": fired.warnings}


@surface.read(f"{SCHEDULE.one}/preview", needs=READ, answer=Timetable, command=Command("schedules preview"))
async def preview_schedule(look: Look, schedule_id: ScheduleNumber, count: Count = 50) -> Row:
    """Preview the next due times, whether or not the schedule is enabled, with a mark where a clock change or the
    execution window moves one."""
    row = await _readable(look, schedule_id)
    if row["cron"] is None:
        return {"in_words": None, "timezone": row["timezone"], "fires": []}
    return _timetable(look, row, count)


@surface.operation(
    "POST",
    f"{SCHEDULE.all}/preview",
    needs=READ,
    answer=Timetable,
    action=None,
    command=Command("schedules preview cron", arguments=("cron",), options=OPTIONS),
)
async def preview_timetable(act: Act, body: PreviewedTimetable) -> Row:
    """Preview the due times of a timetable that is not stored."""
    return _timetable(act, body.model_dump(), body.count)


def _timetable(look: Look, row: Row, count: int) -> Row:
    table = timetable(row["cron"], row["timezone"], row["window_start"], row["window_end"])
    fires = [fire._asdict() for fire in table.preview(look.kit.clock.now(), count)]
    return {"in_words": table.cron.explain(), "timezone": row["timezone"], "fires": fires}


async def _readable(look: Look, schedule_id: int) -> Row:
    row = await load_schedule(look.connection, look.tenant, schedule_id)
    flows.permit(look.caller, row["flow"], "read")
    return row


async def _of_caller(act: Act, schedule_id: int) -> tuple[Flow, Row]:
    row = await load_schedule(act.connection, act.tenant, schedule_id)
    flows.permit(act.caller, row["flow"], "write")
    return flows.loaded(act, row["flow"], f"Schedule {schedule_id}"), row


async def _switch(act: Act, schedule_id: int, *, enabled: bool) -> Row:
    flow, row = await _of_caller(act, schedule_id)
    if enabled and not row["enabled"]:
        plans = plans_of(flow)
        await plans.check_enabled(act.connection, act.tenant, await plans.load(act.connection, row))
    await enable_schedule(act.connection, act.tenant, schedule_id, enabled=enabled, flow=flow)
    return await _in_full(act, schedule_id)


async def _in_full(look: Look, schedule_id: int) -> Row:
    row = await show_schedule(look.connection, look.tenant, schedule_id)
    (listed,) = await fetch_all(look.connection, dict, SHOWN, (schedule_id,))
    flow = look.kit.by_name.get(row["flow"])  # of a flow that is not loaded here, the plan is shown as it is stored
    return {
        **listed,
        "plan": row["input"] if flow is None else await plans_of(flow).shown(look.connection, row),
        "next_fires": next_fires(row, look.kit.clock.now(), NEXT_FIRES) if row["enabled"] else [],
        "slots": with_ids_as_text(row["slots"]),
    }
