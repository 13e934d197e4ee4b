"""Work of automation items: read a day's sales list, or a fiche in full, from the CRM. Retries, pauses, statuses and
commits are the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple, TypeVar

from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound, PermanentError
from ecluse.db.connect import Connection
from ecluse.engine import Done, Item, Result, Saved, WorkContext
from ecluse.flows.audits.work import Access as AuditAccess
from ecluse.flows.audits.work import Auditor, connected_auditor
from ecluse.flows.automation.schedules import secret_name
from ecluse.flows.fiches.cache import cache_sales
from ecluse.flows.fiches.fetch import Fetched, fetch_fiche, save_details
from ecluse.vendors.crm import Crm, CrmAccess, connected_crm

# A schedule's key may be changed: a cached key is read again after KEY_SECONDS, or already after REFUSED_SECONDS if the
# CRM refuses it.
KEY_SECONDS, REFUSED_SECONDS = 30.0, 1.0

ReadSecret = Callable[[Connection, str, str], Awaitable[str]]


@dataclass(frozen=True, kw_only=True)
class Access(CrmAccess):
    """Settings of the vendors. `read_secret` decrypts the keys that schedules have of their own."""

    audits: AuditAccess
    read_secret: ReadSecret | None = None


class Keys:
    """Cache of the schedules' own CRM keys: each is read once per KEY_SECONDS, however many items use it."""

    def __init__(self, read: ReadSecret | None) -> None:
        self._read = read
        self._known: dict[tuple[str, int], tuple[float, str]] = {}
        self._asking = asyncio.Lock()

    async def of(self, context: WorkContext, item: Item, oldest: float = KEY_SECONDS) -> str | None:
        """Return the CRM key of the item's schedule; None if it uses the general key. A key read more than `oldest`
        seconds ago is read again."""
        schedule = item.payload.get("own_key_of") if item.payload else None
        if schedule is None:
            return None
        key = (item.tenant_id, int(schedule))
        async with self._asking:
            asked, value = self._known.get(key, (float("-inf"), ""))
            if time.monotonic() - asked > oldest:
                value = await self._ask(context, *key)
                self._known[key] = (time.monotonic(), value)
        return value

    async def _ask(self, context: WorkContext, tenant: str, schedule: int) -> str:
        """Decrypt the CRM key of a schedule."""
        if self._read is None:
            message = "The schedule's API key is encrypted, and this server has no ECLUSE_SECRET_KEY."
            raise PermanentError(message, code="SEALED")
        try:
            async with context.database() as connection:
                return await self._read(connection, tenant, secret_name(schedule))
        except NotFound as error:
            message = "The schedule's own API key no longer exists: set it again."
            raise PermanentError(message, code="NO_KEY") from error


class Vendors(NamedTuple):
    """The `vendors` of the automation flow."""

    crm: Crm
    keys: Keys
    auditor: Auditor


@asynccontextmanager
async def connected(access: Access, clock: Clock) -> AsyncIterator[Vendors]:
    """Open the vendors of the automation flow for the duration of the context."""
    async with connected_crm(access, clock.now) as crm, connected_auditor(access.audits, clock) as auditor:
        yield Vendors(crm, Keys(access.read_secret), auditor)


R = TypeVar("R")


async def _ask(context: WorkContext, item: Item, call: Callable[[str | None], Awaitable[R]]) -> R:
    """Call the CRM with the key of the item's schedule, if it has one. A refused key may have just been changed: it is
    read again, and the call is repeated once if it differs."""
    keys: Keys = context.vendors.keys
    key = await keys.of(context, item)
    try:
        return await call(key)
    except PermanentError as error:
        if (
            key is None
            or error.status not in (401, 403)
            or (new := await keys.of(context, item, REFUSED_SECONDS)) == key
        ):
            raise
    await context.permit(item)
    return await call(new)


async def revalidate(context: WorkContext, item: Item) -> Result:
    """Read the sales list of a day from the CRM. The work of the stage `revalidate`."""
    crm: Crm = context.vendors.crm
    sales = await _ask(context, item, lambda key: crm.sales(date.fromisoformat(item.key), api_key=key))
    rows = [fiche.model_dump(mode="json") for fiche in sales.fiches]
    return Done({"fiches": len(rows), "skipped": sales.skipped[:20]}, kept={"rows": rows, "at": context.now()})


async def save_sales(connection: Connection, saved: Sequence[Saved]) -> None:
    """Store sales lists in the cache. Used as the `save` of the stage `revalidate`."""
    for tenant in sorted({one.item.tenant_id for one in saved}):
        mine = [one for one in saved if one.item.tenant_id == tenant]
        lists = {date.fromisoformat(one.item.key): one.kept["rows"] for one in mine}
        await cache_sales(connection, tenant, lists, max(one.kept["at"] for one in mine))


async def fetch(context: WorkContext, item: Item) -> Result:
    """Fetch a fiche from the CRM, cached or not. The work of the stage `fetch`. A fiche that the CRM does not know is
    stored as such; it is not a failure."""
    crm: Crm = context.vendors.crm
    answer = await _ask(context, item, lambda key: fetch_fiche(crm, item.key, api_key=key))
    return Done({"found": answer["found"]}, kept=answer.get("details"))


async def save_fetched(connection: Connection, saved: Sequence[Saved]) -> None:
    """Store fetched fiches in the cache. Used as the `save` of the stage `fetch`."""
    await save_details(connection, [Fetched(one.item.tenant_id, one.item.key, one.kept) for one in saved])
