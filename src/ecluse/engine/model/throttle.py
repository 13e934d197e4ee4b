"""A vendor's own limit on calls, as its answers state it: a bucket of points that is refilled evenly. The pace of calls
that follows from it is computed here, by pure functions; `lanes/rates.py` applies it."""

from __future__ import annotations

from typing import NamedTuple

SHARE = 0.1  # weight of the latest call in the mean cost: calls of several kinds alternate
RESERVE = 3  # calls that the vendor's bucket must have room for beyond the next: they may be in flight


class Throttle(NamedTuple):
    """The budget that a vendor states in its answer to a call: the points that are left, the points per second that it
    adds, and the points that this call cost."""

    available: float
    per_second: float
    cost: float


class VendorPace(NamedTuple):
    """The pace that a vendor's budget allows: calls per second, and `credit`, the seconds for which the points that are
    left pay for calls at that pace. Negative credit: no call may start for that many seconds."""

    per_second: float
    credit: float


def mean_cost(before: float | None, told: Throttle) -> float:
    """Return the moving mean of the points that a call costs, updated by one more answer. `before`: the mean so far;
    None: this is the first answer."""
    return told.cost if before is None else before + SHARE * (told.cost - before)


def pace_of(told: Throttle, cost: float) -> VendorPace:
    """Return the pace that a vendor's budget allows for calls that cost `cost` points on average: as fast as the bucket
    is refilled, while RESERVE calls' worth of points stay in it."""
    return VendorPace(told.per_second / cost, (told.available - RESERVE * cost) / told.per_second)
