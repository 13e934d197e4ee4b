"""The parts that all HTTP answers share: a request id, the id of the replica that answered, a limit on request bodies,
and one shape for every error: `{"error": {"code", "message", "details", "request_id"}}`, or problem details (RFC 9457)
if the caller's Accept header names `application/problem+json`.

A request id sent by the caller is used if it consists of harmless characters; it is bound to every log line of the
request. The details of an unexpected error are logged, not sent to the caller.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import psycopg
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from pydantic_core import to_json, to_jsonable_python
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ecluse.access.error_codes import REFUSALS
from ecluse.access.refusal_log import address_of
from ecluse.base.errors import Conflict, EcluseError, ForbiddenTransition, InvalidInput, NotFound
from ecluse.base.validation import as_sent, problem, respelled, where
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.reads import ReadTimeout
from ecluse.db.shares import AllBusy, Busy

log = structlog.get_logger(__name__)
READS_TOO = logging.getLogger(__name__)  # reads are logged at DEBUG; the level is tested first: reads are many

Answered = Callable[[Scope, int, float], None]
LARGEST_BODY = 1_000_000
MOST_DETAILS = 20
IN_BODY = 2  # parts of the place of a field in the body: `body`, and its name
HARMLESS_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
STATUS: dict[type[EcluseError], int] = {
    InvalidInput: 422,
    NotFound: 404,
    Conflict: 409,
    ForbiddenTransition: 409,
    ReadTimeout: 503,
    Busy: 429,
    AllBusy: 503,
}
# Our own table, so that error codes stay the same when the standard library renames a status.
CODES = {
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    413: "BODY_TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
    422: InvalidInput.code,
}
JSON, PROBLEM = "application/json", "application/problem+json"
HUNG_UP = 499  # in log and metrics: the client disconnected before its request was complete (nginx's status)
EXPLAINED = "/docs/errors"  # a page with every code
TOO_LARGE = HTTPException(413, f"A body has at most {LARGEST_BODY} bytes.")


class ErrorDetail(BaseModel):
    where: str = Field(
        description="The parameter or field, as the caller spelled it, or the limit.", examples=["body.name"]
    )
    problem: str


class Error(BaseModel):
    code: str = Field(description="Stable code of the error.", examples=["NOT_FOUND"])
    message: str = Field(description="The error as a sentence for people.")
    details: list[ErrorDetail] | None = Field(
        description="Of `INVALID_INPUT` the invalid parameters and fields, of status 429 the limit; otherwise null."
    )
    request_id: str = Field(description="The server's log has the request under this id.")


class ErrorAnswer(BaseModel):
    error: Error


class Problem(BaseModel):
    """Problem details (RFC 9457), for callers that accept `application/problem+json`."""

    type: str = Field(description="Where the code is explained.", examples=[f"{EXPLAINED}#NOT_FOUND"])
    title: str = Field(description="What the code means.")
    status: int = Field(examples=[404])
    detail: str = Field(description="What is wrong with this request.")
    instance: str = Field(description="The path of the request.", examples=["/api/runs/7"])
    code: str = Field(description="Stable code of the error.", examples=["NOT_FOUND"])
    request_id: str = Field(description="The server's log has the request under this id.")
    errors: list[ErrorDetail] | None = Field(
        description="The invalid parameters and fields; null unless `INVALID_INPUT`."
    )


class Refused(EcluseError):
    """Raised to refuse a request: the HTTP status, code, message, headers and details of the answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        details: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.status, self.headers, self.details = status, headers, details


class BadCredentials(Refused):
    """Raised if the key, token or signature of a request is not valid: status 401, counted in the audit trail."""


def install(app: FastAPI, answered: Answered) -> None:
    """Install the middleware and the error handlers. `answered` is called with the scope, the status and the duration
    in seconds of each request."""
    app.add_middleware(Envelope, answered=answered)
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _validation_error)  # type: ignore[arg-type]
    app.add_exception_handler(EcluseError, _our_error)  # type: ignore[arg-type]


