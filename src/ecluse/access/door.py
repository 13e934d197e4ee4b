"""Authentication and authorization of API routes. Every route except the public ones declares the permission that it
needs, and none of its code runs before the caller's key was checked for it. Bodies are read strictly: JSON, or a form
if the route takes one, without duplicate keys and without text that cannot be stored."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.routing import Match
from starlette.types import Scope

from ecluse.access import answers, tenants
from ecluse.access.envelope import MOST_DETAILS, BadCredentials, ErrorAnswer, Refused
from ecluse.access.error_codes import REFUSALS
from ecluse.access.keys import Caller, Keys
from ecluse.access.limits import BYTES_PER_UNIT, Limiter, cost_of
from ecluse.access.permissions import EXECUTE, PERMISSIONS
from ecluse.base.text import storable
from ecluse.db.reads import Reads

log = structlog.get_logger(__name__)
FORM = "application/x-www-form-urlencoded"
PERMISSION, NARROWED, REFUSES = "x-permission", "x-narrowed", "x-refuses"
DEEPEST = 100
LIMITS = ("RATE_LIMITED", "TOO_MANY_AT_ONCE", "ANSWER_TOO_LARGE")  # codes of every route
ASK = {"WWW-Authenticate": "Bearer"}
TENANT = "ecluse-tenant"  # header: the tenant that an administrator acts for
UNKNOWN = "This key is not known here, or has expired or been revoked."
UNKNOWN_AGENT = "This credential is not known here, or has been revoked: enrol the agent again, with a new token."


def needs(permission: str, *, narrowed: bool = False, refuses: Sequence[str] = ()) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that needs this permission. `narrowed`: the route restricts its answer to
    the scope of a caller whose scope is narrower than ALL; all other routes refuse such callers. `refuses`: error codes
    of its own, besides those of every such route."""
    assert permission in PERMISSIONS | {EXECUTE}, permission  # noqa: S101 - given in code, never by a caller
    assert set(refuses) <= REFUSALS.keys(), refuses  # noqa: S101 - as above
    return {PERMISSION: permission, NARROWED: narrowed, REFUSES: list(refuses), "security": [{"key": []}]}


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


class Guarded(APIRoute):
    """A route that admits the caller, charges the request and checks its query parameters and body before the route's
    function is called."""

    @cached_property
    def beginning(self) -> str:
        """The path up to its first parameter."""
        return self.path.partition("{")[0]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # Routes are searched one by one, and most paths begin otherwise: a comparison is quicker.
        return super().matches(scope) if scope["path"].startswith(self.beginning) else (Match.NONE, {})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        declared = self.openapi_extra or {}
        permission, narrowed = declared[PERMISSION], declared[NARROWED]
        body, known = self.body_field, query_parameters(self)
        wanted = FORM if body is not None and isinstance(body.field_info, Form) else "application/json"

        async def guarded(request: Request) -> Response:
            charge(request, await _admit(request, permission, narrowed))
            refuse_unknown(request, known)
            if body is None or (not body.field_info.is_required() and not _has_content(request)):
                return await counted(request, await handle(request))
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
                raise HTTPException(415, f"Send the body as {wanted}.")
            strict = StrictRequest(request.scope, request.receive)
            if wanted != FORM:
                await strict.parse()
            return await counted(request, await handle(strict))

        return guarded


def charge(request: Request, caller: Caller) -> None:
    """Charge the cost of the request to the limits of its key and its tenant; raise Refused (RATE_LIMITED), and charge
    nothing, if one of them is used up."""
    limiter: Limiter = request.app.state.limits
    rows = request.query_params.get("limit", "")
    limiter.charge(caller, cost_of(request.method, int(rows) if rows.isdecimal() and len(rows) < 4 else 0))


async def counted(request: Request, answer: Response) -> Response:
    """Return the answer, its bytes counted for the limits of the caller: those of a stream as they are sent. A large
    body is compressed."""
    limiter, caller = request.app.state.limits, caller_of(request)
    if isinstance(answer, StreamingResponse):
        answer.body_iterator = _counted_parts(limiter, caller, answer.body_iterator)
    else:
        limiter.count_bytes(caller, len(answer.body))
        await answers.compressed(request, answer)
    return answer


async def _counted_parts(
    limiter: Limiter, caller: Caller, parts: AsyncIterable[str | bytes | memoryview]
) -> AsyncIterator[bytes]:
    async for part in parts:
        sent = part.encode() if isinstance(part, str) else bytes(part)
        limiter.count_bytes(caller, len(sent))
        yield sent


