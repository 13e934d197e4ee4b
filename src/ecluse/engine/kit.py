"""The engine of one process, assembled from its parts: pools, lanes, worker, committer, heartbeat, listener,
workflows."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import structlog

from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound
from ecluse.base.ids import replica_id
from ecluse.base.tasks import stopped
from ecluse.db.connect import pool
from ecluse.db.listen import Hear, listen
from ecluse.db.pools import CLAIMING, PROMPT, SIZE
from ecluse.engine.cluster import periodic_jobs
from ecluse.engine.cluster.heartbeat import Heartbeat
from ecluse.engine.cluster.repeat import Job, repeat
from ecluse.engine.cluster.sweeps import set_clock
from ecluse.engine.cluster.trace_rows import TraceRows
from ecluse.engine.effects.paid_calls import PaidCalls
from ecluse.engine.lanes.registry import LANES_CHANNEL, Lanes
from ecluse.engine.lead import durable
from ecluse.engine.lead.new_runs import NewRuns
from ecluse.engine.lead.story import Story, lead
from ecluse.engine.model.context import EmitLive, WorkContext
from ecluse.engine.model.flow import Flow
from ecluse.engine.model.roles import ROLES, Role
from ecluse.engine.model.shares import share_left
from ecluse.engine.outbox.events import OUTBOX_CHANNEL, Sink
from ecluse.engine.outbox.publisher import Publisher
from ecluse.engine.runs import lifecycle, stages
from ecluse.engine.runs.end_waits import RunEnds
from ecluse.engine.runs.items import WORK_CHANNEL
from ecluse.engine.runs.lifecycle import ENDED_CHANNEL
from ecluse.engine.schedule.slot_decisions import FiringLimits
from ecluse.engine.work.committer import Committer
from ecluse.engine.work.completion import CompletionLoop
from ecluse.engine.work.execution import Executor
from ecluse.engine.work.worker import Worker

log = structlog.get_logger(__name__)

TRACE_SECONDS = 0.5

COMMIT_SECONDS = 10  # limit of a commit or claim: after that, the locks of a frozen replica are released
# Claim and commit are a handful of known statements over tables whose statistics are always stale: the big tables are
# read by index, whatever the planner estimates about their sizes.
PINNED_PLANS = {"enable_seqscan": "off", "enable_mergejoin": "off", "plan_cache_mode": "force_generic_plan"}


@dataclass
class Kit:
    """The engine of one process: `start` starts the parts that its roles need, `stop` hands its work over to other
    replicas. `broken` is set if one of its loops has failed; the process then has to exit."""

    dsn: str
    flows: Sequence[Flow]
    roles: frozenset[Role] = ROLES
    hands: int = 200  # worker slots
    # Of the worker slots, for one tenant's calls to one vendor (`WorkerSlots`), and of the runs led (`NewRuns`).
    tenant_share: float = 1.0
    chunk: int = 200  # rows per statement of a fan-out
    beat: float = 2.0  # seconds between two heartbeats
    dead_after: float = 6.0  # seconds without a heartbeat after which a replica is declared dead
    db_pool: int = SIZE  # connections of its own pool, and as many of DBOS
    trace_rows: bool = False  # store traces as rows of `workflow_logs`
    sinks: Sequence[Sink] = ()  # for the events that it publishes
    live: EmitLive = lambda _: None
    due: FiringLimits = field(default_factory=FiringLimits)
    sweep_every: float = 5.0  # seconds between two runs of most sweeps
    jobs: Sequence[Job] = ()  # periodic jobs of other packages, run beside the engine's own
    hears: Mapping[str, Hear] = field(default_factory=dict)  # callbacks of other packages, by channel
    clock: Clock = field(default_factory=Clock)
    chance: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.replica = replica_id()
        self.by_name = {flow.name: flow for flow in self.flows}
        self.budgets = {f"{flow.name}/{one.name}": one.retry.executions for flow in self.flows for one in flow.stages}
        self.pool = pool(self.dsn, size=self.db_pool)
        self._work_pool = pool(
            self.dsn, size=CLAIMING, settings=PINNED_PLANS, checked=False, transaction_seconds=COMMIT_SECONDS
        )
        self._prompt_pool = pool(self.dsn, size=PROMPT)
        self._new_runs = NewRuns(self.by_name, self.tenant_share)
        self._heart = Heartbeat(self.dsn, self.replica, beat=self.beat, dead_after=self.dead_after)
        self._background: list[asyncio.Task[None]] = []
        self._ends = RunEnds(self.pool, self.clock)
        self.running = False
        self.broken = asyncio.Event()
        self._vendors = AsyncExitStack()
        self.worker: Worker | None = None
        self._committing: asyncio.Task[None] | None = None
        self._traces = TraceRows(self.clock)

    @property
    def tenant_slots(self) -> int | None:
        """The worker slots of this process that one tenant's calls to one vendor may hold; None: all of them."""
        return share_left(self.tenant_share, self.hands, 0, 0) if self.tenant_share < 1 else None

    async def start(self) -> None:
        """Open the pools and start the loops, periodic jobs and listeners that the roles of this process need. Also
        tunes the interpreter of the process: garbage collection and thread switching."""
        # Items live for milliseconds and hold no cycles: the collector would traverse thousands of them for nothing.
        # A full collection blocks the event loop for longer, the more objects there are, so collections are rare.
        gc.freeze()
        gc.set_threshold(10_000, 10, 50)
        # While a thread computes, the event loop waits this long for the interpreter lock after each wait for a socket.
        sys.setswitchinterval(0.001)
        await self.pool.open(wait=True)
        await set_clock(self.pool, self.clock)
        loops: dict[str, Coroutine[Any, Any, None]] = {}
        channels: dict[str, list[Hear]] = {name: [hear] for name, hear in self.hears.items()}
        channels[ENDED_CHANNEL] = [self._on_run_ended]
        own = periodic_jobs.of_every_replica(self.by_name, self.clock, self.due, self.sweep_every)
        if self.roles != {"api"}:
            await self._prompt_pool.open(wait=True)
            work = {f"{flow.name}/{stage.name}": stage for flow in self.flows for stage in flow.stages}
            can = (work, self.hands) if "worker" in self.roles else ({}, 0)
            await asyncio.to_thread(self._heart.start, sorted(self.roles), *can, self.tenant_share)
            publisher = Publisher(self.dsn, self.sinks)
            loops["publisher"] = publisher.run()
            channels[OUTBOX_CHANNEL] = [lambda _: publisher.wake.set()]
        if "worker" in self.roles:
            own += await self._start_worker(loops, channels)
        if self.trace_rows:
            self._traces.start()
            own.append(Job("storing traces", TRACE_SECONDS, self._traces.store))
        for job in [*own, *self.jobs]:
            if job.roles & self.roles:
                wake = asyncio.Event()
                loops[job.name] = repeat(job, self._prompt_pool if job.prompt else self.pool, wake)
                for channel in job.channels:
                    channels.setdefault(channel, []).append(partial(_wake, wake))
        loops["listener"] = listen(self.dsn, {name: partial(_call_all, called) for name, called in channels.items()})
        self._background = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        for task in self._background:
            task.add_done_callback(self._loop_ended)
        self.running = True

    async def _start_worker(
        self, loops: dict[str, Coroutine[Any, Any, None]], channels: dict[str, list[Hear]]
    ) -> list[Job]:
        """Start the parts that only a worker has: lanes, executor, committer, workflows, reaper. Add its loops to
        `loops` and its listeners to `channels`; return its periodic jobs."""
        await self._work_pool.open(wait=True)
        lanes, paid = Lanes(self.pool, self.flows, self.clock), PaidCalls(self.pool, self.replica)
        contexts = {
            flow.name: WorkContext(
                vendors=await self._vendors.enter_async_context(flow.vendors(self.clock)),
                now=self.clock.now,
                reserve=lanes.reserve,
                emit=self.live,
                pool=self.pool,
                replica=self.replica,
            )
            for flow in self.flows
        }
        committer = Committer(self._work_pool, self.replica, lanes)
        executor = Executor(
            contexts=contexts,
            lanes=lanes,
            committer=committer,
            paid=paid,
            clock=self.clock,
            chance=self.chance,
            alive=lambda: self._heart.beats,
        )
        self.worker = worker = Worker(
            self._work_pool,
            self.replica,
            lanes=lanes,
            executor=executor,
            committer=committer,
            completion=CompletionLoop(self.pool, self.by_name, self.live),
            clock=self.clock,
            slots=self.hands,
            share=self.tenant_share,
            slot_ended=self._loop_ended,
        )
        await lanes.put()
        async with self.pool.connection() as connection:
            await stages.raise_budgets(connection, self.flows)
        durable.launch(self.dsn, self.replica, self._lead, self.db_pool)
        self._heart.start_reaping()
        channels[WORK_CHANNEL] = [lambda _: worker.wake()]
        channels[LANES_CHANNEL] = [lambda lane_id: lanes.refresh(int(lane_id) if lane_id else None)]
        loops |= {"lanes": lanes.run(), "lane log": lanes.log_changes(), "worker": worker.run()}
        self._committing = asyncio.create_task(worker.commit_results(), name="committer")
        self._committing.add_done_callback(self._loop_ended)
        return periodic_jobs.of_worker(self.by_name, self._new_runs, worker, contexts, self.replica, self.sweep_every)

    async def stop(self, grace: float = 1.0) -> None:
        """Stop this replica and hand its work over: calls in flight get `grace` seconds to finish, other claimed items
        are released, and other replicas continue its runs. If one part fails to stop (the database is unavailable,
        say), the other parts are stopped all the same, then the error is raised."""
        self.running = False
        await stopped(self._background)
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self.pool.close)
            parts.push_async_callback(self._prompt_pool.close)
            if self.trace_rows:
                parts.push_async_callback(self._traces.stop, self.pool)
            parts.push_async_callback(self._work_pool.close)
            parts.push_async_callback(self._vendors.aclose)
            if self.roles != {"api"}:
                parts.push_async_callback(asyncio.to_thread, self._heart.stop)
            if self.worker is not None and self._committing is not None:
                parts.push_async_callback(self.worker.flush, grace)
                parts.push_async_callback(stopped, [self._committing])
                parts.push_async_callback(self._hand_over, self.worker, grace)

    async def _hand_over(self, worker: Worker, grace: float) -> None:
        """Stop leading workflows and requeue them for other replicas; meanwhile calls in flight get `grace` seconds to
        finish."""
        ending = asyncio.create_task(worker.drain(grace))
        try:
            await durable.stop()
            await asyncio.to_thread(self._heart.hand_over)
        finally:
            await ending

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Set `broken` if the task of a loop ended with an error. Such an error is a bug, and a server without the loop
        would look alive and do nothing."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("engine: loop died", loop=task.get_name(), exc_info=error)
            self.broken.set()

    async def wait_for_run(self, run_id: int, max_wait: timedelta) -> bool:
        """Wait until the run has ended, at most `max_wait`; return whether it has. Raise NotFound if there is no such
        run."""
        return await self._ends.wait(run_id, max_wait)

    def flow(self, name: str) -> Flow:
        """Return the flow of this name. Raise NotFound, which lists the known flows, if it is not loaded in this
        process."""
        if name not in self.by_name:
            raise NotFound(f"There is no flow {name!r} (known: {', '.join(sorted(self.by_name)) or 'none'}).")
        return self.by_name[name]

    async def _lead(self, run_id: int) -> None:
        """Lead the run through the story of its flow; called by every workflow. Raise NotHere if the flow is not loaded
        in this process."""
        if begun := await self._new_runs.begun(run_id):
            run = begun
        else:
            async with self.pool.connection() as connection:
                run = await lifecycle.load_run(connection, run_id)
        if run.flow not in self.by_name:
            raise durable.NotHere(f"flow {run.flow!r} is not loaded")
        story = Story(self.pool, self.flow(run.flow), run, chunk=self.chunk, emit=self.live)
        await lead(story, begun=begun is not None)

    def _on_run_ended(self, run_id: str) -> None:
        """Handle a notification on ENDED_CHANNEL: have the worker drop the items of the ended run, and wake
        `wait_for_run`. An empty `run_id` means that notifications may have been lost."""
        # Without an id, the listener has reconnected and may have missed notifications; a sweep finds those runs.
        if run_id and self.worker is not None:
            self.worker.drop([int(run_id)])
        self._ends.heard(int(run_id) if run_id else None)


def _wake(event: asyncio.Event, _: str) -> None:
    event.set()


def _call_all(callbacks: Sequence[Hear], payload: str) -> None:
    for callback in callbacks:
        callback(payload)
