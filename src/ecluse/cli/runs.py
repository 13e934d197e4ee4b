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
from ecluse.cli.database import operator, with_connection
from ecluse.cli.given import flow_named, json_object
from ecluse.db.connect import Connection
from ecluse.engine import Run, Start, cause_in_words, load_run, start_run
from ecluse.insight import run_queries
from ecluse.insight.previews import preview_end
from ecluse.insight.waiting import RunWaits, Waiting, why, why_run
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS

NO_RUNS = """no runs yet: make a schedule, and run it now:
  ecluse automation schedules create --name nightly --type DAILY --at 06:30 --range yesterday
  ecluse automation trigger nightly"""
app = typer.Typer(no_args_is_help=True, help="Start, end, list and look at runs.")


@app.command()
def start(
    flow: Annotated[str, typer.Argument(help="The flow's name, or package:NAME.")],
    given: Annotated[str, typer.Option("--input", help="The run's input, as JSON.")] = "{}",
    key: Annotated[
        str | None,
        typer.Option(help="Names the decision to run: while that run is not over, a second start is a no-op."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="For whom.")] = "default",
) -> None:
    """Start a run. A running server picks it up at once; otherwise it waits for one."""
    chosen, parsed = flow_named(flow), json_object(given)
    if chosen.not_by_hand:
        raise InvalidInput(chosen.not_by_hand)
    key = f"{chosen.name}-manual-{uuid.uuid4()}" if key is None else key
    wanted = Start(chosen, key, tenant_id=tenant, input=parsed, again=True)

    async def ask(connection: Connection) -> dict[str, Any]:
        await tenants.require(connection, tenant, enabled=True)
        started = await start_run(connection, wanted)
        cursor = await connection.execute("SELECT 1 FROM replicas WHERE state = 'live' LIMIT 1")
        if await cursor.fetchone() is None:
            typer.echo("no server is running yet: the run starts as soon as one is (`ecluse serve`)", err=True)
        return {"run_id": str(started.run.id), "deduplicated": started.deduplicated}

    typer.echo(json.dumps(with_connection(ask)))


