"""The cause for which a waiting item has not started, and when it will start; groups of items with the same cause, and
a sentence that sums them up. Pure functions of facts, which `waiting.py` reads at one instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from ecluse.base.text import count_of
from ecluse.engine.model.breaker import TRIGGERED
from ecluse.engine.work.suspects import Suspicion

Cause = Literal[
    "paused", "held", "breaker", "no worker", "lease", "budget", "postponed", "retry", "window", "suspect", "in flight",
    "per key", "throttled", "queued", "gate",
]  # fmt: skip
# Items with these causes do not start by themselves, or not for a while: a run whose items all have one of them, with
# no call in flight, makes no progress.
BLOCKING: frozenset[Cause] = frozenset({"paused", "held", "breaker", "no worker", "lease", "budget", "postponed"})

LONGEST_PERIOD = timedelta(days=31)  # of a budget; an item that waits longer continues only when its budget is raised
SAMPLE = 3
NAMED = 3  # causes in a summary


@dataclass(frozen=True)
class Example:
    """A waiting item, named as an example of its group."""

    run_id: int
    key: str
    target: str


@dataclass(frozen=True)
class Group:
    """Items that wait for the same cause in one stage and lane; without a lane, the run itself waits. `since`: when the
    lane was paused, the vendor went down, or the oldest call in flight began; `first_at`, `last_at`: when the first and
    the last item are expected to start."""

    cause: Cause
    flow: str
    stage: str | None
    lane: str | None
    count: int
    detail: str
    since: datetime | None = None
    first_at: datetime | None = None
    last_at: datetime | None = None  # a lower bound, where too many items wait to count each position
    sample: Sequence[Example] = ()
    error: str | None = None  # the last error of one of the items


@dataclass(frozen=True)
class Facts:
    """All facts that decide when one item starts, at one instant."""

    now: datetime
    id: int
    run_id: int
    flow: str
    stage: str
    key: str
    target: str
    due_at: datetime
    executions: int
    crashes: int
    suspicion: int
    error_code: str | None
    error: str | None
    postponed_cause: Literal["lease", "postponed", "budget"] | None
    postponed_why: str | None
    position: int | None
    permits_ahead: float | None  # of the rate of its lane, that the calls before its own take
    counted: int  # calls before the end of the counted part of its tenant's queue: at least so many are before it
    lane: str
    paused_at: datetime | None
    paused_reason: str | None
    held_until: datetime | None
    held_reason: str | None
    down_since: datetime | None  # the lane's breaker has opened, and no call has been answered since
    clock_stopped: bool
    per_second: float | None
    spacing: timedelta | None
    next_free_at: datetime | None
    max_in_flight: int | None
    in_flight: int
    probing: bool  # after a breaker's pause: one call at a time
    key_full: bool
    max_per_key: int | None
    workers: int
    hands: int
    busy: int
    own: int  # of them, calls of the tenant in lanes of the same base
    share_full: bool  # no replica has a worker slot left for the tenant's calls in these lanes
    pace: float | None  # recent calls per second of its lane
    batch: int = 1  # the most items of a call of its stage
    permits: int = 1  # that such a call takes of the rate of its lane
    slowed_to: float | None = None  # share of its lane's rate that is used for a while
    slowed_until: datetime | None = None
    budget: int | None = None  # the most executions of an item of its stage; None: not known here


def cause_of(item: Facts) -> Cause:
    """Return the cause for which the item has not started; if several apply, the one that lasts longest."""
    if item.paused_reason is not None:
        return "paused"
    if item.held_until is not None and item.held_until >= item.due_at:
        return "breaker" if (item.held_reason or "").startswith(TRIGGERED) else "held"
    if item.workers == 0:
        return "no worker"
    if item.postponed_cause == "lease":  # also once it is due: the lease is checked first
        return "lease"
    if item.due_at > item.now:
        return item.postponed_cause or ("window" if item.error_code is None else "retry")
    if item.suspicion:
        return "suspect"
    if item.probing:
        return "breaker"
    if item.max_in_flight is not None and item.in_flight >= item.max_in_flight:
        return "in flight"
    if item.key_full:
        return "per key"
    return "queued" if item.spacing is None else "throttled"


def detail_of(item: Facts) -> str:
    """Describe for people why the item has not started, without its position in the queue. All tenants use the same
    lanes: the text names no operator and quotes no vendor's response to another tenant's call."""
    match cause := cause_of(item):
        case "paused":
            since = "" if item.paused_at is None else f" (since {instant(item.paused_at)})"
            clock = "; the clock of its stage is stopped" if item.clock_stopped else ""
            resume = f"resume it with ecluse lanes resume {item.lane} --reason TEXT"
            return f"lane {item.lane} was paused by an operator: {item.paused_reason}{since}{clock}; {resume}"
        case "breaker" if item.down_since is not None:
            held = "one call at a time probes it"
            probe = held if item.held_until is None else f"next probe {instant(item.held_until)}"
            return f"lane {item.lane}: vendor down since {instant(item.down_since)}, {probe}"
        case "held" | "breaker" if item.held_until is not None:
            why = "its breaker is open" if cause == "breaker" else "as the vendor asked (Retry-After)"
            return f"lane {item.lane} is held until {instant(item.held_until)}: {why}"
        case "breaker":
            return f"lane {item.lane} tries one call at a time after its breaker's pause"
        case "no worker":
            return f"no live worker can do {item.flow}/{item.stage}: start one whose flows have it"
        case "budget":
            return str(item.postponed_why)
        case "lease" | "postponed":
            return f"{item.postponed_why}; checked again at {instant(item.due_at)}"
        case "retry":
            return f"{_execution(item)} at {instant(item.due_at)}, after {item.error_code}: {item.error}"
        case "window":
            return f"not before {instant(item.due_at)}"
        case "suspect":
            how = "run in a small group" if item.suspicion < Suspicion.ALONE else "run alone"
            how = how if item.suspicion < Suspicion.POISON else "not run again"
            return f"{count_of(item.crashes, 'worker')} died while it was in flight: it is {how}"
        case "in flight":
            return f"lane {item.lane} has its {count_of(item.max_in_flight or 0, 'call')} in flight"
        case "per key":
            return f"{item.max_per_key} of its group are in flight, which is its cap in lane {item.lane}"
        case "throttled" if item.per_second is not None:
            pace = f"{60 * item.per_second:.4g}"
            return f"lane {item.lane} starts {pace} call{'' if pace == '1' else 's'} a minute{_slowed(item)}"
        case _ if item.busy >= item.hands:
            return f"the {_slots(item)} {'is' if item.hands == 1 else 'are'} in use"
        case _ if item.share_full:
            of = "of the tenant to this vendor"
            held = f"{count_of(item.own, f'call {of} is', f'calls {of} are')} in flight"
            return f"{held}: its share of the {_slots(item)} (ECLUSE_TENANT_SLOTS_SHARE)"
        case _:
            return "about to be claimed"


def _slots(item: Facts) -> str:
    return f"{count_of(item.hands, 'worker slot')} of {count_of(item.workers, 'replica')}"


def _execution(item: Facts) -> str:
    number = item.executions + 1
    of = "" if item.budget is None else f" of {item.budget}"
    return f"execution {number}{of}{' (the last)' if number == item.budget else ''}"


def _slowed(item: Facts) -> str:
    if item.slowed_to is None or item.slowed_until is None:
        return ""
    return f", {item.slowed_to:.0%} of its rate until {instant(item.slowed_until)} at least"


def detail_with_position(item: Facts) -> str:
    """Describe the cause for people, like `detail_of`; for an item that waits for its turn, add the number of calls
    before it in the lane."""
    detail = detail_of(item)
    if cause_of(item) not in ("in flight", "throttled", "queued") and not (item.probing and item.held_until is None):
        return detail
    number, bound = (item.counted, "at least ") if item.position is None else (item.position, "")
    return f"{detail}; {bound}{count_of(number, 'call')} before it"


def expected(item: Facts) -> datetime | None:
    """Return the instant at which the item is expected to start, None if that cannot be predicted."""
    if cause_of(item) in ("paused", "no worker", "lease") or item.suspicion or item.probing:
        return None
    if cause_of(item) == "budget" and item.due_at - item.now > LONGEST_PERIOD:
        return None
    if item.position is None and item.due_at <= item.now:
        return None
    start = max(item.now, item.due_at, item.held_until or item.now)
    position = item.position or 0
    if item.spacing is not None and item.next_free_at is not None:
        return max(start, item.next_free_at) + (item.permits_ahead or 0) * item.spacing
    if start > item.now or (position == 0 and item.busy < item.hands and not item.share_full):
        return start
    return item.now + timedelta(seconds=position / item.pace) if item.pace else None


def grouped(items: Sequence[Facts], count: int) -> Group:
    """Return the group of `count` items with the same cause. `items` holds the facts of some of them: the first in the
    queue, examples, and the last; at most SAMPLE of them are named as examples."""
    first, last = items[0], items[-1]
    if last.position is None and first.position is not None and first.permits_ahead is not None:
        own = (count - 1) // last.batch
        position = max(first.position + own, last.counted - 1)  # it may share the last of the counted calls
        # A lower bound: calls of other stages take at least one permit.
        permits = first.permits_ahead + (position - first.position) + own * (last.permits - 1)
        last = replace(last, position=position, permits_ahead=permits)
    cause, detail = cause_of(first), detail_of(first)
    if cause == "retry" and count > 1:
        when = f"from {instant(first.due_at)} to {instant(last.due_at)}"
        which = "" if first.budget is None else f", {_execution(first)},"
        detail = f"next attempts {when}, the first{which} after {first.error_code}: {first.error}"
    sample = list(dict.fromkeys(Example(one.run_id, one.key, one.target) for one in items))
    return Group(
        cause,
        first.flow,
        first.stage,
        first.lane,
        count,
        detail,
        first.paused_at or (first.down_since if cause == "breaker" else None),
        expected(first),
        expected(last),
        sample[:SAMPLE],
        next((f"{one.error_code}: {one.error}" for one in items if one.error_code), None),
    )


def merged(groups: Sequence[Group]) -> list[Group]:
    """Merge the groups that have the same cause, flow, stage and lane, and return all groups, the largest first. Counts
    are added; the detail of a merged group is that of one of them."""
    found: dict[tuple[str | None, ...], Group] = {}
    for one in groups:
        key = (one.cause, one.flow, one.stage, one.lane)
        if (other := found.get(key)) is None:
            found[key] = one
            continue
        larger = max(one, other, key=lambda group: group.count)
        firsts = [group.first_at for group in (one, other) if group.first_at is not None]
        lasts = [group.last_at for group in (one, other) if group.last_at is not None]
        found[key] = replace(
            larger,
            count=one.count + other.count,
            first_at=min(firsts, default=None),
            last_at=max(lasts) if len(lasts) == 2 else None,
            sample=[*larger.sample, *(one if larger is other else other).sample][:SAMPLE],
            error=larger.error or one.error or other.error,
        )
    return sorted(found.values(), key=lambda group: (-group.count, group.flow, group.stage or "", group.cause))


def summary(groups: Sequence[Group], waiting: int, calls: int) -> str:
    """Summarize in one sentence why a run waits, naming at most NAMED causes. `groups`: its waiting items by cause, at
    least one group; `waiting`: the number of these items; `calls`: the number of calls in flight."""
    if not waiting:
        return f"nothing of it waits in a lane: {groups[0].detail}"
    if len(groups) == 1:
        causes = groups[0].detail
    else:
        causes = "; ".join(f"{group.count:,} of them: {group.detail}" for group in groups[:NAMED])
    more = f"; and {len(groups) - NAMED} more causes" if len(groups) > NAMED else ""
    return f"{waiting:,} waiting, {calls:,} in flight: {causes}{more}"


def instant(at: datetime) -> str:
    """Format the instant for people, in UTC."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
