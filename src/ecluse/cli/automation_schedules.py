"""`ecluse automation schedules …`: create, change, show, enable, disable and delete schedules of automation."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, tenants
from ecluse.base.clock import Clock
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.base.timetable import timetable
from ecluse.cli.automation_given import SPELLINGS_OF_TYPE, Mode, Range, Type, in_options, merged, selection, times
from ecluse.cli.database import operator, with_connection, with_database
from ecluse.cli.given import flow_named
from ecluse.cli.options import AsJson, Limit, Offset, ScheduleId, Tenant, TenantFilter
from ecluse.db.connect import Connection
from ecluse.flows.automation import queries, schedules
from ecluse.flows.automation.plan import Changes, Plan

app = typer.Typer(no_args_is_help=True, help="Manage schedules of automation: due times, selection of fiches, stages.")

DAY = ["%Y-%m-%d"]
TypeOption = Annotated[
    Type | None, typer.Option("--type", help="Kind of due times. Default for a new one: CRON with --cron, else MANUAL.")
]
AtOption = Annotated[str | None, typer.Option("--at", help="Time of day, HH:MM, for DAILY, WEEKLY and MONTHLY.")]
DayOfWeek = Annotated[int | None, typer.Option(help="Day of the week, for WEEKLY: 0 is Sunday.")]
DayOfMonth = Annotated[
    int | None, typer.Option(help="Day of the month, for MONTHLY; in a shorter month, its last day.")
]
CronOption = Annotated[
    str | None, typer.Option("--cron", help="Cron expression, for CRON: five fields, or @hourly … @yearly.")
]
ZoneOption = Annotated[str | None, typer.Option("--tz", help="Time zone of due times and days. Default: UTC.")]
ModeOption = Annotated[
    Mode | None, typer.Option(help="How fiches are selected. Default: date_range with --range, manual with --fiches.")
]
RangeOption = Annotated[Range | None, typer.Option("--range", help="Days of the sales, relative to the due time.")]
StartDate = Annotated[datetime | None, typer.Option(formats=DAY, help="First day, for --range custom.")]
EndDate = Annotated[datetime | None, typer.Option(formats=DAY, help="Last day, for --range custom.")]
Fiches = Annotated[str | None, typer.Option(help="Ids of the fiches, separated by commas.")]
Groupes = Annotated[list[str] | None, typer.Option("--groupe", help="Select only fiches of this groupe. Repeatable.")]
MostFiches = Annotated[int | None, typer.Option("--max-fiches", help="Select at most this many fiches.", min=1)]
More = Annotated[
    str | None,
    typer.Option("--more", help='Other fields, as over HTTP: \'{"run_audits": false, "retry_failed": true}\'.'),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--external-api-key-file", help="File with the CRM's API key for this schedule; stored encrypted."),
]


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Name of the schedule.")],
    type_: TypeOption = None,
    at: AtOption = None,
    day_of_week: DayOfWeek = None,
    day_of_month: DayOfMonth = None,
    cron: CronOption = None,
    timezone: ZoneOption = None,
    mode: ModeOption = None,
    range_: RangeOption = None,
    start_date: StartDate = None,
    end_date: EndDate = None,
    fiches: Fiches = None,
    groupes: Groupes = None,
    max_fiches: MostFiches = None,
    more: More = None,
    key_file: KeyFile = None,
    tenant: Tenant = "default",
) -> None:
    """Create a schedule. Due times before now are not caught up."""
    if mode is None:
        mode = Mode.date_range if range_ else Mode.manual if fiches is not None else None
    timing = times(type_, at, day_of_week, day_of_month, cron, timezone)
    chosen = selection(mode, range_, start_date, end_date, fiches, groupes, max_fiches)
    given = merged({"name": name, **timing, **({"fiche_selection": chosen} if chosen else {})}, more, key_file)
    if not given.keys() & SPELLINGS_OF_TYPE:
        given["schedule_type"] = Type.MANUAL.value
    if not given.keys() & {"fiche_selection", "ficheSelection"}:
        raise InvalidInput("Select fiches: by the days of their sales (--range), or by id (--fiches).")
    with in_options(more):
        plan = Plan.model_validate(given)

    async def make(connection: Connection, database: bootstrap.Database) -> dict[str, Any]:
        await tenants.require(connection, tenant)
        async with connection.transaction():
            means = _means(database, plan.external_api_key or plan.webhook_url)
            row = await schedules.create(connection, flow_named(schedules.FLOW), tenant, plan, **means)
            await _record(connection, tenant, "create", row["id"])
        return row

    with in_options(more):
        row = with_database(make)
    created = {"schedule_id": str(row["id"]), "next_due_at": row["next_due_at"]}
    typer.echo(json.dumps(created | _new_secret(row), default=str))


@app.command()
def update(
    schedule_id: ScheduleId,
    name: Annotated[str | None, typer.Option(help="Name of the schedule.")] = None,
    type_: TypeOption = None,
    at: AtOption = None,
    day_of_week: DayOfWeek = None,
    day_of_month: DayOfMonth = None,
    cron: CronOption = None,
    timezone: ZoneOption = None,
    mode: ModeOption = None,
    range_: RangeOption = None,
    start_date: StartDate = None,
    end_date: EndDate = None,
    fiches: Fiches = None,
    groupes: Groupes = None,
    max_fiches: MostFiches = None,
    more: More = None,
    key_file: KeyFile = None,
    tenant: Tenant = "default",
) -> None:
    """Change the given settings of a schedule. Open runs keep the settings they started with."""
    timing = times(type_, at, day_of_week, day_of_month, cron, timezone)
    chosen = selection(mode, range_, start_date, end_date, fiches, groupes, max_fiches)
    named = {"name": name} if name is not None else {}
    given = merged({**named, **timing, **({"fiche_selection": chosen} if chosen else {})}, more, key_file)
    if not given:
        raise InvalidInput("Nothing to change: `ecluse automation schedules update --help` lists the options.")
    with in_options(more):
        changed = _change(schedule_id, tenant, given, "update")
    _show(schedule_id, tenant, **_new_secret(changed))


@app.command("rotate-secret")
def rotate_secret(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Create a new secret for signing the webhook of a schedule, or its first one. It is shown once. For a day,
    webhooks are signed with the old secret as well."""

    async def rotate(connection: Connection, database: bootstrap.Database) -> dict[str, Any]:
        secrets = bootstrap.open_secrets(settings.load(), database)
        async with connection.transaction():
            row = await schedules.rotate_secret(connection, tenant, schedule_id, secrets=secrets)
            await _record(connection, tenant, "rotate-secret", schedule_id)
        return row

    typer.echo(json.dumps({"schedule_id": str(schedule_id)} | _new_secret(with_database(rotate))))


