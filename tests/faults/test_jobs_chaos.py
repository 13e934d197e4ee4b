"""Jobs while their agents and the replicas are killed."""

from __future__ import annotations

import pytest

from tests.faults.chaos import Plan
from tests.faults.jobs_chaos import JOBS, Execution, contradictions, play

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.mark.req("G-53", "JOB-17")
def test_under_kills_each_fire_is_one_job_and_no_result_is_lost(world_of):
    plan = Plan(kills=4, targets=20, replicas=2, pause=(0.2, 0.8), patience=90.0, seed=3)
    report = play(world_of(JOBS), plan, lease=2.0, quiet=True)
    assert (problems := report.problems()) == [], problems


ROW = {"id": "a", "job_id": "j", "attempt": 1, "status": "succeeded", "late_status": None, "error_code": None}
SUCCEEDED = {**ROW, "claimed": True, "job_status": "succeeded"}
AGAIN = {**SUCCEEDED, "id": "b", "attempt": 2}
ONCE = [Execution(1.0, 2.0)]


@pytest.mark.parametrize(
    ("attempts", "executed", "kept", "found"),
    [
        ([SUCCEEDED], {"a": ONCE}, {"a": "succeeded"}, []),
        ([SUCCEEDED], {"a": ONCE, "x": ONCE}, {}, ["attempt x was executed, but no JobRun says so"]),
        ([SUCCEEDED], {"a": [*ONCE, Execution(3.0, 4.0)]}, {}, ["attempt a was executed 2 times"]),
        ([SUCCEEDED], {"a": [Execution(1.0, None)]}, {}, ["attempt 1 of job j has succeeded, but did not come to"]),
        ([{**SUCCEEDED, "job_status": "failed"}], {"a": ONCE}, {}, ["job j is failed"]),
        ([SUCCEEDED, AGAIN], {"a": ONCE, "b": [Execution(1.5, 3.0)]}, {}, ["attempt 2 of job j began before"]),
        ([SUCCEEDED], {"a": ONCE}, {"a": "failed"}, ["the result of a, failed, is lost"]),
    ],
)
def test_the_account_finds_what_must_not_be(attempts, executed, kept, found):
    lines = list(contradictions(attempts, executed, kept))
    assert [line.startswith(one) for line, one in zip(lines, found, strict=True)] == [True] * len(found), lines
