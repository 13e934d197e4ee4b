"""Many instants, one timer: that of the earliest. Thousands of retries to come must not be as many timers of the
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

# uvloop's clock goes by whole milliseconds, so a timer can be called a hair before the instant it was asked for.
TICK = 0.001


class Alarm:
    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._instants: list[float] = []
        self._timer: asyncio.Handle | None = None
        self._set_to = inf  # kept here: the timers of uvloop do not all know

    def set(self, seconds: float) -> None:
        """It rings then, and whenever else it was set to."""
        heappush(self._instants, asyncio.get_running_loop().time() + max(0.0, seconds) + TICK)
        self._wind()

    def _wind(self) -> None:
        if self._instants[0] < self._set_to:
            if self._timer is not None:
                self._timer.cancel()
            self._set_to = self._instants[0]
            self._timer = asyncio.get_running_loop().call_at(self._set_to, self._due)

    def _due(self) -> None:
        now, self._timer, self._set_to = asyncio.get_running_loop().time(), None, inf
        while self._instants and self._instants[0] <= now + TICK / 2:
            heappop(self._instants)
        if self._instants:
            self._wind()
        self._ring()
