"""Authentication of page requests, and the pages that answer errors: as for the API, but the key comes in a cookie, and
an error is answered with a page.

A page declares the permission it needs, and a visitor without a valid key is sent to the log-in form. A page that
declares none needs no key; one that does is asked only for query parameters that it declares: a list whose filter is
misspelled would show all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote

import psycopg
import structlog
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, RedirectResponse
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ecluse.access import door
from ecluse.access.door import PERMISSION
from ecluse.access.envelope import Refused, note_refusal, request_id, status_of
from ecluse.access.keys import Caller
from ecluse.base.errors import EcluseError
from ecluse.base.validation import problem
from ecluse.db.outage import is_unavailable
from ecluse.web import render

log = structlog.get_logger(__name__)
COOKIE = "ecluse_key"
ANY_PARAMETER = "x-any-parameter"  # of a page that reads the query parameters itself
LOGIN = "/ui/login"
# No foreign and no inline scripts: text that was rendered unescaped by mistake would still not be executed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "same-origin",
}


class Page(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        declared, known = self.openapi_extra or {}, door.query_parameters(self)
        permission, strict = declared.get(PERMISSION), ANY_PARAMETER not in declared

        async def shown(request: Request) -> Response:
            try:
                refuse_other_sites(request)
                if permission is not None:
                    door.charge(request, await admitted(request, permission))
                    if strict:
                        door.refuse_unknown(request, known)
                answer = await handle(request)
                if permission is not None:
                    answer = await door.counted(request, answer)
            except ClientDisconnect:
                raise
            except Exception as error:  # noqa: BLE001 - the envelope would answer in JSON, which a browser shows as it is
                note_refusal(request, error)
                answer = _instead(request, error)
            answer.headers.update(HEADERS)
            return answer

        return shown


async def admitted(request: Request, permission: str) -> Caller:
    key = request.cookies.get(COOKIE)
    if not key:
        raise Refused(401, "UNAUTHENTICATED", "Log in first.")
    return await door.admit(request, key, permission)


def refuse_other_sites(request: Request) -> None:
    """Raise Refused (403) for a form that another site submitted from the visitor's browser (CSRF); GET and HEAD always
    pass. Browsers name the sending site in Sec-Fetch-Site, which no script can set, and in Origin; over plain http in
    Origin alone. A request with neither header comes from no browser and passes. Proxies must forward the header
    Host."""
    if request.method in ("GET", "HEAD"):
        return
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    ours = site in (None, "same-origin", "none")
    if origin is not None:
        ours = ours and origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
    if not ours:
        raise Refused(403, "ANOTHER_SITE", "The request came from another site.")


async def entered_in(request: Request) -> FormData:
    """Return the fields of a submitted form; raise HTTPException (415) unless it is sent as browsers send it."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != door.FORM:
        raise HTTPException(415, f"Send the form as {door.FORM}.")  # multipart has charsets that cannot be stored
    return await request.form()


def inside(wanted: str, home: str) -> str:
    """Return the path to redirect to: `wanted` if it is a page of this server other than log-in, else `home`."""
    return wanted if wanted.startswith("/ui/") and not wanted.startswith(LOGIN) else home


def _instead(request: Request, error: Exception) -> Response:
    match error:
        case EcluseError() if (status := status_of(error)) is not None:
            if status == 401:
                return _ask_for_a_key(request)
            if status == 429:  # not a page: what is refused because it is too much must cost little
                headers = error.headers if isinstance(error, Refused) else {"Retry-After": "1"}
                return PlainTextResponse(error.message, status, headers)
            return render.trouble(request, status, error.message)
        case HTTPException():
            return render.trouble(request, error.status_code, str(error.detail))
        case RequestValidationError():
            wrong = "; ".join(f"{one['loc'][-1]}: {problem(one)}" for one in error.errors())
            return render.trouble(request, 422, f"Invalid parameters in the address: {wrong}.")
        case psycopg.Error() if is_unavailable(error):
            return render.trouble(request, 503, "The database is unavailable. Reload the page in a moment.")
    log.error("pages: request failed", exc_info=error)
    where = f"the server's log has the reason under the request id {request_id(request)}"
    return render.trouble(request, 500, f"The server failed unexpectedly. Try again; {where}.")


def _ask_for_a_key(request: Request) -> Response:
    fetched = request.headers.get("sec-fetch-site"), request.headers.get("sec-fetch-mode", "navigate")
    if fetched[1] != "navigate":  # the stream of a page that is already shown
        return render.trouble(request, 401, "Log in first.")
    if fetched[0] == "cross-site":
        # Browsers do not send a strict cookie when the visitor follows a link in a mail. The same address requested
        # again from our own page comes with the cookie.
        return render.page(request, "again.html")
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{LOGIN}?next={quote(wanted, safe='/')}", 303)
