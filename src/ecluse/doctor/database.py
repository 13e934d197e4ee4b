"""Checks on the database: server, schema, replicas, runs, lanes, vendors, outbox, schedules, growth."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.resources import files
from typing import Any

import psycopg

from ecluse.base.masking import ORIGIN_ENDS
from ecluse.base.text import count_of
from ecluse.db.connect import Connection, open_session
from ecluse.db.outage import one_line
from ecluse.db.pools import most_connections
from ecluse.doctor import vendors
from ecluse.doctor.findings import Finding, graded, rows_of
from ecluse.engine import ROLES, RUNS_AT_ONCE
from ecluse.retention import growth

SKEW = (1.0, 30.0)  # seconds: warn above, fail above
SILENT_SECONDS = 15.0  # more than twice the time after which a silent replica is declared dead
SAMPLE = 5


def newest_revision() -> str:
    scripts = [one.name for one in files("ecluse.migrations.versions").iterdir()]
    return max(name.partition("_")[0] for name in scripts if name[0].isdigit())


async def check_database(
    dsn: str,
    pool: int,
    keep: Mapping[str, int],
    key_ids: Sequence[str] = (),
    has_price: Callable[[str, str], bool] = lambda vendor, model: False,  # noqa: ARG005 - none is known
) -> list[Finding]:
    """Check the database and return the findings. If it is unavailable or its schema is not current, that is a finding,
    and the remaining checks are left out. `pool` is the size of a replica's pool; `keep` maps the knobs of retention to
    days; `key_ids` are the ids of the secret keys of this process, the current one first; `has_price` tells whether a
    price is set for a vendor's model."""
    findings = []
    try:
        async with await open_session(dsn) as connection:
            await connection.execute("SET statement_timeout = '10s'")
            given = (partial(vendors.budgets, has_price), partial(_secrets, key_ids), partial(_growth, keep))
            for part in (*PARTS, *given, partial(_connections, pool)):
                async for finding in part(connection):
                    findings.append(finding)
                    if finding.level == "fail" and part is _schema:
                        return findings
    except psycopg.Error as error:
        findings.append(Finding("fail", "database", one_line(error), "read the log of the database server"))
    return findings


async def _server(connection: Connection) -> AsyncIterator[Finding]:
    (row,) = await rows_of(
        connection,
        "SELECT current_setting('server_version') AS version, pg_is_in_recovery() AS standby,"
        " current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes,"
        " current_setting('synchronous_commit') AS synchronous_commit",
    )
    yield Finding("ok", "database", f"PostgreSQL {row.version}")
    if row.standby:
        yield Finding(
            "fail", "database", "the server is a standby and accepts no writes", "point DATABASE_URL at the primary"
        )
    if off := [name for name in ("fsync", "full_page_writes", "synchronous_commit") if getattr(row, name) == "off"]:
        yield Finding("warn", "database", f"{' and '.join(off)} off: committed data may be lost", "turn it on")


def allowed_connections(most: int, *limits: int) -> int:
    """Return the connections allowed: the smallest of `most` and the limits of role and database; -1 means no limit."""
    return min([most, *(limit for limit in limits if limit >= 0)])


async def _connections(pool: int, connection: Connection) -> AsyncIterator[Finding]:
    (row,) = await rows_of(
        connection,
        "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
        " - coalesce(current_setting('reserved_connections', true)::int, 0) AS most, rolconnlimit, datconnlimit,"
        " (SELECT count(*) FROM pg_stat_activity WHERE usesysid IS NOT NULL) AS used"
        " FROM pg_roles, pg_database WHERE rolname = current_user AND datname = current_database()",
    )
    live = await rows_of(connection, "SELECT roles FROM replicas WHERE state = 'live'")
    needed = sum(most_connections(one.roles, pool) for one in live) or most_connections(ROLES, pool)
    allowed = allowed_connections(row.most, row.rolconnlimit, row.datconnlimit)
    who = f"{len(live)} live replicas" if len(live) > 1 else "one replica"
    says = f"{row.used} in use, {allowed} allowed; {who} may open {needed}"
    if needed > allowed or row.used > 0.9 * row.most:
        do = "raise max_connections (or the role's limit), lower ECLUSE_DB_POOL, or run fewer replicas"
        yield Finding("warn", "connections", says, do)
    else:
        yield Finding("ok", "connections", says)


