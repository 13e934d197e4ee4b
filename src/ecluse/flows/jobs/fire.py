"""Fires of job schedules: a due instant, or a request by hand, becomes a Job and its first JobRun. They are stored with
the schedule's telemetry and the event in the transaction of the tick or the request; its commit notifies the host's
agents."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from ecluse.access.agents import CHANNEL
from ecluse.base.errors import Conflict
from ecluse.base.ids import cuid
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_now, fetch_rows
from ecluse.engine import DueInstant, FiredAs, NotFired, Unfired, write_events
from ecluse.flows.jobs.attempts import event

STILL_ACTIVE = "overlap: a job of the schedule was still active"

# Without the payload, which MAKE copies in the database. An open job is looked up with LIMIT, and not EXISTS, for which
# the planner would read all open jobs.
KNOWN = """
SELECT j.schedule_id, j.id, j.tenant_id, j.server_instance_id, v.name AS server,
       (v.deleted_at IS NOT NULL OR h.deleted_at IS NOT NULL) AS gone,
       (SELECT o.id FROM jobs o WHERE o.job_schedule_id = j.id AND o.ended_at IS NULL LIMIT 1) IS NOT NULL AS active
FROM job_schedules j JOIN job_servers v ON v.id = j.server_instance_id JOIN job_hosts h ON h.id = v.host_id
WHERE j.schedule_id = ANY(%s)
"""
MAKE = f"""
WITH n AS (
    SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb)
        AS n(schedule_id bigint, job_id text, run_id text, key text, due_at timestamptz)),
made AS (
    INSERT INTO jobs (id, tenant_id, key, job_schedule_id, server_instance_id, host_id, type, payload, payload_secret,
        timeout_seconds, max_attempts, backoff_ms, backoff_type, due_at, created_by, created_at)
    SELECT n.job_id, j.tenant_id, n.key, j.id, v.id, v.host_id, j.job_type, j.payload, j.payload_secret,
        j.timeout_seconds, j.max_retries + 1, j.backoff_ms, j.backoff_type, n.due_at, %(by)s, %(now)s
    FROM n JOIN job_schedules j ON j.schedule_id = n.schedule_id JOIN job_servers v ON v.id = j.server_instance_id
    ON CONFLICT (tenant_id, key) DO NOTHING RETURNING *),
first AS (
    INSERT INTO job_runs (id, tenant_id, job_id, host_id, attempt, due_at)
    SELECT n.run_id, m.tenant_id, m.id, m.host_id, 1, %(now)s FROM made m JOIN n ON n.job_id = m.id),
counted AS (
    UPDATE job_schedules j SET last_run_at = %(now)s, last_run_status = 'success', last_run_job_id = m.id,
        run_count = j.run_count + 1
    FROM made m WHERE j.id = m.job_schedule_id),
called AS (
    SELECT count(pg_notify('{CHANNEL}', host_id)) AS hosts FROM (SELECT DISTINCT host_id FROM made) AS h)
SELECT n.schedule_id, n.run_id, m.id, m.tenant_id, m.key, m.job_schedule_id, m.server_instance_id, m.host_id, m.type
FROM called, made m JOIN n ON n.job_id = m.id
"""  # noqa: S608 - the name of our channel
# A key that is taken names the job that was made before: nothing is made or counted again.
TAKEN = """
SELECT j.schedule_id, b.id FROM job_schedules j JOIN jobs b ON b.job_schedule_id = j.id
WHERE j.schedule_id = ANY(%s) AND b.key = ANY(%s)
"""
UNFIRED = """
UPDATE job_schedules j SET last_run_status = CASE n.state WHEN 'failed' THEN 'scheduler_failed' ELSE 'skipped' END,
    failure_count = j.failure_count + CASE n.state WHEN 'failed' THEN 1 ELSE 0 END
