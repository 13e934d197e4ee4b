"""Paid calls of this process: their possible cost is reserved, those in flight are known, and an `attempts` row is
written for each call that may have been paid for without a stored result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from ecluse.base.crash import crashpoint
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import as_json
from ecluse.engine.effects import reservations
from ecluse.engine.effects.reservations import PaidCallRequest
from ecluse.engine.model.batched import BatchedQuery
from ecluse.engine.model.budget import Charge, Exceeded
from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.item import ClaimedItem, Item, Postponed
from ecluse.engine.runs.leases import Held, Lease, acquire, release

# At most `most` notes of an item and code: one per crash, however often the call is retried afterwards.
NOTE = """
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous,
                      maybe_paid)
SELECT t.run_id, t.id, t.event_id, t.round, t.executions, ecluse_now(), %(replica)s, %(code)s, %(error)s, true, true
FROM jsonb_to_recordset(%(items)s::jsonb)
    AS t(id bigint, run_id bigint, event_id text, round smallint, executions smallint)
WHERE (SELECT count(*) FROM attempts a WHERE a.item_id = t.id AND a.error_code = %(code)s AND a.maybe_paid) < %(most)s
"""
DIED = "A worker died while it held the item, perhaps after the call was paid for; the call is sent again"
STOPPED = "The server was stopped while the paid call was in flight; the call is sent again"
MANY = 1_000
HELD = timedelta(seconds=30)  # the heartbeat extends it; after a crash it expires


class OverBudget(Exception):
    """Raised instead of a paid call for which a budget has no room; `postponed` is the result of the execution."""

    def __init__(self, over: Exceeded) -> None:
        self.postponed = Postponed(over.until, over.why, "budget")


class PaidCalls:
    """The paid calls of this process that are in flight. `item_id in paid_calls` tells whether the item has one."""

    def __init__(self, pool: Pool, replica: str) -> None:
        self._pool = pool
        self._replica = replica
        self._under_way: dict[int, str | None] = {}  # by item: the lease that `begin` was given
        self._kept: dict[int, asyncio.Task[Lease | Held]] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._cut_off: list[Item] = []
        self._requests: dict[int, PaidCallRequest] = {}  # by item: its reservation may be committed
        self._reserving = BatchedQuery(self._reserve)

    def __contains__(self, item_id: int) -> bool:
        return item_id in self._under_way

    async def begin(self, context: WorkContext, claimed: ClaimedItem, lock: str | None, charge: Charge) -> None:
        """Reserve the most that a paid call for the item may cost, and note that the call is about to be sent
        (`WorkContext.pay`). Raise OverBudget if a budget has no room for it. `lock`: the key of the lease of its run
        that keeps other runs from paying for the same result. If a worker died while it held the item, an attempt
        records that the call may have been paid for before."""
        item = claimed.item
        if item.crashes:
            await self._note([item], "WORKER_CRASHED", DIED, item.crashes)
        self._requests[item.id] = PaidCallRequest(claimed, charge)
        if (over := await self._reserving.look(context, item)) is not None:
            del self._requests[item.id]
            raise OverBudget(over)
        crashpoint("after reserve")
        self._under_way[item.id] = lock

    async def _reserve(self, connection: Connection, items: Sequence[Item]) -> dict[int, Exceeded | None]:
        return await reservations.reserve(connection, [self._requests[item.id] for item in items])

    def may_be_reserved(self, item_id: int) -> bool:
        """Return whether cost may be reserved for a call of the item; the reservation is then settled with the item's
        result."""
        return item_id in self._requests

    def run_ended(self, items: Sequence[Item]) -> None:
        """Acquire, in the background and for this process, the leases that protect the paid calls in flight of these
        items. Their runs have ended, and with them the runs' own leases."""
        for item in items:
            if (lock := self._under_way.get(item.id)) is not None and item.id not in self._kept:
                self._kept[item.id] = asyncio.create_task(self._hold(item.tenant_id, lock))

    def forget(self, item_ids: Sequence[int]) -> None:
        """Forget the calls of these items, which are over, and release, in the background, the leases that this process
        holds for them."""
        if not (self._under_way or self._requests or self._kept):
            return
        for item_id in item_ids:
            self._under_way.pop(item_id, None)
            self._requests.pop(item_id, None)
            if (kept := self._kept.pop(item_id, None)) is not None:
                task = asyncio.create_task(self._release(kept))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def _hold(self, tenant: str, lock: str) -> Lease | Held:
        async with self._pool.connection() as connection:
            return await acquire(connection, tenant, lock, owner=self._replica, ttl=HELD, replica=self._replica)

    async def _release(self, kept: asyncio.Task[Lease | Held]) -> None:
        lease = await kept
        if isinstance(lease, Lease):
            async with self._pool.connection() as connection:
                await release(connection, lease)

    def cut_off(self, item: Item) -> None:
        """Remember the item for `note_cut_off` if its paid call is in flight: the stop of this process interrupts the
        call."""
        if item.id in self._under_way:
            self._cut_off.append(item)

    async def note_cut_off(self) -> None:
        """Insert an `attempts` row for each call that the stop of this process cut off: it may have been paid for in
        vain."""
        if self._cut_off:
            await self._note(self._cut_off, "INTERRUPTED", STOPPED, MANY)

    async def _note(self, items: Sequence[Item], code: str, error: str, most: int) -> None:
        """Insert an `attempts` row with this error for each item that has fewer than `most` such rows with this
        code."""
        names = ("id", "run_id", "event_id", "round", "executions")
        rows = [{name: getattr(item, name) for name in names} for item in items]
        facts = {"items": as_json(rows), "most": most, "replica": self._replica, "code": code, "error": error}
        async with self._pool.connection() as connection:
            await connection.execute(NOTE, facts)
