"""`ecluse transcriptions …`: queue fiches, and show the status and logs of one."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from ecluse.access import tenants
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.cli.database import with_connection
from ecluse.cli.given import flow_named
from ecluse.cli.options import AsJson, FicheId, Limit, Offset, Tenant
from ecluse.db.connect import Connection
from ecluse.flows.fiches import ids
from ecluse.flows.transcriptions import queries, rules

app = typer.Typer(no_args_is_help=True, help="Queue fiches for transcription, and show the status and logs of a fiche.")


NOT_KNOWN = {
    "missing": "not fetched from the CRM yet: its recordings are unknown",
    "not_found": "the CRM does not know this fiche (404)",
}


class Priority(StrEnum):
    high = "high"
    normal = "normal"
    low = "low"


def _queue(tenant: str, fiche_ids: list[str], priority: Priority, *, daily: bool) -> list[dict[str, Any]]:
    from ecluse.flows.transcriptions.start import start as start_fiches  # read-only commands do not need it

    if why := ids.why_not(fiche_ids):
        raise InvalidInput(f"{why}. Nothing was queued.")
    once = list(dict.fromkeys(fiche_ids))
    if len(once) < len(fiche_ids):
        typer.echo(f"{len(fiche_ids) - len(once)} duplicate ids ignored: each fiche is queued once", err=True)
    flow = flow_named(rules.FLOW)

    async def ask(connection: Connection) -> list[dict[str, Any]]:
        await tenants.require(connection, tenant, enabled=True)
        row = await (await connection.execute("SELECT ecluse_now()")).fetchone()
        assert row is not None  # noqa: S101 - no table: always one row
        moment, today = int(row[0].timestamp() * 1000), row[0].date()
        names = [rules.day_id(one, today) if daily else rules.click_id(one, moment) for one in once]
        started = await start_fiches(
            connection, flow, tenant, once, event_ids=names, priority=priority.value, again=daily
        )
        return [{**one._asdict(), "run_id": str(one.run_id)} for one in started]

    return with_connection(ask)


@app.command()
def start(
    fiche_id: FicheId,
    priority: Annotated[Priority, typer.Option(help="Priority in the queue.")] = Priority.normal,
    tenant: Tenant = "default",
) -> None:
    """Queue one fiche. If it is being transcribed, returns the open run instead of starting another."""
    typer.echo(json.dumps(_queue(tenant, [fiche_id], priority, daily=False)[0]))


@app.command()
def batch(
    fiche_ids: Annotated[list[str], typer.Argument(help="Ids of the fiches in the CRM.")],
    priority: Annotated[Priority, typer.Option(help="Priority in the queue.")] = Priority.normal,
    tenant: Tenant = "default",
) -> None:
    """Queue fiches, and print a line for each. On the same day, a fiche is queued again only if its run has ended."""
    for one in _queue(tenant, fiche_ids, priority, daily=True):
        typer.echo(json.dumps(one))


@app.command()
def status(fiche_id: FicheId, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show how many recordings have a transcript, the state of each, and the open or last run."""
    found = with_connection(lambda connection: queries.status(connection, tenant, fiche_id))
    if as_json:
        typer.echo(json.dumps(found, default=str))
        return
    run = found["run"]
    unplanned = run is not None and run["target_total"] is None
    if found["known"]:
        typer.echo(f"{found['transcribed']} of {found['total']} transcribed ({found['percentage']} %)")
    else:
        typer.echo(NOT_KNOWN[found["details"]])
    if run is not None:
        said = f"{run['processed']} of {run['target_total']} processed, {run['cached']} cached, {run['failed']} failed"
        if unplanned:
            said = "recordings not known yet" if run["ended_at"] is None else "ended before its recordings were known"
        typer.echo(f"run {run['id']} {run['status']} ({run['phase']}): {said}")
        if why := run["reason"] or run["waiting_for"]:
            typer.echo(harmless(f"  {run['error_code']}: {why}" if run["error_code"] else f"  {why}"))
    for one in found["recordings"]:
        typer.echo(harmless(f"  {one['call_id']:<24} {one['state']:<12} {one['reason'] or ''}".rstrip()))


@app.command()
def logs(
    fiche_id: FicheId,
    run_id: Annotated[str | None, typer.Option("--run", help="Show only lines of this run.")] = None,
    tenant: Tenant = "default",
    limit: Limit = 50,
    offset: Offset = 0,
) -> None:
    """Show the stored log lines of a fiche, oldest first (WORKFLOW_LOG_DB_ENABLED stores them)."""
    rows = with_connection(lambda c: queries.logs(c, tenant, fiche_id, run_id=run_id, limit=limit, offset=offset))
    if not rows:
        typer.echo("no log lines are stored: set WORKFLOW_LOG_DB_ENABLED=1 for the servers")
    for row in rows:
        data = json.dumps(row["data"], ensure_ascii=False, default=str)
        typer.echo(harmless(f"{row['created_at']:%Y-%m-%d %H:%M:%S} {row['level']:<7} {row['message']} {data}"))
