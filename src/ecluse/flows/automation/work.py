"""Work of automation items: read a day's sales list, or a fiche in full, from the CRM. Retries, pauses, statuses and
commits are the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from ecluse.db.connect import Connection
from ecluse.engine import Done, Item, Result, Saved, WorkContext
from ecluse.flows.connections.registry import Vendors
from ecluse.flows.fiches.cache import cache_sales
from ecluse.flows.fiches.fetch import Fetched, fetch_fiche, save_details


async def revalidate(context: WorkContext, item: Item) -> Result:
    """Read the sales list of the item's day from the CRM. The work of the stage `revalidate`."""
    vendors: Vendors = context.vendors
    sales = await vendors.crm(context, item, lambda crm: crm.sales(date.fromisoformat(item.key)))
    rows = [fiche.model_dump(mode="json") for fiche in sales.fiches]
    return Done({"fiches": len(rows), "skipped": sales.skipped[:20]}, kept={"rows": rows, "at": context.now()})


async def save_sales(connection: Connection, saved: Sequence[Saved]) -> None:
    """Store sales lists in the cache. Used as the `save` of the stage `revalidate`."""
    for tenant in sorted({one.item.tenant_id for one in saved}):
        mine = [one for one in saved if one.item.tenant_id == tenant]
        lists = {date.fromisoformat(one.item.key): one.kept["rows"] for one in mine}
        await cache_sales(connection, tenant, lists, max(one.kept["at"] for one in mine))


async def fetch(context: WorkContext, item: Item) -> Result:
    """Fetch a fiche from the CRM, even if it is cached. The work of the stage `fetch`. A fiche that the CRM does not
    know is stored as such; it is not a failure."""
    vendors: Vendors = context.vendors
    answer = await vendors.crm(context, item, lambda crm: fetch_fiche(crm, item.key))
    return Done({"found": answer["found"]}, kept=answer.get("details"))


async def save_fetched(connection: Connection, saved: Sequence[Saved]) -> None:
    """Store fetched fiches in the cache. Used as the `save` of the stage `fetch`."""
    await save_details(connection, [Fetched(one.item.tenant_id, one.item.key, one.kept) for one in saved])
