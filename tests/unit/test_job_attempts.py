"""What follows from the end of an attempt at a job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.flows.jobs.attempts import Ended, Open, judged, kept_as

NOW = datetime(2026, 3, 1, tzinfo=UTC)
FIRST = Open(
    run_id="r",
    tenant_id="t",
    job_id="j",
    attempt=1,
    status="running",
    fence=1,
    error_code=None,
    late_status=None,
    max_attempts=1,
    backoff_ms=1000,
    backoff_type="fixed",
    cancelled=False,
)
FAILED = Ended("failed", "EXIT_CODE", "exit code 1")


@pytest.mark.req("JOB-30", "JOB-39", "G-54")
def test_an_attempt_is_repeated_as_often_as_the_policy_says():
    assert judged(FIRST, FAILED, NOW)[1:] == ("failed", None)
    three = replace(FIRST, max_attempts=3)
    assert [judged(replace(three, attempt=one), FAILED, NOW).job_status for one in (1, 2, 3)] == [
        "pending",
        "pending",
        "failed",
    ]


@pytest.mark.req("JOB-40")
@pytest.mark.parametrize(("kind", "seconds"), [("fixed", [1.5, 1.5, 1.5]), ("exponential", [1.5, 3, 6])])
def test_the_delay_repeats_or_doubles(kind, seconds):
    four = replace(FIRST, max_attempts=4, backoff_ms=1500, backoff_type=kind)
    delays = [judged(replace(four, attempt=one), FAILED, NOW).retry_at for one in (1, 2, 3)]
    assert delays == [NOW + timedelta(seconds=one) for one in seconds]


@pytest.mark.parametrize(
    ("attempt", "ended", "status", "code"),
    [
        (FIRST, Ended("succeeded"), "succeeded", None),
        (replace(FIRST, cancelled=True), Ended("succeeded"), "succeeded", None),
        (replace(FIRST, cancelled=True, max_attempts=5), FAILED, "failed", "CANCELLED"),
        (replace(FIRST, max_attempts=5), Ended("failed", "NO_AGENT"), "failed", "NO_AGENT"),
        (replace(FIRST, max_attempts=5), Ended("failed", "LEASE_LOST"), "pending", "LEASE_LOST"),
    ],
)
def test_what_a_job_is_after_an_attempt(attempt, ended, status, code):
    verdict = judged(attempt, ended, NOW)
    assert (verdict.job_status, verdict.ended.error_code) == (status, code)
    assert (verdict.retry_at is None) == (status != "pending")


@pytest.mark.parametrize(
    ("status", "code", "late", "kept"),
    [
        ("running", None, None, "result"),
        ("succeeded", None, None, "repeated"),
        ("failed", "EXIT_CODE", None, "repeated"),
        ("failed", "LEASE_LOST", None, "evidence"),
        ("failed", "LEASE_LOST", "succeeded", "repeated"),
    ],
)
def test_what_a_reported_result_is(status, code, late, kept):
    assert kept_as(replace(FIRST, status=status, error_code=code, late_status=late)) == kept
