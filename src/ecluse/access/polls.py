"""Long polls of this process. They wait in memory, by the key of what they wait for: a notification wakes them, and a
poll itself queries nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastapi import Request


class Polls:
    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.stopping = False

    @property
    def keys(self) -> list[str]:
        return list(self._waiting)

    @contextmanager
    def one(self, key: str) -> Iterator[asyncio.Event]:
        """A poll; the event is set when what it waits for may be there."""
        woken = asyncio.Event()
        self._waiting.setdefault(key, set()).add(woken)
        try:
            yield woken
        finally:
            self._waiting[key].discard(woken)
            if not self._waiting[key]:
                del self._waiting[key]

    def wake(self, key: str) -> None:
        """Wake the polls of a key; without one, all: notifications may have been lost."""
        for one in [key] if key else self.keys:
            for woken in self._waiting.get(one, ()):
                woken.set()

    def stop(self) -> None:
        """End all polls: the server stops."""
        self.stopping = True
        self.wake("")


async def woken_within(request: Request, woken: asyncio.Event, seconds: float) -> bool:
    """Wait for the event; return False after `seconds`, or if the client has gone meanwhile."""
    waiting, gone = asyncio.ensure_future(woken.wait()), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({waiting, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done() and not gone.done()
    finally:
        for one in (waiting, gone):
            one.cancel()
            with suppress(asyncio.CancelledError):
                await one
