"""Pages of audits: the configs, the audits made with them, and one audit in full with its quotes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import read_page
from ecluse.access.wire import Filter, Offset, number, reads_of
from ecluse.db.connect import Connection
from ecluse.flows.audits.queries import show_audit
from ecluse.flows.audits.surface import AUDITS, CONFIGS, Status
from ecluse.web import render
from ecluse.web.actions import buttons
from ecluse.web.authentication import Page

ROWS, MOST_CONFIGS = 25, 200

routes = APIRouter(route_class=Page, include_in_schema=False)
MAY = "audits.read"


class ListFilters(BaseModel):
    """Filters and offset of the list of audits."""

    fiche_id: Filter = None
    status: Status | None = None
    config: Filter = None
    offset: Offset = 0


@routes.get("/ui/audits", openapi_extra=needs(MAY))
async def show_audits(request: Request, filters: Annotated[ListFilters, Query()]) -> Response:
    caller = caller_of(request)
    given = {
        "fiche_id": filters.fiche_id or None,
        "status": filters.status,
        "audit_config_id": number("audit config", filters.config) if filters.config else None,
    }

    async def ask(connection: Connection) -> tuple[dict[str, Any], dict[str, Any]]:
        configs = await read_page(connection, caller, CONFIGS, {}, limit=MOST_CONFIGS)
        return configs, await read_page(connection, caller, AUDITS, given, limit=ROWS, offset=filters.offset)

    configs, audits = await reads_of(request)(ask)
    for config in configs["configs"]:
        named = {"config_id": config["id"]}
        config["buttons"] = buttons(request, ("change_config", named), ("delete_config", named), back="/ui/audits")
    return render.page(
        request,
        "audits.html",
        configs=configs["configs"],
        audits=audits["audits"],
        more=audits["next_cursor"] is not None,
        size=ROWS,
        wanted=filters,
        new=buttons(request, ("create_config", {}), ("start_audit", {}), back="/ui/audits"),
    )


@routes.get("/ui/audits/{audit_id}", openapi_extra=needs(MAY))
async def show_one(request: Request, audit_id: str) -> Response:
    tenant, wanted = caller_of(request).tenant, number("audit", audit_id)
    audit = await reads_of(request)(lambda connection: show_audit(connection, tenant, wanted))
    return render.page(request, "audit.html", audit=audit)
