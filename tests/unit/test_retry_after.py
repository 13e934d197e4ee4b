"""`Retry-After`, parsed from whatever a vendor sends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base.retry_after import parse_retry_after

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("7", 7.0),
        ("120", 120.0),
        ("+3", 3.0),
        ("1.5", 1.5),
        ("  7\t", 7.0),
        ("86400", 86400.0),
    ],
)
def test_delta_seconds_are_that_many_seconds(value: str, seconds: float) -> None:
    assert parse_retry_after(value, NOW) == seconds


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize(
    "value",
    [
        pytest.param("Sun, 01 Mar 2026 12:02:00 GMT", id="the form of today"),
        pytest.param("Sunday, 01-Mar-26 12:02:00 GMT", id="the form of RFC 850"),
        pytest.param("Sun Mar  1 12:02:00 2026", id="the form of asctime"),
        pytest.param("Sun, 01 Mar 2026 13:02:00 +0100", id="with an offset"),
        pytest.param("Sun, 01 Mar 2026 12:02:00 -0000", id="with an unknown offset"),
        pytest.param(" Sun, 01 Mar 2026 12:02:00 GMT ", id="with blanks around"),
    ],
)
def test_a_date_is_the_time_until_then(value: str) -> None:
    assert parse_retry_after(value, NOW) == 120.0


def test_the_time_until_a_date_does_not_depend_on_the_zone_of_now() -> None:
    now = NOW.astimezone(timezone(timedelta(hours=9)))
    assert parse_retry_after("Sun, 01 Mar 2026 12:02:00 GMT", now) == 120.0


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize(
    "value", ["-1", "-0.5", "-99999", "Sun, 01 Mar 2026 11:59:59 GMT", "Sun, 06 Nov 1994 08:49:37 GMT"]
)
def test_a_negative_value_and_a_past_date_are_zero(value: str) -> None:
    assert parse_retry_after(value, NOW) == 0.0


GARBAGE = ["", " ", "-", "soon", "10 seconds", "5s", "1e3", "0x10", "inf", "nan", "12.", ".5", "5, 10", "1 2 3", "null"]
HALF_DATES = ["12:02:00", "1 Mar 2026", "Sun, 32 Mar 2026 12:02:00 GMT", "2026-03-01T12:02:00Z", "Sun, 01 Mar 2026"]


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize("value", [None, *GARBAGE, *HALF_DATES])
def test_garbage_is_no_answer_and_never_zero(value: str | None) -> None:
    assert parse_retry_after(value, NOW) is None


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize(
    "value",
    [
        pytest.param("Sun, 06 Nov 99999999999999999999 08:49:37 GMT", id="year"),
        pytest.param("Sun, 01 Mar 2026 99999999999999999999:00:00 GMT", id="hour"),
        pytest.param("Sun, 01 Mar 2026 12:02:00 +9999999999999999", id="offset"),
        pytest.param("9" * 400, id="number"),
    ],
)
def test_a_value_too_large_to_exist_is_garbage_too(value: str) -> None:
    assert parse_retry_after(value, NOW) is None


@pytest.mark.req("ENG-42")
@given(st.integers(-100_000, 100_000))
def test_a_date_and_a_number_that_mean_the_same_read_the_same(seconds: int) -> None:
    date = format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)
    assert parse_retry_after(date, NOW) == parse_retry_after(str(seconds), NOW) == max(0, seconds)


@given(st.text(max_size=40))
def test_whatever_the_header_says_the_answer_is_none_or_not_negative(value: str) -> None:
    seconds = parse_retry_after(value, NOW)
    assert seconds is None or seconds >= 0
