"""The resources that the work of a stage may use besides its item: vendors, permits of its lane, brief queries, live
events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from ecluse.db.connect import Connection, Pool
from ecluse.engine.model.budget import Charge
from ecluse.engine.model.item import Item
from ecluse.engine.model.throttle import Throttle


class EphemeralEvent(NamedTuple):
    """An event for the current realtime subscribers of a tenant. It is not stored, and may be lost."""

    tenant_id: str
    event: str
    payload: Mapping[str, Any]


EmitLive = Callable[[Sequence[EphemeralEvent]], None]  # never waits, never raises


@dataclass(frozen=True)
class WorkContext:
    """The resources that a stage's work may use besides its item: `vendors` is the object that `Flow.vendors` made. No
    transaction is open while a vendor is called."""

    vendors: Any
    now: Callable[[], datetime]
    reserve: Callable[[Item], Awaitable[None]] | None = None  # for `permit`
    emit: EmitLive = lambda _: None  # emits at once, whatever becomes of the item
    begin_paid: Callable[[str | None, Charge], Awaitable[None]] | None = None  # for `pay`
    pool: Pool | None = None  # for `database`
    replica: str | None = None  # this process, as the holder of a lease
    heard: Callable[[Item, Throttle], None] = lambda _, __: None  # the vendor stated its budget: its lane follows

    async def pay(self, item: Item, lock: str | None = None, charge: Charge | None = None) -> None:
        """Announce a call that costs money (`Stage.paid`), right before it, and reserve `charge`, the most that it may
        cost. If a budget has no room for it, the item is postponed. From here on the call may finish even if its run
        ends; in that case this process holds `lock`, a lease of that run, until the call is over. If a worker died
        while it held the item, an attempt records that the call may have been paid for before."""
        if self.begin_paid is not None:
            await self.begin_paid(lock, charge or Charge(item.flow, item.stage, None))

    @asynccontextmanager
    async def database(self) -> AsyncIterator[Connection]:
        """Lend a connection for a brief query before the vendor is called; leave the block before the call. If the
        database is unavailable, let the error pass: the item is postponed, and no execution is counted."""
        assert self.pool is not None  # noqa: S101 - the kit gives it
        async with self.pool.connection() as connection:
            yield connection

    async def permit(self, item: Item) -> None:
        """Wait until the lane's rate permits a further call for this item; its first call has a permit already. If the
        lane is closed meanwhile, the execution ends here, and the item is executed again later."""
        if self.reserve is not None:
            await self.reserve(item)
