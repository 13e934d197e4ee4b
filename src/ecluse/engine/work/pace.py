"""When is a claim worth its round trips, and for how many items? Work is claimed a tenth of a second ahead, by the pace
measured, so that fast items come in large batches while slow ones stay available to other replicas until there is a
hand for them.

The clock is an argument. What is heard from outside (new work, a lane that opens, an item that is due) is claimed at
once; what our own ends make room for, in helpings.
"""

from __future__ import annotations

from ecluse.engine.work.claim import AHEAD_SECONDS
from ecluse.engine.work.committer import LARGEST_BATCH

POLL_SECONDS = 1.0
BUSY_POLL_SECONDS = 0.05
MEASURE_SECONDS = 0.03


class Pace:
    def __init__(self, hands: int) -> None:
        self._hands = hands
        self._finished = 0
        self._measured_at = 0.0
        self._per_second = 0.0
        self._claimed_at = 0.0
        self._ended = 0  # since the last claim
        self._heard = True  # of more, since then
        self._short = False  # it got less than there was room for: only ends, or news, make more
        self._dry_until = 0.0

    def measure(self, now: float, finished: int) -> None:
        if now - self._measured_at >= MEASURE_SECONDS:
            self._per_second = (finished - self._finished) / (now - self._measured_at)
            self._finished, self._measured_at = finished, now

    @property
    def capacity(self) -> int:
        return min(self._hands + int(self._per_second * AHEAD_SECONDS), LARGEST_BATCH)

    def pause(self, now: float, room: int, in_hand: bool) -> float:
        """How long to wait before the next look; 0: claim. What is finished is `in_hand` until it is stored: until then
        it counts against the caps of its lane."""
        if room > 0 and not in_hand:
            return 0.0
        # What would come free anyway until the next look, and at most a quarter of what we can hold.
        helping = max(1, min(self.capacity // 4, int(self._per_second * BUSY_POLL_SECONDS)))
        if room < helping:
            return BUSY_POLL_SECONDS
        if self._short and not self._heard and self._ended < helping:
            return max(0.0, self._claimed_at + BUSY_POLL_SECONDS - now)
        return 0.0

    def claiming(self, now: float) -> None:
        self._claimed_at, self._ended, self._heard = now, 0, False

    def claimed(self, room: int, got: int) -> None:
        self._short = got < room

    def ended(self, items: int) -> None:
        self._ended += items

    def heard(self) -> None:
        self._heard, self._dry_until = True, 0.0

    def is_dry(self, now: float) -> bool:
        """A moment ago nothing waited in the lanes without caps, and nobody has said since that there is more."""
        return now < self._dry_until

    def found_dry(self, now: float) -> None:
        self._dry_until = 0.0 if self._heard else now + POLL_SECONDS
