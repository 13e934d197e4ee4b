"""Page behind the link of a confirmation mail. A click on its button confirms the mail address; opening the page does
not, because mail programs open links by themselves. It needs no key: the token in the link is the proof."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ecluse.access import audit_trail
from ecluse.access.envelope import request_id
from ecluse.access.refusal_log import address_of
from ecluse.access.wire import reads_of, writes_of
from ecluse.base.errors import NotFound
from ecluse.notify import confirmation_tokens
from ecluse.notify.confirmation_tokens import PATH
from ecluse.web import render
from ecluse.web.authentication import Page, entered_in

VOID = "This link was used already, was replaced by a newer one, or has expired. Ask its sender for another one."

routes = APIRouter(route_class=Page, include_in_schema=False)


@routes.get(PATH)
async def show_request(request: Request, token: str = "") -> Response:
    asked = await reads_of(request)(lambda connection: confirmation_tokens.find(connection, token))
    if asked is None:
        raise NotFound(VOID)
    return render.page(request, "confirm.html", asked=asked, token=token)


@routes.post(PATH)
async def confirm(request: Request) -> Response:
    token = str((await entered_in(request)).get("token", ""))
    async with writes_of(request).pool.connection() as connection, connection.transaction():
        asked = await confirmation_tokens.confirm(connection, token)
        if asked is None:
            raise NotFound(VOID)
        about = (asked.tenant_id, f"mail:{asked.address}", "address.confirm", f"address:{asked.address}")
        entry = audit_trail.Entry(*about, request_id=request_id(request), address=address_of(request))
        await audit_trail.record_all(connection, [entry])
    return render.page(request, "confirm.html", asked=asked, token=None)
