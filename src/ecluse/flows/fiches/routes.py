"""HTTP routes to list and show fiches. A fiche of another tenant is not found; a caller with a narrow scope sees only
the fiches of that scope."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import AfterValidator, BeforeValidator

from ecluse.access import door
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import as_json
from ecluse.access.wire import Filter, Limit, Offset, reads_of, with_ids_as_text
from ecluse.base.text import LONGEST_FOREIGN_ID, storable
from ecluse.flows.fiches import queries, shapes
from ecluse.flows.fiches.cache import Details
from ecluse.flows.fiches.queries import Wanted
from ecluse.flows.fiches.scopes import read_fiche, visible

routes = door.routes("fiches")


def _plain_day(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        raise ValueError("a day as YYYY-MM-DD")  # otherwise pydantic takes a number as seconds
    return value


Day = Annotated[date | None, Query(examples=["2026-03-02"]), BeforeValidator(_plain_day)]
Beginning = Annotated[
    str | None,
    Query(min_length=1, max_length=LONGEST_FOREIGN_ID, description="How its id begins."),
    AfterValidator(lambda text: text and storable(text)),
]


@routes.get("/api/fiches", openapi_extra=needs("fiches.read", narrowed=True), response_model=shapes.FichePage)
async def list_fiches(
    request: Request,
    limit: Limit = 50,
    offset: Offset = 0,
    groupe: Filter = None,
    sales_from: Day = None,
    sales_to: Day = None,
    details: Details | None = None,
    has_recordings: bool | None = None,
    q: Beginning = None,
) -> Response:
    """List fiches, the latest sales first, each with the number of its transcribed recordings."""
    caller, wanted = caller_of(request), Wanted(groupe, sales_from, sales_to, details, has_recordings, q)
    rows = await reads_of(request)(
        lambda c: queries.list_fiches(c, caller.tenant, wanted, visible=visible(caller), limit=limit, offset=offset)
    )
    return as_json({"fiches": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.get(
    "/api/fiches/{fiche_id:fiche}",
    openapi_extra=needs("fiches.read", narrowed=True, refuses=("SCOPE",)),
    response_model=shapes.FicheInFull,
)
async def show_fiche(request: Request, fiche_id: str) -> Response:
    """Return one fiche in full: the CRM's information about it, and its recordings by start time."""
    fiche = await read_fiche(request, fiche_id, queries.show_fiche)
    with_ids_as_text([fiche, *fiche["recordings"]])
    return as_json(fiche)
