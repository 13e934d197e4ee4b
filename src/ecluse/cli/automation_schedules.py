"""`ecluse automation schedules …`: make, change, look at and switch schedules of automation."""

from __future__ import annotations

import json
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, tenants
from ecluse.base.clock import Clock
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.base.timetable import timetable
from ecluse.base.validation import readable
from ecluse.cli.database import operator, with_connection, with_database
from ecluse.cli.given import flow_named, json_object
from ecluse.db.connect import Connection
from ecluse.flows.automation import reading, schedules
from ecluse.flows.automation.plan import Changes, Plan

app = typer.Typer(no_args_is_help=True, help="Schedules of automation: when, which fiches, what is done with them.")


class Type(StrEnum):
    MANUAL = "MANUAL"
    DAILY = "DAILY"
    WEEKLY = "WEEKLY"
    MONTHLY = "MONTHLY"
    CRON = "CRON"


SPELLINGS_OF_TYPE = {"schedule_type", "scheduleType"}


class Mode(StrEnum):
    date_range = "date_range"
    manual = "manual"
    filter = "filter"


class Range(StrEnum):
    today = "today"
    yesterday = "yesterday"
    last_7_days = "last_7_days"
    last_30_days = "last_30_days"
    this_month = "this_month"
    last_month = "last_month"
    custom = "custom"


Day = Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="With --range custom; included.")]
ScheduleId = Annotated[int, typer.Argument(help="The schedule's id.")]
Tenant = Annotated[str, typer.Option(help="Whose.")]
TypeOption = Annotated[
    Type | None, typer.Option("--type", help="By hand only, or when. A new one: CRON with --cron, else MANUAL.")
]
AtOption = Annotated[str | None, typer.Option("--at", help="HH:MM; with DAILY, WEEKLY and MONTHLY.")]
DayOfWeek = Annotated[int | None, typer.Option(help="With WEEKLY: 0 is Sunday.")]
DayOfMonth = Annotated[int | None, typer.Option(help="With MONTHLY; in a shorter month, its last day.")]
CronOption = Annotated[str | None, typer.Option("--cron", help="With CRON: five fields, or @hourly … @yearly.")]
ZoneOption = Annotated[str | None, typer.Option("--tz", help="The time zone of all this. Default: UTC.")]
ModeOption = Annotated[Mode | None, typer.Option(help="By days, or by hand. Default: manual with --fiches.")]
RangeOption = Annotated[Range | None, typer.Option("--range", help="Which days, seen from the due time.")]
StartDate = Day
EndDate = Day
Fiches = Annotated[str | None, typer.Option(help="Their ids, with commas in between.")]
Groupes = Annotated[list[str] | None, typer.Option("--groupe", help="Only of this groupe. Repeatable.")]
MostFiches = Annotated[int | None, typer.Option("--max-fiches", help="No more than so many.", min=1)]
More = Annotated[
    str | None,
    typer.Option("--more", help='Whatever else, as over HTTP: \'{"run_audits": false, "retry_failed": true}\'.'),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--external-api-key-file", help="A file with the CRM's key for this schedule; kept sealed."),
]


