"""Long polls of this process. A poll waits in memory under the key of a record until a notification wakes it; the
waiting itself needs no query."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastapi import Request


class Polls:
    """The waiting polls of this process, by key. `stopping`: the server is stopping, and polls must end."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.stopping = False

    @property
    def keys(self) -> list[str]:
        return list(self._waiting)

    @contextmanager
    def one(self, key: str) -> Iterator[asyncio.Event]:
        """Register a poll under the key for the time of the block; yield the event that is set when the poll must look
        again."""
        woken = asyncio.Event()
        self._waiting.setdefault(key, set()).add(woken)
        try:
            yield woken
        finally:
            self._waiting[key].discard(woken)
            if not self._waiting[key]:
                del self._waiting[key]

    def wake(self, key: str) -> None:
        """Wake the polls of a key. An empty key wakes all polls: notifications may have been lost."""
        for one in [key] if key else self.keys:
            for woken in self._waiting.get(one, ()):
                woken.set()

    def stop(self) -> None:
        """Wake all polls and set `stopping`, so that they end."""
        self.stopping = True
        self.wake("")


async def woken_within(request: Request, woken: asyncio.Event, seconds: float) -> bool:
    """Wait up to `seconds` for the event; return False if it was not set in that time, or if the client has
    disconnected."""
    waiting, gone = asyncio.ensure_future(woken.wait()), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({waiting, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done() and not gone.done()
    finally:
        for one in (waiting, gone):
            one.cancel()
            with suppress(asyncio.CancelledError):
                await one
