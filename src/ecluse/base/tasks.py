"""Cancellation of tasks that run for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_SECONDS = 1.0


async def stopped(tasks: Iterable[asyncio.Task[Any]], again_after: float = AGAIN_SECONDS) -> None:
    """Cancel tasks repeatedly, every `again_after` seconds, until they have ended. Once is not enough: before Python
    3.12 `asyncio.wait_for` (which psycopg uses) loses a cancellation that arrives at the instant in which its future
    completes."""
    going = {task for task in tasks if not task.done()}
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=again_after)