def query_parameters(route: APIRoute) -> list[str]:
    """Return the names of the route's query parameters; of a parameter that is a model, the names of its fields."""
    names: set[str] = set()
    for one in route.dependant.query_params:
        names |= getattr(one.field_info.annotation, "model_fields", {one.alias: None}).keys()
    return sorted(names)


def refuse_unknown(request: Request, known: Sequence[str]) -> None:
    """Raise RequestValidationError if the request has query parameters other than `known`: with a misspelled filter,
    the caller would take an unfiltered answer for a filtered one."""
    unknown = [name for name in dict.fromkeys(request.query_params.keys()) if name not in known]
    if unknown:  # there may be thousands, and each is compared with those known
        raise RequestValidationError([_unknown_parameter(name, known) for name in unknown[:MOST_DETAILS]])


def _unknown_parameter(name: str, known: Sequence[str]) -> dict[str, Any]:
    there = f"there is no such query parameter here (known: {', '.join(known) or 'none'})"
    meant = get_close_matches(name, known, n=1)
    message = f"{there}; did you mean {meant[0]}?" if meant else there
    return {"type": "unknown_parameter", "loc": ("query", storable(name, 50)), "msg": message}


def _has_content(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def routes(tag: str) -> APIRouter:
    # 422 here, so that FastAPI does not describe it with a shape of its own; api/document.py describes all errors.
    wrong: dict[int | str, dict[str, Any]] = {422: {"model": ErrorAnswer}}
    return APIRouter(
        route_class=Guarded, tags=[tag], responses=wrong, generate_unique_id_function=lambda route: route.name
    )


def refusals(route: Guarded) -> list[str]:
    """Return the error codes that a route may answer with."""
    declared, body = route.openapi_extra or {}, route.body_field
    found = ["UNAUTHENTICATED", "FORBIDDEN", "TENANT_DISABLED", *LIMITS]
    found += ["NOT_FOUND"]  # what the path names, or the tenant that an administrator acts for
    found += [] if declared[NARROWED] else ["SCOPE"]
    found += ["BODY_TOO_LARGE"] if "GET" not in (route.methods or ()) else []
    found += ["BAD_REQUEST", "NOT_JSON", "REQUEST_TIMEOUT", "UNSUPPORTED_MEDIA_TYPE"] if body is not None else []
    found += ["INVALID_INPUT", *declared[REFUSES], "INTERNAL", "DATABASE_AWAY", "SERVER_BUSY", "READ_TIMEOUT"]
    found += ["CONNECTION_LIMIT", "HEAD_TOO_LARGE"]
    return [*dict.fromkeys(found)]


async def _admit(request: Request, permission: str, narrowed: bool) -> Caller:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key:
        raise Refused(401, "UNAUTHENTICATED", "Send an API key: `Authorization: Bearer ecl_…`.", ASK)
    return await admit(request, key, permission, narrowed=narrowed)


async def admit(request: Request, key: str, permission: str, *, narrowed: bool = False) -> Caller:
    """Return the caller that the key belongs to; with the header Ecluse-Tenant, acting for that tenant. Raise Refused
    if the key is unknown, its tenant is disabled, its role lacks the permission, or its scope is not ALL and the route
    is not `narrowed`; raise NotFound if the tenant of the header does not exist. A disabled tenant can still be read by
    a caller who acts for it. The caller of a known key is stored in `request.state`, even if the request is refused."""
    keys: Keys = request.app.state.keys
    caller = await keys.find(key)
    if caller is None and permission == EXECUTE:
        raise BadCredentials(401, "CREDENTIAL_REVOKED", UNKNOWN_AGENT, ASK)
    if caller is None:
        raise BadCredentials(401, "UNAUTHENTICATED", UNKNOWN, ASK)
    request.state.caller, request.state.key = caller, key
    if caller.disabled:
        raise Refused(403, "TENANT_DISABLED", f"Tenant {caller.tenant!r} is disabled.")
    if (tenant := request.headers.get(TENANT)) is not None and tenant != caller.tenant:
        request.state.caller = caller = await _acting_for(request, caller, tenant)
        if caller.disabled and request.method != "GET":
            changed = f"can be read, but not changed. Enable it first: `ecluse tenants enable {tenant}`."
            raise Refused(403, "TENANT_DISABLED", f"Tenant {tenant!r} is disabled: it {changed}")
    if not caller.may(permission):
        raise Refused(
            403, "FORBIDDEN", f"This needs the permission {permission}, which the role {caller.role} does not have."
        )
    if caller.scope != "ALL" and not narrowed:
        raise Refused(403, "SCOPE", f"This route needs a key of scope ALL; this key has scope {caller.scope}.")
    return caller


async def admit_again(request: Request, permission: str, *, narrowed: bool = False) -> Caller:
    """Check the key of an admitted request anew, while its answer waits or is sent; return its caller as it is now.
    Raise Refused if the request would not be admitted now."""
    return await admit(request, request.state.key, permission, narrowed=narrowed)


async def admit_rest(request: Request, permission: str) -> None:
    """Check the key of a request anew before more of its answer is sent. If it would not be admitted now, break the
    connection: nothing else tells the client that the answer is incomplete."""
    try:
        await admit_again(request, permission)
    except Refused as refused:
        log.warning("request: answer cut off, its key was refused", path=request.url.path, why=refused.message)
        raise ClientDisconnect from refused


async def _acting_for(request: Request, caller: Caller, tenant: str) -> Caller:
    if not caller.administers_tenants:
        raise Refused(403, "FORBIDDEN", f"Only an admin key of the tenant {tenants.DEFAULT} acts for other tenants.")
    reads: Reads = request.app.state.reads
    disabled = await reads.of(caller.tenant).to_the_end(lambda connection: tenants.is_disabled(connection, tenant))
    return replace(caller, tenant=tenant, disabled=disabled)


class StrictRequest(Request):
    async def parse(self) -> None:
        """Read and parse the JSON body, and charge its size to the caller's limits. Raise Refused if a limit is used
        up, RequestValidationError if the body is not JSON, HTTPException (422) if it cannot be stored. Not done in
        `json`: FastAPI would answer the refusal by a limit as an error of the body."""
        body = await self.body()
        limiter: Limiter = self.app.state.limits
        limiter.count_bytes(caller_of(self), len(body))
        if units := len(body) // BYTES_PER_UNIT:
            limiter.charge(caller_of(self), units)
        self._value: Any = None
        if not body:  # FastAPI says so
            return
        try:
            large = len(body) > answers.LARGE
            self._value = await answers.in_thread(self, lambda: _parsed(body)) if large else _parsed(body)
            self.state.sent = self._value  # for the spelling of errors
        except json.JSONDecodeError as error:
            wrong = {"type": "json_invalid", "loc": ("body", error.pos), "msg": error.msg, "ctx": {"error": error.msg}}
            raise RequestValidationError([wrong]) from error

    async def json(self) -> Any:
        return self._value

    async def _get_form(self, **limits: Any) -> FormData:
        form = await super()._get_form(**limits)
        if len(pairs := form.multi_items()) > len(form):
            raise HTTPException(422, "A field occurs twice in the form.")
        check_storable([text for pair in pairs for text in pair])
        return form


def _parsed(body: bytes) -> Any:
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=_no_key_twice, parse_constant=_no_such_number, parse_float=_finite
        )
    except json.JSONDecodeError:
        raise
    except (UnicodeDecodeError, RecursionError) as error:
        raise json.JSONDecodeError("it is not UTF-8, or nested too deeply", "", 0) from error
    except ValueError as error:  # Python converts no more than 4300 digits: it would take long
        raise HTTPException(422, "A number is too large.") from error
    check_storable(value)
    return value


def check_storable(value: Any) -> None:
    """Raise HTTPException (422) if the value has text with NUL bytes or lone surrogates at any depth, or is nested more
    than DEEPEST levels deep."""
    left, depth = [value], 0
    while left:
        if depth > DEEPEST:
            raise HTTPException(422, f"The JSON is nested more than {DEEPEST} levels deep.")
        inner: list[Any] = []
        for one in left:
            if isinstance(one, str):
                if "\x00" in one or not (one.isascii() or _encodable(one)):
                    raise HTTPException(422, "Text with NUL bytes or lone surrogates cannot be stored.")
            elif isinstance(one, dict):  # not `match`, which takes five times as long
                inner += one
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        left, depth = inner, depth + 1


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise json.JSONDecodeError("a key occurs twice in one object", "", 0)
    return found


def _no_such_number(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is not a number", "", 0)


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise HTTPException(422, "A number is too large.")
    return number
