"""Page of the tenant's connections to vendors: URL and caps of each, and buttons to its forms. Of a key, only the last
characters are shown."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import read_page
from ecluse.access.wire import reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.flows.connections.records import KINDS, VENDORS
from ecluse.flows.connections.surface import CONNECTIONS, READ
from ecluse.web import render
from ecluse.web.actions import buttons
from ecluse.web.authentication import Page

routes = APIRouter(route_class=Page, include_in_schema=False)
HERE = "/ui/connections"
OF_ONE = ("test_connection", "change_connection", "delete_connection")


@routes.get(HERE, openapi_extra=needs(READ))
async def show_connections(request: Request) -> Response:
    async def ask(connection: Connection) -> Row:
        return await read_page(connection, caller_of(request), CONNECTIONS, {}, limit=len(KINDS))

    stored = {one["kind"]: one for one in (await reads_of(request)(ask))["connections"]}
    rows = [{"kind": kind, "vendor": VENDORS[kind], "base_url": None, **stored.get(kind, {})} for kind in KINDS]
    for row in rows:
        named = {"kind": row["kind"]}
        acts = OF_ONE if row["kind"] in stored else ()
        row["buttons"] = buttons(request, *((name, named) for name in acts), back=HERE)
        if row["kind"] not in stored:
            row["buttons"] = buttons(request, ("create_connection", {}), back=HERE, kind=row["kind"])
    return render.page(request, "connections.html", connections=rows, given=request.app.state.connections.given)
