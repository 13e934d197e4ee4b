"""Storage of companies, jobs and sources, and the only place that changes the state of a company: under the lock of its
row, by the table of transitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ecluse.base.errors import Conflict
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_column, fetch_row, fetch_rows
from ecluse.flows.enrichment.rules import Known
from ecluse.flows.enrichment.states import Fetched, Status, Trigger, check_move
from ecluse.vendors.registers import Source

# A statement of its own, before LOOK: it may wait for another transaction that inserts the same companies, and LOOK
# then sees the jobs of that one. In one order: two such transactions must not deadlock.
PUT_COMPANIES = """
INSERT INTO companies (siren, enrichment_status, created_at, status_at)
SELECT s, 'PENDING', ecluse_now(), ecluse_now() FROM unnest(%s::text[]) AS s
WHERE NOT EXISTS (SELECT 1 FROM companies c WHERE c.siren = s) ORDER BY s ON CONFLICT DO NOTHING
"""
# An open job that is locked stays open until the transaction ends; one that is seen and not locked has just ended, and
# what this statement says of the company is older than that.
LOOK = """
WITH locked AS MATERIALIZED (
    SELECT r.id FROM enrichment_jobs j JOIN runs r ON r.id = j.run_id
    WHERE j.siren = ANY(%(sirens)s) AND j.ended_at IS NULL AND r.ended_at IS NULL ORDER BY r.id FOR SHARE OF r)
SELECT c.siren, c.enrichment_status, c.updated_at, c.job_ended_at, c.relaunchable, j.run_id, l.id IS NOT NULL,
       ecluse_now()
FROM companies c LEFT JOIN enrichment_jobs j ON j.siren = c.siren AND j.ended_at IS NULL
LEFT JOIN locked l ON l.id = j.run_id WHERE c.siren = ANY(%(sirens)s)
"""
# A transaction that holds locks of runs must not wait for those of others, which may be in another order.
LOOK_AGAIN = LOOK.replace("FOR SHARE OF r", "FOR SHARE OF r SKIP LOCKED")
PUT_JOBS = """
INSERT INTO enrichment_jobs (run_id, tenant_id, siren, trigger, request_id, correlation_id, idempotency_key, status,
                             asked, created_at)
SELECT run_id, tenant_id, siren, trigger, request_id, correlation_id, idempotency_key, 'PENDING',
       ARRAY(SELECT jsonb_array_elements_text(asked)), ecluse_now()
FROM jsonb_to_recordset(%s::jsonb) AS j(run_id bigint, tenant_id text, siren text, trigger text, request_id bigint,
    correlation_id text, idempotency_key text, asked jsonb)
ORDER BY siren ON CONFLICT DO NOTHING RETURNING run_id
"""
# A company that ages while a job waits in line is marked when the next caller asks, or by the sweep.
MARK_STALE = """
UPDATE companies SET enrichment_status = 'STALE', status_at = ecluse_now(), stale_since = updated_at + %(fresh)s
WHERE siren IN (
    SELECT siren FROM companies WHERE enrichment_status IN ('SUCCESS', 'PARTIAL')
      AND updated_at <= ecluse_now() - %(fresh)s::interval
      AND (%(sirens)s::text[] IS NULL OR siren = ANY(%(sirens)s))
    ORDER BY siren LIMIT 500 FOR NO KEY UPDATE)
"""
# The company before its job, as everywhere: a group that has locked the company waits for a job of it that is changed.
BEGIN_CALL = """
WITH source AS (
    INSERT INTO enrichment_sources (run_id, source_api, started_at) VALUES (%(run)s, %(source)s, ecluse_now())
    ON CONFLICT DO NOTHING),
company AS MATERIALIZED (
    SELECT c.enrichment_status FROM enrichment_jobs j JOIN companies c ON c.siren = j.siren
    WHERE j.run_id = %(run)s AND j.ended_at IS NULL AND j.attempt < %(attempt)s FOR NO KEY UPDATE OF c)
UPDATE enrichment_jobs SET status = 'RUNNING', attempt = %(attempt)s, started_at = coalesce(started_at, ecluse_now())
FROM company WHERE run_id = %(run)s AND ended_at IS NULL AND attempt < %(attempt)s
RETURNING trigger, company.enrichment_status
"""
SET_RUNNING = "UPDATE companies SET enrichment_status = 'RUNNING', status_at = ecluse_now() WHERE siren = %s"
END_SOURCES = """
INSERT INTO enrichment_sources AS s
    (run_id, source_api, started_at, ended_at, status, http_status, error_code, message, executions, facts)
