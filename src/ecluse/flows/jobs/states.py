"""Every change of the status of a job or an attempt, by compare-and-set. Locks are taken in the order agent, attempt,
job, schedule. `fire.py` inserts jobs and their first attempts."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from psycopg.types.json import Jsonb

from ecluse.access.agents import CHANNEL
from ecluse.base.errors import Conflict, NotFound
from ecluse.base.ids import cuid
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_now, fetch_one, fetch_value
from ecluse.engine import Event, write_events
from ecluse.flows.jobs import attempts
from ecluse.flows.jobs.attempts import Ended, Kept, Open, Verdict, event, judged, kept_as

BATCH = 200
leases_lost: Counter[tuple[str]] = Counter()  # by tenant, ended by this process

# One statement, so that an idle poll costs one: it records that the agent is online, and claims attempts of its host.
# Without joins, for which the planner would expect many rows and read whole tables.
CLAIM = """
WITH agent AS (
    UPDATE job_agents SET version = %(version)s, last_seen_at = ecluse_now(),
        online_since = CASE WHEN last_seen_at < ecluse_now() - %(away)s THEN ecluse_now()
            ELSE coalesce(online_since, ecluse_now()) END,
        former_credential_hash = CASE WHEN credential_hash = %(used)s THEN NULL ELSE former_credential_hash END
    WHERE id = %(agent)s AND revoked_at IS NULL RETURNING id, host_id),
before AS MATERIALIZED (
    SELECT r.* FROM job_runs r WHERE r.agent_id = %(agent)s AND r.claim_key = %(key)s),
free AS MATERIALIZED (
    SELECT r.id, r.job_id FROM job_runs r
    WHERE r.host_id = (SELECT host_id FROM agent) AND r.status = 'pending' AND r.due_at <= ecluse_now()
      AND (%(types)s::text[] = '{}' OR (SELECT type FROM jobs WHERE id = r.job_id) = ANY(%(types)s::text[]))
      AND NOT EXISTS (SELECT FROM before)
    ORDER BY r.host_id, r.due_at, r.id LIMIT %(most)s FOR UPDATE SKIP LOCKED),
claimed AS (
    UPDATE job_runs r SET status = 'running', fence = r.fence + 1, agent_id = %(agent)s, claim_key = %(key)s,
        started_at = ecluse_now(), lease_ends_at = ecluse_now() + %(lease)s
    WHERE r.id = ANY(ARRAY(SELECT id FROM free)) RETURNING r.*),
begun AS (UPDATE jobs SET status = 'running' WHERE id = ANY(ARRAY(SELECT job_id FROM free)) AND status = 'pending'),
mine AS (
    SELECT * FROM claimed UNION ALL
    SELECT * FROM before WHERE status = 'running' AND lease_ends_at > ecluse_now())
SELECT a.id IS NOT NULL AS known, m.id, m.job_id, m.attempt, m.fence, j.type, j.payload, j.payload_secret,
       j.timeout_seconds, m.lease_ends_at, extract(epoch FROM m.lease_ends_at - ecluse_now())::float8 AS lease_seconds
FROM (SELECT 1) AS always LEFT JOIN agent a ON true LEFT JOIN mine m ON true
LEFT JOIN LATERAL (SELECT * FROM jobs WHERE id = m.job_id LIMIT 1) AS j ON true
ORDER BY m.due_at, m.id
"""
RENEW = """
WITH seen AS (UPDATE job_agents SET last_seen_at = ecluse_now() WHERE id = %(agent)s)
UPDATE job_runs r SET lease_ends_at = ecluse_now() + %(lease)s FROM jobs j
WHERE r.id = %(run)s AND r.agent_id = %(agent)s AND r.fence = %(fence)s AND r.status = 'running'
  AND r.lease_ends_at > ecluse_now() AND j.id = r.job_id
RETURNING j.cancel_requested_at IS NOT NULL AS cancel, r.lease_ends_at
"""
OPEN = """
SELECT r.id AS run_id, r.tenant_id, r.job_id, r.attempt, r.status, r.fence, r.error_code, r.late_status, j.max_attempts,
       j.backoff_ms, j.backoff_type, j.cancel_requested_at IS NOT NULL AS cancelled, j.payload_secret, r.log_length
