"""Worker slots: a fixed number of coroutines, each with at most one call in flight, that execute the items in `ready`.

They are long-lived, because a task and a timer per item cost more than the engine's own work on it; one watchdog
enforces the time limits of all slots, to half a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from math import inf
from typing import Literal

from ecluse.engine.model.claimed import ClaimedItem

WATCH_SECONDS = 0.5
LAST_SECONDS = 1.0  # for work that cleans up when cancelled, or ignores it
# A slot yields after so many items: items that never wait would otherwise block the event loop.
IN_A_ROW = 64


Why = Literal["late", "dropped"]


class Hand:
    """One worker slot. A call that exceeds its deadline, or is no longer needed, is cancelled; `forgive` then returns
    which of the two."""

    __slots__ = ("deadline", "rest", "taken", "task", "why")

    def __init__(self) -> None:
        self.deadline = inf
        self.why: Why | None = None
        self.rest: asyncio.Future[None] | None = None
        self.taken: ClaimedItem | None = None
        self.task: asyncio.Task[None] | None = None

    def interrupt(self, why: Why) -> None:
        if self.task is not None and self.why is None:
            self.why = why
            self.task.cancel()

    @property
    def told_to_go(self) -> bool:
        return self.task is not None and self.task.cancelling() > 0

    def forgive(self) -> Why | None:
        """Return why `interrupt` cancelled the call, and undo the cancellation; None: it was cancelled elsewhere."""
        why, self.why = self.why, None
        if why is not None and self.task is not None:
            self.task.uncancel()
        return why


class Hands:
    def __init__(
        self,
        count: int,
        work: Callable[[Hand, ClaimedItem], Awaitable[None]],
        empty: Callable[[], None],
        died: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._died = died
        self._work = work
        self._empty = empty
        self._hands = [Hand() for _ in range(count)]
        self._idle: list[Hand] = []
        self._drained: asyncio.Event | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self.ready: deque[ClaimedItem] = deque()
        self.busy = 0
        self.finished = 0

    @property
    def count(self) -> int:
        return len(self._hands)

    @property
    def taken(self) -> list[ClaimedItem]:
        return [hand.taken for hand in self._hands if hand.taken is not None]

    def interrupt(self, useless: Callable[[ClaimedItem], bool]) -> None:
        for hand in self._hands:
            if hand.taken is not None and useless(hand.taken):
                hand.interrupt("dropped")

    def start(self) -> None:
        for hand in self._hands:
            hand.task = asyncio.create_task(self._take(hand), name="hand")
            hand.task.add_done_callback(self._died)
        self._watchdog = asyncio.create_task(self._watch())

    def give(self, taken: Iterable[ClaimedItem]) -> None:
        self.ready.extend(taken)
        for _ in range(min(len(self.ready), len(self._idle))):
            rest = self._idle.pop().rest
            if rest is not None and not rest.done():
                rest.set_result(None)

    def drop(self, useless: Callable[[ClaimedItem], bool]) -> list[ClaimedItem]:
        """Remove the `useless` items that have not started, and return them. Running calls are for `interrupt`."""
        dropped: list[ClaimedItem] = []
        kept: deque[ClaimedItem] = deque()
        for taken in self.ready:  # ask once per item: the answer may change with time
            (dropped if useless(taken) else kept).append(taken)
        self.ready = kept
        return dropped

    async def drain(self, grace: float) -> None:
        """Start no more items; let running calls finish for at most `grace` seconds."""
        self.ready.clear()
        if self.busy:
            self._drained = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._drained.wait()
        tasks = [hand.task for hand in self._hands if hand.task is not None]
        tasks += [self._watchdog] if self._watchdog is not None else []
        for task in tasks:
            task.cancel()
        if tasks:  # none if the worker was stopped before it started
            await asyncio.wait(tasks, timeout=max(grace, LAST_SECONDS))

    async def _take(self, hand: Hand) -> None:
        loop = asyncio.get_running_loop()
        in_a_row = 0
        while True:
            if not self.ready:
                hand.rest = loop.create_future()
                self._idle.append(hand)
                self._empty()
                await hand.rest
                in_a_row = 0
                continue
            hand.taken = taken = self.ready.popleft()
            self.busy += 1
            try:
                await self._work(hand, taken)
            finally:
                hand.deadline = inf
                hand.taken = None
                hand.forgive()  # discard an interruption that the work swallowed
                self.busy -= 1
                self.finished += 1
                if self._drained is not None and not self.busy:
                    self._drained.set()
            if hand.told_to_go:  # stopped at the same time as interrupted; the work saw one cancellation
                raise asyncio.CancelledError
            in_a_row += 1
            if in_a_row % IN_A_ROW == 0:
                await asyncio.sleep(0)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = loop.time()
            for hand in self._hands:
                if hand.deadline < now:
                    hand.interrupt("late")
