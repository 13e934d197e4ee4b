"""Publishing of the outbox: at least once, in order per aggregate, by one replica at a time.

The publisher is the replica that holds a session lock. It marks published events on the connection that holds the lock,
so that a replica that has lost the lock (frozen, disconnected) cannot mark any; the server ends a session that is idle
for SILENT_SECONDS. Readers keep their place by `published_seq`, drawn when a row is marked: rows become visible in that
order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import structlog

from ecluse.base.tasks import stopped
from ecluse.base.text import storable
from ecluse.db.connect import Connection, hanging_up_after, open_session
from ecluse.db.outage import ignoring_outage
from ecluse.engine.outbox.events import EVENTS_CHANNEL, PUBLISHED_EVENT, PublishedEvent, Sink

log = structlog.get_logger(__name__)

TRY_SECONDS = 0.2
POLL_SECONDS = 1.0  # a NOTIFY may be lost; less than SILENT_SECONDS
SILENT_SECONDS = 2.5  # after which the server ends an idle session and its lock, and we give up on a silent server
BEAT_SECONDS = 0.5  # between keepalive queries while a sink is slow
SINK_SECONDS = 30.0
BATCH = 500

# Where the TCP settings do not apply (a Unix socket), a lost peer is noticed at once.
SETTINGS = {
    "idle_session_timeout": f"{SILENT_SECONDS * 1000:.0f}ms",
    "tcp_keepalives_idle": "1",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": "3000",
    "enable_seqscan": "off",
}
LOCK = "SELECT pg_try_advisory_lock(hashtextextended('ecluse publisher', 30))"
READ = f"""
SELECT {PUBLISHED_EVENT} FROM events_outbox e WHERE published_seq IS NULL AND NOT EXISTS (
    SELECT 1 FROM events_outbox b WHERE b.published_seq IS NULL AND b.tries > 0 AND b.try_at > ecluse_now()
        AND b.tenant_id = e.tenant_id AND b.aggregate = e.aggregate AND b.id <= e.id)
ORDER BY id LIMIT {BATCH}
"""  # noqa: S608 - our own names
MARK = f"""
WITH marked AS (
    UPDATE events_outbox e SET published_seq = n.seq, published_at = ecluse_now()
    FROM (SELECT id, nextval('events_published') AS seq FROM unnest(%s::bigint[]) AS t(id)) AS n
    WHERE e.id = n.id AND e.published_seq IS NULL RETURNING published_seq)
SELECT pg_notify('{EVENTS_CHANNEL}', max(published_seq)::text) FROM marked HAVING count(*) > 0
"""  # noqa: S608 - our own names
DELAY = """
UPDATE events_outbox e SET tries = tries + 1, error = f.error,
    try_at = ecluse_now() + least(60, 0.5 * 2 ^ least(tries, 10)) * interval '1 second'
FROM unnest(%s::bigint[], %s::text[]) AS f(id, error) WHERE e.id = f.id AND published_seq IS NULL
"""


class Publisher:
    """Offers the events of the outbox to the sinks, and marks the events that all sinks have accepted as published."""

    def __init__(self, dsn: str, sinks: Sequence[Sink]) -> None:
        self._dsn = dsn
        self._sinks = sinks
        self.wake = asyncio.Event()  # set when an event was written

    async def run(self) -> None:
        """Compete for the lock and publish while holding it, until cancelled. After a database outage, it connects and
        competes again."""
        while True:
            with ignoring_outage("publisher"):
                async with await open_session(self._dsn, SETTINGS) as own:
                    holding = False
                    while True:
                        if holding:
                            await self._publish(own)
                            continue
                        ((holding,),) = await _ask(own, LOCK)
                        if not holding:
                            await asyncio.sleep(TRY_SECONDS)
            await asyncio.sleep(TRY_SECONDS)

    async def _publish(self, own: Connection) -> None:
        self.wake.clear()
        events = [PublishedEvent(*row) for row in await _ask(own, READ)]
        if events:
            await self._publish_all(own, events)
        if len(events) < BATCH:  # an event written since then has set `wake`
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self.wake.wait()

    async def _publish_all(self, own: Connection, events: Sequence[PublishedEvent]) -> None:
        """Offer the events to the sinks, and keep the connection alive meanwhile. Mark the accepted events as
        published, and delay the failed ones; a failed event holds back the later events of its aggregate."""
        offering = asyncio.create_task(self._offer_all(events))
        try:
            while not (await asyncio.wait([offering], timeout=BEAT_SECONDS))[0]:
                await _ask(own, "SELECT")  # keepalive: a slow sink must not cost the lock
        finally:
            await stopped([offering])
        failed = offering.result()
        late = {_aggregate(event): event.id for event in reversed(events) if event.id in failed}
        accepted = [event.id for event in events if event.id < late.get(_aggregate(event), event.id + 1)]
        if accepted:
            await _ask(own, MARK, accepted)
        if failed:
            await _ask(own, DELAY, list(failed), list(failed.values()))

    async def _offer_all(self, events: Sequence[PublishedEvent]) -> dict[int, str]:
        """Offer the events to the sinks together; if one sink fails, offer them again, one by one. Return the errors by
        event id, at most one per aggregate: after its first failure, the later events of an aggregate are not
        offered."""
        if await self._offer(events) is None:
            return {}
        by_aggregate = groupby(sorted(events, key=_aggregate), key=_aggregate)
        failures = await asyncio.gather(*[self._offer_one_by_one(list(group)) for _, group in by_aggregate])
        return dict(failure for failure in failures if failure is not None)

    async def _offer_one_by_one(self, events: Sequence[PublishedEvent]) -> tuple[int, str] | None:
        """Offer the events of one aggregate in order; return the id and the error of the first rejected event, or
        None."""
        for event in events:
            if (error := await self._offer([event])) is not None:
                log.warning("outbox: sink rejected event, will retry", event_key=event.event_key, error=error)
                return event.id, error
        return None

    async def _offer(self, events: Sequence[PublishedEvent]) -> str | None:
        try:
            async with asyncio.timeout(SINK_SECONDS):
                for sink in self._sinks:
                    await sink(events)
        except Exception as error:  # noqa: BLE001 - a sink may raise anything; the error is stored with the event
            return storable(f"{type(error).__name__}: {error}")
        return None


def _aggregate(event: PublishedEvent) -> tuple[str, str]:
    return event.tenant_id, event.aggregate


async def _ask(own: Connection, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Execute the statement and return its rows. If the server is silent for SILENT_SECONDS, shut down the connection,
    so that the statement fails."""
    with hanging_up_after(own, SILENT_SECONDS):
        cursor = await own.execute(statement, parameters or None)
        return await cursor.fetchall() if cursor.description else []
