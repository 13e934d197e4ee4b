"""Grouped requests: requests that arrive while a group is being processed are processed together in the next group, in
one transaction and a few statements, however many they are."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

import psycopg

from ecluse.db.outage import is_unavailable
from ecluse.db.shares import AllBusy, Busy

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")
MOST = 100  # per group: a longer transaction would delay its first callers
TRIES = 3  # of a group that waits too long for a lock, or deadlocks: another transaction locks the same records
TRIED_AGAIN = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


class Groups(Generic[K, T, R]):
    """Groups the requests of callers by key, and processes a group of up to MOST of them with `do(key, requests)`,
    which returns an answer for each, in their order. One group per key is processed at a time; the first caller does
    not wait for others. If a group fails, its requests are repeated one by one, so that one caller cannot fail the
    others, unless the database is unavailable or busy; after a lock timeout or a deadlock the group is tried
    again, TRIES times in all."""

    def __init__(self, do: Callable[[K, Sequence[T]], Awaitable[Sequence[R]]]) -> None:
        self._do = do
        self._lines: dict[K, deque[tuple[T, asyncio.Future[R]]]] = {}
        self._working: set[asyncio.Task[None]] = set()

    async def ask(self, key: K, asked: T) -> R:
        """Add a request to the next group of the key, and return its answer; raise the error of `do` if it failed."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
            # In no caller's context: a group logs nothing under the request id of its first caller.
            task = asyncio.get_running_loop().create_task(self._work(key, line), context=Context())
            self._working.add(task)
            task.add_done_callback(self._working.discard)
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        line.append((asked, answer))
        return await answer

    async def _work(self, key: K, line: deque[tuple[T, asyncio.Future[R]]]) -> None:
        while line:
            await self._answer(key, [line.popleft() for _ in range(min(len(line), MOST))])
        del self._lines[key]

    async def _answer(self, key: K, group: Sequence[tuple[T, asyncio.Future[R]]], tries: int = TRIES) -> None:
        try:
            answers = await self._do(key, [asked for asked, _ in group])
        except Exception as error:  # noqa: BLE001 - any error is the answer of its callers
            if isinstance(error, TRIED_AGAIN) and tries > 1:
                await self._answer(key, group, tries - 1)
                return
            if len(group) > 1 and not isinstance(error, Busy | AllBusy) and not is_unavailable(error):
                for one in group:
                    await self._answer(key, [one])
                return
            for _, future in group:
                if not future.done():  # else the caller was cancelled
                    future.set_exception(error)
            return
        for (_, future), answer in zip(group, answers, strict=True):
            if not future.done():
                future.set_result(answer)
