"""Sweeps: loops that find and continue what a crash, a lost signal or a restart of the database has left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from ecluse.base.clock import Clock
from ecluse.db.connect import Pool
from ecluse.db.outage import ignoring_outage
from ecluse.engine.cluster import forced_ends
from ecluse.engine.effects import probe
from ecluse.engine.lead import durable
from ecluse.engine.model.flow import Flow, WorkContext
from ecluse.engine.runs import leases
from ecluse.engine.work import completion
from ecluse.engine.work.worker import Worker

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 5.0  # and at once when the listener has reconnected
SUSPECT_SECONDS = 1.0
DROP_SECONDS = 0.5
WATCH_SECONDS = 15.0
FORCED_SECONDS = 1.0  # and at once when a run has ended
REST_SECONDS = 0.1

ENDED = "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at IS NOT NULL"

UNLED = """
SELECT r.id, w.status FROM runs r JOIN dbos.workflow_status w ON w.workflow_uuid = r.tenant_id || '/' || r.event_key
WHERE r.ended_at IS NULL AND r.orchestrated AND r.flow = ANY(%s)
  AND w.status NOT IN ('PENDING', 'ENQUEUED', 'DELAYED')
  AND w.updated_at < extract(epoch FROM now() - interval '2 seconds') * 1000
"""


class ForcedEnds:
    """The loop that ends orphaned and stale runs, on every replica that works or keeps schedules."""

    def __init__(self, pool: Pool, flows: Mapping[str, Flow]) -> None:
        self._pool = pool
        self._flows = flows
        self._hint = asyncio.Event()

    def a_run_has_ended(self) -> None:
        self._hint.set()

    async def run(self) -> None:
        stale_at = 0.0  # when to query stale runs again
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FORCED_SECONDS):
                    await self._hint.wait()
            self._hint.clear()
            with ignoring_outage("ending runs"):
                await forced_ends.end_orphans(self._pool, self._flows)
                if time.monotonic() >= stale_at:
                    stale_at = time.monotonic() + SWEEP_SECONDS
                    await forced_ends.end_stale(self._pool, self._flows)
            await asyncio.sleep(REST_SECONDS)


class Sweeps:
    def __init__(
        self,
        pool: Pool,
        flows: Mapping[str, Flow],
        replica: str,
        clock: Clock,
        worker: Worker,
        contexts: Mapping[str, WorkContext],
    ) -> None:
        self._pool = pool
        self._flows = flows
        self._replica = replica
        self._clock = clock
        self._worker = worker
        self._contexts = contexts
        self.hint = asyncio.Event()  # runs may be complete, or the listener has reconnected

    async def drop_ended(self) -> None:
        """Drop the items of ended runs that the worker holds, within a second even if the NOTIFY was lost."""
        while True:
            await asyncio.sleep(DROP_SECONDS)
            if in_hand := self._worker.runs_in_hand:
                with ignoring_outage("dropping ended runs"):
                    async with self._pool.connection() as connection:
                        cursor = await connection.execute(ENDED, (list(in_hand),))
                        self._worker.drop(row[0] for row in await cursor.fetchall())

    async def settle_forgotten(self) -> None:
        """Settle writes in doubt, in a loop of its own: it calls vendors, and no other sweep should wait for them."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with ignoring_outage("settling writes in doubt"):
                await probe.settle_forgotten(self._pool, self._flows, self._contexts, self._replica)

    async def watch(self) -> None:
        """Call the `watch` functions of the flows."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for flow in self._flows.values():
                if flow.watch is not None:
                    with ignoring_outage(f"watching {flow.name}"):
                        async with self._pool.connection() as connection:
                            await flow.watch(connection)

    async def sweep(self) -> None:
        """End runs whose workflow is over, resume interrupted workflows, close self-closing runs and end expired
        leases."""
        suspects: dict[str, float] = {}  # interrupted workflows, and since when
        place = 0  # among the self-closing runs
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SUSPECT_SECONDS if suspects else SWEEP_SECONDS):
                    await self.hint.wait()
            self.hint.clear()
            with ignoring_outage("sweep"):
                await set_clock(self._pool, self._clock)
                await self._end_unled()
                suspects = await self._resume_interrupted(suspects)
                place = await completion.sweep(self._pool, self._flows, place)
                await leases.end_expired(self._pool)

    async def _end_unled(self) -> None:
        """End open runs whose workflow is over: no replica will ever lead them again, and they must not look alive."""
        async with self._pool.connection() as connection:
            cursor = await connection.execute(UNLED, (list(self._flows),))
            for run_id, state in await cursor.fetchall():
                why = f"its workflow is {state}, though the run had not ended; see the server's log of that time"
                await forced_ends.end_one(connection, self._flows, run_id, "catastrophic", "NO_WORKFLOW", why)

    async def _resume_interrupted(self, suspects: dict[str, float]) -> dict[str, float]:
        now = self._clock.monotonic()
        async with self._pool.connection() as connection:
            seen = {name: suspects.get(name, now) for name in await durable.interrupted(connection, self._replica)}
        # Only those interrupted for a while: a workflow that has just been dequeued is about to run.
        if overdue := sorted(name for name, since in seen.items() if now - since >= 2 * SUSPECT_SECONDS):
            log.warning("resuming interrupted workflows", workflows=overdue)
            await durable.resume(overdue)
        return {name: since for name, since in seen.items() if name not in overdue}


async def set_clock(pool: Pool, clock: Clock) -> None:
    async with pool.connection() as connection:
        asked = datetime.now(UTC)
        row = await (await connection.execute("SELECT ecluse_now()")).fetchone()
    if row:  # the database's clock counts: a host whose clock is fast or slow must not retry early or late
        clock.offset = row[0] - (asked + (datetime.now(UTC) - asked) / 2)
