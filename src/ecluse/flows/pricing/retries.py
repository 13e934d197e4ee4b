"""Retries of a price change: how often, how long apart, and the key of each attempt. `attempts` counts the retries that
were scheduled before, as the targets store it: 0 at the first execution."""

from __future__ import annotations

import random

from ecluse.base.errors import TransientError, VendorError
from ecluse.engine import Backoff, RetryPolicy, backoff
from ecluse.vendors.shops import is_429_error

MAX_RETRIES = 3
RETRY_429 = Backoff(base=16.0, multiplier=2.0, longest=64.0)
RETRY = RetryPolicy(executions=MAX_RETRIES + 1, base=2.0, multiplier=2.0, longest=64.0, jitter=0.2, throttled=RETRY_429)


def calculate_delay(attempts: int, chance: random.Random) -> float:
    """Return the seconds before the next retry: 2, 4, 8, each ± 20 %, in whole milliseconds."""
    return backoff(RETRY, attempts + 1, chance)


def handle_429_error(error: VendorError, attempts: int) -> float:
    """Return the seconds before the next retry after a 429: those that the vendor asks for, else 16, 32, 64. Any other
    error is raised."""
    if not is_429_error(error):
        raise error
    asked = error.retry_after if isinstance(error, TransientError) else None
    return backoff(RETRY_429, attempts + 1, random.Random()) if asked is None else asked  # noqa: S311 - has no jitter


def generate_event_key(run: int, target: int, attempts: int, *, round: int = 0) -> str:  # noqa: A002
    """Return the key of the event of one attempt. Rounds after the first are named in it: a manual retry starts with 0
    attempts again, and its events must not be taken for those of the former round."""
    return f"{run}:{target}:apply:{attempts}" + (f":r{round}" if round else "")


def rollback_event_key(run: int, target: int, number: int) -> str:
    """Return the key of the event of the rollback with this number."""
    return f"{run}:{target}:rollback:{number}"
