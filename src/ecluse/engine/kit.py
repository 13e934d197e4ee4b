"""The engine put together: pools, lanes, worker, committer, heart, listener, orchestration. One per process."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import psycopg
import structlog

from ecluse.base.clock import Clock
from ecluse.base.crash import crashpoint
from ecluse.base.errors import EcluseError, NotFound
from ecluse.base.ids import replica_id
from ecluse.db.connect import pool
from ecluse.db.listen import listen
from ecluse.engine import closing, orchestration, runs
from ecluse.engine.fan_out import WORK_CHANNEL, fan_out
from ecluse.engine.flow import Flow, NewItem, Stage, WorkContext
from ecluse.engine.replicas import Heart
from ecluse.engine.runs import ENDED_CHANNEL, RUNS_CHANNEL, Start, Started
from ecluse.engine.story import Story, lead
from ecluse.engine.worker import Worker

log = structlog.get_logger(__name__)

CLOCK_CHANNEL = "ecluse_clock"
SWEEP_SECONDS = 2.0
SUSPECT_SECONDS = 1.0
WAIT_POLL_SECONDS = 1.0

# Claim and commit are a handful of known statements over tables whose statistics are always stale: the plans are
# nested loops over indexes, whatever the planner believes about the sizes.
PINNED_PLANS = (
    " -c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c plan_cache_mode=force_generic_plan"
)

PUT_LANE = """
INSERT INTO lanes (name, max_in_flight, max_per_key, per_second, burst) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (name) DO UPDATE SET max_in_flight = excluded.max_in_flight, max_per_key = excluded.max_per_key,
    per_second = excluded.per_second, burst = excluded.burst
