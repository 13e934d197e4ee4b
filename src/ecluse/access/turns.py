"""The turns of clients: requests are begun a few per pass of the loop, each client in turn. Of two thousand requests
that arrive together all would otherwise be begun in one pass, for which everything else on the loop waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 4  # per pass: begun, a request holds the loop for about a millisecond


class Turns:
    """Begins requests at once, unless more arrive in a pass than AT_ONCE: the others wait in a line per client, and the
    lines take turns."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Callable[[], None]]] = {}  # the next one first
        self._begun = 0  # in this pass
        self._passes = False  # the next pass is scheduled

    def put(self, client: str, begin: Callable[[], None]) -> None:
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
        while self._lines and self._begun < AT_ONCE:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            begin = line.popleft()
            if line:
                self._lines[client] = line  # behind the others
            self._begun += 1
            begin()
        if self._lines or self._begun:
            self._schedule()
