"""The decision when to claim, and how many items: a claim must be worth its round trips. Items are claimed a tenth of a
second ahead, by the measured pace, so that fast items are claimed in large batches while slow ones stay available to
other replicas until a worker slot is free for them.

The clock is an argument. After a wake-up from outside (new work, a lane that opens, an item that becomes due) the next
claim follows at once; slots freed by finished items are refilled several at a time."""

from __future__ import annotations

from ecluse.engine.work.claim import AHEAD_SECONDS
from ecluse.engine.work.committer import LARGEST_BATCH

POLL_SECONDS = 1.0
BUSY_POLL_SECONDS = 0.05
MEASURE_SECONDS = 0.03


class Pace:
    """Decides when a worker with `slots` worker slots claims, and how many items it may hold. The worker reports its
    claims and finished items; `now` is the monotonic clock, in seconds."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._finished = 0
        self._measured_at = 0.0
        self._per_second = 0.0
        self._claimed_at = 0.0
        self._ended = 0  # items, since the last claim
        self.woken = True  # a wake-up has arrived since the last claim
        self._short = False  # the last claim left room: only finished items or a wake-up make more claimable
        self._empty_until = 0.0

    def measure(self, now: float, finished: int) -> None:
        """Measure the pace, unless that was done within MEASURE_SECONDS. `finished`: the number of items finished since
        the worker started."""
        if now - self._measured_at >= MEASURE_SECONDS:
            self._per_second = (finished - self._finished) / (now - self._measured_at)
            self._finished, self._measured_at = finished, now

    @property
    def capacity(self) -> int:
        """The number of items that the worker may hold: one per slot, and as many more as it will finish within
        AHEAD_SECONDS; at most LARGEST_BATCH."""
        return min(self._slots + int(self._per_second * AHEAD_SECONDS), LARGEST_BATCH)

    def pause(self, now: float, room: int, in_hand: bool) -> float:
        """Return the seconds to wait before the next check; 0: claim now. `room`: the number of items that could be
        claimed; `in_hand`: the worker holds items. (An item is held until its result is stored, and counts against the
        caps of its lane until then.)"""
        if room > 0 and not in_hand:
            return 0.0
        # Room that is worth a claim: the slots that become free within one poll, at most a quarter of the capacity.
        helping = max(1, min(self.capacity // 4, int(self._per_second * BUSY_POLL_SECONDS)))
        if room < helping:
            return BUSY_POLL_SECONDS
        if self._short and not self.woken and self._ended < helping:
            return max(0.0, self._claimed_at + BUSY_POLL_SECONDS - now)
        return 0.0

    def claiming(self, now: float) -> None:
        """Note that a claim begins."""
        self._claimed_at, self._ended, self.woken = now, 0, False

    def claimed(self, room: int, got: int) -> None:
        """Note that a claim for at most `room` items returned `got` items."""
        self._short = got < room

    def ended(self, items: int) -> None:
        """Note that the worker holds `items` items fewer."""
        self._ended += items

    def wake(self) -> None:
        """Note that there may be new work: the next claim follows at once."""
        self.woken, self._empty_until = True, 0.0

    def is_empty(self, now: float) -> bool:
        """Return True if a claim within the last POLL_SECONDS found the uncapped lanes empty and no wake-up has arrived
        since."""
        return now < self._empty_until

    def found_empty(self, now: float) -> None:
        """Note that a claim found the uncapped lanes empty; has no effect if a wake-up has arrived since the claim
        began."""
        self._empty_until = 0.0 if self.woken else now + POLL_SECONDS
