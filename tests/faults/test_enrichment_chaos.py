"""Companies that are enriched while replicas are killed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.chaos import Plan
from tests.faults.enrichment_chaos import play
from tests.faults.subjects import ENRICHMENT

pytestmark = [pytest.mark.timeout(200)]


@pytest.mark.req("ENR-04", "ENR-54", "ENR-77", "G-78")
def test_under_kills_every_company_ends_and_no_event_is_lost_or_out_of_order(world_of):
    few = replace(ENRICHMENT, environment=lambda url: {**ENRICHMENT.environment(url), "ECLUSE_HANDS": "6"})
    report = play(world_of(few), Plan(kills=2, replicas=2, targets=20, patience=120.0, seed=3), quiet=True)
    assert (problems := report.problems()) == [], problems
    assert report.kills >= 1
