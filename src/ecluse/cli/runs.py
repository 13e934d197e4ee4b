"""`ecluse runs …`: start, end, list, show and follow runs, through the database that the servers use."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, tenants
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.base.logging import harmless
from ecluse.cli import confirm, sums
from ecluse.cli.database import operator, warn_without_server, with_connection
from ecluse.cli.given import flow_named, json_object
from ecluse.cli.options import (
    AsJson,
    FlowName,
    FlowOfRun,
    Limit,
    Offset,
    RunId,
    Tail,
    Tenant,
    TenantFilter,
    Yes,
)
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_value
from ecluse.engine import Run, Start, State, cause_in_words, load_run, start_run
from ecluse.insight import run_queries
from ecluse.insight.previews import preview_end
from ecluse.insight.waiting import RunWaits, Waiting, why, why_run
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS

NO_RUNS = """no runs yet: create a schedule and start a run of it:
  ecluse automation schedules create --name nightly --type DAILY --at 06:30 --range yesterday
  ecluse automation trigger nightly"""
app = typer.Typer(no_args_is_help=True, help="Start, end, list and inspect runs.")


@app.command()
def start(
    flow: FlowName,
    given: Annotated[str, typer.Option("--input", help="Input of the run, as a JSON object.")] = "{}",
    key: Annotated[
        str | None,
        typer.Option(help="Event key: while its run is open, a second start with the same key returns that run."),
    ] = None,
    tenant: Tenant = "default",
) -> None:
    """Start a run. A running server picks it up at once; without one, the run waits."""
    chosen, parsed = flow_named(flow), json_object(given)
    if chosen.not_by_hand:
        raise InvalidInput(chosen.not_by_hand)
    key = f"{chosen.name}-manual-{uuid.uuid4()}" if key is None else key
    wanted = Start(chosen, key, tenant_id=tenant, input=parsed, again=True)

    async def ask(connection: Connection) -> dict[str, Any]:
        await tenants.require(connection, tenant, enabled=True)
        started = await start_run(connection, wanted)
        await warn_without_server(connection)
        return {"run_id": str(started.run.id), "deduplicated": started.deduplicated}

    typer.echo(json.dumps(with_connection(ask)))


@app.command()
def end(
    run_id: RunId,
    reason: Annotated[str, typer.Option(help="Reason, stored with the run and in the audit trail.")],
    flow: FlowOfRun = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a run and the runs that only it waits for, after showing what will be cancelled and asking for
    confirmation. Exit code 1 if the run had ended already or the answer was no, 2 on an error."""
    from ecluse.engine.work.completion import end_by_operator

    known = {f.name: f for f in bootstrap.load_flows(settings.load(), [flow] if flow else [])}
    if not reason.strip():
        raise InvalidInput("--reason must not be empty: it is stored with the run")

    async def found(connection: Connection) -> Run:
        run = await load_run(connection, run_id)
        if run.flow not in known:
            raise NotFound(
                f"Run {run_id} belongs to flow {run.flow!r}, which is not loaded. Load it with --flow package:NAME."
            )
        return run

    async def look(connection: Connection) -> dict[str, Any]:
        run = await found(connection)
        return await preview_end(connection, known[run.flow], run)

    async def ask(connection: Connection) -> bool:
        run = await found(connection)
        done = (run.tenant_id, operator(), "run.end", f"run:{run_id}", reason)
        record = partial(audit_trail.record, connection, *done)
        return await end_by_operator(connection, known[run.flow], run, reason, by=operator(), record=record)

    preview = with_connection(look)
    if not preview["ended"]:
        typer.echo(_what_will_happen(preview), err=True)
        confirm.ask(f"Cancel run {run_id}?", yes=yes)
    ended = with_connection(ask)
    run = _read(run_id)
    how = sums.cancelled_by(run) if ended else f"had ended already ({sums.word(run)}), nothing was changed"
    typer.echo(f"run {run_id}: {how}: {sums.in_full(run)}", err=as_json or not ended)
    if as_json:
        _print(run)
    raise typer.Exit(0 if ended else 1)


