"""The `vendors` of the flows: the clients of a process, by the credential that an item uses. A connection is read again
when it is used after a few seconds, so that every replica sees a change without a message that could be lost; a client
lives as long as its connection is the same and in use. No transaction is open while a vendor is called."""

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
    """What an item calls a vendor with: the connection of its tenant, or a key that its schedule has of its own."""

    tenant: str
    kind: Kind
    schedule: int | None = None

    @classmethod
    def of(cls, item: Item, kind: Kind) -> Credential:
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
        """Return whether the item's connection has a key: that of the environment may be unset."""
        return bool((await self._client(context, Credential.of(item, kind), FRESH_SECONDS)).access.key)

    def shared(self, make: Callable[[], R]) -> R:
        """Return what `make` makes, such as a batched query of a flow. It is called once for this registry: the result
        is kept under the function itself."""
        if make not in self._shared:
            self._shared[make] = make()
        found: R = self._shared[make]
        return found

    async def _call(self, kind: Kind, context: WorkContext, item: Item, call: Callable[[Any], Awaitable[R]]) -> R:
        """Make a call. A refused key may have just been changed: the connection is read again, and the call repeated
        once if it differs."""
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
        """Return the client of a credential, from its connection as it was at most `oldest` seconds ago."""
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
        """Close the clients that were not used lately, but for the one that is needed now. A connection that is used is
        read again and again."""
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
