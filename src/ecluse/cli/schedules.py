"""`ecluse schedules …`: create, list, preview, enable, disable and delete schedules, and start a run of one."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from ecluse.access import audit_trail, tenants
from ecluse.base.clock import Clock
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.base.timetable import timetable
from ecluse.cli.database import operator, with_connection
from ecluse.cli.given import flow_named, json_object
from ecluse.cli.options import FlowName, FlowOfRun, Limit, Offset, ScheduleId, Tenant, TenantFilter
from ecluse.db.connect import Connection
from ecluse.engine import (
    NewSchedule,
    create_schedule,
    delete_schedule,
    enable_schedule,
    fire_by_hand,
    list_schedules,
    load_schedule,
    show_schedule,
)

app = typer.Typer(no_args_is_help=True, help="Manage schedules, which start runs at due times.")
AUTOMATION = "automation"  # has its own commands, because its schedules have more settings


class Overlap(StrEnum):
    wait = "wait"
    allow = "allow"


class CatchUp(StrEnum):
    latest = "latest"
    skip = "skip"


CronOption = Annotated[str | None, typer.Option("--cron", help="Cron expression: five fields, or @hourly … @yearly.")]
ZoneOption = Annotated[str, typer.Option("--tz", help="Time zone of the cron expression and the window.")]
WindowStart = Annotated[str | None, typer.Option(help="HH:MM: start no run before this time of day.")]
WindowEnd = Annotated[str | None, typer.Option(help="HH:MM: start no run after this time of day.")]


@app.command()
def create(
    flow: FlowName,
    name: Annotated[str, typer.Option(help="Name of the schedule.")],
    cron: CronOption = None,
    timezone: ZoneOption = "UTC",
    window_start: WindowStart = None,
    window_end: WindowEnd = None,
    given: Annotated[str, typer.Option("--input", help="Input of the runs, as a JSON object.")] = "{}",
    overlap: Annotated[
        Overlap, typer.Option(help="Overlap policy: wait for the running run, or allow several at once.")
    ] = Overlap.wait,
    catch_up: Annotated[
        CatchUp, typer.Option(help="Catch-up policy after downtime: run the latest missed slot, or skip all.")
    ] = CatchUp.latest,
    tenant: Tenant = "default",
) -> None:
    """Create a schedule. Without --cron it is manual: only `ecluse schedules run` starts it."""
    if flow == AUTOMATION:
        raise InvalidInput(
            "Schedules of automation need a selection of fiches: use `ecluse automation schedules create`."
        )
    new = NewSchedule(
        flow_named(flow), name, cron, timezone, window_start, window_end, json_object(given),
        overlap.value, catch_up.value, tenant_id=tenant,
    )  # fmt: skip

    async def make(connection: Connection) -> dict[str, Any]:
        await tenants.require(connection, tenant)
        async with connection.transaction():
            schedule_id = await create_schedule(connection, new)
            await _record(connection, tenant, "schedule.create", schedule_id)
        return await load_schedule(connection, tenant, schedule_id)

    row = with_connection(make)
    typer.echo(json.dumps({"schedule_id": str(row["id"]), "next_due_at": row["next_due_at"]}, default=str))


@app.command("list")
def list_(
    tenant: TenantFilter = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> None:
    """List schedules by name, with the next due time."""
    rows = with_connection(lambda connection: list_schedules(connection, tenant, limit=limit, offset=offset))
    if not rows:
        none = "no schedules yet: create one with `ecluse schedules create FLOW --name … --cron …`"
        typer.echo("no matching schedules" if tenant or offset else none)
    for row in rows:
        due = (
            f"{row['next_due_at']:%Y-%m-%d %H:%M:%SZ}"
            if row["next_due_at"]
            else "disabled"
            if row["cron"]
            else "manual"
        )
        trouble = f"  failing: {row['error']}" if row["error"] else ""
        what = f"{row['tenant_id']:<12} {row['flow']:<14} {row['name']:<24} {row['cron'] or '-':<16}"
        typer.echo(harmless(f"{row['id']:>8}  {what} {row['timezone']:<18} {due}{trouble}"))


@app.command()
def show(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Show one schedule in full, as JSON, with its latest slots."""
    _print(with_connection(lambda connection: show_schedule(connection, tenant, schedule_id)))