@app.command()
def create(
    name: Annotated[str, typer.Option(help="What people call it.")],
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
    """Make a schedule. It is due for times from now on."""
    times = _times(type_, at, day_of_week, day_of_month, cron, timezone)
    if mode is None:
        mode = Mode.date_range if range_ else Mode.manual if fiches is not None else None
    selection = _selection(mode, range_, start_date, end_date, fiches, groupes, max_fiches)
    given = _merged({"name": name, **times, **({"fiche_selection": selection} if selection else {})}, more, key_file)
    if not given.keys() & SPELLINGS_OF_TYPE:
        given["schedule_type"] = Type.MANUAL.value
    try:
        plan = Plan.model_validate(given)
    except ValidationError as error:
        raise InvalidInput(readable(error)) from error

    async def make(connection: Connection, database: bootstrap.Database) -> dict[str, Any]:
        await tenants.require(connection, tenant)
        async with connection.transaction():
            means = _means(database, key_file or "external_api_key" in given)
            row = await schedules.create(connection, flow_named(schedules.FLOW), tenant, plan, **means)
            await _record(connection, tenant, "create", row["id"])
        return row

    row = with_database(make)
    typer.echo(json.dumps({"schedule_id": str(row["id"]), "next_due_at": row["next_due_at"]}, default=str))


@app.command()
def update(
    schedule_id: ScheduleId,
    name: Annotated[str | None, typer.Option(help="What people call it.")] = None,
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
    """Change what is given, and only that. Runs under way go on as they began."""
    times = _times(type_, at, day_of_week, day_of_month, cron, timezone)
    selection = _selection(mode, range_, start_date, end_date, fiches, groupes, max_fiches)
    named = {"name": name} if name is not None else {}
    given = _merged({**named, **times, **({"fiche_selection": selection} if selection else {})}, more, key_file)
    if not given:
        raise InvalidInput("Say what is to change: `ecluse automation schedules update --help` lists the options.")
    _change(schedule_id, tenant, given, "update")
    show(schedule_id, tenant)


@app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="Whose; everybody's by default.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    offset: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """By name, with when each is due next and how its last run went."""
    rows = with_connection(lambda c: reading.list_schedules(c, tenant, _longest(), limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"schedules": rows}, default=str))
        return
    if not rows:
        none = "no schedules yet: make one with `ecluse automation schedules create --name … --range yesterday`"
        typer.echo("no such schedules" if tenant or offset else none)
    for row in rows:
        due = (
            f"{row['next_due_at']:%Y-%m-%d %H:%M:%SZ}"
            if row["next_due_at"]
            else "by hand"
            if row["is_active"]
            else "off"
        )
        last = "stale" if row["is_stale"] else row["last_run_status"] or "-"
        trouble = f"  failing: {row['error']}" if row["error"] else ""
        what = f"{row['tenant_id']:<12} {row['schedule_type']:<8} {row['name']:<28}"
        typer.echo(harmless(f"{row['id']:>8}  {what} {due:<21} last: {last}{trouble}"))


@app.command()
def show(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """One schedule in full, as JSON, with its last runs, its latest slots and when it is due next."""
    row = with_connection(lambda c: reading.show_schedule_in_full(c, tenant, schedule_id, _longest()))
    typer.echo(json.dumps(row, default=str, indent=2))


@app.command()
def preview(
    schedule_id: ScheduleId,
    count: Annotated[int, typer.Option("-n", help="How many.", min=1, max=1000)] = 10,
    tenant: Tenant = "default",
) -> None:
    """When it is due next, whether or not it is switched on, and what changes of the clocks do to it."""
    row = with_connection(lambda c: reading.show_schedule_in_full(c, tenant, schedule_id, _longest()))
    if row["cron"] is None:
        raise InvalidInput(f"Schedule {schedule_id} is started by hand only.")
    table = timetable(row["cron"], row["timezone"], None, None)
    typer.echo(f"{table.cron.explain()} ({row['timezone']})")
    for fire in table.preview(Clock().now(), count):
        typer.echo(f"{fire.at:%a %Y-%m-%d %H:%M %z}" + (f"  {fire.mark}" if fire.mark else ""))


@app.command()
def enable(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Switch it on. It is due for what comes from now on."""
    _change(schedule_id, tenant, {"is_active": True}, "enable")
    show(schedule_id, tenant)


@app.command()
def disable(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Switch it off. Runs that it has started go on."""
    _change(schedule_id, tenant, {"is_active": False}, "disable")
    show(schedule_id, tenant)


@app.command()
def delete(schedule_id: ScheduleId, tenant: Tenant = "default") -> None:
    """Its runs and slots stay, its name is free again."""

    async def drop(connection: Connection) -> None:
        async with connection.transaction():
            await schedules.delete(connection, tenant, schedule_id)
            await _record(connection, tenant, "delete", schedule_id)

    with_connection(drop)
    typer.echo(f"automation schedule {schedule_id} is deleted")


def _change(schedule_id: int, tenant: str, given: dict[str, Any], verb: str) -> None:
    try:
        changes = Changes.model_validate(given)
    except ValidationError as error:
        raise InvalidInput(readable(error)) from error

    async def change(connection: Connection, database: bootstrap.Database) -> None:
        async with connection.transaction():
            means = _means(database, changes.external_api_key is not None)
            await schedules.update(connection, flow_named(schedules.FLOW), tenant, schedule_id, changes, **means)
            await _record(connection, tenant, verb, schedule_id)

    with_database(change)


def _times(
    type_: Type | None,
    at: str | None,
    day_of_week: int | None,
    day_of_month: int | None,
    cron: str | None,
    timezone: str | None,
) -> dict[str, Any]:
    given = {
        "schedule_type": None if type_ is None else type_.value,
        "time_of_day": at,
        "day_of_week": day_of_week,
        "day_of_month": day_of_month,
        "cron_expression": cron,
        "timezone": timezone,
    }
    return {name: value for name, value in given.items() if value is not None}


def _selection(
    mode: Mode | None,
    range_: Range | None,
    start_date: datetime | None,
    end_date: datetime | None,
    fiches: str | None,
    groupes: list[str] | None,
    max_fiches: int | None,
) -> dict[str, Any]:
    given = {
        "mode": None if mode is None else mode.value,
        "date_range": None if range_ is None else range_.value,
        "start_date": None if start_date is None else start_date.date(),
        "end_date": None if end_date is None else end_date.date(),
        "fiche_ids": fiches,
        "groupes": groupes or None,
        "max_fiches": max_fiches,
    }
    return {name: value for name, value in given.items() if value is not None}


def _merged(given: dict[str, Any], more: str | None, key_file: Path | None) -> dict[str, Any]:
    """Options win over --more."""
    rest = json_object(more, "--more") if more is not None else {}
    if "fiche_selection" in given and isinstance(rest.get("fiche_selection"), dict):
        given = {**given, "fiche_selection": {**rest["fiche_selection"], **given["fiche_selection"]}}
    key = {"external_api_key": _read(key_file)} if key_file is not None else {}
    merged = {**rest, **given, **key}
    if "cron_expression" in given and not merged.keys() & SPELLINGS_OF_TYPE:
        merged["schedule_type"] = Type.CRON.value  # no other has any use for it
    return merged


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"The key cannot be read from {file}: {error}.") from error


def _means(database: bootstrap.Database, sealing: object) -> dict[str, Any]:
    from ecluse.vendors.guarded import GuardedHttp  # who only looks need not wait for it

    given = settings.load()
    secrets = bootstrap.open_secrets(given, database) if sealing else None
    return {"secrets": secrets, "guard": GuardedHttp(given.allowed_networks)}


def _longest() -> Any:
    return bootstrap.automation_config(settings.load()).longest


async def _record(connection: Connection, tenant: str, verb: str, schedule_id: int) -> None:
    done = (tenant, operator(), f"automation_schedule.{verb}", f"schedule:{schedule_id}")
    await audit_trail.record(connection, *done)
