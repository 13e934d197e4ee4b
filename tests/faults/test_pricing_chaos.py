"""The apply of a rule run whose replicas are killed, in a shop that lies about what it has applied."""

from __future__ import annotations

import pytest

from tests.faults.chaos import Plan
from tests.faults.pricing_chaos import play
from tests.faults.subjects import PRICING

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.mark.req("PRC-60", "ENG-05", "ENG-06")
def test_under_kills_no_price_is_changed_twice_or_lost_or_reported_wrongly(world_of):
    report = play(world_of(PRICING), Plan(kills=4, targets=200, patience=120.0, seed=3), quiet=True)
    assert (problems := report.problems()) == [], problems
    assert report.kills >= 1
