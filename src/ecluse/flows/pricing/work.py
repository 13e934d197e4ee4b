"""Calls of executions to shops: prices read, prices set. Retries, pauses and the protocol of writes are the engine's.
No transaction is open while a shop is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ecluse.base.errors import VendorError
from ecluse.engine import Done, Item, Order, Result, WorkContext
from ecluse.flows.pricing.states import By

WORKER = By("Worker", "engine")


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
