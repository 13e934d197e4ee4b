"""I-08, due times: every fired slot has one run or one job, under the key computed from the slot, and every such run or
job has a fired slot.

The tables do not show at which instants a schedule is due (tests check that against another implementation), but they
show the decision for each slot.
"""

from __future__ import annotations

from ecluse.verify.database import Check
from ecluse.verify.retention import before

NAME = "format('schedule %s due %s', s.schedule_id, s.due_at)"
KEY = """format(CASE r.flow WHEN 'automation' THEN 'automation-schedule-%s-%s' ELSE 'schedule:%s:%s' END,
    s.schedule_id, (extract(epoch FROM s.due_at) * 1000)::bigint)"""

SLOTS = f"""
SELECT {NAME} AS subject, s.schedule_id, s.run_id, CASE
    WHEN r.id IS NULL THEN format('fired as run %s, which does not exist', s.run_id)
    WHEN r.tenant_id <> s.tenant_id THEN format('belongs to tenant %s, but its run to %s', s.tenant_id, r.tenant_id)
    WHEN r.event_key <> {KEY} THEN format('fired as run %s, which has event key %s', r.id, r.event_key)
    ELSE format('fired as run %s, which names schedule %s', r.id, coalesce(r.schedule_id::text, 'none')) END
    AS message
FROM schedule_slots s LEFT JOIN runs r ON r.id = s.run_id
WHERE s.state = 'fired' AND s.reference IS NULL AND (r.id IS NULL
    OR (r.tenant_id, r.event_key, r.schedule_id) IS DISTINCT FROM (s.tenant_id, {KEY}, s.schedule_id))
ORDER BY 2, s.due_at
"""  # noqa: S608 - the fragments above

RUNS = """
SELECT 'run ' || r.id AS subject, r.schedule_id, r.id AS run_id,
       format('was started by schedule %s as %s, but has no fired slot', r.schedule_id, r.event_key) AS message
FROM runs r LEFT JOIN schedule_slots s ON s.schedule_id = r.schedule_id AND s.run_id = r.id AND s.state = 'fired'
WHERE r.schedule_id IS NOT NULL AND r.event_key ~ '^(schedule:[0-9]+:|automation-schedule-[0-9]+-)[0-9]+$'
  AND s.run_id IS NULL ORDER BY r.id
"""

JOB_KEY = "format('schedule:%s:%s', d.id, (extract(epoch FROM s.due_at) * 1000)::bigint)"
SLOTS_OF_JOBS = f"""
SELECT {NAME} AS subject, s.schedule_id, CASE
    WHEN j.id IS NULL THEN format('fired as job %s, which does not exist', s.reference)
    ELSE format('fired as job %s of tenant %s, which has key %s', j.id, j.tenant_id, j.key) END AS message
FROM schedule_slots s LEFT JOIN job_schedules d ON d.schedule_id = s.schedule_id LEFT JOIN jobs j ON j.id = s.reference
WHERE s.state = 'fired' AND s.reference IS NOT NULL AND CASE WHEN j.id IS NULL THEN s.decided_at >= {before("jobs")}
    ELSE (j.tenant_id, j.key) IS DISTINCT FROM (s.tenant_id, {JOB_KEY}) END ORDER BY 2, s.due_at
"""  # noqa: S608 - the fragments above

JOBS = f"""
SELECT 'job ' || j.id AS subject, d.schedule_id, format('was made for %s, but has no fired slot', j.due_at) AS message
FROM jobs j JOIN job_schedules d ON d.id = j.job_schedule_id
LEFT JOIN schedule_slots s ON s.schedule_id = d.schedule_id AND s.due_at = j.due_at AND s.reference = j.id
WHERE j.due_at IS NOT NULL AND s.reference IS NULL AND j.created_at >= {before("slots")} ORDER BY j.id
"""  # noqa: S608 - the fragment of retention

COUNTS_OF_JOBS = f"""
SELECT 'job schedule ' || d.id AS subject, d.schedule_id, format('counts %s jobs, but has %s', d.run_count,
       coalesce(j.n, 0)) AS message
FROM job_schedules d
LEFT JOIN (SELECT job_schedule_id, count(*) AS n FROM jobs WHERE key !~ ':retry-' GROUP BY 1) j
    ON j.job_schedule_id = d.id
WHERE coalesce(j.n, 0) > d.run_count OR coalesce(j.n, 0) < d.run_count AND {before("jobs")} = '-infinity' ORDER BY 2
"""  # noqa: S608 - the fragment of retention

BEYOND = f"""
SELECT {NAME} AS subject, s.schedule_id, format('is %s, but the schedule is handled until %s only', s.state,
       c.handled_until) AS message
FROM schedule_slots s JOIN schedules c ON c.id = s.schedule_id WHERE s.due_at > c.handled_until ORDER BY 2, s.due_at
"""  # noqa: S608 - the fragment above

FOREIGN = f"""
SELECT {NAME} AS subject, s.schedule_id, format('belongs to tenant %s, but its schedule to %s', s.tenant_id,
       c.tenant_id) AS message
FROM schedule_slots s JOIN schedules c ON c.id = s.schedule_id WHERE s.tenant_id <> c.tenant_id ORDER BY 2, s.due_at
"""  # noqa: S608 - the fragment above

# A waiting slot needs a tick, and a disabled schedule has none. Two slots never wait at once: the later replaces the
# earlier.
WAITING = """
SELECT 'schedule ' || s.schedule_id AS subject, s.schedule_id, CASE
    WHEN count(*) > 1 THEN format('%s slots wait at once', count(*))
    ELSE 'is disabled, but a slot waits' END AS message
FROM schedule_slots s JOIN schedules c ON c.id = s.schedule_id WHERE s.state = 'waiting'
GROUP BY s.schedule_id, c.next_due_at HAVING count(*) > 1 OR c.next_due_at IS NULL ORDER BY 2
"""

# A schedule of a flow that no running replica has loaded is no violation: only if others of the same flow were fired
# since.
PASSED_OVER = """
SELECT 'schedule ' || c.id AS subject, c.id AS schedule_id,
       format('was due at %s, but other schedules of flow %s were fired until %s', c.next_due_at, c.flow, d.at)
       AS message
FROM schedules c JOIN (
    SELECT c.flow, max(s.decided_at) AS at FROM schedule_slots s JOIN schedules c ON c.id = s.schedule_id
    WHERE s.state = 'fired' GROUP BY 1) d ON d.flow = c.flow
WHERE c.next_due_at < d.at - interval '5 minutes' AND EXISTS (SELECT 1 FROM clock_offset WHERE "offset" = '0')
ORDER BY c.id
"""

I_08_DUE_TIMES = Check(
    "I-08",
    "SELECT (SELECT count(*) FROM schedules) + (SELECT count(*) FROM schedule_slots) AS n",
    (SLOTS, RUNS, SLOTS_OF_JOBS, JOBS, COUNTS_OF_JOBS, BEYOND, FOREIGN, WAITING, PASSED_OVER),
)
