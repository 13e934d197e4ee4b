"""Log-in and log-out, static files, and the answer for unknown paths.

The cookie holds the API key itself: a revoked key is refused within a second, and there are no sessions to store.
Scripts cannot read the cookie, other sites cannot cause it to be sent, and it ends with the browser session.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from ecluse.access import door
from ecluse.access.changes import change
from ecluse.access.envelope import Refused, note_refusal
from ecluse.access.refusal_log import address_of
from ecluse.base.errors import NotFound
from ecluse.web import render
from ecluse.web.authentication import COOKIE, LOGIN, Page, admitted, entered_in, inside
from ecluse.web.files import FILES, PATH, VERSION

HOME = "/ui/runs"
FOR_GOOD = "public, max-age=31536000, immutable"

routes = APIRouter(route_class=Page, include_in_schema=False)


@routes.get("/")
@routes.get("/ui")
@routes.get("/ui/")
async def go_home() -> Response:
    return RedirectResponse(HOME, 303)


@routes.get(LOGIN)
async def show_form(request: Request, next: str = "") -> Response:  # noqa: A002 - its name in the address
    try:
        await admitted(request, "runs.read")
    except Refused as refused:
        problem = refused.message if COOKIE in request.cookies else None  # the key of this browser is no good any more
        return render.page(request, "login.html", next=inside(next, HOME), problem=problem)
    return RedirectResponse(inside(next, HOME), 303)


@routes.post(LOGIN)
async def log_in(request: Request) -> Response:
    form = await entered_in(request)
    key, wanted = str(form.get("key", "")).strip(), inside(str(form.get("next", "")), HOME)
    try:
        await door.admit(request, key, "runs.read")
    except Refused as refused:
        note_refusal(request, refused)
        return render.page(request, "login.html", refused.status, next=wanted, problem=refused.message)
    async with change(request, "page.log-in", f"address:{address_of(request)}"):
        pass  # nothing changes: only the row in the audit trail is stored
    answer = RedirectResponse(wanted, 303)
    secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, key, path="/ui", httponly=True, samesite="strict", secure=secure)
    return answer


@routes.post("/ui/logout")
async def log_out(request: Request) -> Response:
    with suppress(Refused):  # an invalid key is logged out, too
        await admitted(request, "runs.read")
        async with change(request, "page.log-out", f"address:{address_of(request)}"):
            pass  # as above
    answer = RedirectResponse(LOGIN, 303)
    answer.delete_cookie(COOKIE, path="/ui", httponly=True, samesite="strict")
    return answer


@routes.get(f"{PATH}/{{version}}/{{name:path}}")
async def send_file(request: Request, version: str, name: str) -> Response:
    """Send a static file; raise NotFound if there is none with this name. If the address has another version (its page
    came from a replica of that version), send the file of this version, and forbid the browser to cache it."""
    if (file := FILES.get(name)) is None:
        raise NotFound("There is no such file.")
    headers = {"Cache-Control": FOR_GOOD if version == VERSION else "no-cache", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        gzipped = await asyncio.to_thread(lambda: file.gzipped)
        return Response(gzipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.type)
    return Response(file.plain, headers=headers, media_type=file.type)


@routes.get("/ui/{rest:path}")
async def show_nothing(request: Request) -> Response:
    with suppress(Refused):
        await admitted(request, "runs.read")
    raise NotFound("There is no such page.")
