"""Worker slots: a fixed number of tasks, each with at most one call in flight, that execute the items in `ready`.

The tasks are long-lived, because a task and a timer per item cost more than the engine's own work on it; one watchdog
enforces the time limits of all slots, with a precision of WATCH_SECONDS."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from math import inf
from typing import Any, Literal

from ecluse.engine.model.item import ClaimedItem
from ecluse.engine.model.shares import share_left
from ecluse.engine.work.claim import SlotsLeft

WATCH_SECONDS = 0.5
LAST_SECONDS = 1.0  # for work that cleans up when cancelled, or ignores it
# A slot yields after this many items: items that never wait would otherwise block the event loop.
IN_A_ROW = 64


Why = Literal["late", "dropped"]
Owner = tuple[str, str]  # of a call: the declared lane and the tenant
NO_OWNER = ("", "")


class WorkerSlot:
    """One worker slot. A call that exceeds its deadline, or is no longer needed, is cancelled by `interrupt`; `reset`
    then returns the reason."""

    __slots__ = ("claimed", "deadline", "idle", "task", "why")

    def __init__(self) -> None:
        self.deadline = inf
        self.why: Why | None = None
        self.idle: asyncio.Future[None] | None = None
        self.claimed: ClaimedItem | None = None
        self.task: asyncio.Task[None] | None = None

    def interrupt(self, why: Why) -> None:
        """Cancel the call of this slot for the reason `why`, unless it is being interrupted already."""
        if self.task is not None and self.why is None:
            self.why = why
            self.task.cancel()

    @property
    def is_stopping(self) -> bool:
        """True if the task of the slot itself is being cancelled, because the worker stops."""
        return self.task is not None and self.task.cancelling() > 0

    def reset(self) -> Why | None:
        """Return why `interrupt` cancelled the call, and undo the cancellation. None: `interrupt` was not called."""
        why, self.why = self.why, None
        if why is not None and self.task is not None:
            self.task.uncancel()
        return why


class WorkerSlots:
    """All slots of a worker. `work` executes an item in a slot, `done` gets its results, `idle` is called when a slot
    has nothing to do, `ended` when the task of a slot ends. The calls of one owner (`owner_of`: by default all calls
    have the same one; in a worker, a tenant's calls through the lanes of one base) take at most a `share` of the slots
    that other owners leave."""

    def __init__(
        self,
        count: int,
        work: Callable[[WorkerSlot, ClaimedItem], Awaitable[list[Any]]],
        done: Callable[[ClaimedItem, list[Any]], None],
        idle: Callable[[], None],
        ended: Callable[[asyncio.Task[None]], None],
        *,
        share: float = 1.0,
        owner_of: Callable[[ClaimedItem], Owner] = lambda _: NO_OWNER,
    ) -> None:
        self._share = share
        self._owner_of = owner_of
        self._running: Counter[Owner] = Counter()
        self._ended = ended
        self._work = work
        self._done = done
        self._on_idle = idle
        self._slots = [WorkerSlot() for _ in range(count)]
        self._idle: list[WorkerSlot] = []
        self._drained: asyncio.Event | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self.ready: deque[ClaimedItem] = deque()
        self.busy = 0
        self.finished = 0

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def executing(self) -> list[ClaimedItem]:
        return [slot.claimed for slot in self._slots if slot.claimed is not None]

    @property
    def claimed(self) -> list[ClaimedItem]:
        """The items in the slots, and the items that wait for a slot."""
        return [*self.ready, *self.executing]

    def queued(self, ahead: int) -> int:
        """Return the number of ready items that slots will take soon, counting per owner at most the slots that it may
        take and `ahead` more. Items beyond that are left out: they must not keep other items from being claimed."""
        if not self.ready or self._share == 1.0:
            return len(self.ready)
        queued = 0
        for owner, n in Counter(map(self._owner_of, self.ready)).items():
            running = self._running.get(owner, 0)
            queued += min(n, ahead + max(0, share_left(self._share, self.count, running, self.busy - running)))
        return queued

    def left(self, ahead: int) -> SlotsLeft:
        """Return how many more items of each owner may be claimed, `ahead` of them before a slot is free."""
        if self._share == 1.0:
            return SlotsLeft(self.count + ahead, [], [], [])
        held = self._running + Counter(map(self._owner_of, self.ready))
        total = self.busy + len(self.ready)
        left = [share_left(self._share, self.count, n, total - n) + ahead for n in held.values()]
        fresh = share_left(self._share, self.count, 0, total) + ahead
        return SlotsLeft(fresh, [base for base, _ in held], [tenant for _, tenant in held], left)

    def _next(self) -> tuple[ClaimedItem, Owner] | None:
        """Remove and return the first ready item whose owner may take another slot, with its owner; None if there is
        none."""
        if self._share == 1.0:
            return (self.ready.popleft(), NO_OWNER) if self.ready else None
        for place, claimed in enumerate(self.ready):
            owner = self._owner_of(claimed)
            running = self._running.get(owner, 0)
            if share_left(self._share, self.count, running, self.busy - running) > 0:
                del self.ready[place]
                return claimed, owner
        return None

    def interrupt(self, useless: Callable[[ClaimedItem], bool]) -> None:
        """Cancel the running calls of the items for which `useless` returns True."""
        for slot in self._slots:
            if slot.claimed is not None and useless(slot.claimed):
                slot.interrupt("dropped")

    def start(self) -> None:
        """Start one task per slot, and the watchdog."""
        for slot in self._slots:
            slot.task = asyncio.create_task(self._work_off(slot), name="worker slot")
            slot.task.add_done_callback(self._ended)
        self._watchdog = asyncio.create_task(self._watch())

    def give(self, claimed: Iterable[ClaimedItem]) -> None:
        """Add claimed items to `ready`, and wake as many idle slots as there are ready items."""
        self.ready.extend(claimed)
        for _ in range(min(len(self.ready), len(self._idle))):
            idle = self._idle.pop().idle
            if idle is not None and not idle.done():
                idle.set_result(None)

    def drop(self, useless: Callable[[ClaimedItem], bool]) -> list[ClaimedItem]:
        """Remove the items for which `useless` returns True from `ready`, and return them. (`interrupt` cancels running
        calls.)"""
        dropped: list[ClaimedItem] = []
        kept: deque[ClaimedItem] = deque()
        for claimed in self.ready:  # ask once per item: the answer may change with time
            (dropped if useless(claimed) else kept).append(claimed)
        self.ready = kept
        return dropped

    async def drain(self, grace: float) -> None:
        """Start no more items, let running calls finish for at most `grace` seconds, then cancel the tasks of the
        slots, and wait for their end at most max(`grace`, LAST_SECONDS) seconds."""
        self.ready.clear()
        if self.busy:
            self._drained = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._drained.wait()
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        tasks += [self._watchdog] if self._watchdog is not None else []
        for task in tasks:
            task.cancel()
        if tasks:  # none if the worker was stopped before it started
            await asyncio.wait(tasks, timeout=max(grace, LAST_SECONDS))

    async def _work_off(self, slot: WorkerSlot) -> None:
        loop = asyncio.get_running_loop()
        in_a_row = 0
        while True:
            if (taken := self._next()) is None:
                slot.idle = loop.create_future()
                self._idle.append(slot)
                self._on_idle()
                await slot.idle
                in_a_row = 0
                continue
            slot.claimed, owner = taken
            self.busy += 1
            self._running[owner] += 1
            try:
                results = await self._work(slot, taken[0])
            finally:
                slot.deadline = inf
                slot.claimed = None
                slot.reset()  # discard an interruption that the work swallowed
                self.busy -= 1
                self._running[owner] -= 1
                self.finished += 1
                if self._drained is not None and not self.busy:
                    self._drained.set()
            self._done(taken[0], results)
            if slot.is_stopping:  # stopped at the same time as interrupted; the work saw one cancellation
                raise asyncio.CancelledError
            in_a_row += 1
            if in_a_row % IN_A_ROW == 0:
                await asyncio.sleep(0)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = loop.time()
            for slot in self._slots:
                if slot.deadline < now:
                    slot.interrupt("late")
