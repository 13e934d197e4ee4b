"""I-24, jobs: their attempts are numbered without a gap and within their policy, no two have leases at the same time,
a job has the status of its last attempt, counters equal rows, and no attempt is pending or leased past its time. I-08
checks that every fired slot has its job."""

from __future__ import annotations

from ecluse.verify.database import Check
from ecluse.verify.retention import before
from ecluse.verify.stuck import CARE

SCHEDULE = "(SELECT d.schedule_id FROM job_schedules d WHERE d.id = j.job_schedule_id) AS schedule_id"

ATTEMPTS = f"""
SELECT 'job ' || j.id AS subject, {SCHEDULE}, CASE WHEN r.last = r.n
    THEN format('has %s attempts, of at most %s', r.n, j.max_attempts)
    ELSE format('has %s attempts, the last of them number %s', coalesce(r.n, 0), coalesce(r.last, 0)) END AS message
FROM jobs j LEFT JOIN (SELECT job_id, count(*) AS n, max(attempt) AS last FROM job_runs GROUP BY 1) r ON r.job_id = j.id
WHERE r.n IS NULL OR r.last <> r.n OR r.n > j.max_attempts ORDER BY j.id
"""  # noqa: S608 - the fragment above
STATUS = f"""
SELECT 'job ' || j.id AS subject, {SCHEDULE},
       format('is %s, but its attempt %s is %s', j.status, r.attempt, r.status) AS message
FROM jobs j JOIN (SELECT DISTINCT ON (job_id) * FROM job_runs ORDER BY job_id, attempt DESC) r ON r.job_id = j.id
WHERE j.status <> r.status ORDER BY j.id
"""  # noqa: S608 - the fragment above
# Of an attempt that its agent has reported, the lease ends with the report. An agent that cannot renew reports
# LEASE_LOST, too, after it has stopped the program, whose exit code it knows.
OVERLAPS = f"""
SELECT 'job ' || j.id AS subject, {SCHEDULE},
       format('attempt %s was begun at %s, but attempt %s had its lease until %s', attempt + 1, following, attempt,
              until) AS message
FROM jobs j JOIN (
    SELECT job_id, attempt, lead(started_at) OVER (PARTITION BY job_id ORDER BY attempt) AS following,
           CASE WHEN error_code = 'LEASE_LOST' AND exit_code IS NULL THEN greatest(lease_ends_at, ended_at)
                ELSE coalesce(ended_at, lease_ends_at) END AS until
    FROM job_runs WHERE started_at IS NOT NULL) a ON a.job_id = j.id
WHERE following < until ORDER BY j.id, attempt
"""  # noqa: S608 - the fragment above
FAILURES = f"""
SELECT 'job schedule ' || d.id AS subject, d.schedule_id, format('counts %s due times that failed, but has %s',
       d.failure_count, coalesce(s.n, 0)) AS message
FROM job_schedules d LEFT JOIN (
    SELECT schedule_id, count(*) AS n FROM schedule_slots WHERE state = 'failed' GROUP BY 1) s
    ON s.schedule_id = d.schedule_id
WHERE coalesce(s.n, 0) > d.failure_count
   OR coalesce(s.n, 0) < d.failure_count AND {before("slots")} = '-infinity' ORDER BY 2
"""  # noqa: S608 - the fragment of retention
LEASED = f"""
{CARE}
SELECT 'job ' || j.id AS subject, {SCHEDULE},
       format('attempt %s is running, but its lease was over at %s', r.attempt, r.lease_ends_at) AS message
FROM care, job_runs r JOIN jobs j ON j.id = r.job_id WHERE NOT care.moved AND r.status = 'running'
  AND greatest(r.lease_ends_at, care.since) < now() - interval '60 seconds' ORDER BY r.id
"""  # noqa: S608 - the fragment above
# How long a job waits for an agent is a setting: one is past its time if others that came later have been ended.
PENDING = f"""
{CARE}
SELECT 'job ' || j.id AS subject, {SCHEDULE},
       format('attempt %s waits since %s, but one since %s was ended as NO_AGENT at %s', r.attempt, r.due_at, o.due_at,
              o.ended_at) AS message
FROM care, job_runs r JOIN jobs j ON j.id = r.job_id, (
    SELECT due_at, ended_at FROM job_runs WHERE error_code = 'NO_AGENT' AND ended_at < now() - interval '5 minutes'
    ORDER BY due_at DESC LIMIT 1) o
WHERE NOT care.moved AND r.status = 'pending' AND r.due_at < o.due_at AND care.since < now() - interval '5 minutes'
ORDER BY r.id
"""  # noqa: S608 - the fragment above

I_24_JOBS = Check(
    "I-24",
    "SELECT (SELECT count(*) FROM jobs) + (SELECT count(*) FROM job_runs) AS n",
    (ATTEMPTS, STATUS, OVERLAPS, FAILURES, LEASED, PENDING),
)
