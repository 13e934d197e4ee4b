"""`ecluse automation …`: start runs of schedules, look at them, and run once more what failed."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, tenants
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.base.validation import readable
from ecluse.cli import automation_schedules
from ecluse.cli.database import operator, with_connection
from ecluse.cli.given import flow_named, json_object
from ecluse.db.connect import Connection
from ecluse.engine import Started, load_run
from ecluse.flows.automation import reading
from ecluse.flows.automation.schedules import FLOW
from ecluse.flows.automation.selection import Override

app = typer.Typer(no_args_is_help=True, help="Automation: schedules of fiches, and what became of their runs.")
app.add_typer(automation_schedules.app, name="schedules")

RunId = Annotated[int, typer.Argument(help="The run's id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]
LimitOption = Annotated[int, typer.Option(min=1, max=200)]
OffsetOption = Annotated[int, typer.Option(min=0)]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Follow it until it ends; exit code 1 if it does not succeed.")
]
NOBODY = "no server is running yet: the run starts as soon as one is (`ecluse serve`)"


class RunStatusName(StrEnum):
    running = "running"
    completed = "completed"
    partial = "partial"
    failed = "failed"


class FicheStatusName(StrEnum):
    open = "open"
    successful = "successful"
    failed = "failed"
    ignored = "ignored"


@app.command()
def trigger(
    schedule_id: Annotated[int, typer.Argument(help="The schedule's id.")],
    fiches: Annotated[
        str | None, typer.Option(help="Over these instead, this time: their ids, with commas in between.")
    ] = None,
    override: Annotated[
        str | None, typer.Option(help='What else is to be otherwise, as over HTTP: \'{"date_range": "today"}\'.')
    ] = None,
    wait: WaitOption = False,
    tenant: Annotated[str, typer.Option(help="Whose.")] = "default",
) -> None:
    """Run a schedule now, whatever else is running. No due time is used up by that."""
    from ecluse.flows.automation import starting  # brings the faces along: who only looks need not wait for them

    given = json_object(override, "--override") if override is not None else {}
    if fiches is not None:
        if not fiches.strip(" ,"):
            raise InvalidInput("--fiches names no fiche: leave it out to take those that the schedule says.")
        given |= {"mode": "manual", "fiche_ids": fiches}
    try:
        instead = Override.model_validate(given) if given else None
    except ValidationError as error:
        raise InvalidInput(readable(error)) from error
    config = replace(bootstrap.automation_config(settings.load()), unset=())  # of this shell, not of the server

    async def ask(connection: Connection) -> dict[str, Any]:
        await tenants.require(connection, tenant, enabled=True)
        async with connection.transaction():
            started = await starting.start(connection, flow_named(FLOW), tenant, schedule_id, instead)
            await _record(connection, tenant, "automation_schedule.trigger", f"schedule:{schedule_id}")
            found = await starting.warnings(connection, tenant, schedule_id, instead, config)
        return await _told(connection, started, warnings=found)

    _follow(with_connection(ask), wait)


@app.command()
def redrive(run_id: RunId, wait: WaitOption = False) -> None:
    """Run once more over the fiches that failed in a run. While that goes on, asking again gets the same run."""
    from ecluse.flows.automation import starting

    async def ask(connection: Connection) -> dict[str, Any]:
        tenant = (await load_run(connection, run_id)).tenant_id
        await tenants.require(connection, tenant, enabled=True)
        async with connection.transaction():
            started = await starting.redrive(connection, flow_named(FLOW), tenant, run_id)
            if not started.deduplicated:
                await _record(connection, tenant, "automation_run.redrive", f"run:{run_id}")
        return await _told(connection, started, parent_run_id=str(run_id), deduplicated=started.deduplicated)

    _follow(with_connection(ask), wait)


@app.command()
def runs(
    schedule: Annotated[int | None, typer.Option(help="Only of this schedule.")] = None,
    status: Annotated[RunStatusName | None, typer.Option(help="Only in this status.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this one.")] = None,
    limit: LimitOption = 50,
    offset: OffsetOption = 0,
    as_json: JsonOption = False,
) -> None:
    """The newest runs first."""
    wanted: Any = {"schedule_id": schedule, "status": status.value if status else None}
    rows = with_connection(lambda c: reading.list_runs(c, tenant, **wanted, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"runs": rows}, default=str))
        return
    if not rows:
        filtered = schedule or status or tenant or offset
        typer.echo("no such runs" if filtered else "no runs yet: start one with `ecluse automation trigger SCHEDULE`")
    for row in rows:
        counts = f"{row['successful_fiches']}+{row['failed_fiches']}"
        ignored = f", {row['ignored_fiches']} ignored" if row["ignored_fiches"] else ""
        about = f"{row['tenant_id']:<12} schedule {row['schedule_id']}  {row['status']:<10}"
        began = f"{row['started_at']:%Y-%m-%d %H:%M:%SZ}"
        typer.echo(f"{row['id']:>8}  {about} {began}  {row['total_fiches']:>6} = {counts}{ignored}")


@app.command()
def show(run_id: RunId, as_json: JsonOption = False) -> None:
    """One run: where it stands, what it goes by, what was picked and why the rest was not."""
    longest = bootstrap.automation_config(settings.load()).longest
    run = with_connection(lambda c: reading.show_run(c, None, run_id, longest))
    if as_json:
        typer.echo(json.dumps(run, default=str))
        return
    stages, snapshot = run.pop("stages"), run.pop("config_snapshot")
    run["schedule_name"] = snapshot.get("schedule_name")
    for name, value in run.items():
        if isinstance(value, (dict, list)):
            value = json.dumps(value, ensure_ascii=False, default=str) if value else None
        typer.echo(harmless(f"{name:<20} {'' if value is None else value}".rstrip()))
    for stage in stages:
        finished = stage["done"] + stage["failed"] + stage["ignored"]
        end = stage["end_cause"] or f"until {stage['deadline_at']:%H:%M:%SZ}"
        told = f"{finished}/{stage['expected']}, {stage['failed']} failed, {stage['waiting']} waiting"
        typer.echo(f"  {stage['stage']:<18} {told} ({end})")


@app.command()
def logs(run_id: RunId, limit: LimitOption = 200, offset: OffsetOption = 0, as_json: JsonOption = False) -> None:
    """What happened in a run, the oldest first."""
    rows = with_connection(lambda c: reading.list_logs(c, None, run_id, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"logs": rows}, default=str))
        return
    if not rows:
        typer.echo("nothing yet" if not offset else "no more")
    for row in rows:
        data = json.dumps(row["metadata"], ensure_ascii=False) if row["metadata"] else ""
        line = f"{row['timestamp']:%Y-%m-%d %H:%M:%S} {row['level']:<7} {row['message']} {data}"
        typer.echo(harmless(line.rstrip()))


@app.command()
def fiches(
    run_id: RunId,
    status: Annotated[FicheStatusName | None, typer.Option(help="Only in this status.")] = None,
    limit: LimitOption = 50,
    offset: OffsetOption = 0,
    as_json: JsonOption = False,
) -> None:
    """What became of each fiche of a run; of one that is open, what it still lacks."""
    wanted: Any = status.value if status else None
    rows = with_connection(lambda c: reading.list_fiches(c, None, run_id, status=wanted, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"fiches": rows}, default=str))
        return
    if not rows:
        typer.echo("no such fiches" if status or offset else "none is selected yet")
    for row in rows:
        recordings, audits = row["recordings"], row["audits"]
        gates = f"details {row['details']}, {recordings['transcribed']}/{recordings['total']} transcribed"
        gates += f", {audits['completed']}/{audits['total']} audited"
        why = row["error"] or row["ignore_reason"] or gates
        typer.echo(harmless(f"{row['fiche_id']:>20}  {row['status']:<10} {why}"))


async def _told(connection: Connection, started: Started, **more: Any) -> dict[str, Any]:
    cursor = await connection.execute("SELECT 1 FROM replicas WHERE state = 'live' LIMIT 1")
    if await cursor.fetchone() is None:
        typer.echo(NOBODY, err=True)
    return {"run_id": str(started.run.id), "event_ids": [started.run.event_key], **more}


def _follow(told: dict[str, Any], wait: bool) -> None:
    typer.echo(json.dumps(told))
    if wait:
        from ecluse.cli.watch import watch

        raise typer.Exit(watch(int(told["run_id"]), 1.0))


async def _record(connection: Connection, tenant: str, action: str, subject: str) -> None:
    await audit_trail.record(connection, tenant, operator(), action, subject)
