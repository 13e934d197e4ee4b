"""I-14, rates: the calls that the vendors received, from all replicas, keep the rates of the lanes and respect
`Retry-After`.

A lane is matched with a vendor of the ledger by its name: `price-list:account-7` and `price-list/7` are lanes to
`price_list`; the lane of a connected shop by the connector of its project. For several lanes to one vendor the sum of
their rates is the limit, and `Retry-After` is not checked: the ledger does not say which lane has to wait. The current
rates are applied, without temporary reductions (by a vendor's own budget, or after a burst of 429s). The ledger counts
calls, not their weights.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ecluse.verify.ledger import Ledger, Line, as_effect_id
from ecluse.verify.report import About, Report, Violation

# Without declared lanes through which nothing was called, because each call has the lane of its credential.
# A shop is called once outside its lane, when it is connected.
LANES = """
SELECT coalesce(p.connector, replace(split_part(l.base, ':', 1), '-', '_')) AS vendor,
       CASE WHEN l.slowed_to IS NULL AND l.vendor_per_second IS NULL THEN l.per_second
            ELSE coalesce(l.set_per_second, l.declared_per_second) END AS per_second,
       l.burst + (p.id IS NOT NULL)::int AS burst
FROM lanes l LEFT JOIN pricing_projects p ON l.name = format('shop/%s/project-%s', p.tenant_id, p.id)
WHERE EXISTS (SELECT 1 FROM claims c WHERE c.lane_id = l.id)
   OR NOT EXISTS (SELECT 1 FROM lanes o JOIN claims c ON c.lane_id = o.id WHERE o.base = l.base) ORDER BY l.name
"""
ENDED = "SELECT ended_at FROM replicas WHERE ended_at IS NOT NULL"

# Seconds by which calls may bunch up on their way to the vendor.
BUNCHING = 0.5
# Seconds after the answer in which calls may still arrive: those in flight, and those begun before the hold was known
# on all replicas.
UNDER_WAY = 0.5
# The same for writes: once its intent is being committed, a write is sent, up to two seconds later.
WRITES_UNDER_WAY = 2.5
# A longer `Retry-After` is ignored: the failed attempt is retried after the usual backoff.
LONGEST_RETRY_AFTER = 900.0
# Seconds around the end of a replica: it may have died before it stored the answer.
LAST_WORDS = (-1.0, 15.0)
SHOWN = 8


def check(lanes: list[dict[str, Any]], ended: list[dict[str, Any]], ledger: Ledger, report: Report) -> None:
    """Check the rates of `lanes` against the calls in the ledger; `ended` are the instants at which replicas ended."""
    to_vendor = defaultdict(list)
    for lane in lanes:
        to_vendor[lane["vendor"]].append(lane)
    ends = [row["ended_at"].timestamp() for row in ended]
    for vendor, its_lanes in to_vendor.items():
        calls = [line for line in ledger.lines if line.kind == "call" and line.vendor == vendor and _ours(line)]
        report.checked["I-14"] += len(calls)
        rates = [lane["per_second"] for lane in its_lanes]
        if None not in rates:
            burst = sum(lane["burst"] for lane in its_lanes)
            report.violations += i_14_rate(vendor, calls, sum(rates), burst)
        if len(its_lanes) == 1:
            report.violations += i_14_patience(vendor, calls, ends)


def _ours(line: Line) -> bool:
    """Return True if the call is ours. A call that names a client, or has a key that is not the id of an effect, is a
    third party's."""
    return line.client is None and (line.key is None or as_effect_id(line.key) is not None)


def i_14_rate(vendor: str, calls: Sequence[Line], rate: float, burst: int) -> Iterable[Violation]:
    """Check that the calls keep the rate (per second, with `burst` at once), by a leaky bucket, which overflows if any
    window holds too many calls. Return the first violation, or nothing."""
    level, first = 0.0, 0  # index of the first call of the window
    for n, line in enumerate(calls):
        level = max(0.0, level - (line.at - calls[n - 1].at) * rate) if n else 0.0
        first = first if level > 0 else n
        level += 1
        if level > burst + rate * BUNCHING:
            span = line.at - calls[first].at
            message = (
                f"{n - first + 1} calls within {span:.3f} s, but {burst} at once and {rate:g} a second are allowed"
            )
            about = About(seqs=tuple(each.seq for each in calls[max(first, n - SHOWN + 1) : n + 1]))
            return [Violation("I-14", f"vendor {vendor}", message, about=about)]
    return []


def i_14_patience(vendor: str, calls: Sequence[Line], ends: Sequence[float]) -> Iterable[Violation]:
    """Check that no call arrived during a `Retry-After`, and return the violations. Calls within UNDER_WAY seconds of
    the answer that asked for it are allowed, and writes within WRITES_UNDER_WAY. An answer is not checked if a replica
    ended around then (`ends`), which may have died before it stored the answer."""
    found, instants = [], [line.at for line in calls]
    for asked in calls:
        if asked.done_at is None or not asked.retry_after or asked.retry_after > LONGEST_RETRY_AFTER:
            continue
        if any(LAST_WORDS[0] <= end - asked.done_at <= LAST_WORDS[1] for end in ends):
            continue
        since, until = asked.done_at + UNDER_WAY, asked.done_at + asked.retry_after - BUNCHING
        arrived = calls[bisect_right(instants, since) : bisect_left(instants, until)]
        if early := [one for one in arrived if one.key is None or one.at > asked.done_at + WRITES_UNDER_WAY]:
            message = f"{len(early)} calls during the Retry-After of {asked.retry_after:g} s of call {asked.seq}"
            about = About(seqs=(asked.seq, *(line.seq for line in early[:SHOWN])))
            found.append(Violation("I-14", f"vendor {vendor}", message, about=about))
    return found
