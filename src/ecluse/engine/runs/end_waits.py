"""Waiting for the end of a run, in the process that waits. The notification of an end wakes only the waiters of that
run, and all of them share one read of its row; reads of several runs at the same time are one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound
from ecluse.db.connect import Pool
from ecluse.db.groups import Groups
from ecluse.db.outage import ignoring_outage
from ecluse.db.query import fetch_rows

POLL_SECONDS = 1.0
LOOK_SECONDS = 0.5  # the longest look at the end of a wait
ENDED = "SELECT id, ended_at IS NOT NULL FROM runs WHERE id = ANY(%s)"


@dataclass(slots=True)
class Watch:
    """The waiters of one run since its last notification. `look`: the task that reads its row, started at `looked_at`
    (monotonic clock), at most once per poll interval."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: int = 0
    look: asyncio.Task[bool] | None = None
    looked_at: float = 0.0


class RunEnds:
    """The runs that this process waits for, with their waiters."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._watches: dict[int, Watch] = {}
        self._looks = Groups(self._look_at)

    def heard(self, run_id: int | None) -> None:
        """Wake the waiters of a run that has ended; None: wake all, because notifications may have been lost."""
        for ended in list(self._watches) if run_id is None else [run_id]:
            if (watch := self._watches.pop(ended, None)) is not None:
                watch.woken.set()

    async def wait(self, run_id: int, max_wait: timedelta) -> bool:
        """Wait until the run has ended, at most `max_wait`; return whether it has. Raise NotFound if there is no such
        run. The notification only wakes; the row is read first and after every wake-up, so that an end just before the
        wait, or a lost notification, is not missed. If no connection is free for that in time, the run counts as open:
        busy workers must not delay the caller."""
        deadline = self._clock.monotonic() + max_wait.total_seconds()
        while True:
            watch = self._watches.setdefault(run_id, Watch())
            watch.waiters += 1
            try:
                left = deadline - self._clock.monotonic()
                with ignoring_outage("waiting for a run") if left > 0 else nullcontext(), suppress(TimeoutError):
                    async with asyncio.timeout(max(left, LOOK_SECONDS)):
                        if await asyncio.shield(self._look(run_id, watch)):
                            return True
                if left <= 0:
                    return False
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(deadline - self._clock.monotonic(), POLL_SECONDS)):
                        await watch.woken.wait()
            finally:
                watch.waiters -= 1
                if not watch.waiters and self._watches.get(run_id) is watch:
                    del self._watches[run_id]

    def _look(self, run_id: int, watch: Watch) -> asyncio.Task[bool]:
        """Return the task that reads the run's row: the one that is running or was just started, else a new one."""
        now = self._clock.monotonic()
        if watch.look is None or now - watch.looked_at >= POLL_SECONDS or _failed(watch.look):
            watch.look, watch.looked_at = asyncio.create_task(self._has_ended(run_id)), now
            watch.look.add_done_callback(_failed)  # retrieves an error that no waiter is left to see
        return watch.look

    async def _has_ended(self, run_id: int) -> bool:
        ended = await self._looks.ask("runs", run_id)
        if ended is None:
            raise NotFound(f"There is no run {run_id}.")
        return ended

    async def _look_at(self, _: str, run_ids: Sequence[int]) -> list[bool | None]:
        async with self._pool.connection() as connection:
            rows = await fetch_rows(connection, ENDED, (list(run_ids),))
        found: dict[int, bool] = dict(rows)
        return [found.get(run_id) for run_id in run_ids]


def _failed(look: asyncio.Task[bool]) -> bool:
    return look.done() and (look.cancelled() or look.exception() is not None)