FROM job_runs r JOIN jobs j ON j.id = r.job_id WHERE {which} FOR UPDATE OF r, j {rest}
"""
OF_HOST = OPEN.format(which="r.id = %s AND r.tenant_id = %s AND r.host_id = %s", rest="")
OF_JOB = OPEN.format(which="r.job_id = %s AND r.ended_at IS NULL", rest="")
UNCANCELLED = "j.tenant_id = %s AND j.ended_at IS NULL AND j.cancel_requested_at IS NULL"
UNCANCELLED_LEFT = f"SELECT EXISTS (SELECT FROM jobs j WHERE {UNCANCELLED})"  # noqa: S608 - our own words
OF_TENANT = OPEN.format(which=f"{UNCANCELLED} AND r.ended_at IS NULL ORDER BY r.id", rest="")

# Attempts whose lease is over, or that were not claimed in time. The indexes find the oldest of both before the join,
# without which the planner would read all attempts; the time is read once, in a subquery.
LEASE_OVER = "r.status = 'running' AND %(leases)s AND r.lease_ends_at <= (SELECT ecluse_now())"
UNCLAIMED = "r.status = 'pending' AND r.due_at <= (SELECT ecluse_now() - %(longest)s::interval)"
OVERDUE = OPEN.format(
    which=f"""(({LEASE_OVER}) OR ({UNCLAIMED})) AND r.id = ANY(
    ARRAY(SELECT r.id FROM job_runs r WHERE {LEASE_OVER} ORDER BY r.lease_ends_at LIMIT {BATCH})
    || ARRAY(SELECT r.id FROM job_runs r WHERE {UNCLAIMED} ORDER BY r.due_at LIMIT {BATCH}))""",  # noqa: S608 - our own
    rest="SKIP LOCKED",
)
END = f"""
WITH e AS (
    SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS e(run_id text, was text, status text, error_code text,
        error text, exit_code integer, output jsonb, job_status text, retry_at timestamptz, next_id text)),
ended AS (
    UPDATE job_runs r SET status = e.status, ended_at = %(now)s, error_code = e.error_code, error = e.error,
        exit_code = e.exit_code, output = e.output
    FROM e WHERE r.id = e.run_id AND r.status = e.was RETURNING r.*),
again AS (
    INSERT INTO job_runs (id, tenant_id, job_id, host_id, attempt, due_at)
    SELECT e.next_id, d.tenant_id, d.job_id, d.host_id, d.attempt + 1, e.retry_at
    FROM ended d JOIN e ON e.run_id = d.id WHERE e.next_id IS NOT NULL RETURNING host_id),
of_jobs AS (
    UPDATE jobs j SET status = e.job_status, ended_at = CASE WHEN e.next_id IS NULL THEN %(now)s END
    FROM ended d JOIN e ON e.run_id = d.id WHERE j.id = d.job_id RETURNING j.*, d.id AS run_id),
of_schedules AS (
    UPDATE job_schedules s SET last_run_status = 'failed' FROM of_jobs j
    WHERE j.status = 'failed' AND s.id = j.job_schedule_id AND s.last_run_job_id = j.id),
called AS (SELECT count(pg_notify('{CHANNEL}', host_id)) AS hosts FROM (SELECT DISTINCT host_id FROM again) AS h)
SELECT j.* FROM of_jobs j, called WHERE j.ended_at IS NOT NULL
"""  # noqa: S608 - our own words
LATE = "UPDATE job_runs SET late_status = %s, late_at = ecluse_now(), late_result = %s WHERE id = %s"
CANCEL = """
UPDATE jobs SET cancel_requested_at = coalesce(cancel_requested_at, ecluse_now()),
    cancel_requested_by = coalesce(cancel_requested_by, %s) WHERE id = ANY(%s) AND ended_at IS NULL
"""
AGAIN = f"""
WITH made AS (
    INSERT INTO jobs (id, tenant_id, key, job_schedule_id, server_instance_id, host_id, type, payload, payload_secret,
        timeout_seconds, max_attempts, backoff_ms, backoff_type, created_by, created_at)
    SELECT %(job)s, j.tenant_id, 'schedule:' || j.job_schedule_id || ':retry-' || %(uuid)s, j.job_schedule_id,
        j.server_instance_id, j.host_id, j.type, j.payload, j.payload_secret, j.timeout_seconds, j.max_attempts,
        j.backoff_ms, j.backoff_type, %(by)s, %(now)s
    FROM jobs j WHERE j.id = %(again)s AND j.status = 'failed' RETURNING *),
first AS (
    INSERT INTO job_runs (id, tenant_id, job_id, host_id, attempt, due_at)
    SELECT %(run)s, tenant_id, id, host_id, 1, %(now)s FROM made)
SELECT made.*, pg_notify('{CHANNEL}', host_id) FROM made
"""  # noqa: S608 - our own words


class Claim(NamedTuple):
    agent: str
    key: uuid.UUID
    most: int
    types: list[str]
    version: str
    used: bytes  # hash of the credential
    lease: timedelta
    away: timedelta  # silence after which an agent was offline


async def claim(connection: Connection, wanted: Claim) -> list[Row] | None:
    """Claim attempts that wait for the agent's host, or return the running ones that this key has claimed before;
    record that the agent is online. Return None if the agent has been revoked."""
    rows = await fetch_all(connection, dict, CLAIM, wanted._asdict())
    return [row for row in rows if row["id"] is not None] if rows[0]["known"] else None


async def renew(connection: Connection, agent: str, run_id: str, fence: int, lease: timedelta) -> Row | None:
    """Extend a running attempt's lease; return its end, and whether to `cancel` the job. None: the lease is over."""
    given = {"agent": agent, "run": run_id, "fence": fence, "lease": lease}
    return await fetch_one(connection, dict, RENEW, given)