async def _clock(connection: Connection) -> AsyncIterator[Finding]:
    asked = datetime.now(UTC)
    ((theirs,),) = await rows_of(connection, "SELECT clock_timestamp()")
    answered = datetime.now(UTC)
    skew = (theirs - (asked + (answered - asked) / 2)).total_seconds()
    level = graded(abs(skew), *SKEW)
    do = "" if level == "ok" else "synchronize both hosts with a time server (NTP)"
    yield Finding(level, "clock", f"the database's clock and this host's differ by {abs(skew):.2f} s", do)


async def _schema(connection: Connection) -> AsyncIterator[Finding]:
    newest = newest_revision()
    try:
        rows = await rows_of(connection, "SELECT version_num FROM alembic_version")
    except psycopg.errors.UndefinedTable:
        rows = []
    current = rows[0].version_num if rows else "none"
    if current == newest:
        yield Finding("ok", "schema", f"revision {current} is current")
    elif current != "none" and current > newest:
        do = "upgrade the program on this host"
        yield Finding("fail", "schema", f"revision {current} is newer than this program ({newest})", do)
    else:
        do = "run `ecluse migrate`, or start a server, which migrates the database"
        yield Finding("fail", "schema", f"revision {current}, but this program needs {newest}", do)
    if current == newest:
        ((moved,),) = await rows_of(connection, 'SELECT "offset" FROM clock_offset')
        if moved != timedelta(0):
            yield Finding(
                "warn", "clock", f"clock_offset moves time by {moved}", "set clock_offset to zero: only tests move time"
            )


async def _replicas(connection: Connection) -> AsyncIterator[Finding]:
    rows = await rows_of(
        connection,
        "SELECT id, state, extract(epoch FROM clock_timestamp() - beat_at)::float8 AS age FROM replicas"
        " ORDER BY beat_at",
    )
    live = [row for row in rows if row.state == "live"]
    silent = [row for row in live if row.age > SILENT_SECONDS]
    if silent:
        do = "start a server: it takes over their work"
        yield Finding(
            "warn", "replicas", f"no heartbeat from {_some(silent, lambda r: f'{r.id} for {r.age:.0f} s')}", do
        )
    if len(live) == len(silent):
        says = "no live worker or scheduler: no run makes progress"
        yield Finding("warn", "replicas", says, "start one with `ecluse serve`")
    else:
        yield Finding("ok", "replicas", f"{len(live) - len(silent)} live, last heartbeat {live[-1].age:.1f} s ago")
    if dead := [row for row in rows if row.state == "dead"]:
        says = f"declared dead in the last hour: {_some(dead, lambda r: r.id)}"
        yield Finding("warn", "replicas", says, "other replicas took over their work; find out why they died")


# A new run waits without a workflow while the workers that have its flow lead as many runs as they may, or as many of
# its tenant.
UNLED = f"""
WITH workers AS MATERIALIZED (SELECT count(*) AS live FROM replicas WHERE state = 'live' AND 'worker' = ANY(roles)),
led AS MATERIALIZED (
    SELECT executor_id AS replica, split_part(workflow_uuid, '/', 1) AS tenant, count(*) AS n
    FROM dbos.workflow_status WHERE status = 'PENDING' GROUP BY 1, 2)
SELECT r.id, r.flow FROM runs r, workers
WHERE r.ended_at IS NULL AND r.orchestrated AND r.created_at < ecluse_now() - interval '15 seconds'
  AND NOT EXISTS (
    SELECT 1 FROM dbos.workflow_status w LEFT JOIN replicas p ON p.id = w.executor_id
    WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key
      AND (w.status IN ('ENQUEUED', 'DELAYED') AND workers.live > 0 OR w.status = 'PENDING' AND p.state = 'live'))
  AND (r.state <> 'queued' OR (
    SELECT coalesce(bool_or(l.total < {RUNS_AT_ONCE}
                            AND share_left(p.tenant_share, {RUNS_AT_ONCE}, l.own, l.total - l.own) > 0), true)
    FROM replicas p CROSS JOIN LATERAL (
        SELECT coalesce(sum(n), 0)::bigint AS total,
               coalesce(sum(n) FILTER (WHERE tenant = r.tenant_id), 0)::bigint AS own
        FROM led WHERE replica = p.id) l
    WHERE p.state = 'live'
      AND EXISTS (SELECT 1 FROM unnest(p.work) AS w(name) WHERE split_part(w.name, '/', 1) = r.flow)))
ORDER BY r.id
"""  # noqa: S608 - our own number