def _what_will_happen(preview: dict[str, Any]) -> str:
    kept, lost = preview["finished"], preview["in_flight"] + preview["waiting"]
    standing = f"{kept} targets are finished and keep their outcome, {lost} are cancelled"
    how = f"({preview['in_flight']} in flight, {preview['waiting']} waiting)"
    lines = [f"run {preview['run_id']} ({preview['flow']}, {preview['status']}) will be cancelled: {standing} {how}"]
    if preview["children_that_end"] or preview["children_that_go_on"]:
        lines.append(
            f"{preview['children_that_end']} child runs that only this run waits for are cancelled with it,"
            f" {preview['children_that_go_on']} that others wait for continue"
        )
    if calls := preview["calls_in_flight"]:
        lines.append(f"{calls} calls are in flight: paid calls finish, and their results are kept")
    return "\n".join(lines)


@app.command("show")
def show_run(run_id: RunId) -> None:
    """Show one run in full, as JSON: its columns, its stages, its outcomes by reason."""
    _print(_read(run_id))


def _read(run_id: int) -> run_queries.Row:
    return with_connection(lambda connection: run_queries.show_run(connection, None, run_id))


def _print(run: run_queries.Row) -> None:
    typer.echo(json.dumps(run | {"end_cause": cause_in_words(run["end_cause"])}, default=str, indent=2))


