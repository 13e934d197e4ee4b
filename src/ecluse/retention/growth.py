"""Growth rate of the database, and the size it reaches under the current retention knobs. An estimate: the share of
recent rows is taken from a sample of each large table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_value

DAYS = 7.0
RUNS = "ECLUSE_KEEP_RUNS_DAYS"
SAMPLE = 50_000  # rows
LATE = timedelta(days=1)  # without a sweep: worth a warning


class Group(NamedTuple):
    """Tables whose rows are deleted together, by one knob; `at` is the creation time of rows in the first table."""

    name: str
    knob: str
    tables: tuple[str, ...]
    at: str


GROUPS = (
    Group(
        "runs",
        RUNS,
        (
            "runs", "stages", "items", "claims", "attempts", "effects", "outcomes", "run_log", "run_waiters",
            "transcription_runs", "automation_run_facts", "automation_run_fiches", "deliveries", "schedule_slots",
            "enrichment_jobs", "enrichment_sources",
        ),
        "created_at",
    ),
    Group("events", "ECLUSE_KEEP_EVENTS_DAYS", ("events_outbox",), "occurred_at"),
    Group("logs", "ECLUSE_KEEP_LOGS_DAYS", ("workflow_logs",), "created_at"),
    Group("paid results", "ECLUSE_KEEP_PAID_RESULTS_DAYS", ("speech_results",), "created_at"),
    Group("jobs", "ECLUSE_KEEP_JOBS_DAYS", ("jobs", "job_runs", "job_logs"), "created_at"),
    Group("leases", "ECLUSE_KEEP_LEASES_DAYS", ("leases",), "acquired_at"),
    Group(
        "workflows",
        "ECLUSE_KEEP_WORKFLOWS_DAYS",
        (
            "dbos.workflow_status", "dbos.workflow_input", "dbos.workflow_output", "dbos.operation_outputs",
            "dbos.notifications",
        ),
        "to_timestamp(created_at / 1000.0)",
    ),
    Group(
        "fiches, transcripts and audits",
        "ECLUSE_KEEP_FICHES_DAYS",
        ("fiche_cache", "fiche_cache_information", "recordings", "recording_transcription_chunks", "audits"),
        "created_at",
    ),
    Group("companies", "ECLUSE_KEEP_COMPANIES_DAYS", ("companies", "company_snapshots", "requests"), "created_at"),
)  # fmt: skip
SIZES = "SELECT sum(pg_total_relation_size(name::regclass))::bigint FROM unnest(%s::text[]) AS name"
ROWS = "SELECT greatest(reltuples, 0)::float8 FROM pg_class WHERE oid = %s::regclass"
SHARE = """
SELECT count(*) FILTER (WHERE {at} > ecluse_now() - %(days)s * interval '1 day')::float8 / greatest(count(*), 1)
FROM {table} TABLESAMPLE SYSTEM (%(percent)s)
"""
DATABASE_SIZE = """
SELECT pg_database_size(current_database()) AS bytes, ecluse_now() AS now, (SELECT min(created_at) FROM (
           SELECT created_at FROM runs ORDER BY id LIMIT 1) first) AS since,
       (SELECT before FROM pruned WHERE kind = 'runs') AS before,
       EXISTS (SELECT 1 FROM runs WHERE parent_run_id IS NULL AND flow <> 'notifications'
               AND ended_at < ecluse_now() - %s * interval '1 day') AS old
"""


class Growing(NamedTuple):
    """The size of a group of tables, how fast it grows, and how long its rows are kept."""

    name: str
    keep: int  # days; 0: for ever
    bytes: int
    per_day: float  # bytes


class DatabaseSize(NamedTuple):
    """The size of the database at the instant `now`, and up to when its runs were pruned."""

    bytes: int
    now: datetime
    since: datetime | None  # creation of the oldest run
    before: datetime | None  # runs older than this were pruned
    old: bool  # there are runs older than the knob keeps


async def measure(connection: Connection, keep: Mapping[str, int]) -> tuple[DatabaseSize, float, list[Growing]]:
    """Measure the size of the database and its growth over up to DAYS days. Return the size, the number of days
    measured, and the growth per group of tables (no groups before a day of runs). `keep` maps each knob of retention to
    its days."""
    (database,) = await fetch_all(connection, DatabaseSize, DATABASE_SIZE, (keep[RUNS] or 36_500,))
    age = (database.now - database.since) / timedelta(days=1) if database.since else 0.0
    days = min(DAYS, age)
    groups = []
    for group in GROUPS if days >= 1 else ():
        size = await fetch_value(connection, SIZES, ([*group.tables],))
        rows = await fetch_value(connection, ROWS, (group.tables[0],))
        percent = 100.0 if rows <= SAMPLE else 100 * SAMPLE / rows
        statement = SHARE.format(at=group.at, table=group.tables[0])
        share = await fetch_value(connection, statement, {"days": days, "percent": percent})
        groups.append(Growing(group.name, keep[group.knob], size, size * share / days))
    return database, days, groups


def sentence(database: DatabaseSize, days: float, groups: Sequence[Growing]) -> str:
    """Return the result of `measure` as a sentence for people: size, growth a day, and the size it levels off at."""
    if not groups:
        return f"database size {_size(database.bytes)}; its growth is measured after one day of runs"
    steady = sum(one.per_day * one.keep for one in groups)
    lasting = [one for one in groups if not one.keep and one.per_day > 0]
    most = max(groups, key=lambda one: one.per_day)
    text = (
        f"database size {_size(database.bytes)}, growth {_size(sum(one.per_day for one in groups))} a day over"
        f" {days:.0f} days, most of it {most.name}; rows that are deleted by age level off at {_size(steady)}"
    )
    if lasting:
        names = ", ".join(one.name for one in lasting)
        text += f"; {names} are kept for ever and grow by {_size(365 * sum(one.per_day for one in lasting))} a year"
    return text


def trouble(database: DatabaseSize, keep: Mapping[str, int]) -> tuple[str, str] | None:
    """Return a problem with the deletion of old runs and the advice for it: runs are kept for ever, or no sweep has
    deleted old ones for a day (LATE). None if there is no problem."""
    days = keep[RUNS]
    if not days:
        return "runs are never deleted (ECLUSE_KEEP_RUNS_DAYS=0)", "set it to the number of days to keep runs"
    swept_at = None if database.before is None else database.before + timedelta(days=days)
    if database.old and (swept_at is None or database.now - swept_at > LATE):
        since = "never pruned" if swept_at is None else f"last pruned at {swept_at:%Y-%m-%d %H:%M}"
        do = "start a server with the role scheduler, or have one prune with `ecluse retention prune`"
        return f"runs older than {days} days are not deleted: {since}", do
    return None


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