FROM jsonb_to_recordset(%s::jsonb) AS n(schedule_id bigint, state text) WHERE j.schedule_id = n.schedule_id
"""


class Known(NamedTuple):
    """The state of a schedule that a fire depends on. `gone`: its server instance or host was deleted."""

    schedule_id: int
    id: str
    tenant_id: str
    server_instance_id: str
    server: str
    gone: bool
    active: bool


class JobToMake(NamedTuple):
    """A job to be made: its schedule, its key, and the due instant; None: requested by hand."""

    known: Known
    key: str
    due_at: datetime | None


def refusal(known: Known | None, *, skip_active: bool) -> NotFired | None:
    """Return why no job can be made of a schedule; None if one can. `skip_active`: refuse while a job of it is open."""
    if known is None:
        return NotFired("failed", "the job schedule has no settings")
    if known.gone:
        return NotFired("failed", f"server instance {known.server_instance_id} ({known.server}) was deleted")
    if known.active and skip_active:
        return NotFired("skipped", STILL_ACTIVE)
    return None


async def fire(connection: Connection, due: Sequence[DueInstant]) -> Mapping[int, FiredAs | NotFired]:
    """Make the jobs of due instants, each once; return the job or the refusal by schedule id. Used as `Flow.fire`."""
    found = await fetch_all(connection, Known, KNOWN, ([one.schedule_id for one in due],))
    known = {one.schedule_id: one for one in found}
    results: dict[int, FiredAs | NotFired] = {}
    wanted: list[JobToMake] = []
    for one in due:
        schedule = known.get(one.schedule_id)
        why = refusal(schedule, skip_active=one.overlap == "skip")
        if why is not None:
            results[one.schedule_id] = why
        elif schedule is not None:
            milliseconds = int(one.due_at.timestamp() * 1000)
            wanted.append(JobToMake(schedule, f"schedule:{schedule.id}:{milliseconds}", one.due_at))
    for made in await _make(connection, wanted, "scheduler"):
        results[made["schedule_id"]] = FiredAs(made["id"])
    if taken := [one for one in wanted if one.known.schedule_id not in results]:
        given = ([one.known.schedule_id for one in taken], [one.key for one in taken])
        results |= {schedule: FiredAs(job) for schedule, job in await fetch_rows(connection, TAKEN, given)}
    return results


async def on_unfired(connection: Connection, instants: Sequence[Unfired]) -> None:
    """Store that the latest due instants were not fired; `lastRunAt` stays. Used as `Flow.on_unfired`."""
    rows = [{"schedule_id": one.schedule_id, "state": one.state} for one in instants]
    await connection.execute(UNFIRED, (as_json(rows),))


async def run_now(connection: Connection, schedule_id: int, by: str) -> Row:
    """Make a job of the schedule now, even if others of it are active; no due instant is used up. Return its row, with
    `id`, `run_id` and `host_id`. Raise Conflict if its server was deleted."""
    known = (await fetch_all(connection, Known, KNOWN, ([schedule_id],)))[0]
    if (why := refusal(known, skip_active=False)) is not None:
        raise Conflict(f"No job was made: {why.reason}. Give the schedule another server.", code="SERVER_GONE")
    (made,) = await _make(connection, [JobToMake(known, f"schedule:{known.id}:manual-{uuid.uuid4()}", None)], by)
    return made


async def _make(connection: Connection, wanted: Sequence[JobToMake], by: str) -> list[Row]:
    """Insert the jobs whose keys are not taken, with first attempts and events; return the rows of these jobs."""
    if not wanted:
        return []
    now = await fetch_now(connection)
    milliseconds = int(now.timestamp() * 1000)
    rows = [
        {
            "schedule_id": one.known.schedule_id,
            "job_id": cuid(milliseconds),
            "run_id": cuid(milliseconds),
            "key": one.key,
            "due_at": one.due_at,
        }
        for one in wanted
    ]
    made = await fetch_all(connection, dict, MAKE, {"rows": as_json(rows), "by": by, "now": now})
    await write_events(connection, [event(one, "created", job_run_id=one["run_id"]) for one in made])
    return made
