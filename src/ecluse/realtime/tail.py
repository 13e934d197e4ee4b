"""Delivery of durable events to the subscribers of this replica. Each replica that serves clients reads the published
events of the outbox, beginning with those published after its start. NOTIFY only wakes it; it polls every second
anyway."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ecluse.db.connect import Pool
from ecluse.db.outage import ignoring_outage
from ecluse.db.query import fetch_value
from ecluse.engine import read_published
from ecluse.realtime.hub import Hub

POLL_SECONDS = 1.0
PAGE = 100  # far below a listener's queue: a listener that keeps up has sent one page before the next is read
NEWEST = "SELECT coalesce(max(published_seq), 0) FROM events_outbox"


class Tail:
    """Reader of published events for the hub. Setting `hint` makes it read at once."""

    def __init__(self, pool: Pool, hub: Hub) -> None:
        self._pool, self._hub = pool, hub
        self.hint = asyncio.Event()
        self.at = 0  # `published_seq` of the last event handed to the hub

    async def start(self) -> None:
        """Set the position to the newest published event: only later ones are delivered."""
        self.at = await self._newest()

    async def run(self) -> None:
        """Read and deliver published events until cancelled."""
        while True:
            self.hint.clear()
            with ignoring_outage("realtime tail"):
                while await self._read_on():
                    pass
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self.hint.wait()

    async def _read_on(self) -> bool:
        """Deliver the next page of events; return True if there was one. Without listeners, only advance to the newest
        event."""
        if not self._hub.listeners:
            newest = await self._newest()
            if not self._hub.listeners:  # a listener that connected meanwhile gets what was published meanwhile
                self.at = newest
                return False
        async with self._pool.connection() as connection:
            events = await read_published(connection, self.at, limit=PAGE)
        for event in events:
            self._hub.emit_durable(event)
            self.at = event.seq or self.at
        return bool(events)

    async def _newest(self) -> int:
        """Return the `published_seq` of the newest published event."""
        async with self._pool.connection() as connection:
            return int(await fetch_value(connection, NEWEST))
