"""The outbox: an event is a row, written in the transaction that makes it true; `publisher.py` publishes it.

Ids of one aggregate are drawn under its lock, which lasts until the commit. They follow the order of the commits, so a
reader that sees an event can already see all earlier events of that aggregate. Write events at the end of a
transaction, so that the lock is held briefly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_all

OUTBOX_CHANNEL = "ecluse_outbox"
EVENTS_CHANNEL = "ecluse_events"  # something was published


@dataclass(frozen=True)
class Event:
    """An event to be published. `event_key` deduplicates: a second event of the tenant with the same key is not
    written. Events of one aggregate are published in the order in which they were written."""

    tenant_id: str
    event_key: str
    event_type: str
    aggregate: str
    payload: Mapping[str, Any]
    correlation_id: str
    producer: str = "ecluse"


# To follow a WITH whose rows are called `events`. An id is drawn for each row that leaves the join, hence after the
# locks are taken.
WRITTEN = f"""
locked AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(h) AS lock
    FROM (SELECT DISTINCT hashtextextended(tenant_id || '/' || aggregate, 20) AS h FROM events ORDER BY h) AS hashes),
written AS (
    INSERT INTO events_outbox
        (tenant_id, event_key, event_type, aggregate, correlation_id, producer, payload, occurred_at)
    SELECT tenant_id, event_key, event_type, aggregate, correlation_id, producer, payload, ecluse_now()
    FROM events, (SELECT count(lock) FROM locked) AS all_locked ORDER BY place
    ON CONFLICT ON CONSTRAINT events_outbox_key DO NOTHING RETURNING pg_notify('{OUTBOX_CHANNEL}', ''))
"""  # noqa: S608 - our own names

# Without locks, for aggregates that this statement creates: no other transaction can know them, and thousands of locks
# would exhaust the server.
WRITTEN_FIRST = WRITTEN[WRITTEN.index("written AS (") :].replace(
    "FROM events, (SELECT count(lock) FROM locked) AS all_locked ORDER BY place", "FROM events ORDER BY place"
)

WRITE = f"""
WITH events AS (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS t(place integer, tenant_id text, event_key text, event_type text,
        aggregate text, correlation_id text, producer text, payload jsonb)),
{WRITTEN} SELECT count(*) FROM written
"""  # noqa: S608 - our own names

# The engine's own events, made from run rows; to follow a WITH whose runs are called `r`. Ids are text on the wire; the
# input, which may be anything, is not part of the payload.
OF_RUNS = """
events AS (
    SELECT r.id AS place, r.tenant_id, r.event_key || ':' || %(what)s::text AS event_key,
           r.flow || '/' || %(what)s::text AS event_type, 'run:' || r.id AS aggregate,
           coalesce(nullif(r.correlation_id, ''), r.event_key) AS correlation_id, 'ecluse' AS producer,
           jsonb_strip_nulls(jsonb_build_object('run_id', r.id::text, 'status', r.status, 'state', r.state,
               'selected', r.selected, 'successful', r.successful, 'failed', r.failed, 'ignored', r.ignored,
               'cancelled', nullif(r.cancelled, 0), 'end_cause', r.end_cause, 'ended_by', r.ended_by,
               'schedule_id', r.schedule_id::text, 'error_code', r.error_code, 'error', r.error_message)) AS payload
    FROM r),
"""

WRITE_OF_RUNS = (
    f"WITH r AS (SELECT * FROM runs WHERE id = ANY(%(runs)s)), {OF_RUNS}{WRITTEN} SELECT count(*) FROM written"  # noqa: S608
)


async def write(connection: Connection, events: Sequence[Event]) -> None:
    """Write events to the outbox, in the caller's transaction. Events whose key the tenant has used before are left
    out."""
    if events:
        rows = [{"place": place, **vars(event)} for place, event in enumerate(events)]
        await connection.execute(WRITE, (as_json(rows),))


async def write_run_events(
    connection: Connection, run_ids: Sequence[int], what: Literal["started", "selected", "completed", "failed"]
) -> None:
    """Write one event of the type `<flow>/<what>` per run, with the present values of the run's row, in the caller's
    transaction."""
    await connection.execute(WRITE_OF_RUNS, {"runs": list(run_ids), "what": what})


@dataclass(frozen=True)
class PublishedEvent:
    """An event as sinks and readers of the outbox get it."""

    id: int
    tenant_id: str
    event_key: str
    event_type: str
    aggregate: str
    correlation_id: str
    producer: str
    occurred_at: datetime
    payload: dict[str, Any]
    seq: int | None  # place in the order of publishing; None while it is being published


# A sink raises if it could not accept all events; then they are offered again, one by one.
Sink = Callable[[Sequence[PublishedEvent]], Awaitable[None]]


PUBLISHED_EVENT = """
id, tenant_id, event_key, event_type, aggregate, correlation_id, producer, occurred_at, payload, published_seq AS seq
"""
PUBLISHED = f"""
SELECT {PUBLISHED_EVENT} FROM events_outbox
WHERE published_seq > %(after)s {{whose}} ORDER BY published_seq LIMIT %(limit)s
"""  # noqa: S608 - our own names


async def read_published(
    connection: Connection, after_seq: int, tenant: str | None = None, limit: int = 500, producer: str | None = None
) -> list[PublishedEvent]:
    """Return at most `limit` events published after the event numbered `after_seq`, in the order of publishing.
    `tenant` None: events of all tenants; `producer` None: events of all producers."""
    whose = "" if tenant is None else "AND tenant_id = %(tenant)s"
    whose += "" if producer is None else " AND producer = %(producer)s"
    parameters = {"after": after_seq, "tenant": tenant, "limit": limit, "producer": producer}
    return await fetch_all(connection, PublishedEvent, PUBLISHED.format(whose=whose), parameters)