async def attempt_of(connection: Connection, tenant: str, host: str, run_id: str, fence: int) -> Open:
    """Lock and return an attempt of this host. Raise NotFound if it has no such one, Conflict if the fence is wrong."""
    found = await fetch_one(connection, Open, OF_HOST, (run_id, tenant, host))
    if found is None:
        raise NotFound(f"There is no attempt {run_id} of this host.")
    if fence != found.fence or fence == 0:
        raise Conflict(f"Attempt {run_id} was never given out with fence {fence}.", code="FENCE_UNKNOWN")
    return found


async def report(connection: Connection, attempt: Open, ended: Ended) -> Kept:
    """Store a result that an agent reports: as the end of the attempt, or as evidence if it is late; return which."""
    kept = kept_as(attempt)
    if kept == "result":
        await _end(connection, [(attempt, ended)])
    elif kept == "evidence":
        await connection.execute(LATE, (ended.status, Jsonb(ended._asdict()), attempt.run_id))
    return kept


async def end_overdue(connection: Connection, longest: timedelta, *, leases: bool) -> bool:
    """End attempts that no agent has claimed for `longest` and, with `leases`, those whose lease is over, up to BATCH
    of each; return whether there may be more."""
    async with connection.transaction():
        found = await fetch_all(connection, Open, OVERDUE, {"longest": longest, "leases": leases})
        ends = {"running": attempts.LOST, "pending": attempts.NOT_CLAIMED}
        await _end(connection, [(one, ends[one.status]) for one in found])
    leases_lost.update((one.tenant_id,) for one in found if one.status == "running")
    return len(found) >= BATCH


async def cancel(connection: Connection, job_id: str, by: str) -> None:
    """Cancel a job. An attempt that waits ends at once; one that runs is stopped by its agent, at the next renewal.
    Raise Conflict if the job has ended."""
    if not await _cancel(connection, await fetch_all(connection, Open, OF_JOB, (job_id,)), by):
        raise Conflict("The job has ended already.", code="ALREADY_ENDED")


async def cancel_all(connection: Connection, tenant: str, by: str) -> int:
    """Cancel all open jobs of a tenant, as above; return the number of those that were not cancelled before. Repeated
    until there is none: an attempt that ends meanwhile is followed by one that a statement does not see."""
    count = 0
    while await fetch_value(connection, UNCANCELLED_LEFT, (tenant,)):
        count += await _cancel(connection, await fetch_all(connection, Open, OF_TENANT, (tenant,)), by)
    return count


async def _cancel(connection: Connection, found: Sequence[Open], by: str) -> int:
    await connection.execute(CANCEL, (by, [one.job_id for one in found]))
    waiting = [replace(one, cancelled=True) for one in found if one.status == "pending"]
    await _end(connection, [(one, attempts.CANCELLED_WAITING) for one in waiting])
    return len(found)


async def make_again(connection: Connection, job_id: str, by: str) -> str:
    """Make a new job like a failed one; return its id. Raise Conflict if the job has not failed."""
    now = await fetch_now(connection)
    given = {"again": job_id, "by": by, "now": now, "uuid": str(uuid.uuid4())}
    ids = {"job": cuid(int(now.timestamp() * 1000)), "run": cuid(int(now.timestamp() * 1000))}
    job = await fetch_one(connection, dict, AGAIN, given | ids)
    if job is None:
        raise Conflict("Only a failed job can be repeated.", code="CONFLICT")
    await write_events(connection, [event(job, "created", job_run_id=ids["run"], retry_of=job_id)])
    return str(job["id"])


async def _end(connection: Connection, ends: Sequence[tuple[Open, Ended]]) -> None:
    """Store the ends of locked attempts, with next attempts, statuses of jobs and schedules, and events."""
    if not ends:
        return
    now = await fetch_now(connection)
    verdicts = {attempt.run_id: (attempt, judged(attempt, how, now)) for attempt, how in ends}
    rows: list[Row] = []
    for attempt, (ended, job_status, retry_at) in verdicts.values():
        next_id = None if retry_at is None else cuid(int(now.timestamp() * 1000))
        row = {"run_id": attempt.run_id, "was": attempt.status, "job_status": job_status, "next_id": next_id}
        rows.append({**row, "retry_at": retry_at, **ended._asdict()})
    over = await fetch_all(connection, dict, END, {"rows": as_json(rows), "now": now})
    await write_events(connection, [_over(job, *verdicts[job["run_id"]]) for job in over])


def _over(job: Row, last: Open, verdict: Verdict) -> Event:
    ended, about = verdict.ended, {"status": job["status"], "attempts": last.attempt}
    if ended.status == "succeeded":
        return event(job, "completed", **about)
    return event(job, "failed", **about, error_code=ended.error_code, error=ended.error)
