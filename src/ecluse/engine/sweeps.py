"""What a crash, a lost signal or a restart of the database has left lying, and the loops that find it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

import structlog

from ecluse.base.clock import Clock
from ecluse.db.connect import Connection, Pool, is_away, one_line
from ecluse.engine import closing, ending, leases, orchestration, run_log, runs, settling
from ecluse.engine.ending import EndCause
from ecluse.engine.flow import Flow, WorkContext
from ecluse.engine.worker import Worker

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 5.0  # and at once after a lost connection: the listener says so
SUSPECT_SECONDS = 1.0
DROP_SECONDS = 0.5
WATCH_SECONDS = 15.0

ENDED = "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at IS NOT NULL"

# Orchestrated runs whose workflow was never started: the starter died in between, or is not this program.
UNSTARTED = """
SELECT r.id FROM runs r WHERE r.ended_at IS NULL AND r.orchestrated AND r.state = 'queued' AND r.flow = ANY(%s)
AND NOT EXISTS (SELECT 1 FROM dbos.workflow_status w WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key)
ORDER BY r.id LIMIT 100
"""

UNLED = """
SELECT r.id, w.status FROM runs r JOIN dbos.workflow_status w ON w.workflow_uuid = r.tenant_id || '/' || r.event_key
WHERE r.ended_at IS NULL AND r.orchestrated AND r.flow = ANY(%s)
  AND w.status NOT IN ('PENDING', 'ENQUEUED', 'DELAYED')
  AND w.updated_at < extract(epoch FROM now() - interval '2 seconds') * 1000
"""

# Nobody leads them, or they have had twice their time. `only_overdue`: a live replica leads it.
STALE = """
SELECT r.id, date_trunc('second', ecluse_now() - r.started_at), f.most,
       led AND r.started_at >= ecluse_now() - 2 * f.most AS only_overdue
FROM runs r JOIN unnest(%(flows)s::text[], %(limits)s::interval[]) AS f(flow, most) ON f.flow = r.flow,
LATERAL (SELECT EXISTS (
    SELECT 1 FROM dbos.workflow_status w JOIN replicas p ON p.id = w.executor_id AND p.state = 'live'
    WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key AND w.status = 'PENDING') AS led) l
WHERE r.ended_at IS NULL AND r.orchestrated AND r.started_at < ecluse_now() - f.most
"""


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
        self.hint = asyncio.Event()  # somebody has started a run, or the listener is back

    async def drop_ended(self) -> None:
        """The signal may be lost; what an ended run has in hand is dropped within a second all the same."""
        while True:
            await asyncio.sleep(DROP_SECONDS)
            if in_hand := self._worker.runs_in_hand:
                with patience("dropping ended runs"):
                    async with self._pool.connection() as connection:
                        cursor = await connection.execute(ENDED, (list(in_hand),))
                        self._worker.drop(row[0] for row in await cursor.fetchall())

    async def settle_forgotten(self) -> None:
        """On its own: it asks vendors, and nobody else should wait for them."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with patience("settling writes in doubt"):
                await settling.settle_forgotten(self._pool, self._flows, self._contexts, self._replica)

    async def watch(self) -> None:
        """What the flows themselves look after."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for flow in self._flows.values():
                if flow.watch is not None:
                    with patience(f"watching {flow.name}"):
                        async with self._pool.connection() as connection:
                            await flow.watch(connection)

    async def sweep(self) -> None:
        """What a crash, a lost connection or a restart of the database has left lying."""
        suspects: dict[str, float] = {}  # since when
        place = 0  # among the runs that close themselves
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SUSPECT_SECONDS if suspects else SWEEP_SECONDS):
                    await self.hint.wait()
            self.hint.clear()
            with patience("sweep"):
                await set_clock(self._pool, self._clock)
                await self._start_unstarted()
                await self._end_unled()
                suspects = await self._resume_interrupted(suspects)
                place = await closing.sweep(self._pool, self._flows, place)
                await self._end_stale()
                await leases.end_expired(self._pool)

    async def _start_unstarted(self) -> None:
        async with self._pool.connection() as connection:
            cursor = await connection.execute(UNSTARTED, (list(self._flows),))
            waiting = [await runs.load(connection, row[0]) for row in await cursor.fetchall()]
        for run in waiting:
            await orchestration.start(run)

    async def _end_unled(self) -> None:
        """A run whose workflow is over though it is not: nobody will ever lead it, and it must not look alive."""
        async with self._pool.connection() as connection:
            cursor = await connection.execute(UNLED, (list(self._flows),))
            for run_id, state in await cursor.fetchall():
                why = f"its workflow is {state}, though the run had not ended; see the server's log of that time"
                await self._end(connection, run_id, "catastrophic", "NO_WORKFLOW", why)

    async def _end_stale(self) -> None:
        """Longer than its stages may take: a bug, or a story that hangs. One that is being led gets twice the time."""
        limits = [flow.stale_after for flow in self._flows.values()]
        async with self._pool.connection() as connection:
            cursor = await connection.execute(STALE, {"flows": list(self._flows), "limits": limits})
            for run_id, running_for, limit, only_overdue in await cursor.fetchall():
                why = f"running for {running_for}, longer than the {limit} that its stages may take"
                if only_overdue:
                    await run_log.write_once(connection, run_id, "overdue: still being led", why=why)
                else:
                    await self._end(connection, run_id, "stale", "STALE", why)

    async def _end(self, connection: Connection, run_id: int, cause: EndCause, code: str, why: str) -> None:
        run = await runs.load(connection, run_id)
        try:
            await ending.end(connection, self._flows[run.flow], run, cause=cause, code=code, reason=why)
        except Exception as error:  # one that cannot be ended must not keep the others
            if is_away(error):
                raise
            log.exception("a run cannot be ended", run_id=run_id)

    async def _resume_interrupted(self, suspects: dict[str, float]) -> dict[str, float]:
        now = self._clock.monotonic()
        async with self._pool.connection() as connection:
            seen = {
                name: suspects.get(name, now) for name in await orchestration.interrupted(connection, self._replica)
            }
        # For a while already: one that has just been dequeued is about to run.
        if overdue := sorted(name for name, since in seen.items() if now - since >= 2 * SUSPECT_SECONDS):
            log.warning("resuming interrupted workflows", workflows=overdue)
            await orchestration.resume(overdue)
        return {name: since for name, since in seen.items() if name not in overdue}


async def set_clock(pool: Pool, clock: Clock) -> None:
    async with pool.connection() as connection:
        asked = datetime.now(UTC)
        row = await (await connection.execute("SELECT ecluse_now()")).fetchone()
    if row:  # the database's clock is everybody's: a host that is fast or slow must not retry early or late
        clock.offset = row[0] - (asked + (datetime.now(UTC) - asked) / 2)


@contextmanager
def patience(doing: str) -> Iterator[None]:
    """A database that is away comes back: whoever looks again soon anyway need only say so."""
    try:
        yield
    except orchestration.DATABASE_ERRORS as error:
        if not orchestration.away(error):
            raise
        log.warning(f"{doing}: database away", error=one_line(error))