@app.command("list")
def list_(
    tenant: TenantFilter = None,
    limit: Limit = 50,
    offset: Offset = 0,
    as_json: AsJson = False,
) -> None:
    """List schedules by name, with the next due time and the status of the last run."""
    rows = with_connection(lambda c: queries.list_schedules(c, tenant, _longest(), limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"schedules": rows}, default=str))
        return
    if not rows:
        none = "no schedules yet: create one with `ecluse automation schedules create --name … --range yesterday`"
        typer.echo("no matching schedules" if tenant or offset else none)
    for row in rows:
        due = (
            f"{row['next_due_at']:%Y-%m-%d %H:%M:%SZ}"
            if row["next_due_at"]
            else "manual"
            if row["is_active"]
            else "disabled"
        )
        last = "stale" if row["is_stale"] else row["last_run_status"] or "-"
        trouble = f"  failing: {row['error']}" if row["error"] else ""
        what = f"{row['tenant_id']:<12} {row['schedule_type']:<8} {row['name']:<28}"
        typer.echo(harmless(f"{row['id']:>8}  {what} {due:<21} last: {last}{trouble}"))


@app.command()
def show(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Show one schedule in full, as JSON, with its last runs, its latest slots and its next due times."""
    _show(schedule_id, tenant)


def _show(schedule_id: int, tenant: str, **more: Any) -> None:
    row = with_connection(lambda c: queries.show_schedule_in_full(c, tenant, schedule_id, _longest()))
    typer.echo(json.dumps(row | more, default=str, indent=2))


def _new_secret(row: dict[str, Any]) -> dict[str, Any]:
    return {"webhook_secret": row["webhook_secret"]} if row["webhook_secret"] else {}


@app.command()
def preview(
    schedule_id: ScheduleId,
    count: Annotated[int, typer.Option("-n", help="Number of due times.", min=1, max=1000)] = 10,
    tenant: Tenant = "default",
) -> None:
    """Show the next due times, whether or not the schedule is enabled, and how DST affects them."""
    row = with_connection(lambda c: queries.show_schedule_in_full(c, tenant, schedule_id, _longest()))
    if row["cron"] is None:
        raise InvalidInput(f"Schedule {schedule_id} is manual: it has no due times.")
    table = timetable(row["cron"], row["timezone"], None, None)
    typer.echo(f"{table.cron.explain()} ({row['timezone']})")
    for fire in table.preview(Clock().now(), count):
        typer.echo(f"{fire.at:%a %Y-%m-%d %H:%M %z}" + (f"  {fire.mark}" if fire.mark else ""))


@app.command()
def enable(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Enable a schedule. Due times before now are not caught up."""
    _change(schedule_id, tenant, {"is_active": True}, "enable")
    show(schedule_id, tenant)


@app.command()
def disable(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Disable a schedule. Its open runs continue."""
    _change(schedule_id, tenant, {"is_active": False}, "disable")
    show(schedule_id, tenant)


@app.command()
def delete(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Delete a schedule. Its runs and slots stay; its name can be used again."""

    async def drop(connection: Connection) -> None:
        async with connection.transaction():
            await schedules.delete(connection, tenant, schedule_id)
            await _record(connection, tenant, "delete", schedule_id)

    with_connection(drop)
    typer.echo(f"deleted automation schedule {schedule_id}")


def _change(schedule_id: int, tenant: str, given: dict[str, Any], verb: str) -> dict[str, Any]:
    changes = Changes.model_validate(given)

    async def change(connection: Connection, database: bootstrap.Database) -> dict[str, Any]:
        async with connection.transaction():
            means = _means(database, changes.external_api_key or changes.webhook_url)
            row = await schedules.update(connection, flow_named(schedules.FLOW), tenant, schedule_id, changes, **means)
            await _record(connection, tenant, verb, schedule_id)
        return row

    return with_database(change)


def _means(database: bootstrap.Database, sealing: object) -> dict[str, Any]:
    from ecluse.vendors.guarded import GuardedHttp  # read-only commands do not need it

    given = settings.load()
    secrets = bootstrap.open_secrets(given, database) if sealing else None
    return {"secrets": secrets, "guard": GuardedHttp(given.allowed_networks)}


def _longest() -> Any:
    return bootstrap.automation_config(settings.load()).longest


async def _record(connection: Connection, tenant: str, verb: str, schedule_id: int) -> None:
    done = (tenant, operator(), f"automation_schedule.{verb}", f"schedule:{schedule_id}")
    await audit_trail.record(connection, *done)
