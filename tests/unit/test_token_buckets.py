"""Token buckets, and what requests cost, as functions of the time."""

from __future__ import annotations

import pytest

from ecluse.access.envelope import Refused
from ecluse.access.keys import Caller
from ecluse.access.limits import Allowed, Bucket, Limiter, cost_of, seconds_until, used


def caller(key_id: int = 1, tenant: str = "acme") -> Caller:
    return Caller(key_id, tenant, "operator", "ALL", (), None, False)


class Time:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def limiter(**allowed: int) -> tuple[Limiter, Time]:
    time = Time()
    return Limiter(Allowed(**({"key_requests": 0, "tenant_requests": 0} | allowed)), time), time


def limit_of(refusal: pytest.ExceptionInfo[Refused]) -> tuple[int, str, str, str]:
    error = refusal.value
    assert error.headers is not None
    assert error.details is not None
    return error.status, error.code, error.details[0]["where"], error.headers["Retry-After"]


def test_a_bucket_drains_evenly_within_a_minute():
    bucket = Bucket(60, at=100)
    assert [used(bucket, 60, now) for now in (100, 101, 130, 160, 500)] == [60, 59, 30, 0, 0]


@pytest.mark.parametrize(
    ("level", "cost", "wait"),
    [(0, 60, 0), (59, 1, 0), (60, 1, 1), (60, 10, 10), (30, 60, 30), (0, 500, 0), (10, 500, 10)],
)
def test_what_does_not_fit_waits_until_it_does(level, cost, wait):
    assert seconds_until(Bucket(level, at=7), 60, cost, now=7) == wait


def test_a_read_is_cheap_and_a_long_list_is_not():
    assert [cost_of("GET", rows) for rows in (0, 19, 50, 200)] == [1, 1, 3, 11]
    assert cost_of("POST", 0) == 5


def test_a_key_and_its_tenant_have_a_bucket_each():
    limits, time = limiter(key_requests=60, tenant_requests=90)
    limits.charge(caller(1), 60)
    with pytest.raises(Refused) as refusal:
        limits.charge(caller(1), 1)
    assert limit_of(refusal) == (429, "RATE_LIMITED", "key_requests", "1")
    limits.charge(caller(2), 30)
    with pytest.raises(Refused) as refusal:
        limits.charge(caller(2), 15)
    assert limit_of(refusal) == (429, "RATE_LIMITED", "tenant_requests", "10")
    limits.charge(caller(3, "rival"), 60)
    time.now += 10
    limits.charge(caller(2), 15)


def test_a_refused_request_is_not_counted():
    limits, time = limiter(key_requests=60)
    limits.charge(caller(), 60)
    for _ in range(100):
        with pytest.raises(Refused):
            limits.charge(caller(), 5)
    time.now += 5
    limits.charge(caller(), 5)


def test_bytes_are_counted_when_they_are_known_and_delay_what_follows():
    limits, time = limiter(key_megabytes=6)
    limits.charge(caller(), 1)
    limits.count_bytes(caller(), 12_000_000)
    with pytest.raises(Refused) as refusal:
        limits.charge(caller(), 1)
    assert limit_of(refusal) == (429, "RATE_LIMITED", "key_megabytes", "61")
    time.now += 61
    limits.charge(caller(), 1)


def test_no_limit_is_zero():
    limits, _ = limiter(key_megabytes=0, tenant_megabytes=0, key_page_streams=0, tenant_page_streams=0)
    for _ in range(1_000):
        limits.charge(caller(), 1_000)
        limits.count_bytes(caller(), 10**9)
        limits.open(caller(), "page_streams")


def test_a_stream_gives_its_place_back():
    limits, _ = limiter(key_page_streams=2, tenant_page_streams=3)
    close, *_ = [limits.open(caller(1), "page_streams") for _ in range(2)]
    with pytest.raises(Refused) as refusal:
        limits.open(caller(1), "page_streams")
    assert limit_of(refusal) == (429, "TOO_MANY_CONNECTIONS", "key_page_streams", "10")
    limits.open(caller(2), "page_streams")
    with pytest.raises(Refused) as refusal:
        limits.open(caller(2), "page_streams")
    assert limit_of(refusal)[2] == "tenant_page_streams"
    close()
    limits.open(caller(1), "page_streams")
