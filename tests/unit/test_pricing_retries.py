"""Delays between the attempts of a price change, what a 429 is, and the keys of attempts."""

from __future__ import annotations

import random

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.flows.pricing.rules import (
    MAX_RETRIES,
    RETRY,
    RETRY_429,
    calculate_delay,
    generate_event_key,
    handle_429_error,
    rollback_event_key,
)
from ecluse.vendors.shops import is_429_error


class Middle(random.Random):
    """No jitter."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


@pytest.mark.req("PRC-33", "PRC-34", "PRC-35", "PRC-37", "PRC-78")
def test_the_series_is_two_four_eight_seconds():
    assert [calculate_delay(attempts, Middle()) for attempts in range(MAX_RETRIES)] == [2, 4, 8]
    assert (RETRY.executions, RETRY.longest, RETRY.jitter) == (4, 64, 0.2)


@pytest.mark.req("PRC-38")
def test_the_jitter_is_a_fifth_in_both_directions_and_whole_milliseconds():
    delays = [calculate_delay(1, random.Random(seed)) for seed in range(500)]  # noqa: S311
    assert 3.2 <= min(delays) < 3.3
    assert 4.7 < max(delays) <= 4.8
    assert all(round(delay * 1_000, 6).is_integer() for delay in delays)


def error(code: str = "VENDOR_ERROR", status: int | None = None, retry_after: float | None = None) -> VendorError:
    made = TransientError("no", code=code, retry_after=retry_after)
    made.status = status
    return made


@pytest.mark.req("PRC-39", "PRC-40", "PRC-78")
def test_one_predicate_knows_every_429():
    assert is_429_error(error(status=429))
    assert is_429_error(error("THROTTLED"))
    assert is_429_error(error("429"))
    assert not is_429_error(error("VENDOR_ERROR_503", 503))
    assert not is_429_error(PermanentError("no", code="UNAUTHORIZED"))


@pytest.mark.req("PRC-40", "PRC-41", "PRC-78")
def test_a_429_waits_as_the_vendor_asks_or_in_a_series_of_its_own():
    assert handle_429_error(error("THROTTLED", retry_after=7.5), 2) == 7.5
    assert [handle_429_error(error(status=429), attempts) for attempts in range(3)] == [16, 32, 64]
    assert RETRY_429.jitter == 0
    with pytest.raises(PermanentError):
        handle_429_error(PermanentError("no", code="UNAUTHORIZED"), 0)


@pytest.mark.req("PRC-57", "PRC-59", "PRC-78")
def test_each_attempt_of_each_round_has_a_key_of_its_own():
    assert generate_event_key(7, 12, 0) == "7:12:apply:0"
    assert generate_event_key(7, 12, 3) == "7:12:apply:3"
    assert generate_event_key(7, 12, 0, round=2) == "7:12:apply:0:r2"
    assert rollback_event_key(7, 12, 1) == "7:12:rollback:1"
    keys = {generate_event_key(7, 12, attempts, round=one) for attempts in range(4) for one in range(4)}
    assert len(keys) == 16
