"""Forms: every operation that a page offers is done through its form, which is made from the operation's declaration.
The operation does the same as over HTTP, in one transaction with its row in the audit trail. The form adds the preview,
a token that makes a double submit act once, and a digest of the record it shows, so that no change made meanwhile is
overwritten."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_snake

from ecluse.access.door import check_storable, needs
from ecluse.access.envelope import Refused, status_of
from ecluse.access.idempotency import replayed
from ecluse.access.surface import Declared
from ecluse.access.wire import kit_of
from ecluse.base.errors import EcluseError, InvalidInput, NotFound
from ecluse.base.validation import NULLS, problem
from ecluse.web import actions, render
from ecluse.web.actions import ACTIONS
from ecluse.web.authentication import ANY_PARAMETER, Page, admitted, inside
from ecluse.web.fields import (
    MORE,
    Field,
    changes,
    fields_of,
    in_names_of,
    model_of,
    never_null,
    texts_of,
    values_of,
)

TOKEN, SHOWN, BACK = "_token", "_shown", "_back"  # hidden fields
LOOK = "_look"  # button that reads the preview again with the entered values
STALE = "The record has changed since this form was shown. The form now has its present values; nothing was saved."
EMPTY = "This may not be empty."
KEY = b"idempotency-key"
FIRST_SECONDS, LOOK_SECONDS = 3.0, 0.1  # how long a second submission waits for the first, and how often it tries
# The operation names the permission that its form needs; query parameters are values of fields.
ANY_PAGE = needs("me.read") | {ANY_PARAMETER: True}

routes = APIRouter(route_class=Page, include_in_schema=False)


@dataclass(frozen=True)
class FormRequest:
    """A request for the form of an operation: the operation's declaration, its path parameters, the record that it acts
    on, its preview, and the page to return to."""

    name: str
    declared: Declared
    values: dict[str, str]
    back: str
    record: dict[str, Any]  # the record as it is now; empty if the operation acts on none
    body: type[BaseModel] | None  # model of the operation's body
    current: dict[str, Any] | None  # values of the record by field name, if the form edits them
    preview: dict[str, Any] | None = None
    looks: bool = False  # the preview depends on fields of the form
    needed: frozenset[str] = frozenset()  # fields that always have a value in a record

    @property
    def digest(self) -> str:
        """Digest of the record's values that the form edits; an empty text if it edits no record."""
        if self.current is None:
            return ""
        shown = {name: self.current[name] for name in sorted(self.current)}
        return hashlib.sha256(json.dumps(shown, default=str).encode()).hexdigest()[:32]


@routes.get("/ui/do/{name}", openapi_extra=ANY_PAGE)
@routes.get("/ui/do/{name}/{place:path}", openapi_extra=ANY_PAGE)
async def show_form(request: Request, name: str, place: str = "") -> Response:
    given = dict(request.query_params)
    if not place and (chosen := _chosen(request, name)):
        return RedirectResponse(chosen, 303)
    declared, values = await _operation(request, name, place)
    asked = await _form_request(request, name, declared, values, given, given.pop("back", ""))
    return _form(request, asked, given)


@routes.post("/ui/do/{name}", openapi_extra=ANY_PAGE)
@routes.post("/ui/do/{name}/{place:path}", openapi_extra=ANY_PAGE)
async def do_it(request: Request, name: str, place: str = "") -> Response:
    sent = await request.body()
    pairs = parse_qsl(sent.decode("ascii", "replace"), keep_blank_values=True)
    given = {one: entered.replace("\r\n", "\n") for one, entered in pairs}  # browsers send line breaks so
    check_storable(given)
    declared, values = await _operation(request, name, place)
    keyed = _keyed(request, sent, given)
    if (answered := await replayed(keyed)) is not None:  # submitted and done before
        return _done(request, name, declared, values, given, answered)
    asked = await _form_request(request, name, declared, values, given, given.get(BACK, ""))
    if MORE in given or LOOK in given:
        return _form(request, asked, given)
    if asked.current is not None and given.get(SHOWN) != asked.digest:
        return _form(request, asked, {}, 409, {"": STALE})
    entered = _entered(asked, given)
    problems = {one: EMPTY for one in asked.needed if one in entered and entered[one] is None}
    try:
        body = {"body": asked.body.model_validate(entered)} if asked.body else {}
    except ValidationError as error:
        problems |= _at_fields(error)
    if problems:
        return _form(request, asked, given, 422, problems)
    try:
        answer = await _called(declared, keyed, **values, **body)
    except EcluseError as error:
        if (status := status_of(error)) is None or status in (401, 403, 404):
            raise
        return _form(request, asked, given, status, _at_field(asked, error.message))
    return _done(request, name, declared, values, given, answer)


