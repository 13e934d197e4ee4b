"""Ending tasks that run for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_SECONDS = 1.0


async def stopped(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel, until they have ended. Once is not enough: `asyncio.wait_for` (psycopg waits with it) before Python 3.12
    loses a cancellation that comes in the instant in which what it waits for is there."""
    going = {task for task in tasks if not task.done()}
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=AGAIN_SECONDS)
