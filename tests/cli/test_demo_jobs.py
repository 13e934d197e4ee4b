"""The demonstration of jobs: each due time has its decision and each job its end, although agents and server fail."""

from __future__ import annotations

import json

import pytest

from ecluse.demo import jobs
from tests.support.demos import PATIENCE

pytestmark = pytest.mark.long


@pytest.mark.timeout(2 * PATIENCE)
def test_every_due_time_and_job_is_accounted_for_under_kills(demo):
    played = demo("jobs", "--json")
    assert played.end() == 0, played.said
    report = json.loads(played.out[-1])
    assert {name: report[name] for name in jobs.EXPECTED} == jobs.EXPECTED
    assert report["attempts"] > report["jobs"], "the kills have cost no attempt"
    assert played.left() == []


@pytest.mark.parametrize(("changed", "fine"), [({}, True), ({"unaccounted": 1}, False), ({"verify": [{}]}, False)])
def test_only_what_was_expected_is_a_success(changed, fine):
    assert jobs.as_expected({**jobs.EXPECTED, **changed}) is fine
