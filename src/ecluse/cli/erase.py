"""`ecluse erase …`: delete personal data for good, after listing it and asking; recorded in the audit trail."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Annotated

import typer

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, tenants
from ecluse.access.maintenance import NAMELESS, RUNS, SHOWN, TENANT, erase_rows, refuse_open_runs
from ecluse.cli import confirm
from ecluse.cli.database import operator, with_connection
from ecluse.cli.options import FicheId, Flows, JsonLine, Tenant, Yes
from ecluse.cli.prune import Progress
from ecluse.db.connect import Connection
from ecluse.retention import erasure
from ecluse.retention.pace import Pace

app = typer.Typer(no_args_is_help=True, help="Erase the data of a fiche or of a tenant for good.")


@app.command()
def fiche(
    fiche_id: FicheId,
    tenant: Tenant = "default",
    yes: Yes = False,
    as_json: JsonLine = False,
) -> None:
    """Erase a fiche: its data, recordings, transcripts, audits, paid results, and the texts about it in runs, events,
    deliveries and logs. Its runs keep ids, counts, outcomes and codes. Erase it in the CRM first."""
    from ecluse.flows.automation import erasure as of_fiche  # imports FastAPI

    folders = bootstrap.trace_folders(settings.load())

    async def look(connection: Connection) -> tuple[of_fiche.Found, Counter[str]]:
        await tenants.require(connection, tenant)
        found = await of_fiche.find(connection, tenant, fiche_id)
        await of_fiche.refuse_open_runs(connection, found)
        return found, await of_fiche.foresee(connection, found)

    async def erase(connection: Connection) -> Counter[str]:
        async with connection.transaction():
            done = await of_fiche.erase(connection, found)
            subject = f"fiche:{fiche_id}"
            await audit_trail.record(connection, tenant, operator(), "fiche.erase", subject, _counts(done))
        files = sum(folders["transcription"].erase(run) for run in found.runs)
        done["log files"] = files + sum(folders["automation"].erase(run, naming=fiche_id) for run in found.shared)
        return done

    found, foreseen = with_connection(look)
    typer.echo(f"fiche {fiche_id} of tenant {tenant}: these rows will be erased for good")
    _show(foreseen)
    own, others = _named(found.runs), _named(found.shared)
    typer.echo(f"runs of this fiche alone keep ids, counts and codes only: {own or 'none'}")
    typer.echo(f"runs with other fiches keep its id, outcome and code: {others or 'none'}")
    confirm.ask(f"Erase fiche {fiche_id}? This cannot be undone.", yes=yes)
    _done("fiche", fiche_id, with_connection(erase), as_json=as_json)


@app.command("tenant")
def erase_tenant(
    tenant: Annotated[str, typer.Argument(metavar="NAME", help="Id of the tenant.")],
    yes: Yes = False,
    as_json: JsonLine = False,
    flow: Flows = None,
) -> None:
    """Erase all data of a tenant, schedules, keys and secrets included, and disable it. Its audit trail stays."""
    given = settings.load()
    flows = {one.name: one for one in bootstrap.load_flows(given, flow or ())}
    folders = bootstrap.trace_folders(given)

    async def look(connection: Connection) -> Counter[str]:
        await tenants.require(connection, tenant)
        await refuse_open_runs(connection, tenant)
        return await erasure.count(connection, (*RUNS, *TENANT), {"tenant": tenant})

    async def erase(connection: Connection) -> Counter[str]:
        subject = f"tenant:{tenant}"
        async with connection.transaction():  # once committed, no run of it is started
            if await tenants.set_disabled(connection, tenant, True):
                await audit_trail.record(connection, tenant, operator(), "tenant.disable", subject, "to be erased")
            await connection.execute(NAMELESS, (tenant,))
            await refuse_open_runs(connection, tenant)
        pace = Pace(rest=0, longest=math.inf)  # no pauses: an operator waits
        done = await erase_rows(connection, flows, folders, tenant, Progress(), pace)
        await audit_trail.record(connection, tenant, operator(), "tenant.erase", subject, _counts(done))
        return done

    foreseen = with_connection(look)
    typer.echo(f"tenant {tenant}: these rows will be erased for good, and the tenant disabled")
    _show(foreseen)
    confirm.ask(f"Erase tenant {tenant}? This cannot be undone.", yes=yes)
    _done("tenant", tenant, with_connection(erase), as_json=as_json)


def _named(runs: list[int]) -> str:
    return ", ".join(f"#{run}" for run in runs[:SHOWN]) + (
        f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    )


def _show(counted: Counter[str]) -> None:
    for what, rows in counted.items():
        if rows:
            typer.echo(f"  {rows:>10,} {what}")
    if not counted.total():
        typer.echo("  nothing is stored")


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{what}: {rows}" for what, rows in counted.items() if rows) or "nothing was stored"


def _done(kind: str, name: str, done: Counter[str], *, as_json: bool) -> None:
    typer.echo(f"erased {kind} {name}: {_counts(done)}")
    if as_json:
        typer.echo(json.dumps({"erased": kind, "id": name, "removed": {what: n for what, n in done.items() if n}}))
