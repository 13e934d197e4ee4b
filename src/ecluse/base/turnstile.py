"""Limit how many coroutines continue per pass of the event loop. If a hundred did in one pass, each with a millisecond
of work, every other task would wait for all of them."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """A limiter that lets at most `a_pass` coroutines continue per pass of the event loop."""

    def __init__(self, a_pass: int) -> None:
        self._a_pass = self._left = a_pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def go_through(self) -> None:
        """Wait for this coroutine's turn: return at once, or in one of the next passes of the loop, in the order of
        arrival."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._left > 0:
            self._left -= 1
        else:
            self._waiting.append(loop.create_future())
            await self._waiting[-1]

    def _turn(self) -> None:
        """Let the next coroutines continue; scheduled once per pass of the loop for as long as coroutines arrive."""
        self._left = self._a_pass
        while self._waiting and self._left > 0:
            future = self._waiting.popleft()
            if not future.done():  # else the waiting task was cancelled
                future.set_result(None)
                self._left -= 1
        self._turning = bool(self._waiting) or self._left < self._a_pass
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
