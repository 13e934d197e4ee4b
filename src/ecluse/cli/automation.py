"""`ecluse automation …`: start runs of schedules, list and show them, and redrive failed fiches."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, tenants
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.cli import automation_schedules, confirm, sums
from ecluse.cli.automation_given import in_options
from ecluse.cli.database import operator, warn_without_server, with_connection
from ecluse.cli.given import flow_named, json_object
from ecluse.cli.options import AsJson, Limit, Offset, RunId, Tail, Tenant, TenantFilter
from ecluse.db.connect import Connection
from ecluse.engine import CANCELLED, Started, cause_in_words, load_run
from ecluse.flows.automation import queries
from ecluse.flows.automation.schedules import FLOW, find
from ecluse.flows.automation.selection_model import Override
from ecluse.insight.waiting import why_run

app = typer.Typer(no_args_is_help=True, help="Manage automation schedules; start, redrive and inspect their runs.")
app.add_typer(automation_schedules.app, name="schedules")

WaitOption = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="Follow the run until it ends; exit code 1 if it does not succeed, 4 if it is still open (no worker is "
        "live, or --timeout is over).",
    ),
]
TimeoutOption = Annotated[float | None, typer.Option(help="With --wait: stop after this many seconds.", min=0)]


class RunStatusName(StrEnum):
    running = "running"
    completed = "completed"
    partial = "partial"
    failed = "failed"
    cancelled = "cancelled"


class FicheStatusName(StrEnum):
    open = "open"
    successful = "successful"
    failed = "failed"
    ignored = "ignored"


@app.command()
def trigger(
    schedule: Annotated[str, typer.Argument(help="Id or name of the schedule.")],
    fiches: Annotated[str | None, typer.Option(help="Run over these fiches instead: ids, separated by commas.")] = None,
    override: Annotated[
        str | None, typer.Option(help='Override other fields, as over HTTP: \'{"date_range": "today"}\'.')
    ] = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    tenant: Tenant = "default",
) -> None:
    """Start a run of a schedule now, even if another run is open. Due times are not affected."""
    from ecluse.flows.automation import start  # imports FastAPI: read-only commands do not need it

    given = json_object(override, "--override") if override is not None else {}
    if fiches is not None:
        if not fiches.strip(" ,"):
            raise InvalidInput("--fiches is empty: omit it to use the selection of the schedule.")
        given |= {"mode": "manual", "fiche_ids": fiches}
    with in_options(override, {"fiche_ids": "--fiches"}):
        instead = Override.model_validate(given) if given else None
    config = replace(bootstrap.automation_config(settings.load()), unset=())  # unset in this shell, not in the server

    async def ask(connection: Connection) -> dict[str, Any]:
        await tenants.require(connection, tenant, enabled=True)
        schedule_id = await find(connection, tenant, schedule)
        async with connection.transaction():
            started = await start.start(connection, flow_named(FLOW), tenant, schedule_id, instead)
            await _record(connection, tenant, "automation_schedule.trigger", f"schedule:{schedule_id}")
            found = await start.warnings(connection, tenant, schedule_id, instead, config)
        return await _answer(connection, started, warnings=found)

    with in_options(override, {"fiche_ids": "--fiches"}):
        answer = with_connection(ask)
    _follow(answer, wait, timeout)


@app.command()
def redrive(
    run_id: RunId,
    cancelled: Annotated[
        bool, typer.Option("--cancelled", help="Include fiches that were cancelled before they were finished.")
    ] = False,
    leave_out: Annotated[
        bool, typer.Option("--leave-out-hopeless", help="Leave out fiches that cannot succeed as they are.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: redrive all of them (for scripts).")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Redrive the fiches that failed in a run, in a new run. Lists fiches that cannot succeed before asking. While the
    new run is open, returns it instead of starting another."""
    from ecluse.flows.automation import start

    async def tenant_of(connection: Connection) -> str:
        tenant = (await load_run(connection, run_id)).tenant_id
        await tenants.require(connection, tenant, enabled=True)
        return tenant

    async def look(connection: Connection) -> dict[str, Any]:
        tenant = await tenant_of(connection)
        return await start.preview_redrive(connection, tenant, run_id, include_cancelled=cancelled)

    preview = with_connection(look)
    if preview["cannot_succeed"]:
        typer.echo(_hopeless(preview), err=True)
        if not yes and not leave_out and preview["cannot_succeed"] < preview["takes"]:
            leave_out = confirm.choose("Leave them out?")
        elif not leave_out:
            confirm.ask("Redrive them anyway?", yes=yes)

    async def ask(connection: Connection) -> dict[str, Any]:
        tenant = await tenant_of(connection)
        async with connection.transaction():
            started = await start.redrive(
                connection,
                flow_named(FLOW),
                tenant,
                run_id,
                include_cancelled=cancelled,
                leave_out_hopeless=leave_out,
            )
            if not started.deduplicated:
                await _record(connection, tenant, "automation_run.redrive", f"run:{run_id}")
        return await _answer(connection, started, parent_run_id=str(run_id), deduplicated=started.deduplicated)

    _follow(with_connection(ask), wait, timeout)


