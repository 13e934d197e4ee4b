"""The claim loop: claim as many items as there are free worker slots. Each slot executes one item (`execution.py`), and
its result goes to the committer. NOTIFY wakes the loop, a slow poll is the fallback; `pace.py` decides when to claim
and how many items, `suspects.py` which claims are allowed while suspects wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from datetime import datetime, timedelta

from ecluse.base.alarm import Alarm
from ecluse.base.clock import Clock
from ecluse.base.crash import crashpoint
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import ignoring_outage
from ecluse.engine.effects.protocol import Intent
from ecluse.engine.lanes.registry import Lanes
from ecluse.engine.model.item import ClaimedItem
from ecluse.engine.work.claim import AHEAD_SECONDS, LANES_AT_ONCE, Claimant, WaitingLanes, Window, claim_items
from ecluse.engine.work.committer import Committer
from ecluse.engine.work.completion import CompletionLoop
from ecluse.engine.work.execution import Executor
from ecluse.engine.work.mates import join_mates
from ecluse.engine.work.pace import BUSY_POLL_SECONDS, POLL_SECONDS, Pace
from ecluse.engine.work.release import release_unknown
from ecluse.engine.work.suspects import SuspectClaims
from ecluse.engine.work.verdict import ItemResult, release
from ecluse.engine.work.worker_slots import Owner, WorkerSlots

FLUSH_SECONDS = 3.0  # at a stop: an unavailable database must not delay the exit
# A lane with a rate gives permits for a tenth of a second at a time: for so long after a permit, poll more often. The
# next permit of a slow lane is at a known instant, so an alarm is set instead.
PACED_SECONDS = 2.0


class Worker:
    """The claim loop of a process, with the parts that its items go through: slots, executor, committer, completion.
    `slots`: the number of worker slots; `share`: the share of them that one tenant may take (`WorkerSlots`);
    `slot_ended`: called when the task of a slot ends."""

    def __init__(
        self,
        pool: Pool,
        replica: str,
        *,
        lanes: Lanes,
        executor: Executor,
        committer: Committer,
        completion: CompletionLoop,
        clock: Clock,
        slots: int,
        share: float,
        slot_ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._pool = pool
        self._lanes = lanes
        self._executor = executor
        self.committer = committer
        self._completion = completion
        self._clock = clock
        names, weights = [f"{flow}/{stage}" for flow, stage in lanes.stages], [s.weight for s in lanes.stages.values()]
        self._claimant = Claimant(replica, names, weights)
        self._batches = {name: stage.batch for name, stage in lanes.stages.items() if stage.batch > 1}
        self._suspects = SuspectClaims(self._claimant, slots)
        self._pace = Pace(slots)
        self._wake = asyncio.Event()
        self._alarm = Alarm(self.wake)
        self._waiting = WaitingLanes(lanes.bases)
        self._found: Window | None = None  # all lanes in which items waited at the last search, if they were few
        self._found_at = 0.0
        self.slots = WorkerSlots(
            slots,
            executor.execute,
            self._executed,
            idle=self._wake.set,
            ended=slot_ended,
            share=share,
            owner_of=self._owner_of,
        )
        self._in_hand: Counter[tuple[int, str]] = Counter()  # (run, stage): items claimed and not stored yet
        self._unsure = False  # a claim failed, but may have been committed
        self._paced_until = 0.0
        lanes.on_change = self._lanes_changed

    def wake(self) -> None:
        """Have the loop claim soon, because there may be new work."""
        self._pace.wake()
        self._wake.set()

    def _lanes_changed(self) -> None:
        """Release the items that have not started and whose lane is closed now, and wake the loop."""
        for claimed in self.slots.drop(lambda claimed: self._lanes.is_closed(claimed.item.lane_id)):
            stage = self._lanes.stages[claimed.item.flow, claimed.item.stage]
            for one in claimed.batch:
                self.committer.put(release(stage, one))
        self.wake()

    async def run(self) -> None:
        """Claim and execute items until cancelled; `drain` then lets running calls finish."""
        self.slots.start()
        while True:
            now = self._clock.monotonic()
            self._pace.measure(now, self.slots.finished)
            room = self._pace.capacity - self.slots.busy - self.slots.queued(self._ahead) - self.committer.backlog
            self._wake.clear()
            if (pause := self._pace.pause(now, room, bool(self._in_hand))) > 0:
                await self._sleep(pause)
            elif await self._claim(room) == 0:
                await self._sleep(BUSY_POLL_SECONDS if now < self._paced_until else POLL_SECONDS)

    async def commit_results(self) -> None:
        """Store results as they gather, until cancelled; `flush` then stores the rest."""
        while True:
            await self._commit(await self.committer.next_batch(self.slots))

    @property
    def runs_in_hand(self) -> set[int]:
        """The ids of the runs with items that this worker holds, because their results are not stored yet."""
        return {run for run, _ in self._in_hand}

    def drop(self, run_ids: Iterable[int]) -> None:
        """Drop the items that this worker holds of these runs, which have ended: items that have not started are
        forgotten, reads are cancelled, writes and paid calls in flight may finish."""
        held = self.runs_in_hand
        ended = held.intersection(run_ids)
        self._executor.runs_ended(ended, held, self.slots.executing)
        if ended:
            for dropped in self.slots.drop(lambda claimed: claimed.item.run_id in ended):
                self._forget(dropped.batch)
            self.slots.interrupt(
                lambda claimed: claimed.item.run_id in ended and not self._executor.is_worth_its_answer(claimed)
            )

    async def drain(self, grace: float) -> None:
        """Stop sending writes, and let running calls finish for at most `grace` seconds. Called after `run` was
        cancelled."""
        self._executor.stop_sending()
        await self.slots.drain(grace)

    async def flush(self, grace: float) -> None:
        """Store the remaining results, record interrupted paid calls and check for complete stages, for at most `grace`
        seconds or FLUSH_SECONDS, whichever is longer. Called after `drain`, once `commit_results` was cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(grace, FLUSH_SECONDS)):
                if batch := self.committer.uncommitted:
                    await self._commit(batch)
                await self._executor.note_cut_off()
                await self._completion.finish()

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _claim(self, room: int) -> int:
        """Claim at most `room` items and give them to the slots; return their number. If the previous claim failed,
        claims that it may have committed all the same are released first. While the database is unavailable, nothing is
        claimed."""
        count, woken = 0, self._pace.woken
        self._pace.claiming(self._clock.monotonic())
        unsure, self._unsure = self._unsure, True
        with ignoring_outage("claim"):
            async with self._pool.connection() as connection:
                if unsure:
                    known = {one.claim_id for claimed in self.slots.claimed for one in claimed.batch}
                    known |= {result.claim_id for result in self.committer.uncommitted}
                    await release_unknown(connection, replica=self._claimant.replica, known=list(known))
                async with aclosing(self._windows(connection, woken=woken)) as windows:
                    async for window in windows:
                        await self._suspects.query(connection, self._lanes.bases, self._clock.monotonic())
                        claimed = await self._choose(connection, room - count, window)
                        self._take(claimed)
                        count += len(claimed)
                        if count >= room or (count and not claimed):
                            break
            self._unsure = False
        self._pace.claimed(room, count)
        return count

    async def _windows(self, connection: Connection, *, woken: bool) -> AsyncGenerator[Window]:
        """Yield the lanes to claim from: all lanes if they are few, else only lanes in which items wait. The search for
        these is also worth it for a mere poll, which most often finds none. Unless a wake-up has arrived (`woken`), the
        lanes of a search within AHEAD_SECONDS come first: most often they fill the room, and no search is needed."""
        now = self._clock.monotonic()
        if len(self._lanes) <= LANES_AT_ONCE and (self._in_hand or woken):
            yield Window(self._lanes.ids(capped=True), self._lanes.ids(capped=False), True)
            return
        if self._found is not None and not woken and now < self._found_at + AHEAD_SECONDS:
            yield self._found._replace(is_all=False)
        first = True
        async for window in self._waiting.windows(connection):
            await self._lanes.learn(connection, window.capped + window.uncapped)
            self._found, self._found_at = (window if first and window.is_all else None), now
            first = False
            yield window

    def _take(self, claimed: Sequence[ClaimedItem]) -> None:
        """Give claimed items to the slots, and set the alarm for the next permits of their lanes."""
        if claimed:
            crashpoint("after claim")
        for one in claimed:
            self._in_hand[one.item.run_id, one.item.stage] += 1 + len(one.mates)
            if one.start_at is not None:
                if (spacing := self._lanes.spacing(one.item)) < PACED_SECONDS / 10:
                    self._paced_until = self._clock.monotonic() + PACED_SECONDS
                else:
                    self._wake_at(one.start_at + timedelta(seconds=spacing - AHEAD_SECONDS / 2))
        self.slots.give(claimed)

    async def _choose(self, connection: Connection, room: int, window: Window) -> list[ClaimedItem]:
        """Claim at most `room` items from the lanes of `window`, as `SuspectClaims.allowed` permits; if no suspect
        waits, that is one ordinary claim. Return the claimed items; a suspect that runs alone is the only one."""
        claimed: list[ClaimedItem] = []
        for claimant, most in self._suspects.allowed(self.slots, room, holds_items=bool(self._in_hand)):
            found = await self._claim_from(connection, claimant, window, min(most, room - len(claimed)))
            claimed += found
            if found and claimant.apart == "alone":
                self._suspects.runs_alone = True
                break
        return claimed

    async def _claim_from(
        self, connection: Connection, claimant: Claimant, window: Window, room: int
    ) -> list[ClaimedItem]:
        """Claim from the capped lanes of the window, then from the uncapped ones, unless these were found empty just
        before."""
        now, ordinary = self._clock.monotonic(), claimant == self._claimant
        free = [] if ordinary and self._pace.is_empty(now) else window.uncapped
        left = self.slots.left(self._ahead)
        claimed: list[ClaimedItem] = []
        # From capped lanes, only as many items as slots are free right now; half as many, if uncapped lanes may have
        # items as well.
        now_free = min(room, self.slots.count - self.slots.busy - self.slots.queued(self._ahead))
        capped_room = (now_free + 1) // 2 if free else now_free
        if window.capped and capped_room > 0:
            claimed += await claim_items(connection, claimant, window.capped, capped_room, capped=True, left=left)
        if free and len(claimed) < room:
            found = await claim_items(connection, claimant, free, room - len(claimed), capped=False, left=left)
            # Nothing found is no proof of empty lanes if a tenant has its share of the slots.
            if ordinary and window.is_all and not found and min(left.slots_left, default=1) > 0:
                self._pace.found_empty(now)
            claimed += found
        return await join_mates(connection, claimant.replica, claimed, self._batches) if ordinary else claimed

    @property
    def _ahead(self) -> int:
        """The number of items that may be claimed before a slot is free for them."""
        return max(0, self._pace.capacity - self.slots.count)

    def _owner_of(self, claimed: ClaimedItem) -> Owner:
        return self._lanes.base(claimed.item.lane_id), claimed.item.tenant_id

    def _executed(self, claimed: ClaimedItem, results: Sequence[ItemResult]) -> None:
        for result in results:
            self.committer.put(result)
        if len(results) <= len(claimed.mates):
            kept = {result.claim_key for result in results}
            self._forget([one for one in claimed.batch if one.claim_key not in kept])

    async def _commit(self, batch: Sequence[ItemResult | Intent]) -> None:
        """Store the batch, set the alarm for items that are due later, and pass on stages that may be complete now."""
        over = await self.committer.commit(batch)
        results = [one for one in batch if isinstance(one, ItemResult)]
        for result in results:
            if result.due_at is not None:
                self._wake_at(result.due_at)
            elif result.status == "open":
                self._pace.wake()
        self._forget(results)
        self._completion.committed(over, busy=bool(self._in_hand))

    def _wake_at(self, instant: datetime) -> None:
        self._alarm.set((instant - self._clock.now()).total_seconds())

    def _forget(self, ended: Sequence[ClaimedItem | ItemResult]) -> None:
        """Drop the state kept for items whose results are stored or whose claims are lost. If the worker holds no other
        item of a stage, queue the stage for the completion loop."""
        self._pace.ended(len(ended))
        self._executor.forget(ended)
        for pair, count in Counter([(one.item.run_id, one.item.stage) for one in ended]).items():
            self._in_hand[pair] -= count
            if self._in_hand[pair] == 0:
                del self._in_hand[pair]
                self._completion.add(*pair)
        self._wake.set()