async def _called(declared: Declared, keyed: Request, **given: Any) -> Response:
    """Call the operation. If the same form is being submitted already, wait up to FIRST_SECONDS for that submission and
    return its answer; raise Refused (IN_PROGRESS) if it has not ended by then."""
    for _ in range(int(FIRST_SECONDS / LOOK_SECONDS)):
        try:
            return await declared.call(keyed, **given)
        except Refused as error:
            if error.code != "IN_PROGRESS":
                raise
        await asyncio.sleep(LOOK_SECONDS)
    return await declared.call(keyed, **given)


def _done(
    request: Request,
    name: str,
    declared: Declared,
    values: Mapping[str, str],
    given: Mapping[str, str],
    answer: Response,
) -> Response:
    """Return the answer to a form whose operation was done: a redirect to the page that the action names, or from which
    the form was opened, and which shows a message. If the operation created a secret, a page shows that instead."""
    found, action = json.loads(bytes(answer.body)), ACTIONS[name]
    leads = action.home if action.leaves else inside(given.get(BACK, ""), action.home)
    leads = actions.in_words(action.shows, found, {}) or leads
    made = {**found, **(found.get("once") or {})}
    named = [one for one in made if one.endswith("secret") or one == "token"]
    if secret := next((made[one] for one in named if made[one]), None):
        return render.page(request, "secret.html", action=action, secret=secret, back=leads)
    shown = RedirectResponse(leads, 303)
    actions.keep_said(shown, name, {**values, **found}, declared.command.follows if declared.command else "")
    return shown


def _chosen(request: Request, name: str) -> str:
    """Return the address of the form of one record, if the query has all path parameters of the operation (the record
    was chosen from a list); else an empty text."""
    declared, given = request.app.state.operations.get(name), request.query_params
    names = actions.parameters(declared.path) if declared else ()
    if not names or any(one not in given for one in names):
        return ""
    return actions.address(declared.path, name, given, given.get("back", ""), {})


async def _operation(request: Request, name: str, place: str) -> tuple[Declared, dict[str, str]]:
    """Return the operation with this name and its path parameters, read from `place`. Raise NotFound if there is no
    such operation, it has no form, or the parameters do not match; raise Refused if the caller's role does not permit
    it."""
    declared: Declared | None = request.app.state.operations.get(name)
    if declared is None or name not in ACTIONS:
        raise NotFound("There is no such form.")
    await admitted(request, declared.permission)
    names = actions.parameters(declared.path)
    parts = [place] if len(names) == 1 else place.split("/") if place else []
    if len(parts) != len(names):
        raise NotFound("There is no such form.")
    return declared, dict(zip(names, parts, strict=True))


async def _form_request(
    request: Request, name: str, declared: Declared, values: dict[str, str], given: Mapping[str, str], back: str
) -> FormRequest:
    preview = declared.command.preview if declared.command and ACTIONS[name].previews else ""
    of_record = declared.path[: declared.path.rfind("}") + 1] if ACTIONS[name].what else ""

    def shows(route: APIRoute) -> bool:
        return route.path == of_record and "GET" in (route.methods or ())

    record = await read(request, shows, values)
    route = _route(request, lambda route: route.name == name)
    edits = route is not None and bool({"PATCH", "PUT"} & set(route.methods or ()))
    body = model_of(declared.bodies, given)
    known = set(body.model_fields) if body else set()
    looks = known & _parameters(_route(request, lambda route: route.name == preview))
    chosen = {one: given[one] for one in looks if given.get(one)}
    return FormRequest(
        name,
        declared,
        values,
        inside(back, ACTIONS[name].home),
        record or {},
        body,
        in_names_of(body, record) if record and edits and body else None,
        await _preview(request, declared, values, chosen) if preview else None,
        bool(looks),
        never_null(shown.response_model) if edits and (shown := _route(request, shows)) else frozenset(),
    )


async def _preview(
    request: Request, declared: Declared, values: Mapping[str, str], chosen: Mapping[str, str]
) -> dict[str, Any]:
    of = declared.command
    found = await read(request, lambda route: of is not None and route.name == of.preview, values, chosen)
    return {name: value for name, value in (found or {}).items() if of is None or name not in of.hides}


