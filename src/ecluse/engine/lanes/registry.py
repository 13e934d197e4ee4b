"""The lanes as one process knows them: their ids, which of them are closed, and the results of its own calls.

The table is the truth, and the claim reads it; but items claimed a moment before a lane closes must not start either.
So every change that closes or opens a lane sends a NOTIFY, and all replicas read the changed rows again. While no call
fails, nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from ecluse.base.alarm import Alarm
from ecluse.base.clock import Clock
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import until_back
from ecluse.db.query import fetch_all
from ecluse.engine.lanes.breaker_counts import HOLD, Change, record_results
from ecluse.engine.lanes.lane_log import log_to_runs
from ecluse.engine.lanes.permits import Permits
from ecluse.engine.lanes.rates import follow_vendor
from ecluse.engine.lanes.rows import put_declared
from ecluse.engine.model.breaker import (
    NO_FAILURES,
    Breaker,
    CallResult,
    FailureStreak,
    Spared,
    asked_for,
    counts,
    is_spared,
    is_vendor_outage,
    tally,
)
from ecluse.engine.model.flow import Flow
from ecluse.engine.model.item import ClaimedItem, Item
from ecluse.engine.model.throttle import Throttle, VendorPace, mean_cost, pace_of

LANES_CHANNEL = "ecluse_lanes"
POLL_SECONDS = 5.0
A_MOMENT = 0.02  # seconds by which our clock may be ahead of the database's

LANE_STATES = """
SELECT id, base, paused_at IS NOT NULL AS paused, CASE WHEN held_until > ecluse_now() THEN held_until END AS held_until,
       failures, trips, failing_since, failing,
       num_nulls(max_in_flight, max_per_key, per_second, break_after) < 4 AS capped, spacing