@app.command()
def preview(
    schedule_id: Annotated[int | None, typer.Argument(help="Id of a schedule. Without it, give --cron.")] = None,
    cron: CronOption = None,
    timezone: ZoneOption = "UTC",
    window_start: WindowStart = None,
    window_end: WindowEnd = None,
    count: Annotated[int, typer.Option("-n", help="Number of due times.", min=1, max=1000)] = 10,
    tenant: Tenant = "default",
) -> None:
    """Show the next due times, and how DST affects them."""
    if schedule_id is not None:
        row = with_connection(lambda connection: load_schedule(connection, tenant, schedule_id))
        cron, timezone, window_start, window_end = (row[n] for n in ("cron", "timezone", "window_start", "window_end"))
    if cron is None:
        raise InvalidInput("Give --cron, or the id of a schedule that has one.")
    table = timetable(cron, timezone, window_start, window_end)
    typer.echo(f"{table.cron.explain()} ({timezone})")
    for fire in table.preview(Clock().now(), count):
        typer.echo(f"{fire.at:%a %Y-%m-%d %H:%M %z}" + (f"  {fire.mark}" if fire.mark else ""))


@app.command()
def enable(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Enable a schedule. Due times before now are not caught up."""
    _switch(schedule_id, tenant, enabled=True)
    show(schedule_id, tenant)


@app.command()
def disable(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Disable a schedule. Its open runs continue."""
    _switch(schedule_id, tenant, enabled=False)
    show(schedule_id, tenant)


@app.command()
def delete(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Delete a schedule. Its runs and slots stay; its name can be used again."""

    async def drop(connection: Connection) -> None:
        if (await load_schedule(connection, tenant, schedule_id))["flow"] == AUTOMATION:
            right = f"ecluse automation schedules delete {schedule_id}"
            raise InvalidInput(f"Schedule {schedule_id} is a schedule of automation: use `{right}`.")
        async with connection.transaction():
            await delete_schedule(connection, tenant, schedule_id)
            await _record(connection, tenant, "schedule.delete", schedule_id)

    with_connection(drop)
    typer.echo(f"deleted schedule {schedule_id}")


@app.command()
def run(
    schedule_id: ScheduleId,
    tenant: Tenant = "default",
    flow: FlowOfRun = None,
) -> None:
    """Start a run of a schedule now. Due times are not affected."""

    async def fire(connection: Connection) -> dict[str, str]:
        row = await load_schedule(connection, tenant, schedule_id)
        if row["flow"] == AUTOMATION:
            raise InvalidInput(
                f"Schedule {schedule_id} is a schedule of automation: use `ecluse automation trigger {schedule_id}`."
            )
        async with connection.transaction():
            started = await fire_by_hand(connection, tenant, schedule_id, flow_named(flow or row["flow"]))
            await _record(connection, tenant, "schedule.run", schedule_id)
        return {"run_id": str(started.run.id), "event_key": started.run.event_key}

    typer.echo(json.dumps(with_connection(fire)))


def _switch(schedule_id: int, tenant: str, *, enabled: bool) -> None:
    async def switch(connection: Connection) -> None:
        async with connection.transaction():
            await enable_schedule(connection, tenant, schedule_id, enabled=enabled)
            await _record(connection, tenant, "schedule.enable" if enabled else "schedule.disable", schedule_id)

    with_connection(switch)


async def _record(connection: Connection, tenant: str, action: str, schedule_id: int) -> None:
    await audit_trail.record(connection, tenant, operator(), action, f"schedule:{schedule_id}")


def _print(row: dict[str, Any]) -> None:
    typer.echo(json.dumps(row, default=str, indent=2))
