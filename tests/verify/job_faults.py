"""Faults of jobs and their attempts (I-24)."""

from __future__ import annotations

from tests.verify.plants import Fault, sql

LEASED = """
UPDATE jobs SET status = 'running', ended_at = NULL;
UPDATE job_runs SET status = 'running', ended_at = NULL WHERE attempt = 3
"""
WAITING = """
UPDATE jobs SET status = 'pending', ended_at = NULL;
UPDATE job_runs SET status = 'pending', ended_at = NULL, agent_id = NULL, claim_key = NULL, lease_ends_at = NULL,
    started_at = NULL, due_at = now() - interval '2 days' WHERE attempt = 3;
UPDATE job_runs SET error_code = 'NO_AGENT' WHERE attempt = 2
"""

FAULTS = [
    Fault("I-24", "more attempts than the policy allows", "has 3 attempts, of at most 1",
          sql("UPDATE jobs SET max_attempts = 1")),
    Fault("I-24", "an attempt lost", "has 2 attempts, the last of them number 3",
          sql("DELETE FROM job_runs WHERE attempt = 1")),
    Fault("I-24", "a job without attempts", "has 0 attempts", sql("DELETE FROM job_runs")),
    Fault("I-24", "a job that does not follow its attempt", "is failed, but its attempt 3 is succeeded",
          sql("UPDATE jobs SET status = 'failed'")),
    Fault("I-24", "an attempt begun during the lease of another", "but attempt 2 had its lease until",
          sql("UPDATE job_runs SET lease_ends_at = lease_ends_at + interval '1 hour' WHERE attempt = 2")),
    Fault("I-24", "a failed due time that has no slot", "counts 1 due times that failed, but has 0",
          sql("UPDATE job_schedules SET failure_count = 1")),
    Fault("I-24", "a lease that was over long ago", "is running, but its lease was over",
          sql(LEASED)),
    Fault("I-24", "an attempt that sweeps pass over", "but one since", sql(WAITING)),
]  # fmt: skip