async def _runs(connection: Connection) -> AsyncIterator[Finding]:
    led = await rows_of(connection, UNLED)
    overdue = await rows_of(
        connection,
        "SELECT r.id, s.stage FROM runs r JOIN stages s ON s.run_id = r.id WHERE r.ended_at IS NULL"
        " AND s.ended_at IS NULL AND s.deadline_at < ecluse_now() - interval '1 minute'"
        " AND NOT clock_stopped(r.id, s.stage) ORDER BY r.id",
    )
    if led:
        do = "start a server that loads their flow, or end them with `ecluse runs end`"
        yield Finding("warn", "runs", f"no live replica leads {_some(led, lambda r: f'{r.id} ({r.flow})')}", do)
    if overdue:
        says = f"past the deadline of a stage: {_some(overdue, lambda r: f'{r.id} ({r.stage})')}"
        yield Finding("warn", "runs", says, "read `ecluse runs log ID`; a running server ends the stage")
    if not led and not overdue:
        ((count,),) = await rows_of(connection, "SELECT count(*) FROM runs WHERE ended_at IS NULL")
        yield Finding("ok", "runs", f"{count} open, each led by a live replica and within its deadline")


async def _work(connection: Connection) -> AsyncIterator[Finding]:
    rows = await rows_of(
        connection,
        "SELECT event, sum(items)::int AS items, max(age) AS age, EXISTS (SELECT 1 FROM replicas p"
        " WHERE p.state = 'live' AND u.event = ANY (p.work)) AS has_worker FROM unclaimed u GROUP BY 1 ORDER BY 1",
    )
    for row in rows:
        if not row.has_worker:
            due = count_of(row.items, f"item of {row.event} is", f"items of {row.event} are")
            says = f"{due} due, but no live worker has loaded the flow"
            yield Finding("warn", "work", says, "start a server with this flow (ECLUSE_FLOWS or --flow)")
    if all(row.has_worker for row in rows):
        yield Finding("ok", "work", f"{count_of(sum(row.items for row in rows), 'item')} due, a live worker for each")


async def _lanes(connection: Connection) -> AsyncIterator[Finding]:
    rows = await rows_of(
        connection,
        "SELECT name, paused_by, paused_reason, clock_stopped_at, held_until, held_reason, failing_since, last_failure,"
        " trips > 0 AS down FROM lanes"
        " WHERE paused_at IS NOT NULL OR held_until > ecluse_now() OR trips > 0 ORDER BY name",
    )
    for row in rows:
        if row.paused_reason is not None:
            clock = (
                "is stopped" if row.clock_stopped_at else "keeps running: items that still wait at the deadline fail"
            )
            says = f"{row.name} is paused by {row.paused_by}: {row.paused_reason}; the clock of its stages {clock}"
            do = f"resume it with `ecluse lanes resume {row.name} --reason …`"
        elif row.down:
            says = f"{row.name}: vendor down since {row.failing_since:%Y-%m-%d %H:%M:%S%z}: {row.last_failure}"
            do = "no action: only probes are sent, no attempt is counted, and the lane opens when the vendor answers"
        else:
            says, do = (
                f"{row.name} is held until {row.held_until:%H:%M:%S}: {row.held_reason}",
                "no action: it opens then",
            )
        yield Finding("warn", "lanes", says, do)
    if not rows:
        yield Finding("ok", "lanes", "none held, paused or down")