def request_id(request: Request) -> str:
    return str(request.state.request_id)


def age(request: Request) -> timedelta:
    """Return the time since the request was received."""
    return timedelta(seconds=time.perf_counter() - request.state.began)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None, kind: str = JSON) -> Response:
    return Response(as_bytes(value), status, headers, kind)


def as_bytes(value: Any) -> bytes:
    try:
        return to_json(value)
    except ValueError:  # nested too deeply for pydantic, as a vendor's answer may be
        return json.dumps(value, default=to_jsonable_python).encode()


class Envelope:
    """ASGI middleware that gives each HTTP request its id, limits its body, answers unexpected errors, and logs and
    reports the answer. WebSockets pass through, unless their path has NUL bytes."""

    def __init__(self, app: ASGIApp, answered: Answered) -> None:
        self._app, self._answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unnamed = "\x00" in scope.get("path", "")  # PostgreSQL stores no NUL: such a path names nothing
        if scope["type"] != "http":
            if unnamed:
                await send({"type": "websocket.close"})
            else:
                await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope)
        given = sent.get("x-request-id", "")
        this = given if HARMLESS_ID.fullmatch(given) else uuid.uuid4().hex
        began, status, taken = time.perf_counter(), 0, 0
        scope.setdefault("state", {}).update(request_id=this, began=began)
        replica = scope["app"].state.kit.replica

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > LARGEST_BODY:
                raise TOO_LARGE
            return message

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"], headers["X-Replica"] = this, replica
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=this):
            try:
                if unnamed:
                    await error_answer(scope, 404, CODES[404], "A path has no NUL bytes.")(scope, receive, marked)
                elif _announced(sent) > LARGEST_BODY:
                    await error_answer(scope, 413, CODES[413], TOO_LARGE.detail)(scope, receive, marked)
                else:
                    await self._app(scope, limited, marked)
            except ClientDisconnect:
                status = HUNG_UP
            except Exception as error:  # outermost handler: the caller gets an error answer, the log the reason
                if status:
                    raise  # the answer has begun: only a broken connection can tell the client that it is incomplete
                await _unexpected(scope, error)(scope, receive, marked)
            finally:
                seconds = time.perf_counter() - began
                self._answered(scope, status or 500, seconds)
            told = status != HUNG_UP and (scope["method"] != "GET" or status >= 400)  # slow bodies may be a flood
            if told or READS_TOO.isEnabledFor(logging.DEBUG):
                log.info(
                    "request: answered",
                    method=scope["method"],
                    path=_path(scope),
                    http_status=status,
                    duration_ms=round(seconds * 1000, 1),
                )


