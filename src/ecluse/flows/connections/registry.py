"""The `vendors` of the flows: the clients of a process, by the credential that an item uses. A connection in use is
read again every few seconds, so that every replica sees a change without a message that could be lost; a client lives
as long as its connection is unchanged and in use. No transaction is open while a vendor is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Self, TypeVar

from ecluse.base.clock import Clock
from ecluse.base.errors import PermanentError
from ecluse.engine import Item, WorkContext
from ecluse.flows.connections.clients import Client, Setup
from ecluse.flows.connections.records import Kind
from ecluse.vendors.audio import AudioSource
from ecluse.vendors.crm import Crm
from ecluse.vendors.elevenlabs import ElevenLabs
from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.llm import Llm

# A connection is read again after FRESH_SECONDS, or already after REFUSED_SECONDS if the vendor refuses its key; a
# client that was not used for IDLE_SECONDS is closed.
FRESH_SECONDS, REFUSED_SECONDS, IDLE_SECONDS = 5.0, 1.0, 600.0

R = TypeVar("R")


class Credential(NamedTuple):
    """Identifies the credential of an item's calls: its tenant's connection to a kind of vendor, or a schedule's own
    key for it."""

    tenant: str
    kind: Kind
    schedule: int | None = None

    @classmethod
    def of(cls, item: Item, kind: Kind) -> Credential:
        """Return the credential with which an item calls this kind of vendor. Only for the CRM can it be a schedule's
        own key."""
        own = item.payload.get("own_key_of") if kind == "crm" and item.payload else None
        return cls(item.tenant_id, kind, None if own is None else int(own))


class Vendors:
    """The clients of one process. `crm`, `speech` and `llm` make a call with the client that an item uses."""

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self._setup = setup
        self._clock = clock
        self._guard = GuardedHttp(setup.allowed_networks, deadline=setup.deadlines["speech"])
        self.audio = AudioSource(self._guard, now=clock.now) if setup.upload else None
        self._clients: dict[Credential, Client] = {}
        self._read_at: dict[Credential, float] = {}
        self._reading = asyncio.Lock()
        self._shared: dict[Callable[[], Any], Any] = {}

    async def crm(self, context: WorkContext, item: Item, call: Callable[[Crm], Awaitable[R]]) -> R:
        return await self._call("crm", context, item, call)

    async def speech(self, context: WorkContext, item: Item, call: Callable[[ElevenLabs], Awaitable[R]]) -> R:
        return await self._call("speech", context, item, call)

    async def llm(self, context: WorkContext, item: Item, call: Callable[[Llm], Awaitable[R]]) -> R:
        return await self._call("llm", context, item, call)

    async def has_key(self, context: WorkContext, item: Item, kind: Kind) -> bool:
        """Return whether the item's connection has a key; the environment's may be unset."""
        return bool((await self._client(context, Credential.of(item, kind), FRESH_SECONDS)).access.key)

    def shared(self, make: Callable[[], R]) -> R:
        """Return the object that `make` returns, such as a batched query of a flow. `make` is called once per registry:
        all callers that pass the same function share the object."""
        if make not in self._shared:
            self._shared[make] = make()
        found: R = self._shared[make]
        return found

    async def _call(self, kind: Kind, context: WorkContext, item: Item, call: Callable[[Any], Awaitable[R]]) -> R:
        """Make a call with the item's client. If the vendor refuses the key (401 or 403), it may just have been
        changed: read the connection again and, if it differs, repeat the call once, with a further permit of the
        lane."""
        credential = Credential.of(item, kind)
        client = await self._client(context, credential, FRESH_SECONDS)
        try:
            return await client.call(call)
        except PermanentError as error:
            if error.status not in (401, 403):
                raise
            if await self._client(context, credential, REFUSED_SECONDS) is client:
                raise
        await context.permit(item)
        client = await self._client(context, credential, FRESH_SECONDS)
        return await client.call(call)

    async def _client(self, context: WorkContext, credential: Credential, oldest: float) -> Client:
        """Return the client of a credential; its connection is read again if it was last read more than `oldest`
        seconds ago."""
        if self._is_fresh(credential, oldest):
            return self._clients[credential]
        async with self._reading:  # items that start together read it once
            if self._is_fresh(credential, oldest):
                return self._clients[credential]
            async with context.database() as connection:
                tenant, kind, schedule = credential
                access = await self._setup.access(connection, tenant, kind, schedule)
            await self._close_idle(credential)
            known = self._clients.get(credential)
            if known is None or known.access != access:
                self._clients[credential] = Client(self._setup, kind, access, self._guard, self._clock.now)
            self._read_at[credential] = time.monotonic()
            if known is not None and known is not self._clients[credential]:
                await known.retire()
            return self._clients[credential]

    def _is_fresh(self, credential: Credential, oldest: float) -> bool:
        return time.monotonic() - self._read_at.get(credential, float("-inf")) <= oldest

    async def _close_idle(self, needed: Credential) -> None:
        """Close the clients without calls in flight whose connection was not read for IDLE_SECONDS, except that of
        `needed`. A connection in use is read again every few seconds."""
        for credential, client in list(self._clients.items()):
            if credential != needed and not client.calls and not self._is_fresh(credential, IDLE_SECONDS):
                del self._clients[credential], self._read_at[credential]
                await client.retire()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.retire()
        await self._guard.close()