def _route(request: Request, wanted: Callable[[APIRoute], bool]) -> APIRoute | None:
    found = (route for route in request.app.router.routes if isinstance(route, APIRoute) and wanted(route))
    return next(found, None)


async def read(
    request: Request,
    wanted: Callable[[APIRoute], bool],
    values: Mapping[str, str],
    chosen: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Call the first API operation that `wanted` matches, as the caller, and return its JSON answer; None if no route
    matches. `values`: its path parameters; `chosen`: its query parameters. Errors of the operation are passed on."""
    if (route := _route(request, wanted)) is None:
        return None
    named = {name: values[name] for name in actions.parameters(route.path)}
    answer = await route.endpoint(request=request, **named, **(chosen or {}))
    found: dict[str, Any] = json.loads(bytes(answer.body))
    return found


def _parameters(route: APIRoute | None) -> set[str]:
    return {one.name for one in route.dependant.query_params} if route is not None else set()


def _key(given: Mapping[str, str]) -> str:
    if not given.get(TOKEN):
        raise InvalidInput("This form is incomplete: open it again.")
    return f"form-{given[TOKEN]}"


def _keyed(request: Request, sent: bytes, given: Mapping[str, str]) -> Request:
    """Return the request as a client of the API would send it, with the token of the form as its Idempotency-Key. Raise
    InvalidInput if the form has no token."""

    async def again() -> dict[str, Any]:
        return {"type": "http.request", "body": sent, "more_body": False}

    others = [one for one in request.scope["headers"] if one[0] != KEY]
    headers = [*others, (KEY, _key(given).encode("ascii", "replace"))]
    return Request({**request.scope, "headers": headers}, again)


def _entered(asked: FormRequest, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the operation's body from the entered texts; empty if it takes no body. If a record is
    edited, only the changed fields."""
    if asked.body is None:
        return {}
    entered = values_of(fields_of(asked.body, asked.current, given), given, asked.current)
    return entered if asked.current is None else changes(entered, asked.current)


def _at_fields(error: ValidationError) -> dict[str, str]:
    """Return the messages of a validation error by field name, the first one for each field."""
    found: dict[str, str] = {}
    for one in error.errors():
        place = [to_snake(part) if isinstance(part, str) else str(part) for part in one["loc"]]
        empty = one["type"] == "missing" or one["input"] is None
        says = EMPTY if empty or one["type"] == NULLS else problem(one)
        for name in one["ctx"]["names"].split(", ") if one["type"] == NULLS else [""]:
            found.setdefault(".".join([*place, name] if name else place), says)
    return found


def _at_field(asked: FormRequest, message: str) -> dict[str, str]:
    """Return the message as a problem of the field whose name it begins with (`name: …`), else of the form as a whole
    (the empty name)."""
    name, colon, rest = message.partition(": ")
    known = asked.body.model_fields if asked.body else {}
    return {name: rest} if colon and name.partition(".")[0] in known else {"": message}


def _form(
    request: Request,
    asked: FormRequest,
    given: Mapping[str, str],
    status: int = 200,
    problems: dict[str, str] | None = None,
) -> Response:
    model, action = asked.body, ACTIONS[asked.name]
    fields = fields_of(model, asked.current, given) if model else []
    begun = texts_of(fields, asked.current)
    kept = {one: given[one] for one in given if one not in _names(fields, "password")}
    texts = {**({} if TOKEN in given else begun), **kept}
    problems = problems or {}
    known = set(_names(fields))
    return render.page(
        request,
        "form.html",
        status,
        action=action,
        title=actions.titled(action, asked.values, asked.record),
        says=actions.in_words(action.says, asked.values, asked.record),
        fields=fields,
        texts=texts,
        problems=problems,
        elsewhere=[f"{name}: {text}" if name else text for name, text in problems.items() if name not in known],
        preview=asked.preview,
        back=asked.back,
        hidden={TOKEN: secrets.token_urlsafe(16), SHOWN: given.get(SHOWN, asked.digest), BACK: asked.back},
        looks=asked.looks,
        flows=sorted(kit_of(request).by_name),
    )


def _names(fields: Sequence[Field], kind: str = "") -> list[str]:
    """Return the names of the fields at any depth; if `kind` is given, only of fields of that kind."""
    found: list[str] = []
    for one in fields:
        found += [one.name] if kind in ("", one.kind) else []
        found += [name for part in (one.fields, *one.rows) for name in _names(part, kind)]
    return found
