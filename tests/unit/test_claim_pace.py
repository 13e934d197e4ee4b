"""When the work loop claims, and when it waits: the clock is an argument."""

from __future__ import annotations

import pytest

from ecluse.engine.work.pace import BUSY_POLL_SECONDS, POLL_SECONDS, Pace

HANDS = 100


def at_work(per_second: int = 1_000) -> Pace:
    """One second after the start, at this pace: fifty items make a helping, or a quarter of what can be held."""
    pace = Pace(HANDS)
    pace.measure(1.0, per_second)
    return pace


def short_of(pace: Pace, now: float) -> Pace:
    pace.claiming(now)
    pace.claimed(room=100, got=30)
    return pace


def test_with_nothing_in_hand_it_claims_at_once() -> None:
    pace = short_of(at_work(), 1.0)
    assert pace.pause(1.0, room=1, in_hand=False) == 0


def test_without_room_it_waits_even_if_nothing_is_in_hand() -> None:
    assert at_work().pause(1.0, room=0, in_hand=False) == BUSY_POLL_SECONDS


@pytest.mark.parametrize(("room", "pause"), [(49, BUSY_POLL_SECONDS), (50, 0.0)])
def test_a_claim_brings_a_helping(room: int, pause: float) -> None:
    assert at_work().pause(1.0, room, in_hand=True) == pause


def test_slow_work_is_claimed_one_by_one() -> None:
    assert at_work(per_second=3).pause(1.0, room=1, in_hand=True) == 0


def test_a_helping_is_at_most_a_quarter_of_what_can_be_held() -> None:
    pace = at_work(per_second=100_000)
    assert pace.capacity == 2_000
    assert (pace.pause(1.0, 499, in_hand=True), pace.pause(1.0, 500, in_hand=True)) == (BUSY_POLL_SECONDS, 0.0)


def test_what_a_lane_did_not_give_it_is_not_asked_for_again_at_once() -> None:
    pace = short_of(at_work(), 1.0)
    assert pace.pause(1.01, room=90, in_hand=True) == pytest.approx(BUSY_POLL_SECONDS - 0.01)
    assert pace.pause(1.0 + BUSY_POLL_SECONDS, room=90, in_hand=True) == 0


def test_a_claim_that_got_all_it_asked_for_is_followed_by_the_next() -> None:
    pace = at_work()
    pace.claiming(1.0)
    pace.claimed(room=100, got=100)
    assert pace.pause(1.01, room=90, in_hand=True) == 0


def test_ends_make_room_again() -> None:
    pace = short_of(at_work(), 1.0)
    pace.ended(49)
    assert pace.pause(1.01, room=90, in_hand=True) > 0
    pace.ended(1)
    assert pace.pause(1.01, room=90, in_hand=True) == 0
    short_of(pace, 1.02)
    assert pace.pause(1.03, room=90, in_hand=True) > 0  # counted anew


def test_news_is_claimed_at_once_even_if_it_came_during_the_claim() -> None:
    pace = short_of(at_work(), 1.0)
    pace.wake()
    assert pace.pause(1.01, room=90, in_hand=True) == 0
    pace.claiming(1.01)
    pace.wake()
    pace.claimed(room=100, got=0)
    assert pace.pause(1.02, room=90, in_hand=True) == 0


def test_lanes_without_caps_are_left_alone_while_they_are_known_to_be_dry() -> None:
    pace = at_work()
    pace.claiming(1.0)
    assert not pace.is_empty(1.0)
    pace.found_empty(1.0)
    assert pace.is_empty(1.5)
    assert not pace.is_empty(1.0 + POLL_SECONDS)
    pace.wake()
    assert not pace.is_empty(1.5)
    pace.found_empty(1.5)  # what was heard of may have come after the look
    assert not pace.is_empty(1.6)


def test_the_pace_is_measured_over_a_while() -> None:
    pace = at_work(per_second=1_000)
    assert pace.capacity == HANDS + 100
    pace.measure(1.01, 5_000)
    assert pace.capacity == HANDS + 100
    pace.measure(2.0, 1_000)
    assert pace.capacity == HANDS
