"""An alarm that can be set to many instants and uses one timer of the loop, for the earliest. Thousands of pending
retries must not be as many timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

# uvloop's clock has a resolution of one millisecond, so a timer can fire slightly before the instant it was set to.
TICK = 0.001


class Alarm:
    """An alarm that calls `ring` at each of the instants it was set to, on the running event loop. Instants that are
    due together may be one call."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._instants: list[float] = []
        self._timer: asyncio.Handle | None = None
        self._set_to = inf  # stored here: not every uvloop handle knows its instant

    def set(self, seconds: float) -> None:
        """Add an instant, `seconds` from now, at which the alarm rings; instants set before stay set."""
        heappush(self._instants, asyncio.get_running_loop().time() + max(0.0, seconds) + TICK)
        self._wind()

    def _wind(self) -> None:
        """Set the timer to the earliest instant, if it is not set to an earlier one already."""
        if self._instants[0] < self._set_to:
            if self._timer is not None:
                self._timer.cancel()
            self._set_to = self._instants[0]
            self._timer = asyncio.get_running_loop().call_at(self._set_to, self._due)

    def _due(self) -> None:
        """Drop the instants that have passed, set the timer for the next one, and ring."""
        now, self._timer, self._set_to = asyncio.get_running_loop().time(), None, inf
        while self._instants and self._instants[0] <= now + TICK / 2:
            heappop(self._instants)
        if self._instants:
            self._wind()
        self._ring()
