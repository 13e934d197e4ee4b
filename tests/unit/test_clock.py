"""The one clock: the world's time plus the offset that tests set."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.base.clock import Clock


@pytest.mark.req("ENG-47")
@pytest.mark.parametrize("offset", [timedelta(0), timedelta(days=400), timedelta(hours=-3)])
def test_the_clock_shows_the_time_moved_by_its_offset(offset: timedelta) -> None:
    clock = Clock()
    clock.offset += offset
    before = datetime.now(UTC)
    shown = clock.now()
    assert before + offset <= shown <= datetime.now(UTC) + offset


def test_the_clock_knows_that_its_time_is_utc() -> None:
    assert Clock().now().tzinfo is UTC


def test_moving_the_clock_changes_no_duration() -> None:
    clock = Clock()
    before = time.monotonic()
    clock.offset = timedelta(days=400)
    assert before <= clock.monotonic() <= time.monotonic()


def test_each_clock_has_its_own_offset() -> None:
    moved, other = Clock(), Clock()
    moved.offset = timedelta(days=1)
    assert other.offset == timedelta(0)
