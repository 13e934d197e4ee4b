"""Circuit breaker rules: when consecutive failures mean that a vendor is down, how long its lane pauses, and whether a
failure is the fault of the vendor or of the item. Pure decisions; `lanes/breaker_counts.py` stores the counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from ecluse.base.errors import TransientError, VendorError
from ecluse.engine.model.retry import LONGEST_RETRY_AFTER

# Error codes of vendors/http.py: no connection, no answer, or an answer about the vendor and not about the item.
OUTAGES = frozenset(
    {
        "TIMEOUT",
        "VENDOR_DISCONNECTED",
        "VENDOR_UNREACHABLE",
        "VENDOR_ERROR_408",
        *(f"VENDOR_ERROR_{status}" for status in range(500, 600)),
    }
)
NO_ANSWER = frozenset({"TIMEOUT", "VENDOR_DISCONNECTED", "VENDOR_UNREACHABLE", "WORKER_CRASHED"})
TRIGGERED = "Circuit breaker triggered"


@dataclass(frozen=True)
class Breaker:
    """The breaker of a lane. More than `failures` consecutive calls that end with one of `codes`, counted over all
    replicas, pause the lane; then one call at a time probes the vendor, after pauses that double up to `longest` (None:
    every pause is `pause`). Any other answer of the vendor ends the streak of failures; the codes in `silent`, and
    calls without an answer, do not.

    An execution that ends with one of OUTAGES is not counted against its item once more than `failures` different items
    have failed in the streak. With fewer items, the item itself may be the cause: the execution is counted, but the
    item is given up only after the streak has lasted for `doubt`."""

    failures: int = 5
    pause: timedelta = timedelta(seconds=60)
    longest: timedelta | None = None
    codes: frozenset[str] = frozenset({"THROTTLED"})
    silent: frozenset[str] = frozenset()
    doubt: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        if self.failures < 1 or self.pause <= timedelta(0) or not self.codes:
            raise ValueError(
                "a breaker needs at least 1 failure, a pause above 0 and a code to count; None is no breaker"
            )

    def pause_after(self, trips: int) -> timedelta:
        """Return the pause of a breaker that has already opened `trips` times in this streak of failures."""
        longest = self.longest or self.pause
        return longest if trips > 30 else min(self.pause * 2**trips, longest)


# For a lane to one vendor. A run of few items survives an outage of a minute, a run of many items any outage within its
# stage's time; a vendor that is back is noticed half a minute later at most.
VENDOR_DOWN = Breaker(
    pause=timedelta(seconds=2), longest=timedelta(seconds=30), codes=OUTAGES, doubt=timedelta(seconds=90)
)


class FailureStreak(NamedTuple):
    """Consecutive failed calls of a lane. `trips`: the number of times that its breaker has opened since the first
    failure."""

    failures: int = 0
    trips: int = 0
    since: datetime | None = None
    items: frozenset[int] = frozenset()  # distinct, at most one more than the breaker's `failures`


NO_FAILURES = FailureStreak()


class CallResult(NamedTuple):
    """The result of a call, as it is recorded for its lane."""

    lane_id: int
    item_id: int
    error: str
    at: datetime
    until: datetime | None  # the vendor asked for no calls before this instant
    counts: bool | None  # True adds to the streak of failures, False ends it, None does neither
    outage: bool = False
    tenant: str = ""  # of the item


class Spared(NamedTuple):
    """A failed execution that is not counted, because the failure is the vendor's fault: the item is retried at
    `due_at`."""

    due_at: datetime
    order_at: datetime | None  # set for a probe: behind items not tried yet, so that it is not the next probe, too


def asked_for(error: Exception, now: datetime) -> datetime | None:
    """Return the instant until which the Retry-After of this error asks for no calls. None if it asks for nothing, or
    for longer than LONGEST_RETRY_AFTER: then only this call was refused."""
    asked = error.retry_after if isinstance(error, TransientError) else None
    return now + timedelta(seconds=asked) if asked and asked <= LONGEST_RETRY_AFTER.total_seconds() else None


def counts(breaker: Breaker | None, error: Exception | None) -> bool | None:
    """Return how the result of a call counts for the breaker of its lane: True as a failure, False as the end of the
    streak, None not at all (no answer of the vendor, a code in `silent`, or no breaker). `error` None: the call
    succeeded."""
    code = error.code if isinstance(error, VendorError) else None
    if breaker is None or (error is not None and code is None):
        return None
    throttled = isinstance(error, VendorError) and error.throttled
    if code in breaker.codes or (throttled and "THROTTLED" in breaker.codes):
        return True
    return None if code in NO_ANSWER | breaker.silent else False


def is_vendor_outage(breaker: Breaker | None, error: Exception | None) -> bool:
    """Return True if the error is one of OUTAGES and this breaker counts it: the vendor seems to be down."""
    return breaker is not None and isinstance(error, VendorError) and error.code in breaker.codes & OUTAGES


def tally(streak: FailureStreak, ends: Iterable[CallResult], most: int) -> tuple[FailureStreak, bool]:
    """Add call results to a lane's streak of failures; return the new streak, and True if it has exceeded `most`
    failures (the breaker opens). The count is capped at `most`, so that one failed probe opens the breaker again. Once
    `most` is exceeded, a success in the same batch does not reset the streak: that call was in flight with the
    failures."""
    too_long = False
    for end in ends:
        if end.counts:
            items = streak.items if len(streak.items) > most else streak.items | {end.item_id}
            too_long = too_long or streak.failures >= most
            streak = FailureStreak(min(streak.failures + 1, most), streak.trips, streak.since or end.at, items)
        elif not too_long:
            streak = NO_FAILURES
    return (streak._replace(trips=streak.trips + 1), True) if too_long else (streak, False)


def is_spared(breaker: Breaker, streak: FailureStreak, now: datetime, *, executions: int, budget: int) -> bool:
    """Return True if a failed execution is the vendor's fault and is not counted against its item: more than
    `breaker.failures` different items failed in the streak; or the item has used up its `budget`, the streak has at
    least min(`budget`, `breaker.failures`) failures, and it is younger than `breaker.doubt`. `streak` and `executions`
    include this failure."""
    if len(streak.items) > breaker.failures:
        return True
    alone = executions >= budget and streak.failures >= min(budget, breaker.failures)
    return alone and streak.since is not None and now - streak.since < breaker.doubt