SELECT run_id, source_api, ecluse_now(), ecluse_now(), status, http_status, error_code, message, executions, facts
FROM jsonb_to_recordset(%s::jsonb) AS e(run_id bigint, source_api text, status text, http_status integer,
    error_code text, message text, executions integer, facts jsonb)
ORDER BY run_id
ON CONFLICT (run_id, source_api) DO UPDATE SET ended_at = excluded.ended_at, status = excluded.status,
    http_status = excluded.http_status, error_code = excluded.error_code, message = excluded.message,
    executions = excluded.executions, facts = excluded.facts
RETURNING run_id, (extract(epoch FROM s.ended_at - s.started_at) * 1000)::bigint
"""
# In one order: two transactions that end several jobs must not deadlock.
LOCK_COMPANIES = """
SELECT siren, enrichment_status, sources FROM companies WHERE siren = ANY(%s) ORDER BY siren FOR NO KEY UPDATE
"""
JOBS = """
SELECT run_id, tenant_id, siren, trigger, request_id, correlation_id, status, attempt, asked FROM enrichment_jobs
WHERE run_id = ANY(%s) AND ended_at IS NULL ORDER BY siren
"""
SOURCES = """
SELECT run_id, source_api, status, http_status, error_code, message, facts FROM enrichment_sources
WHERE run_id = ANY(%s) AND ended_at IS NOT NULL
"""
ENDED = """e AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS e(run_id bigint, siren text, status text, began boolean,
        merged boolean, enrichment_error text, core_identity_present boolean, sources_success_count integer,
        required_sources_failed_count integer, optional_sources_failed_count integer, relaunchable boolean,
        legal_name text, sources jsonb))"""
FAILED = ("required_sources_failed_count", "optional_sources_failed_count")
COUNTERS = ("core_identity_present", "sources_success_count", *FAILED)
# A job that never began has changed nothing about its company, which keeps its state.
END_COMPANIES = f"""
WITH {ENDED}
UPDATE companies c SET enrichment_status = e.status, enrichment_error = e.enrichment_error, job_ended_at = ecluse_now(),
    {", ".join(f"{name} = e.{name}" for name in COUNTERS)}, relaunchable = e.relaunchable, status_at = ecluse_now(),
    legal_name = CASE WHEN e.merged THEN e.legal_name ELSE c.legal_name END,
    sources = CASE WHEN e.merged THEN e.sources ELSE c.sources END,
    updated_at = CASE WHEN e.merged THEN ecluse_now() ELSE c.updated_at END,
    stale_since = CASE WHEN e.merged THEN NULL ELSE c.stale_since END
FROM e WHERE c.siren = e.siren AND e.began
"""  # noqa: S608 - our own names
PUT_SNAPSHOTS = f"""
WITH {ENDED}
INSERT INTO company_snapshots (siren, job_id, enrichment_status, sources, created_at)
SELECT siren, run_id, status, sources, ecluse_now() FROM e WHERE merged ORDER BY siren
"""  # noqa: S608 - our own names
END_JOBS = f"""
WITH {ENDED}, cleared AS (
    UPDATE enrichment_sources s SET facts = NULL FROM e WHERE s.run_id = e.run_id AND s.facts IS NOT NULL)
UPDATE enrichment_jobs j SET status = e.status, enrichment_error = e.enrichment_error, ended_at = ecluse_now(),
    {", ".join(f"{name} = e.{name}" for name in COUNTERS)}
FROM e WHERE j.run_id = e.run_id
"""  # noqa: S608 - our own names
END_REQUESTS = f"""
WITH {ENDED}, waiting AS MATERIALIZED (
    SELECT DISTINCT ON (r.job_id, r.tenant_id) r.job_id, r.tenant_id, r.correlation_id
    FROM requests r JOIN e ON e.run_id = r.job_id ORDER BY r.job_id, r.tenant_id, r.id DESC),
updated AS (
    UPDATE requests r SET job_id = e.run_id, updated_at = ecluse_now() FROM e WHERE r.company_siren = e.siren)
