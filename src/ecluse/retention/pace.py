"""The pace of deletions: the size of the batches follows from the time that they take, so that runs are not slowed
down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class Busy(Exception):
    """The database took too long for a batch; the next sweep continues."""


@dataclass
class Pace:
    """Size and pauses of batches of deletions: a batch takes about `target` seconds, and an equal pause follows it."""

    rows: int = 2_000
    least: int = 200
    most: int = 10_000
    target: float = 0.1
    longest: float = 2.0  # a batch that takes longer ends the sweep
    rest: float = 1.0  # pause, as a multiple of the batch's time
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[int]:
        """Yield the number of rows that the batch in the body may delete; afterwards adapt the size of the next batch,
        and pause. Raise Busy after a batch that took too long."""
        began = self.clock()
        yield self.rows
        took = self.clock() - began
        self.paced(took)
        await asyncio.sleep(took * self.rest)

    def paced(self, took: float) -> None:
        """Adapt the size of the next batch to the seconds that the last one took; raise Busy if these were too many."""
        rows = self.rows
        if took > 1.5 * self.target:
            self.slower()
        elif took < 0.5 * self.target:
            self.rows = min(self.most, self.rows * 3 // 2)
        if took > self.longest:
            raise Busy(f"a batch of {rows} rows took {took:.1f} s")

    def slower(self) -> None:
        """Halve the size of the next batch."""
        self.rows = max(self.least, self.rows // 2)
