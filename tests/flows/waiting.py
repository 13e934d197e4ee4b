"""Waiting for something to become true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def until(true: Callable[[], Any], seconds: float = 60) -> Any:
    """Patiently."""
    async with asyncio.timeout(seconds):
        while not (found := true()):
            await asyncio.sleep(0.02)
        return found
