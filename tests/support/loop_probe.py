"""How long a server's event loop was held in one piece, while something was asked of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.api_server import Client
from tests.support.realtime_events import on_its_loop

TICK_SECONDS = 0.001


@dataclass
class Held:
    longest: float = 0.0  # seconds


@contextmanager
def probing(client: Client) -> Iterator[Held]:
    """Record the longest time that the loop of the client's server did not come round."""
    held = Held()

    async def watch() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            held.longest, before = max(held.longest, now - before - TICK_SECONDS), now

    task: asyncio.Task[None] = on_its_loop(client, lambda: asyncio.create_task(watch()))
    try:
        yield held
    finally:
        on_its_loop(client, task.cancel)