"""

# Orchestrated runs whose workflow was never started: the starter died in between, or is not this program.
UNSTARTED = """
SELECT r.id FROM runs r WHERE r.ended_at IS NULL AND r.orchestrated AND r.state = 'queued' AND r.flow = ANY(%s)
AND NOT EXISTS (SELECT 1 FROM dbos.workflow_status w WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key)
ORDER BY r.id LIMIT 100
"""


@dataclass
class Kit:
    dsn: str
    flows: Sequence[Flow]
    hands: int = 200
    chunk: int = 200
    beat: float = 2.0
    dead_after: float = 6.0
    clock: Clock = field(default_factory=Clock)
    chance: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.replica = replica_id()
        self.by_name = {flow.name: flow for flow in self.flows}
        self.pool = pool(self.dsn, size=10)
        self._work_pool = pool(self.dsn, size=3, extra_options=PINNED_PLANS)
        self._heart = Heart(self.dsn, self.replica, beat=self.beat, dead_after=self.dead_after)
        self._background: list[asyncio.Task[None]] = []
        self._runs_hint = asyncio.Event()
        self._run_ended = asyncio.Event()  # of any run; replaced each time it is set
        self.running = False
        self.broken = asyncio.Event()
        self._vendors = AsyncExitStack()

    async def start(self) -> None:
        # Items live for milliseconds and hold no cycles: the collector would look at thousands of them for nothing.
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        await self.pool.open(wait=True)
        await self._work_pool.open(wait=True)
        contexts = {
            flow.name: WorkContext(
                vendors=await self._vendors.enter_async_context(flow.vendors(self.clock)), now=self.clock.now
            )
            for flow in self.flows
        }
        self.worker = Worker(
            work_pool=self._work_pool,
            pool=self.pool,
            flows=self.by_name,
            contexts=contexts,
            replica=self.replica,
            hands=self.hands,
            clock=self.clock,
            chance=self.chance,
        )
        await self._read_clock()
        await self._put_lanes()
        await asyncio.to_thread(self._heart.start)
        await orchestration.launch(self.dsn, self.replica, self._lead)
        self._background = [
            asyncio.create_task(job, name=name)
            for name, job in {
                "worker": self.worker.run(),
                "committer": self.worker.committer.run(),
                "listener": listen(
                    self.dsn,
                    {
                        WORK_CHANNEL: lambda _: self.worker.wake(),
                        RUNS_CHANNEL: lambda _: self._runs_hint.set(),
                        ENDED_CHANNEL: self._hear_end,
                        CLOCK_CHANNEL: self._hear_clock,
                    },
                ),
                "sweeper": self._sweep(),
            }.items()
        ]
        for task in self._background:
            task.add_done_callback(self._loop_ended)
        self.running = True

    async def stop(self, grace: float = 1.0) -> None:
        """Hand over: finish or give back what is in hand, leave the runs to the other replicas."""
        self.running = False
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.worker.drain(grace)
        await orchestration.stop()
        await asyncio.to_thread(self._heart.stop)
        await self._vendors.aclose()
        await self._work_pool.close()
        await self.pool.close()

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by itself is a bug; a server without it would look alive and do nothing."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("engine loop died", loop=task.get_name(), exc_info=error)
            self.broken.set()

    async def start_run(self, start: Start) -> Started:
        """Commit the run, then lead it from here; what a crash in between leaves, a sweep starts."""
        async with self.pool.connection() as connection:
            started = await runs.insert(connection, start)
        crashpoint("after run insert")
        if not started.deduplicated and start.flow.story is not None:
            await orchestration.start(started.run)
        return started

    async def start_runs(self, starts: Sequence[Start]) -> list[Started | Exception]:
        """Many at once: rows and workflows in one commit, led by whichever replica takes them from the queue. One that
        cannot be started is reported in its place and does not stop the others."""
        results: list[Started | Exception] = []
        async with self.pool.connection() as connection, connection.transaction():
            for start in starts:
                try:
                    async with connection.transaction():
                        results.append(await runs.insert(connection, start))
                except (EcluseError, psycopg.DataError, psycopg.IntegrityError) as error:
                    results.append(error)
            fresh = [r.run.id for r in results if isinstance(r, Started) and not r.deduplicated]
            await orchestration.enqueue(connection, fresh)
        return results

    async def start_items(self, start: Start, stage: Stage, items: Sequence[NewItem]) -> Started:
        """A run that is only items, in one commit: nobody leads it, and it ends when its last item is finished."""
        async with self.pool.connection() as connection, connection.transaction():
            started = await runs.insert(connection, start)
            if not started.deduplicated:
                await runs.begin(connection, start.flow, started.run)
                await runs.select(connection, started.run, items)
                await fan_out(connection, started.run, stage, items, chunk=self.chunk)
        return started

    async def wait_for_run(self, run_id: int, max_wait: timedelta) -> dict[str, object]:
        """Until the run has ended, at most `max_wait`. The signal only wakes; the row is read first and on every look,
        so that an end just before the wait, or a lost signal, is not missed."""
        deadline = self.clock.monotonic() + max_wait.total_seconds()
        while True:
            ended = self._run_ended
            async with self.pool.connection() as connection:
                row = await runs.show(connection, run_id)
            left = deadline - self.clock.monotonic()
            if row["ended_at"] is not None or left <= 0:
                return row
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, WAIT_POLL_SECONDS)):
                    await ended.wait()

    def flow(self, name: str) -> Flow:
        if name not in self.by_name:
            raise NotFound(f"there is no flow {name!r}; known: {', '.join(sorted(self.by_name)) or 'none'}")
        return self.by_name[name]

    async def _lead(self, run_id: int) -> None:
        async with self.pool.connection() as connection:
            run = await runs.load(connection, run_id)
        if run.flow not in self.by_name:
            # Taken from the queue during an upgrade, say: no reason to fail. Whoever takes over from us leads it.
            log.error("a run of a flow that is not loaded here waits for another replica", run_id=run_id, flow=run.flow)
            await asyncio.Event().wait()
        await lead(Story(self.pool, self.flow(run.flow), run, chunk=self.chunk))

    async def _put_lanes(self) -> None:
        lanes = {stage.lane.name: stage.lane for flow in self.flows for stage in flow.stages}
        async with self.pool.connection() as connection:
            for lane in sorted(lanes.values(), key=lambda lane: lane.name):
                await connection.execute(
                    PUT_LANE, (lane.name, lane.max_in_flight, lane.max_per_key, lane.per_second, lane.burst)
                )
            cursor = await connection.execute(
                "SELECT id, max_in_flight IS NOT NULL OR max_per_key IS NOT NULL OR per_second IS NOT NULL FROM lanes"
                " WHERE name = ANY(%s)",
                (list(lanes),),
            )
            rows = await cursor.fetchall()
        self.worker.set_lanes(
            free=[lane for lane, capped in rows if not capped],
            capped=[lane for lane, capped in rows if capped],
        )

    def _hear_end(self, _: str) -> None:
        self._run_ended.set()
        self._run_ended = asyncio.Event()

    def _hear_clock(self, _: str) -> None:
        self._reading = asyncio.create_task(self._read_clock())

    async def _read_clock(self) -> None:
        async with self.pool.connection() as connection:
            row = await (await connection.execute('SELECT "offset" FROM clock_offset')).fetchone()
        if row and isinstance(row[0], timedelta):
            self.clock.offset = row[0]

    async def _sweep(self) -> None:
        """What a crash, a lost connection or a restart of the database has left lying."""
        suspects: set[str] = set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SUSPECT_SECONDS if suspects else SWEEP_SECONDS):
                    await self._runs_hint.wait()
            self._runs_hint.clear()
            try:
                async with self.pool.connection() as connection:
                    cursor = await connection.execute(UNSTARTED, (list(self.by_name),))
                    unstarted = [row[0] for row in await cursor.fetchall()]
                    waiting = [await runs.load(connection, run_id) for run_id in unstarted]
                    interrupted = await orchestration.interrupted(connection, self.replica)
                for run in waiting:
                    await orchestration.start(run)
                # Seen twice: one that has just been dequeued is about to run.
                if again := suspects & interrupted:
                    log.warning("resuming interrupted workflows", workflows=sorted(again))
                    await orchestration.resume(again)
                suspects = interrupted - again
                await closing.sweep(self.pool, self.by_name)
            except (psycopg.OperationalError, *orchestration.Infrastructure) as error:
                log.warning("sweep: database away", error=str(error).strip().splitlines()[0])
