"""The work of the stages of pricing: read the catalogue for a preview, read prices, set prices, and read prices for a
reconciliation. Retries, pauses and the protocol of writes are the engine's, except that `preview` postpones itself
after an error once it has read a page. No transaction is open while a shop is called."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from operator import methodcaller
from typing import Any

from pydantic import TypeAdapter

from ecluse.base.errors import TransientError, VendorError
from ecluse.db.query import fetch_rows
from ecluse.engine import Done, Item, Order, Postponed, Result, WorkContext
from ecluse.flows.connections.shops import Shops
from ecluse.flows.pricing import runs
from ecluse.flows.pricing.rules import Terms, make_plan
from ecluse.flows.pricing.states import WORKER
from ecluse.vendors.shops import Variant

VARIANTS = TypeAdapter(list[Variant])
# Pages are kept until the preview has ended, so that after an error it goes on with the page that is missing.
READ_PAGES = "SELECT tag, cursor, variants::text FROM rule_pages WHERE rule_run_id = %s ORDER BY number"
KEEP_PAGE = "INSERT INTO rule_pages (rule_run_id, number, tag, cursor, variants) VALUES (%s, %s, %s, %s, %s)"


async def preview(context: WorkContext, item: Item) -> Result:
    """Read what is missing of the catalogue page by page, each with a permit of its own, and store the plan of the run.
    An error after progress counts no execution, because a long catalogue may meet more errors than an item has
    executions; but a `Retry-After` is left to the engine, which closes the lane."""
    shops: Shops = context.vendors
    run = item.payload["rule_run"]
    async with context.database() as connection:
        found = await runs.require_run(connection, item.tenant_id, run)
        known = await fetch_rows(connection, READ_PAGES, (run,))
    terms = Terms.model_validate(found["rule"])
    tags: Sequence[str | None] = terms.selection.tags or [None]
    listed = [variant for *_, page in known for variant in VARIANTS.validate_json(page)]
    tag, cursor = known[-1][:2] if known else (0, None)
    pages = len(known)
    while tag < len(tags):
        if pages > len(known):
            await context.permit(item)
            await shops.refilled(item)
        call = methodcaller("catalogue", cursor, tag=tags[tag], costs=terms.change.kind == "margin")
        try:
            page = await shops.call(context, item, call)
        except TransientError as error:
            if pages == len(known) or error.retry_after:
                raise
            return Postponed(context.now(), error.message)
        listed += page.variants
        tag, cursor = (tag + 1, None) if page.cursor is None else (tag, page.cursor)
        async with context.database() as connection:
            kept = VARIANTS.dump_json(list(page.variants)).decode()
            await connection.execute(KEEP_PAGE, (run, pages, tag, cursor, kept))
        pages += 1
    plan = await asyncio.to_thread(make_plan, terms, found["currency"], listed)
    async with context.database() as connection, connection.transaction():
        await runs.store_plan(connection, run, plan, WORKER)
    return Done({"pages": pages, "variants": len(listed), "targets": len(plan.targets)})


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
