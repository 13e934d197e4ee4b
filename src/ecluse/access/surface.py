"""The surface of a part of Ecluse, declared once: listings, reads and operations. A declaration is a route and its
entry in the OpenAPI document; the command line is made from that document (`x-command`), and so are the forms of the
pages.

    surface = Surface("audits")
    surface.listing("/api/audits", AUDITS, list_audits="List audits, the newest first.", command=Command("audits list"))

    @surface.operation("POST", "/api/audit-configs", needs="audits.write", answer=ConfigInFull, status=201,
                       action="audit_config.create", subject="audit_config:{id}")
    async def create_config(act: Act, body: NewConfig) -> Row: ...

An operation is one transaction: its effect, its row in the audit trail, and its answer under an `Idempotency-Key`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ecluse.access import answers, door, idempotency, permissions
from ecluse.access.changes import Change, record_all
from ecluse.access.commands import Command, as_extra
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import age, request_id
from ecluse.access.idempotency import Answer, Call, Outcome, call_of, carry_out, response
from ecluse.access.keys import Caller
from ecluse.access.listing import Cursor, Listing, read_page
from ecluse.access.wire import Limit, Offset, id_as_text, kit_of, number, reads_of, writes_of
from ecluse.db.connect import Connection
from ecluse.db.groups import Groups
from ecluse.db.query import Row
from ecluse.db.shares import Writes
from ecluse.engine.kit import Kit

Function = Callable[..., Awaitable[Any]]
Parameters = Sequence[inspect.Parameter]
F = TypeVar("F", bound=Function)


class Noun(NamedTuple):
    """Annotation of a path parameter with the kind of record that it names: `Annotated[int, Noun("run")]` is an id, and
    text that is not an id is answered with 404. `find(look, text)`, for records with other names, returns the value for
    the text or raises."""

    name: str
    find: Callable[[Look, str], Awaitable[Any]] | None = None


@dataclass(frozen=True)
class CallerRequest:
    """The request of an authenticated caller, without a database connection."""

    request: Request

    @property
    def caller(self) -> Caller:
        return caller_of(self.request)

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def kit(self) -> Kit:
        return kit_of(self.request)

    @property
    def state(self) -> Any:
        """The objects that the composition root has put into the application's state."""
        return self.request.app.state

    @property
    def request_id(self) -> str:
        return request_id(self.request)

    @property
    def age(self) -> timedelta:
        return age(self.request)


@dataclass(frozen=True)
class Look(CallerRequest):
    """The context of a read: the request of a caller, and a connection to read with."""

    connection: Connection


@dataclass(frozen=True)
class Act(Look):
    """The context of an operation: a request, a connection in a transaction, and the answer to be given."""

    # `status`, `recorded` (in the audit trail), and `once`: fields of the answer that are not stored for a repetition
    answer: dict[str, Any]
    before: Any = None  # what the operation's `before` returned

    def answers(self, status: int, **once: Any) -> None:
        """Set the status of the answer. `once`: fields that only the first answer has, not its repetition under the
        same Idempotency-Key."""
        self.answer.update(status=status, once=once)

    def changes_nothing(self) -> None:
        """Write no row to the audit trail for this operation."""
        self.answer["recorded"] = False

    def charge(self, cost: int) -> None:
        """Charge `cost` to the caller's limits, in addition to that of an ordinary request; raise Refused if one is
        used up."""
        self.state.limits.charge(self.caller, cost)

    async def require_room(self, name: str) -> None:
        """Raise Refused if the tenant has as many records of this kind (`name` in `limits.COUNTED`) as allowed. Locks
        the tenant until the end of the transaction."""
        await self.state.limits.require_room(self.connection, self.tenant, name)

    def room_kept(self, name: str, adds: bool) -> AbstractAsyncContextManager[None]:
        """As `require_room`, for the records that the block adds; checked at its end. If it adds none (`adds`), the
        tenant is not locked."""
        if not adds:
            return nullcontext()
        kept: AbstractAsyncContextManager[None] = self.state.limits.room_kept(self.connection, self.tenant, name)
        return kept

    def answered(self, row: Row, after: Function | None) -> Answer:
        followed = None if after is None else partial(after, CallerRequest(self.request), row)
        return Answer(self.answer["status"], row, self.answer["once"], followed)

    @property
    def idempotency_key(self) -> str | None:
        return idempotency.key_of(self.request)


