"""A run of automation whose replicas are killed comes to the same outcomes as one whose replicas are left alone."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from tests.faults.automation_chaos import compare
from tests.faults.chaos import Plan
from tests.faults.conftest import short_folder
from tests.faults.world import open_world

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.req("ENG-05", "ENG-06", "AUT-75", "AUT-76")
def test_under_kills_each_fiche_has_the_outcome_of_a_run_without_kills(shared, fork_server):
    @contextmanager
    def opened(subject):
        with short_folder() as folder, open_world(subject, shared, fork_server, folder) as world:
            yield world

    report = compare(opened, Plan(kills=4, targets=80, patience=200.0, seed=2), quiet=True)
    assert (problems := report.problems()) == [], problems
    assert report.kills >= 1
    assert {outcome for outcome, _ in report.outcomes.values()} == {"successful", "failed", "ignored"}