def error_answer(
    scope: Scope,
    status: int,
    code: str,
    message: str,
    *,
    details: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the answer for an error: problem details if the caller accepts them, otherwise the usual shape."""
    request_id, headers = scope["state"]["request_id"], {**(headers or {}), "Vary": "Accept"}
    if not _wants_problem(Headers(scope=scope).get("accept", "")):
        error = {"code": code, "message": message, "details": details, "request_id": request_id}
        return as_json({"error": error}, status, headers)
    known = REFUSALS.get(code)  # a flow may have codes of its own
    problem = {
        "type": f"{EXPLAINED}#{code}" if known else "about:blank",
        "title": known.meaning if known else HTTPStatus(status).phrase,
        "status": status,
        "detail": message,
        "instance": _path(scope),
        "code": code,
        "request_id": request_id,
        "errors": details,
    }
    return as_json(problem, status, headers, PROBLEM)


def _wants_problem(accept: str) -> bool:
    """Return True if the Accept header names the type of problem details, and not with q=0. `*/*` alone gets the usual
    errors."""
    for one in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in one.split(";"))
        if kind == PROBLEM:
            return not any(re.fullmatch(r"q=0(\.0*)?", part) for part in parameters)
    return False


def _path(scope: Scope) -> str:
    """Return the path as it was sent, without the query, cut at 500 bytes."""
    raw: bytes = scope["raw_path"]
    return raw[:500].decode("ascii", "replace")


def _announced(sent: Headers) -> int:
    length = sent.get("content-length", "0")
    return int(length) if length.isdecimal() else 0


def _unexpected(scope: Scope, error: Exception) -> Response:
    if isinstance(error, psycopg.Error) and is_unavailable(error):
        log.warning("request: database unavailable", error=one_line(error))
        headers = {"Retry-After": "1"}
        return error_answer(scope, 503, "DATABASE_AWAY", "The database is unavailable.", headers=headers)
    log.error("request: failed", exc_info=error)
    return error_answer(
        scope, 500, "INTERNAL", "The server failed unexpectedly; its log has the reason under this request id."
    )


async def _http_error(request: Request, error: HTTPException) -> Response:
    code, message = CODES.get(error.status_code, "BAD_REQUEST"), str(error.detail)
    if message in ("Not Found", "Method Not Allowed"):  # by the router
        message = f"There is no route {request.method} {_path(request.scope)}."
    return error_answer(request.scope, error.status_code, code, message, headers=error.headers)


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    wrong = error.errors()
    if any(one["type"] == "json_invalid" for one in wrong):
        why = f"The body is not JSON: {wrong[0]['ctx']['error']}."
        return error_answer(request.scope, 400, "NOT_JSON", why)
    spelled = as_sent(_sent(request))
    known = _fields(request)
    details = [
        {"where": where(one, spelled), "problem": problem(one, spelled, known if len(one["loc"]) == IN_BODY else ())}
        for one in wrong[:MOST_DETAILS]
    ]
    message = "; ".join(f"{one['where']}: {one['problem']}" for one in details)
    return error_answer(request.scope, 422, InvalidInput.code, message, details=details)


def _fields(request: Request) -> list[str]:
    """Return the names of the fields of the route's body, as the route documents them; [] without a route or body."""
    body = getattr(request.scope.get("route"), "body_field", None)
    fields = getattr(body and body.field_info.annotation, "model_fields", {})
    return [field.alias or name for name, field in fields.items()]


async def _our_error(request: Request, error: EcluseError) -> Response:
    status = status_of(error)
    if status is None:
        return _unexpected(request.scope, error)
    note_refusal(request, error)
    headers, details = None, None
    if isinstance(error, Refused):
        headers, details = error.headers, error.details
    elif isinstance(error, Busy | AllBusy):
        headers = {"Retry-After": "1"}
        details = [{"where": error.limit, "problem": error.message}] if isinstance(error, Busy) else None
    message = respelled(error.message, as_sent(_sent(request), guess=False))
    return error_answer(request.scope, status, error.code, message, headers=headers, details=details)


def note_refusal(request: Request, error: Exception) -> None:
    """Count the error for the audit trail if it refuses the credentials (BadCredentials) or a known caller (Refused
    with status 403). Other errors are not counted."""
    if isinstance(error, BadCredentials):
        request.app.state.refusals.invalid_credentials(address_of(request))
    elif isinstance(error, Refused) and error.status == 403 and hasattr(request.state, "caller"):
        caller, route = request.state.caller, getattr(request.scope.get("route"), "path", "")
        about = (caller.tenant, caller.actor, f"{request.method} {route}")
        request.app.state.refusals.forbidden(*about, error.message, address_of(request))


def _sent(request: Request) -> Any:
    """Return the parsed body of the request; None if no JSON body was parsed."""
    return getattr(request.state, "sent", None)


def status_of(error: EcluseError) -> int | None:
    """Return the HTTP status of an error that is an answer to the caller; None for a fault of the server."""
    if isinstance(error, Refused):
        return error.status
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), None)
