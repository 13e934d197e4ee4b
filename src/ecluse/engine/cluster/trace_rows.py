"""Storage of traces as rows of `workflow_logs`, if a setting enables it. Best effort: a trace call only appends to a
bounded list, and a periodic job stores the list; records that do not fit or cannot be stored are dropped, counted and
logged."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import suppress
from typing import Any

import psycopg
import structlog

from ecluse.base import trace
from ecluse.base.clock import Clock
from ecluse.base.text import storable
from ecluse.db.connect import Pool
from ecluse.db.outage import ignoring_outage, is_unavailable

log = structlog.get_logger(__name__)

LAST_SECONDS = 2.0  # at a stop: an unavailable database must not delay the exit
MOST = 10_000
BATCH = 500

STORE = """
INSERT INTO workflow_logs (created_at, tenant_id, workflow, entity_type, entity_id, run_id, trace_id, level,
                           inngest_event_id, function_id, message, data)
SELECT created_at, tenant_id, workflow, entity_type, entity_id, run_id, trace_id, level, inngest_event_id, function_id,
       message, data
FROM jsonb_to_recordset(%s::jsonb) AS t(created_at timestamptz, tenant_id text, workflow text, entity_type text,
    entity_id text, run_id bigint, trace_id text, level text, inngest_event_id text, function_id text, message text,
    data jsonb)
"""


class TraceRows:
    """Collects the trace records of this process and stores them as rows. `dropped` counts the records that were not
    stored."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[dict[str, Any]] = deque()
        self._storing = asyncio.Lock()
        self.dropped = 0

    def put(self, record: trace.Record) -> None:
        """Append a record to be stored, or drop it if MOST records wait already. A listener of `base/trace.py`."""
        if len(self._waiting) >= MOST:
            self._drop(1)
            return
        tracer = record.tracer
        self._waiting.append(
            {
                "created_at": self._clock.now(),
                "tenant_id": tracer.tenant_id,
                "workflow": tracer.workflow,
                "entity_type": tracer.entity[0],
                "entity_id": storable(tracer.entity[1]),
                "run_id": tracer.run_id,
                "trace_id": storable(tracer.trace_id or tracer.correlation_id),
                "level": record.level,
                "inngest_event_id": None if record.event_id is None else storable(record.event_id),
                "function_id": tracer.function_id,
                "message": storable(record.message),
                "data": record.data,
            }
        )

    def start(self) -> None:
        """Begin to collect the records of this process."""
        trace.listeners.append(self.put)

    async def store(self, pool: Pool) -> None:
        """Store the waiting records. A periodic job; if it is cancelled, the storing goes on in the background."""
        await asyncio.shield(self._store(pool))  # a batch that a stop interrupts half-way would be stored twice

    async def stop(self, pool: Pool) -> None:
        """Collect no more records, and store the waiting ones, for at most LAST_SECONDS; drop the rest."""
        if self.put in trace.listeners:
            trace.listeners.remove(self.put)
        with ignoring_outage("storing the last traces"), suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await self._store(pool)
        if self._waiting:
            self._drop(len(self._waiting))

    async def _store(self, pool: Pool) -> None:
        async with self._storing:
            while self._waiting:
                batch = [self._waiting[n] for n in range(min(BATCH, len(self._waiting)))]
                # jsonb refuses NUL and lone surrogates, and `data` may contain anything.
                rows = json.dumps(batch, ensure_ascii=False, default=str).replace("\\u0000", "\\ufffd")
                try:
                    async with pool.connection() as connection:
                        await connection.execute(STORE, (rows.encode("utf-8", "replace").decode(),))
                except psycopg.Error as error:
                    if is_unavailable(error):
                        raise
                    log.error("trace rows: cannot be stored", error=str(error).strip(), rows=len(batch))
                    self._drop(len(batch))
                for _ in batch:
                    self._waiting.popleft()

    def _drop(self, count: int) -> None:
        self.dropped += count
        if self.dropped == count or self.dropped // 1_000 > (self.dropped - count) // 1_000:
            log.warning("trace rows: dropped, too many or database unavailable", dropped=self.dropped)
