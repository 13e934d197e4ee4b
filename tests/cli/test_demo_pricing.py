"""The demonstration of pricing: nothing is written twice or lost by the shop, although its server is killed."""

from __future__ import annotations

import json

import pytest

from ecluse.demo import pricing
from tests.support.demos import PATIENCE

pytestmark = pytest.mark.long


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.req("PRC-15", "PRC-51", "PRC-60", "PRC-75")
def test_prices_are_applied_retried_compared_and_restored_under_a_kill(demo):
    played = demo("pricing", "--json")
    assert played.end() == 0, played.said
    report = json.loads(played.out[-1])
    assert {name: report[name] for name in pricing.EXPECTED} == pricing.EXPECTED
    assert report["ledger_writes"] >= report["applied"] + report["rolled_back"]
    assert "kill -9 of the server, on purpose" in played.said
    assert played.left() == []


@pytest.mark.parametrize(
    ("changed", "fine"), [({}, True), ({"doubled": 1}, False), ({"lost": 1}, False), ({"verify": [{}]}, False)]
)
def test_only_what_was_expected_is_a_success(changed, fine):
    assert pricing.as_expected({**pricing.EXPECTED, **changed}) is fine