def _hopeless(preview: dict[str, Any]) -> str:
    lines = [f"{preview['cannot_succeed']} of {preview['takes']} fiches cannot succeed as they are:"]
    lines += [
        f"  {one['count']:>6}  {one['error_code']}  (fiche {one['fiche_id']}: {one['error']})"
        for one in preview["causes"]
    ]
    return "\n".join(harmless(line) for line in lines)


@app.command()
def runs(
    schedule: Annotated[int | None, typer.Option(help="List only runs of this schedule.")] = None,
    status: Annotated[RunStatusName | None, typer.Option(help="List only runs with this status.")] = None,
    tenant: TenantFilter = None,
    limit: Limit = 50,
    offset: Offset = 0,
    as_json: AsJson = False,
) -> None:
    """List automation runs, newest first."""
    wanted: Any = {"schedule_id": schedule, "status": status.value if status else None}
    rows = with_connection(lambda c: queries.list_runs(c, tenant, **wanted, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"runs": rows}, default=str))
        return
    if not rows:
        filtered = schedule or status or tenant or offset
        typer.echo(
            "no matching runs" if filtered else "no runs yet: start one with `ecluse automation trigger SCHEDULE`"
        )
    for row in rows:
        about = f"{row['tenant_id']:<12} schedule {row['schedule_id']}  {sums.word(row):<10}"
        began = f"{row['started_at']:%Y-%m-%d %H:%M:%SZ}"
        of = f"  redrive of {row['parent_run_id']}" if row["parent_run_id"] else ""
        counts = sums.in_short(_counts(row)) if row["completed_at"] else "…"
        typer.echo(f"{row['id']:>8}  {about} {began}  {row['selected'] or 0:>6} = {counts}{of}")


@app.command()
def show(run_id: RunId, as_json: AsJson = False) -> None:
    """Show one run: its status and settings, the selected fiches and why others were not selected, its stages."""
    longest = bootstrap.automation_config(settings.load()).longest
    run = with_connection(lambda c: queries.show_run(c, None, run_id, longest))
    if as_json:
        typer.echo(json.dumps(run, default=str))
        return
    stages, snapshot = run.pop("stages"), run.pop("config_snapshot")
    run["schedule_name"] = snapshot.get("schedule_name")
    if run["state"] == "cancelled":
        run["status"] = "cancelled"
    if run["completed_at"] is not None:
        run["selected"] = sums.in_full(_counts(run))
    del run["total_fiches"]
    if run["after_redrives"]:
        run["after_redrives"] = sums.in_full(run["after_redrives"])
    run["end_cause"] = cause_in_words(run["end_cause"])
    for name, value in run.items():
        if isinstance(value, (dict, list)):
            value = json.dumps(value, ensure_ascii=False, default=str) if value else None
        typer.echo(harmless(f"{name:<20} {'' if value is None else value}".rstrip()))
    for stage in stages:
        finished = stage["done"] + stage["failed"] + stage["ignored"]
        end = stage["end_cause"] or f"deadline {stage['deadline_at']:%H:%M:%SZ}"
        counts = f"{finished}/{stage['expected']}, {stage['failed']} failed, {stage['waiting']} waiting"
        typer.echo(f"  {stage['stage']:<18} {counts} ({end})")
    if run["completed_at"] is None:
        waits = with_connection(lambda c: why_run(c, None, run_id))
        typer.echo(harmless(f"{'why it waits':<20} {waits.summary}"))


