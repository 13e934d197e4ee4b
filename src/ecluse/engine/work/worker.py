"""The claim loop: claim as many items as there are free worker slots. Each slot executes one item (`execution.py`) and
hands the result to the committer. NOTIFY wakes the loop, a slow poll is the fallback; `pace.py` says when to claim how
much."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

import psycopg
import structlog

from ecluse.base.alarm import Alarm
from ecluse.base.clock import Clock
from ecluse.base.crash import crashpoint
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import is_unavailable
from ecluse.engine.effects.paid import PaidCalls
from ecluse.engine.effects.perform import WriteExecutor
from ecluse.engine.lanes.registry import Lanes
from ecluse.engine.model.claimed import ClaimedItem
from ecluse.engine.model.flow import EmitLive, Flow, Item, WorkContext
from ecluse.engine.work import claim, suspects
from ecluse.engine.work.claim import AHEAD_SECONDS, Claimant
from ecluse.engine.work.committer import Committer, ItemResult
from ecluse.engine.work.completion import CompletionLoop
from ecluse.engine.work.execution import Executor
from ecluse.engine.work.pace import BUSY_POLL_SECONDS, POLL_SECONDS, Pace
from ecluse.engine.work.suspects import Suspicion
from ecluse.engine.work.verdict import release
from ecluse.engine.work.worker_slots import Hand, Hands

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 3.0  # at a stop: an unavailable database must not delay the exit
# A lane with a rate gives permits for a tenth of a second at a time: for so long after a permit, poll more often. The
# next permit of a slow lane is at a known instant, so an alarm is set instead.
PACED_SECONDS = 2.0
SUSPECTS_SECONDS = 1.0  # between two queries for waiting suspects


class Worker:
    def __init__(
        self,
        *,
        work_pool: Pool,
        pool: Pool,
        flows: Mapping[str, Flow],
        lanes: Lanes,
        contexts: Mapping[str, WorkContext],
        replica: str,
        hands: int,
        clock: Clock,
        chance: random.Random,
        alive: Callable[[], bool],
        tell: EmitLive,
        paying: PaidCalls,
        died: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._work_pool = work_pool
        self._paying = paying
        self._stages = {(flow.name, stage.name): stage for flow in flows.values() for stage in flow.stages}
        weights = [stage.weight for stage in self._stages.values()]
        self._who = Claimant(replica, [f"{flow}/{stage}" for flow, stage in self._stages], weights)
        self._lanes = lanes
        lanes.changed = self._lanes_changed
        self._clock = clock
        self._wake = asyncio.Event()
        self._pace = Pace(hands)
        self._alarm = Alarm(self.wake)
        self.hands = Hands(hands, self._run_one, empty=self._wake.set, died=died)
        self.committer = Committer(
            work_pool, replica, self._committed, lambda: self.hands.busy, partial(lanes.tell, work_pool)
        )
        self._executor = Executor(
            stages=self._stages,
            contexts=contexts,
            lanes=lanes,
            writes=WriteExecutor(self.committer.intend, self._may_send, clock.now),
            paid=paying,
            clock=clock,
            chance=chance,
        )
        self._alive = alive  # the heartbeat is recent: no replica can have declared this one dead
        self._leaving = False
        self._ended: set[int] = set()  # runs that ended while this worker held items of them
        self._suspects: dict[int, int] = {}  # per kind of waiting suspects, how many this worker may hold
        self._suspects_at = 0.0
        self._emptying = False  # claim nothing until all slots are empty, to run a suspect alone
        self._alone = False
        self._unsure = False  # a claim failed, but may have been committed
        self._in_hand: Counter[tuple[int, str]] = Counter()
        self._paced_until = 0.0
        self._closer = CompletionLoop(pool, flows, tell)

    def wake(self) -> None:
        """Claim soon: there may be new work."""
        self._pace.heard()
        self._wake.set()

    def _lanes_changed(self) -> None:
        """Release the items that have not started and whose lane is closed now."""
        for taken in self.hands.drop(lambda taken: self._lanes.is_closed(taken.lane_id)):
            self.committer.put(release(self._stages[taken.item.flow, taken.item.stage], taken))
        self.wake()

    async def run(self) -> None:
        """Claim and execute until cancelled; `drain` then lets running calls finish."""
        self.hands.start()
        while True:
            now = self._clock.monotonic()
            self._pace.measure(now, self.hands.finished)
            room = self._pace.capacity - self.hands.busy - len(self.hands.ready) - self.committer.backlog
            self._wake.clear()
            if (pause := self._pace.pause(now, room, bool(self._in_hand))) > 0:
                await self._sleep(pause)
            elif await self._claim(room) == 0:
                await self._sleep(BUSY_POLL_SECONDS if now < self._paced_until else POLL_SECONDS)

    @property
    def runs_in_hand(self) -> set[int]:
        return {run for run, _ in self._in_hand}

    def drop(self, run_ids: Iterable[int]) -> None:
        """Drop the items of runs that have ended: those not started are forgotten, reads are cancelled, writes and paid
        calls finish."""
        ended = self.runs_in_hand.intersection(run_ids)
        self._ended = self._ended & self.runs_in_hand | ended
        if ended:
            for taken in self.hands.drop(lambda taken: taken.item.run_id in ended):
                self._forget([taken])
            self.hands.interrupt(
                lambda taken: taken.item.run_id in ended and not self._executor.is_worth_its_answer(taken)
            )
            self._paying.run_ended([taken.item for taken in self.hands.taken if taken.item.run_id in ended])

    async def drain(self, grace: float) -> None:
        """Let running calls finish for at most `grace` seconds, after `run` was cancelled."""
        self._leaving = True
        await self.hands.drain(grace)

    async def flush(self, grace: float) -> None:
        """Store the remaining results, after `drain` and after the committer was stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(grace, FLUSH_SECONDS)):
                await self.committer.flush()
                await self._paying.note_cut_off()
                await self._closer.finish()

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _claim(self, room: int) -> int:
        taken: list[ClaimedItem] = []
        self._pace.claiming(self._clock.monotonic())
        try:
            async with self._work_pool.connection() as connection:
                if self._unsure:
                    await claim.release_unknown(connection, replica=self._who.replica, known=self._known_claims())
                    self._unsure = False
                if self._clock.monotonic() >= self._suspects_at:
                    await self._look_for_suspects(connection)
                    self._suspects_at = self._clock.monotonic() + SUSPECTS_SECONDS
                self._alone = self._alone and bool(self._in_hand)
                if not self._alone:
                    taken = await self._choose(connection, room)
        except psycopg.Error as error:
            if not is_unavailable(error):
                raise
            log.warning("claim: database away", error=str(error).strip())
            self._unsure = True
        if taken:
            crashpoint("after claim")
        for one in taken:
            self._in_hand[one.item.run_id, one.item.stage] += 1
            if one.start_at is not None:
                if (spacing := self._lanes.spacing(one.item)) < PACED_SECONDS / 10:
                    self._paced_until = self._clock.monotonic() + PACED_SECONDS
                else:
                    self._wake_at(one.start_at + timedelta(seconds=spacing - AHEAD_SECONDS / 2))
        self.hands.give(taken)
        self._pace.claimed(room, len(taken))
        return len(taken)

    async def _look_for_suspects(self, connection: Connection) -> None:
        waiting = await suspects.waiting(connection, self._who, self._lanes.free + self._lanes.capped)
        self._suspects = suspects.company(waiting, self.hands.count)
        alone = sum(waiting[kind] for kind, most in self._suspects.items() if most == 1)
        # As many workers empty their slots as there are suspects to run alone: those that hold the fewest items. The
        # others go on.
        self._emptying = alone > 0 and await suspects.sooner(connection, self._who) < alone

    async def _choose(self, connection: Connection, room: int) -> list[ClaimedItem]:
        """Claim items that are no suspects, and a few suspects. A suspect that must run alone is claimed only when the
        worker holds no item, and nothing else is claimed while it runs."""
        if alone := [kind for kind, most in self._suspects.items() if most == 1]:
            if self._in_hand and self._emptying:
                return []
            last = self._who._replace(least=min(alone), most=max(Suspicion), apart="alone")
            if not self._in_hand and (taken := await self._claim_from(connection, last, 1)):
                self._alone = True
                return taken
        taken = []
        for kind, most in self._suspects.items():
            held = sum(one.suspicion == kind for one in (*self.hands.ready, *self.hands.taken))
            if most > 1 and (free := min(room, most - held)) > 0:
                who = self._who._replace(least=kind, most=kind, apart="group")
                taken += await self._claim_from(connection, who, free)
        return taken + await self._claim_from(connection, self._who, room - len(taken))

    async def _claim_from(self, connection: Connection, who: Claimant, room: int) -> list[ClaimedItem]:
        free, capped = self._lanes.free, self._lanes.capped
        now, clean = self._clock.monotonic(), who == self._who
        free = [] if clean and self._pace.is_dry(now) else free
        taken: list[ClaimedItem] = []
        # From capped lanes, only as many items as slots are free right now; half as many, if uncapped lanes may have
        # items as well.
        now_free = min(room, self.hands.count - self.hands.busy - len(self.hands.ready))
        capped_room = (now_free + 1) // 2 if free else now_free
        if capped and capped_room > 0:
            taken += await claim.claim_capped(connection, who, capped, capped_room)
        if free and len(taken) < room:
            found = await claim.claim_free(connection, who, free, room - len(taken))
            if clean and not found:
                self._pace.found_dry(now)
            taken += found
        return taken

    def _known_claims(self) -> list[int]:
        uncommitted = self.committer.uncommitted
        return list(
            {taken.claim_id for taken in (*self.hands.ready, *self.hands.taken)}
            | {one.claim_id for one in uncommitted if isinstance(one, ItemResult)}
        )

    def _may_send(self, item: Item) -> bool:
        return self._alive() and not self._leaving and item.run_id not in self._ended

    async def _run_one(self, slot: Hand, claimed: ClaimedItem) -> None:
        result = await self._executor.execute(slot, claimed)
        if result is None:
            self._forget([claimed])
        else:
            self.committer.put(result)

    def _committed(self, batch: Sequence[ItemResult], over: Sequence[ItemResult]) -> None:
        for finish in batch:
            if finish.due_at is not None:
                self._wake_at(finish.due_at)
            elif finish.status == "open":
                self._pace.heard()
        self._forget(batch)
        self._closer.committed(over, busy=bool(self._in_hand))

    def _wake_at(self, instant: datetime) -> None:
        self._alarm.set((instant - self._clock.now()).total_seconds())

    def _forget(self, ended: Sequence[ClaimedItem | ItemResult]) -> None:
        self._pace.ended(len(ended))
        for one in ended:
            self._executor.forget(one)
            pair = (one.item.run_id, one.item.stage)
            self._in_hand[pair] -= 1
            if self._in_hand[pair] == 0:
                del self._in_hand[pair]
                self._closer.add(*pair)
        self._wake.set()
