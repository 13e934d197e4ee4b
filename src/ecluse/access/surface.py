"""What a part of Ecluse shows and lets people do, declared once: listings, reads and operations. A declaration is a
route and its entry in the OpenAPI document; the command line is made from that document (`x-command`), and so are the
forms of the pages.

    surface = Surface("audits")
    surface.listing("/api/audits", AUDITS, list_audits="List audits, the newest first.", command=Command("audits list"))

    @surface.operation("POST", "/api/audit-configs", needs="audits.write", answer=ConfigRow, status=201,
                       action="audit_config.create", subject="audit_config:{id}")
    async def create_config(act: Act, body: NewConfig) -> Row: ...

An operation is one transaction: its effect, its row in the audit trail, and its answer under an `Idempotency-Key`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from ecluse.access import door, idempotency
from ecluse.access.changes import record
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import as_json, request_id
from ecluse.access.idempotency import Answer
from ecluse.access.keys import Caller
from ecluse.access.listing import Cursor, Listing, read_page
from ecluse.access.wire import Limit, Offset, id_as_text, kit_of, number, reads_of, text_in_path
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine.kit import Kit

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


class Noun(NamedTuple):
    """Marks an id in a path: `Annotated[int, Noun("run")]`. Text that cannot be an id is not found."""

    name: str


@dataclass(frozen=True)
class Command:
    """How the command line offers a route. Path parameters and `arguments`, fields of the body, are given by place, all
    other fields as options."""

    name: str  # the words after `ecluse`
    columns: Sequence[str] = ()  # of its table; by default all that are no objects
    arguments: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # short name → field, `selection.days` for a nested one
    preview: str = ""  # name of the read that shows what would change, before the command asks for a confirmation
    follows: str = ""  # field of the answer with the id of a run: the command has --wait
    empty: str = ""  # what to say of an empty list
    example: str = ""


@dataclass(frozen=True)
class Look:
    """A read by a caller."""

    request: Request
    connection: Connection

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
        """What the composition root has put together for routes."""
        return self.request.app.state

    @property
    def request_id(self) -> str:
        return request_id(self.request)


@dataclass(frozen=True)
class Act(Look):
    """An operation by a caller, in one transaction."""

    answer: dict[str, Any]  # `status`, and `once`: fields of the answer that are not kept for a repetition

    def answers(self, status: int, **once: Any) -> None:
        """Answer with this status; the fields in `once` are in the first answer only."""
        self.answer.update(status=status, once=once)

    def changes_nothing(self) -> None:
        """Leave this operation out of the audit trail."""
        self.answer["recorded"] = False

    @property
    def idempotency_key(self) -> str | None:
        return idempotency.key_of(self.request)


class Declared(NamedTuple):
    """An operation as forms need it."""

    function: Callable[..., Awaitable[Any]]
    path: str
    permission: str
    body: type[BaseModel] | None
    call: Callable[..., Awaitable[Response]]
    command: Command | None


class Surface:
    def __init__(self, tag: str) -> None:
        self.routes: APIRouter = door.routes(tag)
        self.operations: dict[str, Declared] = {}

    def listing(
        self,
        path: str,
        listing: Listing,
        *,
        check: Callable[..., Awaitable[Any]] | None = None,
        command: Command | None = None,
        **described: str,
    ) -> None:
        """Add the route of a list. `described` is its name and its description. `check(look, …)` takes the parameters
        of the path and the filters that it names; it raises NotFound if what the list is of does not exist, and may
        return further parameters for the conditions and the source of the listing."""
        ((name, description),) = described.items()
        checked = list(inspect.signature(check).parameters)[1:] if check is not None else []

        async def endpoint(request: Request, **given: Any) -> Response:
            cut = {one: given.pop(one) for one in ("limit", "offset", "cursor")}
            within: dict[str, Any] = {
                one: number(one.removesuffix("_id").replace("_", " "), given[one]) for one in listing.within
            }
            within |= {one: text_in_path(one, given[one]) for one in listing.named}

            async def ask(connection: Connection) -> Row:
                known = {**given, **within}
                if check is not None:
                    more = await check(Look(request, connection), **{one: known[one] for one in checked})
                    known |= more or {}
                return await read_page(connection, caller_of(request), listing, known, **cut)

            return as_json(await reads_of(request)(ask))

        hints = get_type_hints(listing.filters, include_extras=True)
        fields = listing.filters.model_fields.items()
        parameters = [
            *(_parameter(one, str) for one in (*listing.within, *listing.named)),
            *(_parameter(one, hints[one], found.default) for one, found in fields),
            *(_parameter("limit", Limit, 50), _parameter("offset", Offset, 0), _parameter("cursor", Cursor, None)),
        ]
        shown = needs(listing.needs, narrowed=listing.visible is not None) | _as_extra(command)
        self._add("GET", path, endpoint, name, description, parameters, shown, listing.page, 200, None)

    def read(
        self, path: str, *, needs: str, answer: type[BaseModel], narrowed: bool = False, command: Command | None = None
    ) -> Callable[[F], F]:
        """Declare `async def name(look, …)`: its parameters are those of the path and the query."""

        def declare(function: F) -> F:
            async def endpoint(request: Request, **given: Any) -> Response:
                found = await reads_of(request)(lambda c: function(Look(request, c), **_numbers(nouns, given)))
                return as_json(id_as_text(found))

            parameters, nouns = _parameters(function)
            extra = door.needs(needs, narrowed=narrowed) | _as_extra(command)
            doc = inspect.getdoc(function) or ""
            self._add("GET", path, endpoint, function.__name__, doc, parameters, extra, answer, 200, None)
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
        command: Command | None = None,
    ) -> Callable[[F], F]:
        """Declare `async def name(act, …, body)`. `subject` names in the audit trail what was changed, with fields of
        the path and the answer; `action` None is for what leaves no row there. `also`: other statuses, and what each
        means."""

        def declare(function: F) -> F:
            async def call(request: Request, **given: Any) -> Response:
                async def do(connection: Connection) -> Answer:
                    act = Act(request, connection, {"status": status, "once": {}, "recorded": action is not None})
                    found = to_jsonable_python(id_as_text(await function(act, **_numbers(nouns, given))))
                    if action is not None and act.answer["recorded"]:
                        reason = getattr(given.get("body"), "reason", None)
                        await record(connection, request, action, subject.format(**{**given, **found}), reason)
                    return Answer(act.answer["status"], found, act.answer["once"])

                return await idempotency.once(request, kit_of(request).pool, do)

            parameters, nouns = _parameters(function)
            extra = door.needs(needs, narrowed=narrowed) | _as_extra(command)
            doc = inspect.getdoc(function) or ""
            self._add(method, path, call, function.__name__, doc, parameters, extra, answer, status, also)
            body = next((one.annotation for one in parameters if one.name == "body"), None)
            self.operations[function.__name__] = Declared(function, path, needs, _model(body), call, command)
            return function

        return declare

    def _add(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Awaitable[Response]],
        name: str,
        description: str,
        parameters: Sequence[inspect.Parameter],
        extra: dict[str, Any],
        answer: type[BaseModel],
        status: int,
        also: Mapping[int, str] | None,
    ) -> None:
        async def route(**given: Any) -> Response:
            return await endpoint(**given)

        request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)
        route.__signature__ = inspect.Signature([request, *parameters])  # type: ignore[attr-defined]
        route.__name__ = name
        responses: dict[int | str, dict[str, Any]] = {
            code: {"model": answer, "description": meaning} for code, meaning in (also or {}).items()
        }
        self.routes.add_api_route(
            path,
            route,
            methods=[method],
            name=name,
            operation_id=name,
            description=description,
            openapi_extra=extra,
            response_model=answer,
            status_code=status,
            responses=responses,
        )


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], dict[str, str]]:
    """Return the parameters of a function but its first, and the nouns of those that are ids in the path."""
    hints = get_type_hints(function, include_extras=True)
    found, nouns = [], {}
    for name, given in list(inspect.signature(function).parameters.items())[1:]:
        noun = next((one for one in get_args(hints[name])[1:] if isinstance(one, Noun)), None)
        if noun is not None:
            nouns[name] = noun.name
        found.append(_parameter(name, hints[name] if noun is None else str, given.default))
    return found, nouns


def _numbers(nouns: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: number(nouns[name], value) if name in nouns else value for name, value in given.items()}


def _model(annotation: Any) -> type[BaseModel] | None:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
        if get_origin(one) is Annotated:
            return _model(get_args(one)[0])
    return None


def _as_extra(command: Command | None) -> dict[str, Any]:
    if command is None:
        return {}
    return {"x-command": {name: value for name, value in asdict(command).items() if value}}
