"""`ecluse fiches …`: list and show the cached fiches of the CRM, with their recordings."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ecluse.base.logging import harmless
from ecluse.cli.database import with_connection
from ecluse.cli.options import AsJson, FicheId, Limit, Offset, Tenant, TenantFilter
from ecluse.flows.fiches import queries

app = typer.Typer(no_args_is_help=True, help="List and show cached fiches of the CRM and their recordings.")


@app.command("list")
def list_fiches(
    tenant: TenantFilter = None,
    groupe: Annotated[str | None, typer.Option(help="List only fiches of this groupe.")] = None,
    limit: Limit = 50,
    offset: Offset = 0,
    as_json: AsJson = False,
) -> None:
    """List cached fiches, latest sales first."""
    wanted = queries.Wanted(groupe=groupe)
    rows = with_connection(lambda c: queries.list_fiches(c, tenant, wanted, limit=limit, offset=offset))
    if as_json:
        typer.echo(json.dumps({"fiches": rows}, default=str))
        return
    if not rows:
        typer.echo(
            "no matching fiches" if tenant or groupe or offset else "no fiches yet: a run that reads the CRM adds them"
        )
    for row in rows:
        transcribed = f"{row['transcribed']}/{row['total_recordings']} transcribed"
        day = row["sales_date"] or "-"
        line = f"{row['tenant_id']:<12} {row['fiche_id']:>10}  {day!s:<10} {row['details']:<9} {transcribed:<18}"
        typer.echo(harmless(f"{line} {row['groupe'] or ''}".rstrip()))


@app.command()
def show(
    fiche_id: FicheId,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Show one fiche: its data from the CRM, and its recordings by start time."""
    fiche = with_connection(lambda c: queries.show_fiche(c, tenant, fiche_id))
    if as_json:
        typer.echo(json.dumps(fiche, default=str))
        return
    recordings = fiche.pop("recordings")
    for name, value in fiche.items():
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        typer.echo(harmless(f"{name:<20} {'' if shown is None else shown}".rstrip()))
    for one in recordings:
        state = "removed" if one["removed_at"] else "no URL" if one["url_missing"] else "has URL"
        done = "transcribed" if one["has_transcription"] else "not transcribed"
        at = f"{one['start_time']:%Y-%m-%d %H:%M:%S}" if one["start_time"] else "-"
        typer.echo(harmless(f"  {at:<19} {one['call_id']:<20} {state:<8} {done}"))
