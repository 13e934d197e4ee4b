"""The work loop: claim what there are hands for, call with no transaction open, decide, hand the result to the
committer. NOTIFY wakes it, a slow poll is the fallback.

Work is claimed a tenth of a second ahead, by the pace measured, so that fast items come in large batches while slow
ones stay available to other replicas until there is a hand for them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psycopg
import structlog

from ecluse.base.clock import Clock
from ecluse.base.crash import crashpoint
from ecluse.base.errors import EcluseError, TransientError
from ecluse.db.connect import Pool
from ecluse.engine import closing
from ecluse.engine.claim import AHEAD_SECONDS, Claimant, Taken, claim_capped, claim_free, release_unknown
from ecluse.engine.committer import LARGEST_BATCH, Committer, Finish
from ecluse.engine.flow import Done, Flow, Ignored, Stage, WorkContext
from ecluse.engine.hands import Hand, Hands
from ecluse.engine.retry import Retry, decide

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
FLUSH_SECONDS = 3.0  # at a stop: a database that is away must not keep us
BUSY_POLL_SECONDS = 0.05
PACE_SECONDS = 0.03  # over which the pace is measured
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
        died: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._work_pool = work_pool
        self._pool = pool
        self._flows = flows
        self._contexts = contexts
        self._stages = {(flow.name, stage.name): stage for flow in flows.values() for stage in flow.stages}
        self._who = Claimant(replica, [f"{flow}/{stage}" for flow, stage in self._stages])
        self._clock = clock
        self._chance = chance
        self._wake = asyncio.Event()
        self.hands = Hands(hands, self._execute, empty=self._wake.set, died=died)
        self.committer = Committer(work_pool, replica, self._committed, expecting=lambda: self.hands.busy)
        self._lanes: tuple[list[int], list[int]] = ([], [])
        self._unsure = False  # a claim failed: it may have been committed all the same
        self._in_hand: Counter[tuple[int, str]] = Counter()
        self._paced_until = 0.0
        self._to_close: set[tuple[int, str]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        self._wake.set()

    def set_lanes(self, free: list[int], capped: list[int]) -> None:
        self._lanes = (free, capped)
        self.wake()

    async def run(self) -> None:
        """Until cancelled. What is in hand then is finished or handed back by `drain`."""
        self.hands.start()
        measured_at, finished, pace = self._clock.monotonic(), 0, 0.0
        while True:
            now = self._clock.monotonic()
            if now - measured_at >= PACE_SECONDS:
                pace = (self.hands.finished - finished) / (now - measured_at)
                finished, measured_at = self.hands.finished, now
            capacity = min(self.hands.count + int(pace * AHEAD_SECONDS), LARGEST_BATCH)
            room = capacity - self.hands.busy - len(self.hands.ready) - self.committer.backlog
            # Worth a claim: what would come free anyway until the next look, and at most a quarter of what we can hold.
            worth = max(1, min(capacity // 4, int(pace * BUSY_POLL_SECONDS)))
            self._wake.clear()
            got = await self._claim(room) if room >= worth or self.hands.busy == 0 < room else None
            if got is None:
                await self._sleep(BUSY_POLL_SECONDS)
            elif got == 0:
                await self._sleep(BUSY_POLL_SECONDS if now < self._paced_until else POLL_SECONDS)

    async def drain(self, grace: float) -> None:
        """After `run` was cancelled: let what is running finish, for at most `grace` seconds, and store it."""
        await self.hands.drain(grace)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(grace, FLUSH_SECONDS)):
                await self.committer.flush()
                await asyncio.gather(*self._closing)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _claim(self, room: int) -> int:
        free, capped = self._lanes
        taken: list[Taken] = []
        try:
            async with self._work_pool.connection() as connection:
                if self._unsure:
                    await release_unknown(connection, replica=self._who.replica, known=self._known_claims())
                    self._unsure = False
                # Where caps hold, only what there is a hand for right now; and half of it, if others wait as well.
                now_free = min(room, self.hands.count - self.hands.busy - len(self.hands.ready))
                capped_room = (now_free + 1) // 2 if free else now_free
                if capped and capped_room > 0:
                    taken += await claim_capped(connection, self._who, capped, capped_room)
                if free and len(taken) < room:
                    taken += await claim_free(connection, self._who, free, room - len(taken))
        except psycopg.OperationalError as error:
            log.warning("claim: database away", error=str(error).strip())
            self._unsure = True
        if taken:
            crashpoint("after claim")
        for one in taken:
            self._in_hand[one.item.run_id, one.item.stage] += 1
            if one.start_at is not None:
                self._paced_until = self._clock.monotonic() + PACED_SECONDS
        self.hands.give(taken)
        return len(taken)

    def _known_claims(self) -> list[int]:
        uncommitted = self.committer.uncommitted
        return list(
            {taken.claim_id for taken in (*self.hands.ready, *self.hands.taken)}
            | {finish.claim_id for finish in uncommitted}
        )

    async def _execute(self, hand: Hand, taken: Taken) -> None:
        if taken.start_at is not None:
            await asyncio.sleep((taken.start_at - self._clock.now()).total_seconds())
        stage = self._stages[taken.item.flow, taken.item.stage]
        limit = stage.time_limit.total_seconds()
        hand.deadline = asyncio.get_running_loop().time() + limit
        self.committer.put(await self._try(hand, stage, taken))

    async def _try(self, hand: Hand, stage: Stage, taken: Taken) -> Finish:
        item, claim_id, fence, _ = taken
        try:
            result = await stage.work(self._contexts[item.flow], item)
        except asyncio.CancelledError as error:
            if hand.forgive():
                limit = stage.time_limit.total_seconds()
                return self._failed(stage, taken, TransientError(f"No answer within {limit:g} s", code="TIMEOUT"))
            if hand.told_to_go:
                raise
            return self._failed(stage, taken, RuntimeError(f"something inside the work was cancelled: {error!r}"))
        except Exception as error:  # the edge of the work: whatever went wrong in it is this item's error
            if not isinstance(error, EcluseError) and not item.executions:  # once per item will do
                log.exception("work raised", event_id=item.event_id)
            return self._failed(stage, taken, error)
        match result:
            case Done(value):
                return Finish(item, stage, claim_id, fence, "succeeded", result=value)
            case Ignored(reason, code):
                return Finish(item, stage, claim_id, fence, "ignored", error_code=code, error=reason)
            case other:
                return self._failed(stage, taken, TypeError(f"work returned {other!r}, not Done or Ignored"))

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
            log.debug("retry", event_id=item.event_id, code=code, execution=executions, at=str(verdict.at))
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
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self) -> None:
        pairs, self._to_close = self._to_close, set()
        if not pairs:
            return
        try:
            await closing.close(self._pool, self._flows, pairs)
            crashpoint("after hint")
        except psycopg.OperationalError as error:
            log.warning("closing: database away, the sweep or the gate will look", error=str(error).strip())
