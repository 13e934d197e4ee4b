"""Turns of clients: at most AT_ONCE requests are started per pass of the event loop, clients taking turns. Otherwise
two thousand requests that arrive together would all be started in one pass, and everything else on the loop would wait
for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 4  # per pass: a request that is started holds the loop for about a millisecond


class Turns:
    """Starts requests at once, up to AT_ONCE per pass of the event loop. The others wait in one queue per client, and
    the queues take turns."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Callable[[], None]]] = {}  # the next one first
        self._begun = 0  # in this pass
        self._passes = False  # the next pass is scheduled

    def put(self, client: str, begin: Callable[[], None]) -> None:
        """Call `begin` now, or later, when it is the turn of this client's queue."""
        if self._lines or self._begun >= AT_ONCE:
            self._lines.setdefault(client, deque()).append(begin)
        else:
            self._begun += 1
            begin()
        self._schedule()

    def _schedule(self) -> None:
        if not self._passes:
            self._passes = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._passes, self._begun = False, 0
        try:
            while self._lines and self._begun < AT_ONCE:
                client = next(iter(self._lines))
                line = self._lines.pop(client)
                begin = line.popleft()
                if line:
                    self._lines[client] = line  # behind the others
                self._begun += 1
                begin()
        finally:  # also after a request that failed to begin: the others wait for their turns
            if self._lines or self._begun:
                self._schedule()
