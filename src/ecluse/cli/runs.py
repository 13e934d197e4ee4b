"""`ecluse runs …`: start, list and look at runs, through the database that the servers use."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any

import typer

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, tenants
from ecluse.base.errors import NotFound
from ecluse.base.logging import harmless
from ecluse.cli.database import operator, with_connection
from ecluse.cli.given import flow_named, json_object
from ecluse.db.connect import Connection
from ecluse.engine import Start, Waiting, announce, insert_run, load_run, reading, why
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS

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
    """Ask for a run. A running server takes it up at once; it waits for one otherwise."""
    chosen, parsed = flow_named(flow), json_object(given)
    key = f"{chosen.name}-manual-{uuid.uuid4()}" if key is None else key
    wanted = Start(chosen, key, tenant_id=tenant, input=parsed, again=True)

    async def ask(connection: Connection) -> dict[str, Any]:
        await tenants.require(connection, tenant, enabled=True)
        started = await insert_run(connection, wanted)
        await announce(connection)
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
) -> None:
    """End a run now, as failed: nothing more of it is started, and every open target gets this reason."""
    from ecluse.engine import end_by_operator

    known = {f.name: f for f in bootstrap.load_flows(settings.load(), [flow] if flow else [])}

    async def ask(connection: Connection) -> bool:
        run = await load_run(connection, run_id)
        if run.flow not in known:
            raise NotFound(
                f"Run {run_id} is of flow {run.flow!r}, which is not loaded. Name it with --flow package:NAME."
            )
        done = (run.tenant_id, operator(), "run.end", f"run:{run_id}", reason)
        return await end_by_operator(
            connection, known[run.flow], run, reason, lambda: audit_trail.record(connection, *done)
        )

    ended = with_connection(ask)
    if not ended:
        typer.echo(f"run {run_id} had ended already; nothing was changed", err=True)
    _show(run_id)
    raise typer.Exit(0 if ended else 1)


@app.command("show")
def show_run(run_id: Annotated[int, typer.Argument(help="The run's id.")]) -> None:
    """One run in full, as JSON: its columns, its stages, its outcomes by reason."""
    _show(run_id)


def _show(run_id: int) -> None:
    shown = with_connection(lambda connection: reading.show_run(connection, None, run_id))
    typer.echo(json.dumps(shown, default=str, indent=2))


@app.command("list")
def list_runs(
    flow: Annotated[str | None, typer.Option(help="Only runs of this flow.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state: queued, running, failed, …")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's. Default: everybody's.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """The newest runs first; what other runs have started, and deliveries of notifications, only by `--flow`."""
    wanted: dict[str, Any] = {"flow": flow, "state": state, "but": [NOTIFICATIONS], "top": flow is None}
    rows = with_connection(lambda c: reading.list_runs(c, tenant=tenant, **wanted, limit=limit, offset=offset))
    if not rows:
        filtered = flow or state or tenant or offset
        typer.echo("no such runs" if filtered else "no runs yet: start one with `ecluse runs start FLOW`")
    for row in rows:
        counts = f"{row['successful']}+{row['failed']}+{row['ignored']}" if row["ended_at"] else "…"
        selected = row["selected"] or 0
        shown = harmless(row["event_key"])
        typer.echo(f"{row['id']:>8}  {row['flow']:<14} {row['status']:<10} {selected:>7} = {counts:<14} {shown}")


@app.command()
def log(
    run_id: Annotated[int, typer.Argument(help="The run's id.")],
    trace: Annotated[bool, typer.Option(help="Its log lines instead, if WORKFLOW_LOG_DB_ENABLED kept them.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 1_000,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """The run's own account: dispatches, stalls, failures and moves, the oldest first."""
    read = reading.list_trace if trace else reading.list_log
    rows = with_connection(lambda c: read(c, None, run_id, limit=limit, offset=offset))
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
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    offset: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Why its items wait: for each the cause, its place in line and, where it can be told, when it starts."""

    async def ask(connection: Connection) -> tuple[list[Waiting], str]:
        waiting = await why(connection, None, run_id, limit=limit + 1, offset=offset)
        if waiting or offset:
            return waiting, "no more of it waits"
        return waiting, await _why_nothing_waits(connection, run_id)

    waiting, otherwise = with_connection(ask)
    if not waiting:
        typer.echo(otherwise, err=True)
    for one in waiting[:limit]:
        in_line = one.position is not None and "before it" not in one.detail
        place = f", {one.position} before it" if in_line else ""
        at = "" if one.expected_at is None else f", expected {one.expected_at:%Y-%m-%d %H:%M:%S}"
        typer.echo(harmless(f"{one.stage}/{one.key}  {one.cause}: {one.detail}{place}{at}"))
    if len(waiting) > limit:
        typer.echo(f"more of it waits: `ecluse runs why {run_id} --limit {limit} --offset {offset + limit}`", err=True)


async def _why_nothing_waits(connection: Connection, run_id: int) -> str:
    run = await reading.show_run(connection, None, run_id)
    if run["ended_at"] is not None:
        return f"nothing of it waits: it has ended, {run['status']}"
    if run["state"] != "queued":
        return "nothing of it waits"
    workers = await connection.execute("SELECT 1 FROM replicas WHERE state = 'live' AND 'worker' = ANY(roles) LIMIT 1")
    if await workers.fetchone() is None:
        return "the run waits as a whole: no server is running that would take it up (`ecluse serve`)"
    return "the run waits as a whole: a server is about to take it up"


@app.command("watch")
def watch_run(
    run_id: Annotated[int, typer.Argument(help="The run's id.")],
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1, max=60)] = 1.0,
) -> None:
    """Follow a run until it ends. Exit code 0 if it completed, 1 if it did not, 2 if there is no such run."""
    from ecluse.cli.watch import watch

    raise typer.Exit(watch(run_id, every))
