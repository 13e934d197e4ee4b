"""`ecluse audits …`: list audit configs and audits, show an audit, and start an audit."""

from __future__ import annotations

import json
import uuid
from enum import StrEnum
from typing import Annotated, Any

import typer

from ecluse import bootstrap, settings
from ecluse.access import tenants
from ecluse.base.logging import harmless
from ecluse.cli.database import with_connection
from ecluse.cli.options import AsJson, FicheId, Limit, Offset, Tenant, TenantFilter
from ecluse.db.connect import Connection
from ecluse.engine import Start, start_run
from ecluse.flows.audits import configs, queries

app = typer.Typer(no_args_is_help=True, help="List audit configs and audits, show an audit, and audit a fiche.")


class StatusName(StrEnum):
    pending = "pending"
    running = "running"
    completed = "completed"
    failed = "failed"


@app.command("configs")
def list_configs(tenant: TenantFilter = None, limit: Limit = 50, offset: Offset = 0, as_json: AsJson = False) -> None:
    """List audit configs, by id."""
    rows = with_connection(lambda c: configs.listed(c, tenant, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"configs": rows}, default=str))
        return
    if not rows:
        typer.echo("no matching configs" if tenant or offset else "no configs yet: POST /api/audit-configs creates one")
    for row in rows:
        state = "automatic" if row["run_automatically"] else "on demand"
        about = f"v{row['version']}, {len(row['steps'])} steps, {state if row['is_active'] else 'not active'}"
        typer.echo(harmless(f"{row['tenant_id']:<12} {row['id']:>6}  {about:<28} {row['name']}"))


@app.command("list")
def list_audits(
    tenant: TenantFilter = None,
    fiche: Annotated[str | None, typer.Option(help="List only audits of this fiche.")] = None,
    config: Annotated[int | None, typer.Option(help="List only audits with this config.")] = None,
    automation_run: Annotated[int | None, typer.Option(help="List only audits of this automation run.")] = None,
    status: Annotated[StatusName | None, typer.Option(help="List only audits with this status.")] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="List only the latest audit of each fiche and config.")
    ] = False,
    limit: Limit = 50,
    offset: Offset = 0,
    as_json: AsJson = False,
) -> None:
    """List audits, newest first."""
    wanted = queries.Wanted(fiche, config, automation_run, status.value if status else None, latest or None)
    rows = with_connection(lambda c: queries.list_audits(c, tenant, wanted, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"audits": rows}, default=str))
        return
    if not rows:
        typer.echo("no matching audits")
    for row in rows:
        worth = row["error_code"] or ("" if row["score"] is None else f"{row['score']} / 100")
        line = f"{row['tenant_id']:<12} {row['id']:>8}  {row['fiche_id']:>10}  {row['status']:<9} {worth:<20}"
        typer.echo(harmless(f"{line} {row['config_name']} v{row['config_version']}"))


@app.command()
def show(
    audit_id: Annotated[int, typer.Argument(help="Id of the audit.")],
    as_json: AsJson = False,
) -> None:
    """Show one audit: score and comment of each step, and where its quotes are in the transcripts."""
    audit = with_connection(lambda c: queries.show_audit(c, None, audit_id))
    if as_json:
        typer.echo(json.dumps(audit, default=str))
        return
    result = audit.pop("result")
    audit.pop("config")
    for name, value in audit.items():
        typer.echo(harmless(f"{name:<24} {'' if value is None else value}".rstrip()))
    for step in (result or {"steps": ()})["steps"]:
        typer.echo(harmless(f"  {step['score']:g}/{step['max']}  {step['name']}: {step['comment']}"))
        for one in step["evidence"]:
            where = f"{one['call_id']} at {one['position']}" if one["verified"] else "NOT IN ANY TRANSCRIPT"
            typer.echo(harmless(f"        « {one['quote']} » ({where})"))


@app.command()
def run(
    fiche: FicheId,
    config: Annotated[int, typer.Argument(help="Id of the audit config.")],
    tenant: Tenant = "default",
    use_rlm: Annotated[bool, typer.Option("--use-rlm", help="Store use_rlm=true with the audit.")] = False,
) -> None:
    """Audit one fiche with one config. A running server picks it up at once; without one, the audit waits."""
    from ecluse.flows.audits.flow import FLOW  # imports the vendor's client: read-only commands do not need it

    flow = next(one for one in bootstrap.load_flows(settings.load()) if one.name == FLOW)
    given = {"fiche_id": fiche, "audit_config_id": str(config), "use_rlm": use_rlm}
    start = Start(flow, f"audit-{fiche}-{config}-{uuid.uuid4().hex}", tenant_id=tenant, input=given)

    async def ask(connection: Connection) -> dict[str, Any]:
        await tenants.require(connection, tenant, enabled=True)
        async with connection.transaction():
            started = await start_run(connection, start)
            cursor = await connection.execute("SELECT id FROM audits WHERE run_id = %s", (started.run.id,))
            (audit_id,) = await cursor.fetchone() or (0,)
        return {"audit_id": str(audit_id), "run_id": str(started.run.id)}

    typer.echo(json.dumps(with_connection(ask)))