@app.command()
def end(
    run_id: Annotated[int, typer.Argument(help="The run's id.")],
    reason: Annotated[str, typer.Option(help="Why; it stays with the run.")],
    flow: Annotated[
        str | None, typer.Option(help="The run's flow as package:NAME, unless ECLUSE_FLOWS loads it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Without being asked, as in scripts.")] = False,
) -> None:
    """Cancel a run now, and the runs that only it waits for, after showing what will happen and asking. Exit code 1 if
    it had ended already or the answer was no, 2 on an error."""
    from ecluse.engine.work.completion import end_by_operator

    known = {f.name: f for f in bootstrap.load_flows(settings.load(), [flow] if flow else [])}
    if not reason.strip():
        raise InvalidInput("say why the run is ended: the reason stays with it")

    async def found(connection: Connection) -> Run:
        run = await load_run(connection, run_id)
        if run.flow not in known:
            raise NotFound(
                f"Run {run_id} is of flow {run.flow!r}, which is not loaded. Name it with --flow package:NAME."
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
        confirm.ask("End it?", yes=yes)
    ended = with_connection(ask)
    if not ended:
        typer.echo(f"run {run_id} had ended already; nothing was changed", err=True)
    _show(run_id)
    raise typer.Exit(0 if ended else 1)


def _what_will_happen(preview: dict[str, Any]) -> str:
    kept, lost = preview["finished"], preview["in_flight"] + preview["waiting"]
    standing = f"{kept} of its targets are finished and keep their outcome, {lost} are cancelled"
    how = f"({preview['in_flight']} in flight, {preview['waiting']} waiting)"
    lines = [f"run {preview['run_id']} ({preview['flow']}, {preview['status']}) is cancelled: {standing} {how}"]
    if preview["children_that_end"] or preview["children_that_go_on"]:
        lines.append(
            f"{preview['children_that_end']} runs that only it waits for end with it,"
            f" {preview['children_that_go_on']} that others wait for go on"
        )
    if calls := preview["calls_in_flight"]:
        lines.append(f"{calls} calls are in flight: paid ones come to their end, and their results are kept")
    return "\n".join(lines)


@app.command("show")
def show_run(run_id: Annotated[int, typer.Argument(help="The run's id.")]) -> None:
    """Show one run in full, as JSON: its columns, its stages, its outcomes by reason."""
    _show(run_id)


def _show(run_id: int) -> None:
    shown = with_connection(lambda connection: run_queries.show_run(connection, None, run_id))
    shown["end_cause"] = cause_in_words(shown["end_cause"])
    typer.echo(json.dumps(shown, default=str, indent=2))


@app.command("list")
def list_runs(
    flow: Annotated[str | None, typer.Option(help="Only runs of this flow.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state: queued, running, failed, …")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's. Default: everybody's.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """List runs, newest first. Runs started by other runs, and notification deliveries, are listed only with --flow."""
    wanted: dict[str, Any] = {"flow": flow, "state": state, "but": [NOTIFICATIONS], "top": flow is None}
    rows = with_connection(lambda c: run_queries.list_runs(c, tenant=tenant, **wanted, limit=limit, offset=offset))
    if not rows:
        filtered = flow or state or tenant or offset
        typer.echo("no such runs" if filtered else NO_RUNS)
    for row in rows:
        counts = sums.in_short(row) if row["ended_at"] else "…"
        selected = row["selected"] or 0
        of = f"redrive of {row['redrive_of']}  " if row["redrive_of"] else ""
        shown = harmless(f"{of}{row['event_key']}")
        typer.echo(f"{row['id']:>8}  {row['flow']:<14} {sums.word(row):<10} {selected:>7} = {counts:<14} {shown}")


@app.command()
def log(
    run_id: Annotated[int, typer.Argument(help="The run's id.")],
    trace: Annotated[bool, typer.Option(help="Its log lines instead, if WORKFLOW_LOG_DB_ENABLED kept them.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 1_000,
    offset: Annotated[int, typer.Option(min=0)] = 0,
    tail: Annotated[int | None, typer.Option(help="Only the last so many lines.", min=1, max=10_000)] = None,
) -> None:
    """Show the log of a run, oldest line first: dispatches, stalls, failures and status changes."""
    read = run_queries.list_trace if trace else run_queries.list_log
    last: dict[str, Any] = {"newest_first": True, "limit": tail, "offset": 0}
    part = last if tail else {"limit": limit, "offset": offset}
    rows = with_connection(lambda c: read(c, None, run_id, **part))
    if tail:
        rows.reverse()
    if not rows:
        typer.echo(
            "nothing stored: set WORKFLOW_LOG_DB_ENABLED=1 for the servers" if trace else "nothing yet", err=True
        )
    for row in rows:
        at = row["created_at" if trace else "at"]
        data = json.dumps(row["data"], ensure_ascii=False) if row["data"] else ""
        line = f"{at:%Y-%m-%d %H:%M:%S} {row['level']:<7} {row['message']} {data}"
        typer.echo(harmless(line.rstrip()))


@app.command("why")
def why_waiting(
    run_id: Annotated[int, typer.Argument(help="The run's id.")],
    items: Annotated[bool, typer.Option("--items", help="Item by item, with its place in line.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200, help="With --items.")] = 50,
    offset: Annotated[int, typer.Option(min=0, help="With --items.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Explain why a run, and the runs it waits for, are waiting: each cause with the number of items and, where known,
    when the first and the last of them start."""

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
            last = "" if group.last_at is None else f", the last about {group.last_at:%Y-%m-%d %H:%M:%S}"
            typer.echo(f"          the first starts about {group.first_at:%Y-%m-%d %H:%M:%S}{last}")
        if group.sample:
            named = ", ".join(f"{one.key} (run {one.run_id})" for one in group.sample)
            typer.echo(harmless(f"          for example {named}"))


def _show_items(run_id: int, run: RunWaits, waiting: list[Waiting], limit: int, offset: int) -> None:
    if not waiting:
        typer.echo("no more of it waits" if offset else harmless(run.summary), err=True)
    for one in waiting[:limit]:
        in_line = one.position is not None and "before it" not in one.detail
        place = f", {one.position} before it" if in_line else ""
        at = "" if one.expected_at is None else f", expected {one.expected_at:%Y-%m-%d %H:%M:%S}"
        of_run = "" if one.run_id == run_id else f"run {one.run_id} "
        typer.echo(harmless(f"{of_run}{one.stage}/{one.key}  {one.cause}: {one.detail}{place}{at}"))
    if len(waiting) > limit:
        more = f"`ecluse runs why {run_id} --items --limit {limit} --offset {offset + limit}`"
        typer.echo(f"more of it waits: {more}", err=True)


@app.command("watch")
def watch_run(
    run_id: Annotated[int, typer.Argument(help="The run's id.")],
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1, max=60)] = 1.0,
    timeout: Annotated[float | None, typer.Option(help="For so many seconds at most.", min=0)] = None,
) -> None:
    """Follow a run until it ends. Exit code 0 if it completed, 1 if it did not, 2 if there is no such run, 4 if it is
    still open: no worker of its flow is live, or --timeout is over."""
    from ecluse.cli.watch import watch

    raise typer.Exit(watch(run_id, every, timeout))
