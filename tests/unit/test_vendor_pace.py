"""The pace that a vendor's own budget allows."""

from __future__ import annotations

import pytest

from ecluse.engine.model.throttle import RESERVE, Throttle, mean_cost, pace_of


@pytest.mark.parametrize(
    ("available", "credit"),
    [(1000, 19.4), (30, 0), (10, -0.4), (0, -0.6)],
    ids=["full", "only the reserve", "less than that", "empty"],
)
def test_calls_start_as_fast_as_the_bucket_is_refilled_and_wait_while_it_is_empty(available, credit) -> None:
    assert RESERVE == 3
    pace = pace_of(Throttle(available, per_second=50, cost=10), 10)
    assert pace.per_second == 5
    assert pace.credit == pytest.approx(credit)


def test_the_first_call_says_what_calls_cost() -> None:
    assert mean_cost(None, Throttle(0, 50, 12)) == 12


def test_calls_of_two_kinds_are_paced_by_their_mean() -> None:
    cost, seen = None, []
    for n in range(200):
        cost = mean_cost(cost, Throttle(0, 50, 2 if n % 2 else 10))
        seen.append(cost)
    assert all(abs(cost - 6) < 0.6 for cost in seen[100:]), "less than what is worth writing"