class Declared(NamedTuple):
    """A declared operation, with what the forms of the pages need of it."""

    function: Function
    path: str
    permission: str
    bodies: Sequence[type[BaseModel]]  # models of its body: none, one, or alternatives with a discriminating field
    call: Callable[..., Awaitable[Response]]
    command: Command | None


class Surface:
    """The declared routes of one part of the API. `area`: a new area of permissions for it, `{area}.read` and
    `{area}.write`."""

    def __init__(self, tag: str, *, area: str | None = None) -> None:
        if area is not None:
            permissions.add_area(area)
        self.routes: APIRouter = door.routes(tag)
        self.operations: dict[str, Declared] = {}
        self.listings: dict[str, Listing] = {}

    def listing(
        self,
        path: str,
        listing: Listing,
        *,
        check: Function | None = None,
        refuses: Sequence[str] = (),
        command: Command | None = None,
        **described: str,
    ) -> None:
        """Add the route of a list; `described` is its name and its description. `check(look, …)` takes the path
        parameters and filters that it names; it raises NotFound if the record that the list belongs to does not exist,
        and may return further fields of the answer, and parameters for the conditions and the source of the listing.
        `refuses`: error codes of its own, as for reads and operations."""
        nouns = {one: Noun(one.removesuffix("_id").replace("_", " ")) for one in listing.within}
        nouns |= {} if check is None else _nouns(_parameters(check))
        checked = list(inspect.signature(check).parameters)[1:] if check is not None else []
        hints = get_type_hints(listing.filters, include_extras=True)

        async def rows(look: Look, **wanted: Any) -> Row:
            cut = {one: wanted.pop(one) for one in ("limit", "offset", "cursor")}
            more = (check and await check(look, **{one: wanted[one] for one in checked})) or {}
            page = await read_page(look.connection, look.caller, listing, {**wanted, **more}, **cut)
            return {**page, **{one: value for one, value in more.items() if one in listing.page.model_fields}}

        ((rows.__name__, rows.__doc__),) = described.items()
        self.listings[rows.__name__] = listing
        parameters = [
            *(_parameter(one, Annotated[str, noun]) for one, noun in nouns.items()),
            *(_parameter(one, str) for one in listing.named),
            *(_parameter(one, hints[one], found.default) for one, found in listing.filters.model_fields.items()),
            *(_parameter("limit", Limit, 50), _parameter("offset", Offset, 0), _parameter("cursor", Cursor, None)),
        ]
        extra = needs(listing.needs, narrowed=listing.visible is not None, refuses=refuses) | as_extra(command)
        self._read(path, rows, parameters, extra, listing.page)

    def read(
        self,
        path: str,
        *,
        needs: str,
        answer: type[BaseModel],
        narrowed: bool = False,
        refuses: Sequence[str] = (),
        command: Command | None = None,
    ) -> Callable[[F], F]:
        """Declare a read, a function `async def name(look, …)`: its parameters are those of the path and the query."""

        def declare(function: F) -> F:
            extra = door.needs(needs, narrowed=narrowed, refuses=refuses) | as_extra(command)
            self._read(path, function, _parameters(function), extra, answer)
            return function

        return declare

    def operation(
        self,
        method: str,
        path: str,
        *,
        needs: str,
        answer: type[BaseModel],
        action: str | None,
        subject: str = "",
        status: int = 200,
        also: Mapping[int, str] | None = None,
        narrowed: bool = False,
        before: Function | None = None,
        after: Function | None = None,
        together: Callable[[Sequence[Act]], Awaitable[Sequence[Row]]] | None = None,
        refuses: Sequence[str] = (),
        command: Command | None = None,
    ) -> Callable[[F], F]:
        """Declare an operation, a function `async def name(act, …, body)`. `subject` names the changed record in the
        audit trail, with fields of the path and the answer; `action` None: no row is written there. `also`: other
        statuses of the answer, with the meaning of each. `before(asked, …, body)` is called before the transaction
        begins, for calls to a vendor; it gets the parameters of the path as text. `after(asked, answer)` is called once
        the transaction is committed; the caller gets its result instead of `answer`, and a repetition gets `answer`,
        which is stored. With `together(acts)`, the requests of a tenant that arrive together are one transaction: the
        declared function takes the place of `before` and checks one request, and `together` carries out several and
        returns an answer for each."""

        def declare(function: F) -> F:
            prepare = before if together is None else function

            async def do(connection: Connection, calls: Sequence[Call]) -> list[Answer]:
                plain = {"status": status, "once": {}, "recorded": action is not None}
                acts = [Act(one.request, connection, {**plain}, one.prepared) for one in calls]
                if together is None:
                    rows = [await function(acts[0], **await _found(acts[0], nouns, calls[0].given))]
                else:
                    rows = [*await together(acts)]
                done = [(act, one, id_as_text(row)) for act, one, row in zip(acts, calls, rows, strict=True)]
                changes = [
                    Change(act.request, action, subject.format(**{**one.given, **row}), one.reason)
                    for act, one, row in done
                    if action is not None and act.answer["recorded"]
                ]
                await record_all(connection, changes)
                return [act.answered(row, after) for act, _, row in done]

            groups = Groups[tuple[Writes, str], Call, Outcome](lambda whose, calls: carry_out(*whose, calls, do))

            async def call(request: Request, **given: Any) -> Response:
                prepared = None if prepare is None else await prepare(CallerRequest(request), **given)
                this, whose = await call_of(request, given, prepared), (writes_of(request), caller_of(request).tenant)
                outcome = await groups.ask(whose, this) if together else (await carry_out(*whose, [this], do))[0]
                return await response(this, outcome)

            parameters = _parameters(function)
            nouns = _nouns(parameters)
            own = (*idempotency.REFUSES, *refuses)
            extra = door.needs(needs, narrowed=narrowed, refuses=own) | as_extra(command)
            others = {code: {"model": answer, "description": meaning} for code, meaning in (also or {}).items()}
            self._add(method, path, call, function, parameters, extra, answer, status_code=status, responses=others)
            body = next((one.annotation for one in parameters if one.name == "body"), None)
            self.operations[function.__name__] = Declared(function, path, needs, _models(body), call, command)
            return function

        return declare

    def _read(self, path: str, function: Function, parameters: Parameters, extra: Row, answer: type[BaseModel]) -> None:
        nouns = _nouns(parameters)

        async def endpoint(request: Request, **given: Any) -> Response:
            async def ask(connection: Connection) -> Row:
                look = Look(request, connection)
                return id_as_text(await function(look, **await _found(look, nouns, given)))

            return await answers.answer(request, await reads_of(request)(ask))

        self._add("GET", path, endpoint, function, parameters, extra, answer)

    def _add(
        self,
        method: str,
        path: str,
        endpoint: Function,
        function: Function,
        parameters: Parameters,
        extra: Row,
        answer: type[BaseModel],
        **shown: Any,
    ) -> None:
        request = _parameter("request", Request)
        endpoint.__signature__ = inspect.Signature([request, *parameters])  # type: ignore[attr-defined]
        named = Row(name=function.__name__, operation_id=function.__name__, description=inspect.getdoc(function))
        shown |= {"methods": [method], "openapi_extra": extra, "response_model": answer}
        self.routes.add_api_route(path, endpoint, **named, **shown)


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(function: Function) -> Parameters:
    """Return the parameters of a function except the first. Those that name a record (Noun) get the type of text."""
    hints = get_type_hints(function, include_extras=True)
    given = list(inspect.signature(function).parameters.values())[1:]
    found = [_parameter(one.name, hints[one.name], one.default) for one in given]
    return [one.replace(annotation=Annotated[str, *_noun(one)]) if _noun(one) else one for one in found]


def _noun(parameter: inspect.Parameter) -> list[Noun]:
    return [one for one in get_args(parameter.annotation)[1:] if isinstance(one, Noun)]


def _nouns(parameters: Parameters) -> dict[str, Noun]:
    return {one.name: noun for one in parameters for noun in _noun(one)}


async def _found(look: Look, nouns: Mapping[str, Noun], given: Mapping[str, Any]) -> Row:
    """Return the given parameters, with the text of those in `nouns` replaced by the id or value that it names. Raise
    NotFound if the text is not an id."""
    found = dict(given)
    for name, noun in nouns.items():
        found[name] = number(noun.name, given[name]) if noun.find is None else await noun.find(look, given[name])
    return found


def _models(annotation: Any) -> Sequence[type[BaseModel]]:
    """Return the models that an annotation names: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    named = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [model for one in named for model in _models(one)]