@app.command()
def logs(
    run_id: RunId,
    limit: Limit = 200,
    offset: Offset = 0,
    tail: Tail = None,
    as_json: AsJson = False,
) -> None:
    """Show the log of a run, oldest line first."""
    last: dict[str, Any] = {"newest_first": True, "limit": tail, "offset": 0}
    part = last if tail else {"limit": limit, "offset": offset}
    rows = with_connection(lambda c: queries.list_logs(c, None, run_id, **part))
    if tail:
        rows.reverse()
    if as_json:
        typer.echo(json.dumps({"logs": rows}, default=str))
        return
    if not rows:
        typer.echo("no more log lines" if offset else "no log lines yet")
    for row in rows:
        data = json.dumps(row["metadata"], ensure_ascii=False) if row["metadata"] else ""
        line = f"{row['timestamp']:%Y-%m-%d %H:%M:%S} {row['level']:<7} {row['message']} {data}"
        typer.echo(harmless(line.rstrip()))


@app.command()
def fiches(
    run_id: RunId,
    status: Annotated[FicheStatusName | None, typer.Option(help="List only fiches with this status.")] = None,
    limit: Limit = 50,
    offset: Offset = 0,
    as_json: AsJson = False,
) -> None:
    """List the fiches of a run with their outcome; for an open fiche its progress, or why it will fail."""
    wanted: Any = status.value if status else None
    rows = with_connection(lambda c: queries.list_fiches(c, None, run_id, status=wanted, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"fiches": rows}, default=str))
        return
    if not rows:
        typer.echo("no matching fiches" if status or offset else "no fiches selected yet")
    for row in rows:
        recordings, audits = row["recordings"], row["audits"]
        gates = f"details {row['details']}, {recordings['transcribed']}/{recordings['total']} transcribed"
        gates += f", {audits['completed']}/{audits['total']} audited"
        if expected := row["will_fail"]:
            gates = f"will fail: {expected['code']} {expected['reason']} ({gates})"
        why = row["error"] or row["ignore_reason"] or gates
        became = "cancelled" if row["error_code"] == CANCELLED else row["status"]
        typer.echo(harmless(f"{row['fiche_id']:>20}  {became:<10} {why}"))


def _counts(row: dict[str, Any]) -> dict[str, Any]:
    counts = {name: row[f"{name}_fiches"] for name in ("successful", "failed", "cancelled", "ignored")}
    return {"selected": row["selected"], **counts}


async def _answer(connection: Connection, started: Started, **more: Any) -> dict[str, Any]:
    await warn_without_server(connection)
    return {"run_id": str(started.run.id), "event_ids": [started.run.event_key], **more}


def _follow(answer: dict[str, Any], wait: bool, timeout: float | None) -> None:
    typer.echo(json.dumps(answer))
    if wait:
        from ecluse.cli.watch import watch

        raise typer.Exit(watch(int(answer["run_id"]), 1.0, timeout))


async def _record(connection: Connection, tenant: str, action: str, subject: str) -> None:
    await audit_trail.record(connection, tenant, operator(), action, subject)