@app.command("list")
def list_runs(
    flow: Annotated[str | None, typer.Option(help="List only runs of this flow.")] = None,
    state: Annotated[State | None, typer.Option(help="List only runs in this state.")] = None,
    tenant: TenantFilter = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> None:
    """List runs, newest first. Runs started by other runs, and notification deliveries, are listed only with --flow."""
    wanted: dict[str, Any] = {"flow": flow, "state": state, "but": [NOTIFICATIONS], "top": flow is None}
    rows = with_connection(lambda c: run_queries.list_runs(c, tenant=tenant, **wanted, limit=limit, offset=offset))
    if not rows:
        if flow is not None:
            _refuse_unknown_flow(flow)
        filtered = flow or state or tenant or offset
        typer.echo("no matching runs" if filtered else NO_RUNS)
    for row in rows:
        counts = sums.in_short(row) if row["ended_at"] else "…"
        selected = row["selected"] or 0
        of = f"redrive of {row['redrive_of']}  " if row["redrive_of"] else ""
        shown = harmless(f"{of}{row['event_key']}")
        typer.echo(f"{row['id']:>8}  {row['flow']:<14} {sums.word(row):<10} {selected:>7} = {counts:<14} {shown}")


def _refuse_unknown_flow(name: str) -> None:
    """Refuse a flow that is not loaded here and has no runs. (Servers may load flows that this shell does not.)"""
    known = [flow.name for flow in bootstrap.load_flows(settings.load())]
    has_run = "SELECT 1 FROM runs WHERE flow = %s LIMIT 1"
    if name not in known and with_connection(lambda c: fetch_value(c, has_run, (name,))) is None:
        raise NotFound(f"There is no flow {name!r} (known: {', '.join(known)}).")


@app.command()
def log(
    run_id: RunId,
    trace: Annotated[bool, typer.Option(help="Show the trace lines, which WORKFLOW_LOG_DB_ENABLED stores.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of lines to show at most.")] = 1_000,
    offset: Annotated[int, typer.Option(min=0, help="Number of lines to skip.")] = 0,
    tail: Tail = None,
) -> None:
    """Show the log of a run, oldest line first: dispatches, stalls, failures and status changes."""
    read = run_queries.list_trace if trace else run_queries.list_log
    last: dict[str, Any] = {"newest_first": True, "limit": tail, "offset": 0}
    part = last if tail else {"limit": limit, "offset": offset}
    rows = with_connection(lambda c: read(c, None, run_id, **part))
    if tail:
        rows.reverse()
    if not rows:
        unstored = "no trace lines are stored: set WORKFLOW_LOG_DB_ENABLED=1 for the servers"
        typer.echo(unstored if trace else "no log lines yet", err=True)
    for row in rows:
        at = row["created_at" if trace else "at"]
        data = json.dumps(row["data"], ensure_ascii=False) if row["data"] else ""
        line = f"{at:%Y-%m-%d %H:%M:%S} {row['level']:<7} {row['message']} {data}"
        typer.echo(harmless(line.rstrip()))


@app.command("why")
def why_waiting(
    run_id: RunId,
    items: Annotated[
        bool, typer.Option("--items", help="List each waiting item, with its position in the queue.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=200, help="With --items: number of items to list at most.")] = 50,
    offset: Annotated[int, typer.Option(min=0, help="With --items: number of items to skip.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Explain why a run and the runs it waits for are waiting: each cause with the number of items and, if known, the
    expected start of the first and the last of them."""

    async def ask(connection: Connection) -> tuple[RunWaits, list[Waiting]]:
        run = await why_run(connection, None, run_id)
        return run, await why(connection, None, run_id, limit=limit + 1, offset=offset) if items else []

    run, waiting = with_connection(ask)
    if as_json:
        listed = {"items": [asdict(one) for one in waiting[:limit]]} if items else {}
        typer.echo(json.dumps({**asdict(run), **listed}, default=str))
    elif items:
        _show_items(run_id, run, waiting, limit, offset)
    else:
        _show_causes(run)


def _show_causes(run: RunWaits) -> None:
    typer.echo(f"{run.waiting:,} waiting, {run.in_flight:,} in flight" if run.groups else harmless(run.summary))
    for group in run.groups:
        where = f"{group.flow}/{group.stage}" if group.stage else group.flow
        lane = f", lane {group.lane}" if group.lane and f"lane {group.lane}" not in group.detail else ""
        typer.echo(harmless(f"{group.count:>8}  {group.cause}: {where}{lane}: {group.detail}"))
        if group.first_at is not None:
            last = "" if group.last_at is None else f", the last at about {group.last_at:%Y-%m-%d %H:%M:%S}"
            typer.echo(f"          the first starts at about {group.first_at:%Y-%m-%d %H:%M:%S}{last}")
        if group.sample:
            named = ", ".join(f"{one.key} (run {one.run_id})" for one in group.sample)
            typer.echo(harmless(f"          for example {named}"))


def _show_items(run_id: int, run: RunWaits, waiting: list[Waiting], limit: int, offset: int) -> None:
    if not waiting:
        typer.echo("no more waiting items" if offset else harmless(run.summary), err=True)
    for one in waiting[:limit]:
        in_line = one.position is not None and "before it" not in one.detail
        place = f", {one.position} before it" if in_line else ""
        at = "" if one.expected_at is None else f", expected {one.expected_at:%Y-%m-%d %H:%M:%S}"
        of_run = "" if one.run_id == run_id else f"run {one.run_id} "
        typer.echo(harmless(f"{of_run}{one.stage}/{one.key}  {one.cause}: {one.detail}{place}{at}"))
    if len(waiting) > limit:
        more = f"`ecluse runs why {run_id} --items --limit {limit} --offset {offset + limit}`"
        typer.echo(f"more items wait: {more}", err=True)


@app.command("watch")
def watch_run(
    run_id: RunId,
    every: Annotated[float, typer.Option(help="Seconds between polls.", min=0.1, max=60)] = 1.0,
    timeout: Annotated[float | None, typer.Option(help="Stop following after this many seconds.", min=0)] = None,
) -> None:
    """Follow a run until it ends. Exit code 0 if it succeeded, 1 if it did not, 2 if there is no such run, 4 if it is
    still open because no worker of its flow is live or --timeout is over."""
    from ecluse.cli.watch import watch

    raise typer.Exit(watch(run_id, every, timeout))
