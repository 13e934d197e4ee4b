"""`ecluse schedules …`: create, list, preview, enable, disable and delete schedules, and fire one by hand."""

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

app = typer.Typer(no_args_is_help=True, help="Start runs by the clock.")
AUTOMATION = "automation"  # has its own commands, because its schedules have more settings


class Overlap(StrEnum):
    wait = "wait"
    allow = "allow"


class CatchUp(StrEnum):
    latest = "latest"
    skip = "skip"


ScheduleId = Annotated[int, typer.Argument(help="The schedule's id.")]
Tenant = Annotated[str, typer.Option(help="Tenant.")]
CronOption = Annotated[str | None, typer.Option("--cron", help="Five fields, or @hourly … @yearly.")]
ZoneOption = Annotated[str, typer.Option("--tz", help="The time zone that it is read in.")]
WindowStart = Annotated[str | None, typer.Option(help="HH:MM: begin nothing before.")]
WindowEnd = Annotated[str | None, typer.Option(help="HH:MM: begin nothing after.")]


@app.command()
def create(
    flow: Annotated[str, typer.Argument(help="The flow's name, or package:NAME.")],
    name: Annotated[str, typer.Option(help="What people call it.")],
    cron: CronOption = None,
    timezone: ZoneOption = "UTC",
    window_start: WindowStart = None,
    window_end: WindowEnd = None,
    given: Annotated[str, typer.Option("--input", help="The runs' input, as JSON.")] = "{}",
    overlap: Annotated[Overlap, typer.Option(help="While its former run goes on: wait for it, or not.")] = Overlap.wait,
    catch_up: Annotated[CatchUp, typer.Option(help="After a downtime: run the latest, or none.")] = CatchUp.latest,
    tenant: Tenant = "default",
) -> None:
    """Create a schedule. Without --cron it is fired by hand only."""
    if flow == AUTOMATION:
        raise InvalidInput("A schedule of automation says which fiches: use `ecluse automation schedules create`.")
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
    tenant: Annotated[str | None, typer.Option(help="Tenant; all of them by default.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """List schedules by name, with the next due time."""
    rows = with_connection(lambda connection: list_schedules(connection, tenant, limit=limit, offset=offset))
    if not rows:
        none = "no schedules yet: make one with `ecluse schedules create FLOW --name … --cron …`"
        typer.echo("no such schedules" if tenant or offset else none)
    for row in rows:
        due = f"{row['next_due_at']:%Y-%m-%d %H:%M:%SZ}" if row["next_due_at"] else "off" if row["cron"] else "by hand"
        trouble = f"  failing: {row['error']}" if row["error"] else ""
        what = f"{row['tenant_id']:<12} {row['flow']:<14} {row['name']:<24} {row['cron'] or '-':<16}"
        typer.echo(harmless(f"{row['id']:>8}  {what} {row['timezone']:<18} {due}{trouble}"))


@app.command()
def show(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Show one schedule in full, as JSON, with its latest slots."""
    _print(with_connection(lambda connection: show_schedule(connection, tenant, schedule_id)))


@app.command()
def preview(
    schedule_id: Annotated[int | None, typer.Argument(help="A schedule's id; or give --cron.")] = None,
    cron: CronOption = None,
    timezone: ZoneOption = "UTC",
    window_start: WindowStart = None,
    window_end: WindowEnd = None,
    count: Annotated[int, typer.Option("-n", help="How many.", min=1, max=1000)] = 10,
    tenant: Tenant = "default",
) -> None:
    """Show the next due times, and how clock changes (DST) affect them."""
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
    """Enable a schedule. Only due times from now on count."""
    _switch(schedule_id, tenant, enabled=True)
    show(schedule_id, tenant)


@app.command()
def disable(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Disable a schedule. Runs that it has started go on."""
    _switch(schedule_id, tenant, enabled=False)
    show(schedule_id, tenant)


@app.command()
def delete(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Delete a schedule. Its runs and slots stay; its name is free again."""

    async def drop(connection: Connection) -> None:
        if (await load_schedule(connection, tenant, schedule_id))["flow"] == AUTOMATION:
            right = f"ecluse automation schedules delete {schedule_id}"
            raise InvalidInput(f"This is a schedule of automation: use `{right}`.")
        async with connection.transaction():
            await delete_schedule(connection, tenant, schedule_id)
            await _record(connection, tenant, "schedule.delete", schedule_id)

    with_connection(drop)
    typer.echo(f"schedule {schedule_id} is deleted")


@app.command()
def run(
    schedule_id: ScheduleId,
    tenant: Tenant = "default",
    flow: Annotated[str | None, typer.Option(help="Its flow as package:NAME, unless ECLUSE_FLOWS loads it.")] = None,
) -> None:
    """Fire a schedule by hand, now. No due time is used up by that."""

    async def fire(connection: Connection) -> dict[str, str]:
        row = await load_schedule(connection, tenant, schedule_id)
        if row["flow"] == AUTOMATION:
            raise InvalidInput(f"This is a schedule of automation: use `ecluse automation trigger {schedule_id}`.")
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