SELECT job_id, tenant_id, correlation_id FROM waiting
"""  # noqa: S608 - our own names


class Taken(Conflict):
    """These companies have an open job, or their job of today has succeeded. The caller reads the state again."""

    def __init__(self, sirens: Collection[str]) -> None:
        super().__init__(f"There is a job of {', '.join(sorted(sirens))}.")
        self.sirens = sirens


class JobRow(NamedTuple):
    """An open job, with the columns that its end needs."""

    run_id: int
    tenant_id: str
    siren: str
    trigger: str
    request_id: int | None
    correlation_id: str
    status: str
    attempt: int
    asked: list[str]


class Looked(NamedTuple):
    """A company as a trigger finds it; `job`: its open job; `locked`: it cannot end before this transaction."""

    known: Known
    job: int | None
    locked: bool
    now: datetime

    @property
    def held(self) -> int | None:
        return self.job if self.locked else None


async def look(connection: Connection, sirens: Collection[str], *, wait: bool = True) -> dict[str, Looked]:
    """Insert companies that are new, lock the open jobs of all, and return what is known of each, by SIREN. `wait`
    False: a second look at companies, which waits for no lock."""
    if wait:
        await connection.execute(PUT_COMPANIES, (list(sirens),))
    return {
        siren: Looked(Known(Status(status), updated_at, ended_at, relaunchable, job is not None), job, locked, now)
        for siren, status, updated_at, ended_at, relaunchable, job, locked, now in await fetch_rows(
            connection, LOOK if wait else LOOK_AGAIN, {"sirens": list(sirens)}
        )
    }


async def mark_stale(connection: Connection, fresh: timedelta, sirens: Sequence[str] | None = None) -> None:
    """Mark up to 500 companies as STALE whose data are older than `fresh`: of `sirens`, or of all (None)."""
    await connection.execute(MARK_STALE, {"fresh": fresh, "sirens": sirens})


async def put_jobs(connection: Connection, rows: Sequence[Row]) -> None:
    """Insert jobs. Raise Taken if a company has an open job, or one with the same idempotency key has succeeded."""
    put = set(await fetch_column(connection, PUT_JOBS, (as_json(rows),)))
    if taken := {row["siren"] for row in rows if row["run_id"] not in put}:
        raise Taken(taken)


async def begin_call(connection: Connection, run_id: int, siren: str, source: Source, attempt: int) -> bool:
    """Record that a job asks a source under its lock of this `attempt`; return True if that attempt is new. The company
    of the job is RUNNING from here on."""
    given = {"run": run_id, "attempt": attempt, "source": source}
    row = await fetch_row(connection, BEGIN_CALL, given)
    if row is not None:
        begun_by, before = row[0], Status(row[1])
        if before is not Status.RUNNING:
            trigger = Trigger(begun_by) if begun_by in list(Trigger) else None
            check_move(siren, before, Status.RUNNING, trigger)
            await connection.execute(SET_RUNNING, (siren,))
    return row is not None


async def end_sources(connection: Connection, rows: Sequence[Row]) -> dict[int, int]:
    """Store the final results of sources; return the duration of each in milliseconds, by run."""
    return dict(await fetch_rows(connection, END_SOURCES, (as_json(rows),)))


async def open_jobs(connection: Connection, run_ids: Collection[int]) -> list[JobRow]:
    return await fetch_all(connection, JobRow, JOBS, (list(run_ids),))


async def lock_companies(connection: Connection, sirens: Collection[str]) -> dict[str, tuple[Status, Row]]:
    """Lock companies; return state and stored facts of each, by SIREN."""
    rows = await fetch_rows(connection, LOCK_COMPANIES, (sorted(sirens),))
    return {siren: (Status(status), sources) for siren, status, sources in rows}


async def fetched(connection: Connection, run_ids: Collection[int]) -> dict[int, list[tuple[Fetched, Row | None]]]:
    """Return the final results of the sources of jobs, by run, each with its facts (None if it failed)."""
    found: dict[int, list[tuple[Fetched, Row | None]]] = {}
    for run_id, source, _, http_status, code, message, facts in await fetch_rows(connection, SOURCES, (list(run_ids),)):
        found.setdefault(run_id, []).append((Fetched(Source(source), code, http_status, message), facts))
    return found


async def end_jobs(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    """Store the ends of jobs, companies and requests; return (job, tenant, correlation id) per waiting tenant."""
    given = {"rows": as_json(rows)}
    for statement in (END_COMPANIES, PUT_SNAPSHOTS, END_JOBS):
        await connection.execute(statement, given)
    return await fetch_rows(connection, END_REQUESTS, given)
