"""The clients of connected shops in one process, by project; they are the `vendors` of a flow. A project is read again
after a few seconds, so that every replica sees a new access token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from typing import NamedTuple, Self, TypeVar

from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound, PermanentError
from ecluse.engine import Item, Throttle, WorkContext
from ecluse.flows.connections import projects
from ecluse.flows.connections.clients import Setup
from ecluse.vendors.connectors import opened
from ecluse.vendors.shops import Shop

FRESH_SECONDS = 5.0
R = TypeVar("R")


class _Client(NamedTuple):
    shop: Shop
    changed_at: datetime
    read_at: float


class Shops:
    """The clients of one process. The client of a project that has changed is replaced; it is closed with the process,
    since calls may be in flight."""

    def __init__(self, setup: Setup, deadline: float, clock: Clock) -> None:
        self._setup, self._deadline, self._clock = setup, deadline, clock
        self._clients: dict[int, _Client] = {}
        self._open = AsyncExitStack()
        self._reading = asyncio.Lock()

    async def call(self, context: WorkContext, item: Item, call: Callable[[Shop], Awaitable[R]]) -> R:
        """Call the shop of the item's project, and report the shop's cost bucket, if it shows one, to the item's lane.
        Raise PermanentError NO_PROJECT if the project was deleted."""
        async with self._reading:
            shop = await self._shop(context, item)
        try:
            return await call(shop)
        finally:
            if (told := shop.throttle) is not None:
                context.heard(item, Throttle(told.available, told.restored_per_second, told.cost))

    async def refilled(self, item: Item) -> None:
        """Wait until the cost bucket of the shop has room for a call like the last one. The lane follows the bucket
        only after an execution, and the pages of a catalogue are expensive calls of one execution. The shop must have
        been called before."""
        if (told := self._clients[item.payload["project"]].shop.throttle) is not None:
            await asyncio.sleep(max(0.0, (told.cost - told.available) / told.restored_per_second))

    async def _shop(self, context: WorkContext, item: Item) -> Shop:
        project = item.payload["project"]
        known = self._clients.get(project)
        if known is not None and time.monotonic() - known.read_at < FRESH_SECONDS:
            return known.shop
        try:
            async with context.database() as connection:
                row = await projects.show(connection, item.tenant_id, project)
                token = await self._setup.secret(connection, item.tenant_id, projects.secret_name(project))
        except NotFound as error:
            raise PermanentError(error.message, code="NO_PROJECT") from error
        if known is None or known.changed_at != row["updated_at"]:
            client = opened(
                row["connector"],
                row["base_url"],
                token,
                row["currency"],
                allowed_networks=self._setup.allowed_networks,
                now=self._clock.now,
                deadline=self._deadline,
            )
            known = _Client(await self._open.enter_async_context(client), row["updated_at"], 0.0)
        self._clients[project] = known._replace(read_at=time.monotonic())
        return known.shop

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
