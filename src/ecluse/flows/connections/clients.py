"""Clients of vendors, each made from a connection: a tenant's record, or the environment, possibly with a schedule's
own key. The URL of a record was given by a user, so its client is guarded against SSRF; the URLs of the environment are
the operator's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from ecluse.access.tenants import DEFAULT
from ecluse.base.errors import NotFound, PermanentError
from ecluse.db.connect import Connection
from ecluse.flows.connections import records
from ecluse.flows.connections.records import Kind
from ecluse.vendors import crm, elevenlabs, llm
from ecluse.vendors.crm import Crm
from ecluse.vendors.elevenlabs import ElevenLabs, Speech
from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.llm import Llm, Prices
from ecluse.vendors.names import Names

R = TypeVar("R")
ReadSecret = Callable[[Connection, str, str], Awaitable[str]]
Adapter = Crm | ElevenLabs | Llm

NAMED = {"crm": "crm", "speech": "elevenlabs", "llm": "llm"}  # in messages and lanes
LARGEST = {  # bytes of an answer
    "crm": 10_000_000,
    "speech": 100_000_000,  # hours of words, each with timestamps
    "llm": 5_000_000,
}
NAMES: Mapping[Kind, Names] = {"crm": crm.NAMES, "speech": elevenlabs.NAMES, "llm": llm.NAMES}
DEADLINES: Mapping[Kind, float] = {"crm": 30.0, "speech": 600.0, "llm": 120.0}


@dataclass(frozen=True)
class Access:
    """URL, key and model with which a vendor is called. Equal ones share a client. `names`: how error messages name
    these settings; None: by the names of the knobs. `guarded`: the URL was given by a user."""

    url: str | None = None
    key: str | None = field(default=None, repr=False)
    model: str | None = None
    names: Names | None = None
    guarded: bool = False


def of_record(kind: Kind, base_url: str, key: str, model: str | None) -> Access:
    """Return the access of a stored connection of this kind."""
    where = f"of the connection {kind}"
    names = Names(f"the base_url {where}", f"the api_key {where}", f"the model {where}")
    return Access(base_url, key, model, names, guarded=True)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the clients, apart from their connections. `environment` has the connections of the tenant `default`;
    `read_secret` decrypts the keys of records and schedules; `connections`: the maximum of HTTP connections that one
    client opens at once; `upload`: Ecluse downloads recordings and uploads them to the provider, instead of passing
    their URLs."""

    environment: Mapping[Kind, Access] = field(default_factory=dict)
    read_secret: ReadSecret | None = None
    allowed_networks: Sequence[str] = ()
    deadlines: Mapping[Kind, float] = field(default_factory=lambda: DEADLINES)
    connections: int = 200
    speech: Speech = field(default_factory=Speech)
    prices: Prices | None = None
    upload: bool = False

    @property
    def given(self) -> list[Kind]:
        """The kinds of vendors that the environment sets completely: URL, key and, for `llm`, the model."""
        return [
            kind
            for kind, access in self.environment.items()
            if access.url and access.key and (kind != "llm" or access.model)
        ]

    async def access(self, connection: Connection, tenant: str, kind: Kind, schedule: int | None = None) -> Access:
        """Return a tenant's access to a kind of vendor, with the own key of the schedule if `schedule` is given. Raise
        PermanentError if the tenant has no connection of this kind, or its key cannot be read."""
        found = (await records.of_tenants(connection, kind, [tenant])).get(tenant)
        if found is not None:
            key = await self.secret(connection, tenant, records.secret_name(kind))
            access = of_record(kind, found.base_url, key, found.model)
        elif tenant == DEFAULT:
            access = self.environment.get(kind) or Access()
        else:
            lacking = records.no_connection(tenant, [kind])
            raise PermanentError(lacking.message, code=lacking.code)
        if schedule is None:
            return access
        key = await self.secret(connection, tenant, records.schedule_crm_key_name(schedule))
        names = (access.names or NAMES[kind])._replace(key="the API key of this schedule")
        return replace(access, key=key, names=names)

    async def secret(self, connection: Connection, tenant: str, name: str) -> str:
        """Return a key, decrypted. Raise PermanentError if this server has no encryption key, or the key no longer
        exists."""
        whose = "schedule's own" if name.startswith("schedule:") else "connection's"
        if self.read_secret is None:
            message = f"The {whose} API key is encrypted, and this server has no ECLUSE_SECRET_KEY."
            raise PermanentError(message, code="SEALED")
        try:
            return await self.read_secret(connection, tenant, name)
        except NotFound as error:
            message = f"The {whose} API key no longer exists: set it again."
            raise PermanentError(message, code="NO_KEY") from error


class Client:
    """An open client of one access; `calls` counts the calls in flight. `now` is the clock for Retry-After dates."""

    def __init__(
        self, setup: Setup, kind: Kind, access: Access, guard: GuardedHttp, now: Callable[[], datetime]
    ) -> None:
        self.access = access
        self.calls = 0
        self.retired = False
        self._http = None
        if access.url:
            self._http = VendorHttp(
                NAMED[kind],
                access.url,
                deadline=setup.deadlines[kind],
                largest_body=LARGEST[kind],
                connections=setup.connections,
                resolver=guard.resolver(access.url) if access.guarded else None,
                now=now,
            )
        self.adapter = _adapter(setup, kind, access, self._http)

    async def call(self, call: Callable[[Any], Awaitable[R]]) -> R:
        """Make a call with the vendor's adapter. The last call of a retired client closes it."""
        self.calls += 1
        try:
            return await call(self.adapter)
        finally:
            self.calls -= 1
            if self.retired:
                await self.retire()

    async def retire(self) -> None:
        """Close the client, at once or after its last call in flight. The caller must make no new call with it."""
        self.retired = True
        if not self.calls and self._http is not None:
            await self._http.close()


def _adapter(setup: Setup, kind: Kind, access: Access, http: VendorHttp | None) -> Adapter:
    names = access.names or NAMES[kind]
    if kind == "crm":
        return Crm(http, access.key, names)
    if http is None:
        message = f"No URL is configured for {records.VENDORS[kind]}: set {names.url}, or add a connection."
        raise PermanentError(message, code="NOT_CONFIGURED")
    if kind == "speech":
        return ElevenLabs(http, access.key, setup.speech, names)
    return Llm(http, access.key, model=access.model, prices=setup.prices, names=names)
