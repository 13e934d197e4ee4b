"""The preview of a rule: the catalogue is read page by page, each with a permit of its own, and becomes the plan. Pages
are kept until the preview has ended, so that after an error it goes on with the page that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import methodcaller

from pydantic import TypeAdapter

from ecluse.base.errors import TransientError
from ecluse.db.query import fetch_row, fetch_rows
from ecluse.engine import Done, Item, Postponed, Result, WorkContext
from ecluse.flows.connections.shops import Shops
from ecluse.flows.pricing import runs
from ecluse.flows.pricing.rules import Terms, make_plan
from ecluse.flows.pricing.work import WORKER
from ecluse.vendors.shops import Variant

VARIANTS = TypeAdapter(list[Variant])
TO_PLAN = "SELECT rule, currency FROM rule_runs WHERE id = %s"
READ = "SELECT tag, cursor, variants::text FROM rule_pages WHERE rule_run_id = %s ORDER BY number"
KEEP = "INSERT INTO rule_pages (rule_run_id, number, tag, cursor, variants) VALUES (%s, %s, %s, %s, %s)"


async def preview(context: WorkContext, item: Item) -> Result:
    """Read what is missing of the catalogue, and store the plan of the run. An error after progress counts no
    execution, because a long catalogue may meet more errors than an item has executions; but a `Retry-After` is left to
    the engine, which closes the lane."""
    shops: Shops = context.vendors
    run = item.payload["rule_run"]
    async with context.database() as connection:
        rule, currency = await fetch_row(connection, TO_PLAN, (run,)) or ({}, "")
        known = await fetch_rows(connection, READ, (run,))
    terms = Terms.model_validate(rule)
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
            await connection.execute(KEEP, (run, pages, tag, cursor, kept))
        pages += 1
    plan = await asyncio.to_thread(make_plan, terms, currency, listed)
    async with context.database() as connection, connection.transaction():
        await runs.store_plan(connection, run, plan, WORKER)
    return Done({"pages": pages, "variants": len(listed), "targets": len(plan.targets)})