FROM lanes WHERE base = ANY(%(bases)s) AND (%(ids)s::int[] IS NULL OR id = ANY(%(ids)s)) ORDER BY id
"""


class LaneState(NamedTuple):
    """The columns of a lane that decide whether its items may start, and the counts of its breaker."""

    id: int
    base: str
    paused: bool
    held_until: datetime | None
    failures: int
    trips: int
    failing_since: datetime | None
    failing: list[int]
    capped: bool  # has anything that must hold over all replicas
    spacing: timedelta | None


class Closed(Exception):
    """The lane was closed before a further call of an item that is being executed: the item is released."""


class Lanes:
    """The lanes that the stages of these flows use, declared and made at run time, for all parts of one worker
    process."""

    def __init__(self, pool: Pool, flows: Iterable[Flow], clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self.stages = {(flow.name, stage.name): stage for flow in flows for stage in flow.stages}
        self._declared = {stage.lane.name: stage.lane for stage in self.stages.values()}
        self.bases = sorted(self._declared)
        self._known: dict[int, LaneState] = {}
        self.counting: dict[int, FailureStreak] = {}  # lanes whose breaker has counted failures, and its counts
        self._closed: dict[int, datetime | None] = {}  # until when; None: until an operator resumes it
        self._rings_at: dict[int, datetime] = {}  # ends of holds for which the alarm is set
        self._permits = Permits(pool)
        self._alarm = Alarm(lambda: self.on_change())
        self._unwritten: list[CallResult] = []
        self._costs: dict[int, float] = {}  # by lane: mean cost of a call, as its vendor's answers say
        self._paces: dict[int, VendorPace] = {}  # by lane: what its vendor said last, not written yet
        self._unlogged: asyncio.Queue[Change] = asyncio.Queue()
        self._outdated: set[int] | None = set()  # lanes to be read again; None: all
        self._wake = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None  # called when a lane may have closed or opened

    async def put(self) -> None:
        """Insert the declared lanes, or store their caps, rates and breakers where they have changed, and read the
        state of all lanes. Called once, at start-up."""
        async with self._pool.connection() as connection:
            await put_declared(connection, self.stages.values())
            await self._read(connection, None)

    def refresh(self, lane_id: int | None = None) -> None:
        """Have `run` read this lane again (it may be a new one); None: all lanes."""
        if lane_id is None:
            self._outdated = None
        elif self._outdated is not None:
            self._outdated.add(lane_id)
        self._wake.set()

    async def learn(self, connection: Connection, lane_ids: Iterable[int]) -> None:
        """Read the lanes among these that this process does not know yet. Called before their items are claimed,
        because the notification of a new lane may not have arrived."""
        if unknown := set(lane_ids) - self._known.keys():
            await self._read(connection, unknown)

    def __len__(self) -> int:
        return len(self._known)

    def ids(self, *, capped: bool) -> list[int]:
        """Return the ids of the known lanes with (`capped`) or without anything that must hold over all replicas: caps,
        a rate, a breaker."""
        return [one.id for one in self._known.values() if one.capped is capped]

    def base(self, lane_id: int) -> str:
        """Return the name of the declared lane that this lane is beneath; for a declared lane, its own name."""
        return self._known[lane_id].base

    def is_closed(self, lane_id: int) -> bool:
        """Return True if no call of the lane may start now, because of a hold, a breaker or a pause."""
        if lane_id not in self._closed:
            return False
        until = self._closed[lane_id]
        return until is None or until > self._clock.now()

    def spacing(self, item: Item) -> float:
        """Return the seconds between a call for this item and the lane's next permit; 0 if the lane has no rate."""
        stage = self.stages[item.flow, item.stage]
        spacing = self._known[item.lane_id].spacing
        return stage.weight * spacing.total_seconds() if spacing else 0.0

    def record_result(self, claimed: ClaimedItem, error: Exception | None, *, called: bool = True) -> Spared | None:
        """Record the end of an execution (`error` None: it succeeded), to be stored by `write_results`. Return a
        `Spared` if the failure is the vendor's fault and is not counted against the item. A hold that the vendor asks
        for applies in this process at once, and in others as soon as it is written. `called` False: the vendor was not
        called, so nothing is counted for the breaker."""
        item, now = claimed.item, self._clock.now()
        stage, lane_id = self.stages[item.flow, item.stage], item.lane_id
        lane = stage.lane
        until = asked_for(error, now) if error and lane.one_vendor else None
        counted = counts(lane.breaker, error) if called else None
        before = self.counting.get(lane_id, NO_FAILURES)
        if until is None and not (counted or (counted is False and before.failures)):
            return None
        outage, closed = bool(counted) and is_vendor_outage(lane.breaker, error), self.is_closed(lane_id)
        end = CallResult(lane_id, item.id, storable(str(error)), now, until, counted, outage, item.tenant_id)
        self._unwritten.append(end)
        self._count(end)
        if until is not None or (lane_id in self._closed and not closed):
            self._apply_holds()
        tried = {"executions": item.executions + 1, "budget": stage.retry.executions}
        if not outage or lane.breaker is None or not is_spared(lane.breaker, self.counting[lane_id], now, **tried):
            return None
        return Spared(now + lane.breaker.pause, now if before.trips and not closed else None)

    def _count(self, end: CallResult) -> None:
        """Count a call result for the breaker in memory, as the database will; every read of the table replaces this
        count. While the lane is closed, only failures count."""
        breaker, before = self._breaker(end.lane_id), self.counting.get(end.lane_id, NO_FAILURES)
        if breaker is None or end.counts is None or (self.is_closed(end.lane_id) and not end.counts):
            return
        streak, too_long = tally(before, [end], breaker.failures)
        if too_long and not self.is_closed(end.lane_id):
            self._closed[end.lane_id] = end.at + breaker.pause_after(before.trips)
        else:
            streak = streak._replace(trips=before.trips if streak.failures else 0)
        if streak.failures:
            self.counting[end.lane_id] = streak
        else:
            self.counting.pop(end.lane_id, None)

    def _breaker(self, lane_id: int) -> Breaker | None:
        return self._declared[self._known[lane_id].base].breaker

    async def reserve(self, item: Item) -> None:
        """Reserve a permit for a further call of an item that is being executed, and wait for its instant, however far
        ahead: such an item takes precedence over items that wait to start. Raise Closed if the lane is closed before or
        after the wait."""
        stage, lane_id = self.stages[item.flow, item.stage], item.lane_id
        if self._known[lane_id].spacing is not None and not self.is_closed(lane_id):
            start_at = await self._permits.reserve(lane_id, stage.weight) or self._clock.now()
            await asyncio.sleep((start_at - self._clock.now()).total_seconds())
        if self.is_closed(lane_id):
            raise Closed

    def heard(self, item: Item, told: Throttle) -> None:
        """Note the budget that the vendor stated in its answer to a call of this item (`WorkContext.heard`), to be
        stored by `write_results`."""
        cost = self._costs[item.lane_id] = mean_cost(self._costs.get(item.lane_id), told)
        self._paces[item.lane_id] = pace_of(told, cost)

    async def write_results(self, pool: Pool) -> None:
        """Store the results gathered by `record_result`, and the budgets that vendors stated, in the rows of the lanes.
        The committer calls it before it stores the results of the items, so that a claim after that commit finds the
        lanes updated."""
        if self._paces:
            async with pool.connection() as connection:
                for lane_id, pace in self._paces.items():
                    await follow_vendor(connection, lane_id, pace)
            self._paces.clear()
        if results := list(self._unwritten):
            async with pool.connection() as connection:
                if counted := [one for one in results if one.counts is not None]:
                    # Not retried if the response is lost: a count too few is harmless, one too many is not.
                    self._unwritten[: len(results)] = [one._replace(counts=None) for one in results]
                    breakers = {one.lane_id: b for one in counted if (b := self._breaker(one.lane_id)) is not None}
                    for change in await record_results(connection, counted, breakers):
                        self._unlogged.put_nowait(change)
                    for lane_id in breakers:
                        self.refresh(lane_id)
                for one in results:
                    if one.until is not None:
                        reason = f"Retry-After: {one.error}"
                        await connection.execute(HOLD, {"lane": one.lane_id, "until": one.until, "reason": reason})
            del self._unwritten[: len(results)]

    async def run(self) -> None:
        """Read lanes again after every change, by this replica or another, until cancelled; and all lanes every
        POLL_SECONDS, because a notification may be lost."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()
            ids, self._outdated = self._outdated if self._wake.is_set() else None, set()
            self._wake.clear()
            await until_back("lanes", partial(self._read_again, ids))

    async def log_changes(self) -> None:
        """Log the breakers that this replica opened or closed to the runs that need their lanes, until cancelled."""
        while True:
            await until_back("lanes", partial(self._log_change, await self._unlogged.get()))

    async def _log_change(self, change: Change) -> None:
        async with self._pool.connection() as connection:
            await log_to_runs(connection, *change)

    async def _read_again(self, ids: set[int] | None) -> None:
        async with self._pool.connection() as connection:
            await self._read(connection, ids)

    async def _read(self, connection: Connection, ids: set[int] | None) -> None:
        """Read the caps, holds, pauses and breaker counts of these lanes (None: all), and add the results that are not
        written yet."""
        given = {"bases": self.bases, "ids": None if ids is None else list(ids)}
        rows = await fetch_all(connection, LaneState, LANE_STATES, given)
        for lane_id in list(self._known) if ids is None else ids:
            for facts in (self._known, self._closed, self.counting):
                facts.pop(lane_id, None)
        for one in rows:
            self._known[one.id] = one
            if one.paused or one.held_until:
                self._closed[one.id] = None if one.paused else one.held_until
            if one.failures:
                counted = FailureStreak(one.failures, one.trips, one.failing_since, frozenset(one.failing))
                self.counting[one.id] = counted
        for end in self._unwritten:
            if ids is None or end.lane_id in ids:
                self._count(end)
        self._apply_holds()

    def _apply_holds(self) -> None:
        """Apply the holds that vendors asked for and that are not written yet, set an alarm for the end of each hold,
        and call `on_change`."""
        for one in self._unwritten:
            until = self._closed.get(one.lane_id, one.until)
            if one.until is not None and until is not None:
                self._closed[one.lane_id] = max(until, one.until)
        now = self._clock.now()
        for lane_id, until in self._closed.items():
            if until is not None and self._rings_at.get(lane_id) != until:
                self._rings_at[lane_id] = until
                self._alarm.set((until - now).total_seconds() + A_MOMENT)
        self.on_change()
