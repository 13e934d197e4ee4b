"""Connections in the API, the command line and the pages. A connection is tested before it is stored: a cheap call with
its key, with no transaction open. Keys are never shown."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, StringConstraints

from ecluse.access import secrets as sealed
from ecluse.access.listing import Listing
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, CallerRequest, Look, Noun, Surface
from ecluse.access.wire import Body, Page, Shape
from ecluse.base.errors import InvalidInput, NotFound, VendorError
from ecluse.base.text import storable
from ecluse.db.query import Row
from ecluse.flows.connections import lanes, records
from ecluse.flows.connections.clients import Access, Client, Setup, of_record
from ecluse.flows.connections.given import checked_address, key_ends, refused_by_vendor, sealing, sendable
from ecluse.flows.connections.records import KINDS, Kind
from ecluse.vendors.guarded import GuardedHttp

surface = Surface("connections")
READ = "vendors.read"
CLEARS = "If not set: as the server's knobs say."

Url = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=2_000),
    Field(examples=["https://crm.example.com/api"]),
]
Key = Annotated[SecretStr, Field(min_length=1, max_length=5_000, examples=["sk-…"]), AfterValidator(sendable)]
Model = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$", examples=["gpt-4.1"])]
Count = Annotated[int, Field(ge=1, le=1_000_000, examples=[20])]
Rate = Annotated[float, Field(ge=0.01, le=6_000_000, allow_inf_nan=False, examples=[60])]


class Limits(Body):
    model: Model | None = Field(
        None, description="Of the kind `llm`, which needs it: for audits whose config names no model."
    )
    max_in_flight: Count | None = Field(None, examples=[5], description=f"Calls at once, over all replicas. {CLEARS}")
    per_minute: Rate | None = Field(None, description=f"Calls started per minute, over all replicas. {CLEARS}")


class NewConnection(Limits):
    kind: Kind
    base_url: Url
    api_key: Key = Field(description="Stored encrypted, never shown.")


class ChangedConnection(Limits):
    """Fields that are left out stay as they are. A new `base_url` needs the `api_key` again: a stored key is sent only
    to the URL that it was given for."""

    base_url: Url | None = None
    api_key: Key | None = None


class ConnectionRow(Shape):
    tenant_id: str = Field(examples=["acme"])
    kind: Kind
    base_url: str = Field(examples=["https://crm.example.com/api"])
    model: str | None
    max_in_flight: int | None
    per_minute: float | None
    overrides: list[str] = Field(
        description="Caps that an operator has set on lanes of the connection: they stay in force instead of its own.",
        examples=[
            ["lane crm/acme: 2 in flight, set by an operator, until `ecluse lanes cap crm/acme --max-in-flight null`"]
        ],
    )
    api_key_ends: str | None = Field(
        examples=["3f9a"], description="The last characters of the key; null if it is too short to show any."
    )
    created_by: str
    created_at: datetime
    updated_by: str
    updated_at: datetime


class ConnectionPageBase(Page):
    environment: list[Kind] = Field(
        description="Kinds without a connection here that the tenant `default` has by the server's environment."
    )


class TestedConnection(Shape):
    kind: Kind
    works: Literal[True]


class DeletedConnection(Shape):
    kind: Kind
    deleted: Literal[True]


CONNECTION = Resource(surface, "/api/connections/{kind}", "vendors", "connection", "connections", ConnectionRow)
CONNECTIONS = Listing(
    "connections",
    ConnectionRow,
    lanes.WITH_OVERRIDES,
    READ,
    order=("kind",),
    shown=lanes.with_remarks,
    base=ConnectionPageBase,
)


async def _kind(_: Look, text: str) -> Kind:
    return _known(text)


KindInPath = Annotated[Kind, Noun("connection", _kind)]


async def _environment(look: Look) -> Row:
    return {"environment": await records.of_environment(look.connection, look.tenant, _setup(look).given)}


CONNECTION.lists(
    CONNECTIONS,
    check=_environment,
    list_connections="List the connections of the tenant to vendors, by kind; never their keys.",
    columns=("kind", "base_url", "model", "api_key_ends", "max_in_flight", "per_minute", "overrides", "updated_at"),
    empty="no connections: `ecluse connections create KIND --base-url URL --api-key-file FILE`",
)


@CONNECTION.shows()
async def show_connection(look: Look, kind: KindInPath) -> Row:
    """Show one connection, without its key."""
    return lanes.with_remarks(await records.load(look.connection, look.tenant, kind, lanes.WITH_OVERRIDES))


async def _try_new(asked: CallerRequest, body: NewConnection) -> None:
    sealing(asked)
    _check_model(body.kind, body.model)
    key = body.api_key.get_secret_value()
    await _try(asked, body.kind, of_record(body.kind, checked_address(asked, body.base_url), key, body.model))


@CONNECTION.creates(
    before=_try_new,
    named="kind",
    refuses=["NO_SECRET_KEY", "CONNECTION_EXISTS", "CONNECTION_REFUSED"],
    arguments=("kind",),
    example="ecluse connections create crm --base-url https://crm.example.com/api --api-key-file crm.key",
)
async def create_connection(act: Act, body: NewConnection) -> Row:
    """Add a connection of this tenant, after a call to the vendor with its key. If the vendor refuses, nothing is
    stored."""
    key = body.api_key.get_secret_value()
    given = {**body.model_dump(exclude={"kind", "api_key"}), "base_url": body.base_url.rstrip("/")}
    await records.create(
        act.connection, act.tenant, body.kind, {**given, "api_key_ends": key_ends(key)}, act.caller.name
    )
    await sealing(act).put(act.connection, act.tenant, records.secret_name(body.kind), key)
    own = (await records.of_tenants(act.connection, body.kind, [act.tenant]))[act.tenant]
    await lanes.put(act.connection, act.kit.flows, body.kind, own)
    return await show_connection(act, body.kind)


async def _try_changed(asked: CallerRequest, kind: str, body: ChangedConnection) -> Row:
    """Return the connection as it was read; if a new key is given, test the changed connection first. Raise
    InvalidInput if the URL changes without a key."""
    which = _known(kind)
    async with asked.kit.pool.connection() as connection:
        known = await records.load(connection, asked.tenant, which)
    model = body.model if "model" in body.model_fields_set else known["model"]
    if "model" in body.model_fields_set:
        _check_model(which, model)
    url = known["base_url"] if body.base_url is None else checked_address(asked, body.base_url)
    if body.api_key is not None:
        sealing(asked)
        await _try(asked, which, of_record(which, url, body.api_key.get_secret_value(), model))
    elif url != known["base_url"]:
        raise InvalidInput("api_key: give it again with a new base_url: the stored key is not sent to another URL")
    return known


@CONNECTION.changes(
    before=_try_changed,
    refuses=["NO_SECRET_KEY", "CONNECTION_REFUSED", "CONFLICT"],
    example="ecluse connections update llm --model gpt-4.1-mini",
)
async def change_connection(act: Act, kind: KindInPath, body: ChangedConnection) -> Row:
    """Change a connection; a new key is tested first. Every replica uses it within a few seconds."""
    given = body.model_dump(exclude_unset=True, exclude={"api_key"})
    if given.get("base_url") is not None:
        given["base_url"] = given["base_url"].rstrip("/")
    else:
        given.pop("base_url", None)
    if body.api_key is not None:
        key = body.api_key.get_secret_value()
        given["api_key_ends"] = key_ends(key)
        await sealing(act).put(act.connection, act.tenant, records.secret_name(kind), key)
    await records.change(act.connection, act.before, given, act.caller.name)
    own = (await records.of_tenants(act.connection, kind, [act.tenant]))[act.tenant]
    await lanes.put(act.connection, act.kit.flows, kind, own)
    return await show_connection(act, kind)


@CONNECTION.deletes(answer=DeletedConnection, preview="show_connection")
async def delete_connection(act: Act, kind: KindInPath) -> Row:
    """Delete a connection and its key. Calls that are not sent yet fail with NO_CONNECTION; those of the tenant
    `default` use the server's environment."""
    await records.delete(act.connection, act.tenant, kind)
    await sealed.delete(act.connection, act.tenant, records.secret_name(kind))
    await lanes.retire(act.connection, kind, act.tenant)
    return {"kind": kind, "deleted": True}


