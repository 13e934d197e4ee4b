"""The work loop: claim what there are hands for, call with no transaction open, decide, hand the result to the
committer. NOTIFY wakes it, a slow poll is the fallback.

Work is claimed a tenth of a second ahead, by the pace measured, so that fast items come in large batches while slow
ones stay available to other replicas until there is a hand for them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import psycopg
import structlog

from ecluse.base.clock import Clock
from ecluse.base.crash import crashpoint
from ecluse.base.errors import EcluseError, TransientError
from ecluse.db.connect import Pool
from ecluse.engine import closing
from ecluse.engine.claim import AHEAD_SECONDS, Taken, claim
from ecluse.engine.committer import LARGEST_BATCH, Committer, Finish
from ecluse.engine.flow import Done, Flow, Ignored, Stage, WorkContext
from ecluse.engine.retry import Retry, decide

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
BUSY_POLL_SECONDS = 0.05
# A lane with a rate gives permits for a tenth of a second at a time: while it does, ask more often.
PACED_SECONDS = 2.0


class Worker:
    def __init__(
        self,
        *,
        work_pool: Pool,
        pool: Pool,
        flows: Mapping[str, Flow],
        contexts: Mapping[str, WorkContext],
        replica: str,
        hands: int,
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self._work_pool = work_pool
        self._pool = pool
        self._flows = flows
        self._contexts = contexts
        self._stages = {(flow.name, stage.name): stage for flow in flows.values() for stage in flow.stages}
        self._replica = replica
        self._hands = hands
        self._clock = clock
        self._chance = chance
        self.committer = Committer(work_pool, replica, self._committed)
        self.committer.expecting = lambda: self._running
        self._lanes: tuple[list[int], list[int]] = ([], [])
        self._ready: deque[Taken] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._in_hand: Counter[tuple[int, str]] = Counter()
        self._finished_lately = 0
        self._pace = 0.0
        self._paced_until = 0.0
        self._wake = asyncio.Event()
        self._to_close: set[tuple[int, str]] = set()

    def wake(self) -> None:
        self._wake.set()

    def set_lanes(self, free: list[int], capped: list[int]) -> None:
        self._lanes = (free, capped)
        self.wake()

    async def run(self) -> None:
        """Until cancelled. What is in hand then is finished or handed back by `drain`."""
        measured_at = self._clock.monotonic()
        while True:
            now = self._clock.monotonic()
            if now - measured_at >= AHEAD_SECONDS:
                self._pace = self._finished_lately / (now - measured_at)
                self._finished_lately, measured_at = 0, now
            capacity = min(self._hands + int(self._pace * AHEAD_SECONDS), LARGEST_BATCH)
            room = capacity - self._running - len(self._ready) - self.committer.backlog
            self._wake.clear()
            got = await self._claim(room) if room >= max(1, capacity // 4) or self._running == 0 < room else None
            if got is None:
                await self._sleep(BUSY_POLL_SECONDS)
            elif got == 0:
                await self._sleep(BUSY_POLL_SECONDS if now < self._paced_until else POLL_SECONDS)

    async def drain(self, grace: float) -> None:
        """After `run` was cancelled: let what is running finish, for at most `grace` seconds, and store it."""
        self._ready.clear()
        running = set(self._tasks)
        if running:
            _, unfinished = await asyncio.wait(running, timeout=grace)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        await self.committer.flush()

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _claim(self, room: int) -> int:
        free, capped = self._lanes
        try:
            taken = await claim(self._work_pool, replica=self._replica, free=free, capped=capped, room=room)
        except psycopg.OperationalError as error:
            log.warning("claim: database away", error=str(error).strip())
            await asyncio.sleep(POLL_SECONDS)
            return 0
        if taken:
            crashpoint("after claim")
        for one in taken:
            self._in_hand[one.item.run_id, one.item.stage] += 1
            if one.start_at is not None:
                self._paced_until = self._clock.monotonic() + PACED_SECONDS
        self._ready.extend(taken)
        self._start_ready()
        return len(taken)

    def _start_ready(self) -> None:
        while self._ready and self._running < self._hands:
            self._running += 1
            task = asyncio.create_task(self._execute(self._ready.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _execute(self, taken: Taken) -> None:
        try:
            if taken.start_at is not None:
                await asyncio.sleep((taken.start_at - self._clock.now()).total_seconds())
            finish = await self._try(self._stages[taken.item.flow, taken.item.stage], taken)
        finally:
            self._running -= 1
            self._finished_lately += 1
            self._start_ready()
            if not self._ready:
                self._wake.set()
        self.committer.put(finish)

    async def _try(self, stage: Stage, taken: Taken) -> Finish:
        item, claim_id, fence, _ = taken
        try:
            async with asyncio.timeout(stage.time_limit.total_seconds()):
                result = await stage.work(self._contexts[item.flow], item)
        except TimeoutError:
            limit = stage.time_limit.total_seconds()
            return self._failed(stage, taken, TransientError(f"No answer within {limit:g} s", code="TIMEOUT"))
        except Exception as error:  # the edge of the work: whatever went wrong in it is this item's error
            if not isinstance(error, EcluseError):
                log.exception("work raised", event_id=item.event_id)
            return self._failed(stage, taken, error)
        match result:
            case Done(value):
                return Finish(item, stage, claim_id, fence, "succeeded", result=value)
            case Ignored(reason, code):
                return Finish(item, stage, claim_id, fence, "ignored", error_code=code, error=reason)

    def _failed(self, stage: Stage, taken: Taken, error: Exception) -> Finish:
        item, claim_id, fence, _ = taken
        executions = item.executions + 1
        verdict = decide(error, executions=executions, policy=stage.retry, now=self._clock.now(), chance=self._chance)
        known = isinstance(error, EcluseError)
        code = error.code if isinstance(error, EcluseError) else "BUG"
        failed = Finish(
            item,
            stage,
            claim_id,
            fence,
            "failed",
            error_code=code,
            error=str(error) if known else f"{type(error).__name__}: {error}",
            ambiguous=isinstance(error, TransientError) and error.ambiguous,
        )
        if isinstance(verdict, Retry):
            log.info("retry", event_id=item.event_id, code=code, execution=executions, at=str(verdict.at))
            return failed._replace(status="open", due_at=verdict.at)
        return failed._replace(permanent=verdict.permanent)

    def _committed(self, batch: Sequence[Finish]) -> None:
        loop = asyncio.get_running_loop()
        for finish in batch:
            pair = (finish.item.run_id, finish.item.stage)
            self._in_hand[pair] -= 1
            if self._in_hand[pair] == 0:
                del self._in_hand[pair]
                self._to_close.add(pair)
            if finish.due_at is not None:
                loop.call_later(max(0.0, (finish.due_at - self._clock.now()).total_seconds()), self.wake)
        self.wake()
        if self._to_close:
            task = asyncio.create_task(self._close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        pairs, self._to_close = self._to_close, set()
        if not pairs:
            return
        try:
            await closing.close(self._pool, self._flows, pairs)
            crashpoint("after hint")
        except psycopg.OperationalError as error:
            log.warning("closing: database away, the sweep or the gate will look", error=str(error).strip())
        except EcluseError:
            log.exception("closing failed", pairs=sorted(pairs))
