"""The decision whether and when to retry, as pure functions. The committer stores the count, the error and the next due
instant before the backoff begins, so that a restart neither loses nor repeats an attempt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import floor
from typing import Literal

from ecluse.base.errors import NonRetriableError, PermanentError, TransientError, VendorError

# A vendor that asks for a longer wait has only refused this attempt: the policy's own backoff applies.
LONGEST_RETRY_AFTER = timedelta(minutes=15)


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """A series of delays, in seconds. `jitter` is the largest deviation, as a fraction of the delay; `longest` caps
    it."""

    base: float = 1.0
    multiplier: float = 2.0
    longest: float = 60.0
    jitter: float = 0.0
    kind: Literal["exponential", "fixed"] = "exponential"

    def __post_init__(self) -> None:
        if min(self.base, self.longest) < 0 or self.multiplier < 1 or not 0 <= self.jitter <= 1:
            raise ValueError("delays are not negative, the multiplier is at least 1, the jitter is a fraction")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy(Backoff):
    """Retry budget and backoff of a stage. `executions` is the total budget, first try included: 1 means no retry at
    all. `throttled`: the delays after a refusal for too many calls (`VendorError.throttled`); None: the same delays.
    The n-th retry takes the n-th delay of the series that applies to the last failure."""

    executions: int = 3
    throttled: Backoff | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.executions < 1:
            raise ValueError("a retry budget counts total executions: it is at least 1")


@dataclass(frozen=True)
class Retry:
    """Verdict: the item is executed again, at the instant `at` or later."""

    at: datetime


@dataclass(frozen=True)
class GiveUp:
    """Verdict: the item fails, and is not executed again in this round."""

    permanent: bool  # a further round would not help either


def backoff(series: Backoff, retry: int, chance: random.Random) -> float:
    """Return the seconds to wait before retry number `retry` (from 1), in whole milliseconds, never more than
    `series.longest`. `chance` is the source of the jitter."""
    try:
        delay = series.base if series.kind == "fixed" else series.base * series.multiplier ** (retry - 1)
    except OverflowError:
        delay = series.longest
    delay = min(delay, series.longest)
    if series.jitter:
        delay = min(delay + chance.uniform(-series.jitter, series.jitter) * delay, series.longest)
    return floor(round(delay * 1000, 6)) / 1000  # 1.001 s is 1000.9999… ms in binary


def decide(
    error: Exception, *, executions: int, policy: RetryPolicy, now: datetime, chance: random.Random
) -> Retry | GiveUp:
    """Decide whether to retry after `error`, and when. A Retry-After of at most LONGEST_RETRY_AFTER replaces the
    backoff of the policy. `executions` includes the execution that just failed; `chance` is the source of the jitter.
    An unclassified error is a bug of ours: it is retried like a transient one (a race may not recur), within the same
    budget."""
    if isinstance(error, PermanentError | NonRetriableError):
        return GiveUp(permanent=True)
    if executions >= policy.executions:
        return GiveUp(permanent=False)
    asked = error.retry_after if isinstance(error, TransientError) else None
    if asked is not None and asked <= LONGEST_RETRY_AFTER.total_seconds():
        return Retry(now + timedelta(seconds=asked))
    throttled = isinstance(error, VendorError) and error.throttled
    series = policy.throttled if policy.throttled is not None and throttled else policy
    return Retry(now + timedelta(seconds=backoff(series, executions, chance)))