async def _outbox(connection: Connection) -> AsyncIterator[Finding]:
    (row,) = await rows_of(
        connection,
        "SELECT count(*) AS count, coalesce(extract(epoch FROM ecluse_now() - min(occurred_at)), 0)::float8 AS age,"
        " max(error) AS error FROM events_outbox WHERE published_seq IS NULL",
    )
    says = f"{row.count} events unpublished, the oldest {row.age:.0f} s old"
    if row.age > 60:
        yield Finding(
            "warn", "outbox", f"{says}{': ' + row.error if row.error else ''}", "check that a server is running"
        )
    else:
        yield Finding("ok", "outbox", says)


async def _schedules(connection: Connection) -> AsyncIterator[Finding]:
    rows = await rows_of(
        connection,
        "SELECT name, error, next_due_at < ecluse_now() - interval '1 minute' AS overdue FROM schedules"
        " WHERE deleted_at IS NULL AND (error IS NOT NULL OR next_due_at < ecluse_now() - interval '1 minute')"
        " ORDER BY name",
    )
    for row in rows:
        says = f"{row.name}: {row.error or 'due for over a minute, but no scheduler has processed it'}"
        do = "correct or disable the schedule" if row.error else "start a server with the role scheduler"
        yield Finding("warn", "schedules", says, do)
    if not rows:
        yield Finding("ok", "schedules", "none failing, none overdue")


UNSEALED = f"""
SELECT (SELECT count(*) FROM notification_endpoints WHERE kind = 'webhook' AND url NOT LIKE '%{ORIGIN_ENDS}')
     + (SELECT count(*) FROM automation_settings WHERE webhook_url NOT LIKE '%{ORIGIN_ENDS}') AS urls
"""  # noqa: S608 - our own word


async def _secrets(key_ids: Sequence[str], connection: Connection) -> AsyncIterator[Finding]:
    rows = await rows_of(connection, "SELECT key_id, count(*) AS count FROM secrets GROUP BY 1 ORDER BY 1")
    names = dict(zip(key_ids, ("the current key", "the old key"), strict=False))
    says = ", ".join(
        f"{row.count} encrypted with {names.get(row.key_id, 'another key')} ({row.key_id})" for row in rows
    )
    if lost := [row for row in rows if row.key_id not in key_ids]:
        do = f"set ECLUSE_SECRET_KEY_OLD to the key {lost[0].key_id}: without it servers do not start"
        yield Finding("fail", "secrets", says, do)
    elif [row for row in rows if row.key_id != key_ids[0]]:
        yield Finding(
            "warn",
            "secrets",
            says,
            "run `ecluse secrets rotate`, then unset ECLUSE_SECRET_KEY_OLD; if that was done already, its two "
            "keys are the wrong way round",
        )
    else:
        yield Finding("ok", "secrets", says or "none stored")
    ((urls,),) = await rows_of(connection, UNSEALED)
    if urls:
        do = "start a server with the role scheduler and a secret key, or run `ecluse secrets rotate`"
        yield Finding("warn", "secrets", f"{urls} webhook URLs are stored in plain text", do)


async def _growth(keep: Mapping[str, int], connection: Connection) -> AsyncIterator[Finding]:
    database, days, groups = await growth.measure(connection, keep)
    yield Finding("ok", "growth", growth.sentence(database, days, groups))
    if (wrong := growth.trouble(database, keep)) is not None:
        yield Finding("warn", "growth", *wrong)


PARTS = (_server, _clock, _schema, _replicas, _runs, _work, _lanes, _outbox, _schedules, *vendors.PARTS)


def _some(rows: list[Any], name: Callable[[Any], str]) -> str:
    more = f" and {len(rows) - SAMPLE} more" if len(rows) > SAMPLE else ""
    return ", ".join(name(row) for row in rows[:SAMPLE]) + more