async def _try_stored(asked: CallerRequest, kind: str) -> None:
    which = _known(kind)
    try:
        async with asked.kit.pool.connection() as connection:
            access = await _setup(asked).access(connection, asked.tenant, which)
    except VendorError as error:
        if error.code == "NO_CONNECTION":
            raise NotFound(f"There is no connection {kind}. `ecluse connections list` shows them.") from error
        raise refused_by_vendor(error, stored=True) from error
    await _try(asked, which, access, stored=True)


@CONNECTION.does("test", before=_try_stored, refuses=["CONNECTION_REFUSED"], answer=TestedConnection)
async def test_connection(act: Act, kind: KindInPath) -> Row:  # noqa: ARG001 - `before` has tested it
    """Make a cheap call to the vendor with the stored key."""
    return {"kind": kind, "works": True}


async def _try(asked: CallerRequest, kind: Kind, access: Access, *, stored: bool = False) -> None:
    """Make a cheap call to the vendor. Raise Refused with the error of the vendor or of the connection to it. `stored`:
    the connection was stored before the test."""
    setup = _setup(asked)
    guard = GuardedHttp(setup.allowed_networks)
    try:
        client = Client(setup, kind, access, guard, asked.kit.clock.now)
        try:
            await client.call(lambda vendor: vendor.ping())
        finally:
            await client.retire()
    except VendorError as error:
        raise refused_by_vendor(error, stored=stored) from error
    finally:
        await guard.close()


def _check_model(kind: Kind, model: str | None) -> None:
    if model is not None and kind != "llm":
        raise InvalidInput(f"model: a connection of kind {kind} has none")
    if model is None and kind == "llm":
        raise InvalidInput("model: give the model for audits whose config names none, such as gpt-4.1")


def _known(text: str) -> Kind:
    found = next((kind for kind in KINDS if kind == text), None)
    if found is None:
        raise NotFound(f"There is no connection {storable(text, 50)}: a kind is one of {', '.join(KINDS)}.")
    return found


def _setup(asked: CallerRequest) -> Setup:
    setup: Setup = asked.state.connections
    return setup
