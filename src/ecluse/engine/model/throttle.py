"""A vendor's own budget of calls, as its answers state it (a bucket of points that is refilled evenly), and the pace
that follows from it. Pure decisions; `lanes/rates.py` applies them."""

from __future__ import annotations

from typing import NamedTuple

SHARE = 0.1  # of the latest call in the mean cost: calls of several kinds take turns
RESERVE = 3  # calls that the vendor's bucket must have room for beyond the next: they may be in flight


class Throttle(NamedTuple):
    """What a vendor says of its budget in the answer to a call: the points that are left, the points a second that it
    adds, and the points that this call cost."""

    available: float
    per_second: float
    cost: float


class VendorPace(NamedTuple):
    """The pace that a vendor's budget allows: calls a second, and the seconds for which calls of that pace are still
    paid for (`credit`; negative: no call may start for so long)."""

    per_second: float
    credit: float


def mean_cost(before: float | None, told: Throttle) -> float:
    """Return the mean cost of a call, after one more; `before` None: it is the first."""
    return told.cost if before is None else before + SHARE * (told.cost - before)


def pace_of(told: Throttle, cost: float) -> VendorPace:
    """Return the pace that a vendor's budget allows to calls that cost so much on average: as fast as the bucket is
    refilled, and no faster than it empties."""
    return VendorPace(told.per_second / cost, (told.available - RESERVE * cost) / told.per_second)
