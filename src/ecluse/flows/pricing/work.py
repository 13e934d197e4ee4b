"""Calls of executions to shops: the clients of a process, prices read, prices set. Retries, pauses and the
protocol of writes are the engine's. No transaction is open while a shop is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, NamedTuple, Self, TypeVar

from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound, PermanentError, VendorError
from ecluse.engine import Done, Item, Order, Result, Throttle, WorkContext
from ecluse.flows.connections.clients import Setup
from ecluse.flows.pricing import projects
from ecluse.flows.pricing.states import By
from ecluse.vendors.shops import Shop

FRESH_SECONDS = 5.0  # a project is read again after so long: every replica sees a new access token
WORKER = By("Worker", "engine")
R = TypeVar("R")


class _Client(NamedTuple):
    shop: Shop
    changed_at: datetime
    read_at: float


class Shops:
    """The `vendors` of the flow: the clients of a process, by project. The client of a project that has changed is
    replaced; it is closed with the process, since calls may be in flight."""

    def __init__(self, setup: Setup, deadline: float, clock: Clock) -> None:
        self._setup, self._deadline, self._clock = setup, deadline, clock
        self._clients: dict[int, _Client] = {}
        self._open = AsyncExitStack()
        self._reading = asyncio.Lock()

    async def call(self, context: WorkContext, item: Item, call: Callable[[Shop], Awaitable[R]]) -> R:
        """Call the shop of the item's project; its lane follows the cost bucket that the shop shows."""
        async with self._reading:
            shop = await self._shop(context, item)
        try:
            return await call(shop)
        finally:
            if (told := shop.throttle) is not None:
                context.heard(item, Throttle(told.available, told.restored_per_second, told.cost))

    async def refilled(self, item: Item) -> None:
        """Wait until the cost bucket of the shop has room for a call like the last one: the lane follows the bucket
        only after an execution, and the pages of a catalogue are expensive calls of one execution."""
        if (told := self._clients[item.payload["project"]].shop.throttle) is not None:
            await asyncio.sleep(max(0.0, (told.cost - told.available) / told.restored_per_second))

    async def _shop(self, context: WorkContext, item: Item) -> Shop:
        project = item.payload["project"]
        known = self._clients.get(project)
        if known is not None and time.monotonic() - known.read_at < FRESH_SECONDS:
            return known.shop
        if self._setup.read_secret is None:
            raise PermanentError("The access token is sealed, and this server has no ECLUSE_SECRET_KEY.", code="SEALED")
        try:
            async with context.database() as connection:
                row = await projects.show(connection, item.tenant_id, project)
                name = projects.secret_name(project)
                token = await self._setup.read_secret(connection, item.tenant_id, name)
        except NotFound as error:
            raise PermanentError(error.message, code="NO_PROJECT") from error
        if known is None or known.changed_at != row["updated_at"]:
            opened = projects.opened(
                row["connector"],
                row["base_url"],
                token,
                row["currency"],
                allowed_networks=self._setup.allowed_networks,
                now=self._clock.now,
                deadline=self._deadline,
            )
            known = _Client(await self._open.enter_async_context(opened), row["updated_at"], 0.0)
        self._clients[project] = known._replace(read_at=time.monotonic())
        return known.shop

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()


async def read(context: WorkContext, items: Sequence[Item]) -> Mapping[str, Any]:
    """Read the prices of these items, all of one project."""
    ids = [item.payload["variant"] for item in items]
    found = await context.vendors.call(context, items[0], lambda shop: shop.prices(ids))
    return {item.key: {"amount": found[one]} for item, one in zip(items, ids, strict=True) if one in found}


async def send(context: WorkContext, orders: Sequence[tuple[Item, Order]]) -> Mapping[str, Any]:
    """Set the prices of these items, all of one product, in one call."""
    first, order = orders[0]
    prices = {item.payload["variant"]: one.wanted["amount"] for item, one in orders}
    found: Mapping[str, int | VendorError] = await context.vendors.call(
        context, first, lambda shop: shop.set_prices(first.payload["product"], prices, key=order.key)
    )
    answers = {item.key: found[one] for item, _ in orders if (one := item.payload["variant"]) in found}
    return {key: one if isinstance(one, VendorError) else {"amount": one} for key, one in answers.items()}


async def fetch_external_prices(context: WorkContext, item: Item) -> Result:
    """Read the prices of the targets of a reconciliation: by target the price that the shop has, None if it is gone."""
    variants: dict[str, str] = item.payload["variants"]
    found = await context.vendors.call(context, item, lambda shop: shop.prices(list(variants.values())))
    return Done({"targets": len(variants)}, kept={target: found.get(one) for target, one in variants.items()})
