"""Routes for the permanent erasure of personal data: a fiche of the caller's tenant, or a whole tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

from pydantic import Field

from ecluse.access import maintenance, tenants
from ecluse.access.changes import record
from ecluse.access.commands import Command
from ecluse.access.surface import Act, Look, Surface
from ecluse.access.wire import Shape
from ecluse.api.keys import administrators_only
from ecluse.api.shapes import Id, Reason
from ecluse.base.errors import Conflict
from ecluse.base.trace_files import TraceFolder
from ecluse.db.query import Row, fetch_value
from ecluse.flows.automation import erasure
from ecluse.flows.fiches.scopes import FicheInPath

surface = Surface("erasure")

Counts = Annotated[dict[str, int], Field(examples=[{"recordings and transcripts": 3}])]
ASKED_AT = "SELECT asked_at FROM maintenance WHERE what = 'erase tenant' AND subject = %s"


class FicheErasure(Shape):
    fiche_id: str
    rows: Counts = Field(description="Rows with content to erase, by kind.")
    runs: list[Id] = Field(description="Runs of this fiche alone: they keep ids, counts and codes only.")
    shared: list[Id] = Field(description="Runs with other fiches: they keep its id, outcome and code.")


class ErasedFiche(Shape):
    fiche_id: str
    removed: Counts


class TenantErasure(Shape):
    tenant: str
    rows: Counts = Field(description="Rows that still exist, by kind.")
    asked_at: datetime | None = Field(description="When its erasure was requested; null: it was not, or it is done.")


@surface.read("/api/erasure/fiches/{fiche_id:text}", needs="erasure.read", answer=FicheErasure, refuses=("RUN_OPEN",))
async def preview_erasure_of_fiche(look: Look, fiche_id: FicheInPath) -> Row:
    """Preview the erasure of a fiche: the number of rows by kind, and its runs. Refused while a run of it is open."""
    found = await erasure.find(look.connection, look.tenant, fiche_id)
    await erasure.refuse_open_runs(look.connection, found)
    return {
        "fiche_id": fiche_id,
        "rows": _some(await erasure.foresee(look.connection, found)),
        "runs": [str(run) for run in found.runs],
        "shared": [str(run) for run in found.shared],
    }


@surface.operation(
    "POST",
    "/api/erasure/fiches/{fiche_id:text}",
    needs="erasure.write",
    answer=ErasedFiche,
    action=None,  # recorded with what was removed
    refuses=("RUN_OPEN",),
    command=Command("erase fiche", preview="preview_erasure_of_fiche"),
)
async def erase_fiche(act: Act, fiche_id: FicheInPath, body: Reason) -> Row:
    """Erase a fiche for good: its data, recordings, transcripts, audits, paid results, and the texts about it in runs,
    events, deliveries and logs. Its runs keep ids, counts, outcomes and codes. Erase it in the CRM first."""
    found = await erasure.find(act.connection, act.tenant, fiche_id)
    done = await erasure.erase(act.connection, found)
    done["log files"] = await asyncio.to_thread(_erase_files, act.state.upkeep.folders, found)
    said = f"{body.reason} ({maintenance.in_words(done)})"
    await record(act.connection, act.request, "fiche.erase", f"fiche:{fiche_id}", said)
    return {"fiche_id": fiche_id, "removed": _some(done)}


def _erase_files(folders: Mapping[str, TraceFolder], found: erasure.Found) -> int:
    own = sum(folders["transcription"].erase(run) for run in found.runs)
    return own + sum(folders["automation"].erase(run, naming=found.fiche_id) for run in found.shared)


@surface.read(
    "/api/erasure/tenants/{tenant}", needs="erasure.read", answer=TenantErasure, refuses=("CONFLICT", "RUN_OPEN")
)
async def preview_erasure_of_tenant(look: Look, tenant: str) -> Row:
    """Preview the erasure of a tenant, or show its progress: the number of rows that still exist, by kind. Only for
    admins of the tenant `default`."""
    administrators_only(look)
    return await _standing(look, tenant)


@surface.operation(
    "POST",
    "/api/erasure/tenants/{tenant}",
    needs="erasure.write",
    answer=TenantErasure,
    status=202,
    action="tenant.erase",
    subject="tenant:{tenant}",
    refuses=("CONFLICT", "RUN_OPEN"),
    command=Command("erase tenant", preview="preview_erasure_of_tenant"),
)
async def erase_tenant(act: Act, tenant: str, body: Reason) -> Row:  # noqa: ARG001 - its reason is recorded
    """Disable a tenant and erase all its rows for good; its audit trail stays. Refused while a run of it is open. A
    scheduler does it in batches: `GET` shows the rows that are left."""
    administrators_only(act)
    await tenants.require(act.connection, tenant)
    if tenant == act.tenant:
        raise Conflict(f"Tenant {tenant} cannot be erased: the key of this request belongs to it.")
    await maintenance.ask_for_erasure(act.connection, tenant, act.caller.actor)
    return await _standing(act, tenant)


async def _standing(look: Look, tenant: str) -> Row:
    await tenants.require(look.connection, tenant)
    rows = _some(await maintenance.foresee(look.connection, tenant))
    return {"tenant": tenant, "rows": rows, "asked_at": await fetch_value(look.connection, ASKED_AT, (tenant,))}


def _some(counted: Counter[str]) -> dict[str, int]:
    return {what: rows for what, rows in counted.items() if rows}
