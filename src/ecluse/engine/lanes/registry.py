"""The lanes as one process knows them: their ids, which are closed at the moment, and the results of its own calls.

The table is the truth, and the claim reads it; but items claimed a moment before a lane closes must not start either.
So every change that closes or opens a lane sends a NOTIFY, and all replicas read the few rows again. While no call
fails, nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from ecluse.base.clock import Clock
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import until_back
from ecluse.db.query import fetch_all, fetch_value
from ecluse.engine.lanes.breaker_counts import HOLD, Change, record_results
from ecluse.engine.lanes.caps import IN_FORCE
from ecluse.engine.lanes.lane_log import log_to_runs
from ecluse.engine.model.breaker import (
    NO_FAILURES,
    Breaker,
    CallResult,
    FailureStreak,
    Spared,
    asked_for,
    counts,
    is_outage,
    is_spared,
    tally,
)
from ecluse.engine.model.flow import Flow
from ecluse.engine.model.item import ClaimedItem, Item

LANES_CHANNEL = "ecluse_lanes"
A_MOMENT = 0.02  # seconds by which our clock may be ahead of the database's

# A call of any weight may start as soon as one permit is free. So that the vendor's bucket is not overdrawn, the burst
# in force is lowered by the weight of the lane's heaviest call.
PUT_LANE = """
INSERT INTO lanes (name, max_in_flight, max_per_key, per_second, burst, break_after, declared_max_in_flight,
                   declared_max_per_key, declared_per_second, declared_burst, heaviest)
VALUES (%(name)s, %(max_in_flight)s, %(max_per_key)s, %(per_second)s, greatest(1, %(burst)s::int - %(heaviest)s + 1),
        %(break_after)s, %(max_in_flight)s, %(max_per_key)s, %(per_second)s, %(burst)s, %(heaviest)s)
ON CONFLICT (name) DO NOTHING
"""
# Only if a value has changed: a replica that hangs in a claim holds the row's lock, and must not block the start of
# others.
CHANGE_LANE = f"""
UPDATE lanes l SET declared_max_in_flight = n.max_in_flight, declared_max_per_key = n.max_per_key,
    declared_per_second = n.per_second, declared_burst = n.burst, heaviest = n.heaviest, break_after = n.break_after,
    {IN_FORCE.format(declared="n.", heaviest="n.heaviest", set="l.set_")}
FROM (VALUES (%(name)s::text, %(max_in_flight)s::integer, %(max_per_key)s::integer, %(per_second)s::double precision,
              %(burst)s::integer, %(heaviest)s::integer, %(break_after)s::integer))
    AS n(name, max_in_flight, max_per_key, per_second, burst, heaviest, break_after)
WHERE l.name = n.name AND (l.declared_max_in_flight, l.declared_max_per_key, l.declared_per_second, l.declared_burst,
                           l.heaviest, l.break_after)
    IS DISTINCT FROM (n.max_in_flight, n.max_per_key, n.per_second, n.burst, n.heaviest, n.break_after)
"""  # noqa: S608 - our own names
STANDING = """
SELECT id, paused_at IS NOT NULL AS paused, CASE WHEN held_until > ecluse_now() THEN held_until END AS held_until,
       failures, trips, failing_since, failing,
       num_nulls(max_in_flight, max_per_key, per_second, break_after) < 4 AS capped, spacing
FROM lanes WHERE id = ANY(%s) ORDER BY id
"""

# Computed from the row alone: a statement that had to wait for the row's lock reads its current values.
RESERVE = """
UPDATE lanes SET next_free_at = greatest(next_free_at, ecluse_now() - (burst - 1) * spacing) + %(weight)s * spacing
WHERE id = %(lane)s RETURNING next_free_at - %(weight)s * spacing
"""


class Standing(NamedTuple):
    id: int
    paused: bool
    held_until: datetime | None
    failures: int
    trips: int
    failing_since: datetime | None
    failing: list[int]
    capped: bool
    spacing: timedelta | None


class Closed(Exception):
    """The lane was closed before the next call of an item that is being executed: the item is released."""


class Lanes:
    """The lanes that the stages of these flows use, for all parts of one worker process. `capped` has the ids of the
    lanes with caps, rate or breaker, which hold over all replicas, `uncapped` the others."""

    def __init__(self, pool: Pool, flows: Iterable[Flow], clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self.stages = {(flow.name, stage.name): stage for flow in flows for stage in flow.stages}
        self._ids: dict[str, int] = {}
        self._spacing: dict[int, timedelta | None] = {}
        self.uncapped: list[int] = []
        self.capped: list[int] = []
        self.counting: dict[int, FailureStreak] = {}  # lanes whose breaker has counted failures, and its counts
        self._breakers: dict[int, Breaker] = {}
        self._closed: dict[int, datetime | None] = {}  # until when; None: until an operator resumes it
        self._opens: dict[int, asyncio.TimerHandle] = {}
        self._unwritten: list[CallResult] = []
        self._unlogged: asyncio.Queue[Change] = asyncio.Queue()
        self._outdated = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None  # called when a lane has closed or opened

    async def put(self) -> None:
        """Insert the lanes, or store their caps, rates and breakers where they have changed, and read their state.
        Called once, at start-up."""
        lanes = {stage.lane.name: stage.lane for stage in self.stages.values()}
        async with self._pool.connection() as connection:
            for name, lane in sorted(lanes.items()):
                breaker = lane.breaker
                given = {
                    "name": name,
                    "max_in_flight": lane.max_in_flight,
                    "max_per_key": lane.max_per_key,
                    "per_second": lane.per_second,
                    "burst": lane.burst,
                    "heaviest": max(stage.weight for stage in self.stages.values() if stage.lane.name == name),
                    "break_after": breaker.failures if breaker else None,
                }
                for statement in (PUT_LANE, CHANGE_LANE):
                    await connection.execute(statement, given)
                lane_id = await fetch_value(connection, "SELECT id FROM lanes WHERE name = %s", (name,))
                self._ids[name] = lane_id
                if breaker is not None:
                    self._breakers[lane_id] = breaker
            await self._read(connection)

    def refresh(self) -> None:
        """Have `run` read the lanes again: one of them may have changed."""
        self._outdated.set()

    def is_closed(self, lane_id: int) -> bool:
        """Return True if no call of the lane may start now, because of a hold, a breaker or a pause."""
        if lane_id not in self._closed:
            return False
        until = self._closed[lane_id]
        return until is None or until > self._clock.now()

    def spacing(self, item: Item) -> float:
        """Return the seconds until the lane's next permit after a call for this item."""
        stage = self.stages[item.flow, item.stage]
        spacing = self._spacing[self._ids[stage.lane.name]]
        return stage.weight * spacing.total_seconds() if spacing else 0.0

    def record_result(self, claimed: ClaimedItem, error: Exception | None, *, called: bool = True) -> Spared | None:
        """Record the result of an execution (`error` None: it succeeded), for `write_results`; return a `Spared` if the
        failure is the vendor's fault. A hold that the vendor asks for applies in this process at once, and everywhere
        as soon as it is written. `called` False: the vendor was not called."""
        stage, lane_id, now = self.stages[claimed.item.flow, claimed.item.stage], claimed.lane_id, self._clock.now()
        lane = stage.lane
        until = asked_for(error, now) if error and lane.one_vendor else None
        counted = counts(lane.breaker, error) if called else None
        before = self.counting.get(lane_id, NO_FAILURES)
        if until is None and not (counted or (counted is False and before.failures)):
            return None
        outage, closed = bool(counted) and is_outage(lane.breaker, error), self.is_closed(lane_id)
        end = CallResult(lane_id, claimed.item.id, storable(str(error)), now, until, counted, outage)
        self._unwritten.append(end)
        self._count(end)
        if until is not None or (lane_id in self._closed and not closed):
            self._apply_holds()
        tried = {"executions": claimed.item.executions + 1, "budget": stage.retry.executions}
        if not outage or lane.breaker is None or not is_spared(lane.breaker, self.counting[lane_id], now, **tried):
            return None
        return Spared(now + lane.breaker.pause, now if before.trips and not closed else None)

    def _count(self, end: CallResult) -> None:
        """Count the result towards the lane's breaker, as the database will; every read of the table corrects it. While
        the lane is closed, only failures count."""
        breaker, before = self._breakers.get(end.lane_id), self.counting.get(end.lane_id, NO_FAILURES)
        if breaker is None or end.counts is None or (self.is_closed(end.lane_id) and not end.counts):
            return
        row, too_long = tally(before, [end], breaker.failures)
        if too_long and not self.is_closed(end.lane_id):
            self._closed[end.lane_id] = end.at + breaker.pause_after(before.trips)
        else:
            row = row._replace(trips=before.trips if row.failures else 0)
        if row.failures:
            self.counting[end.lane_id] = row
        else:
            self.counting.pop(end.lane_id, None)

    async def reserve(self, item: Item) -> None:
        """Wait for a permit for a further call of an item that is being executed. Its instant is reserved at once,
        however far ahead: such an item goes before items that wait to start. Raises Closed if the lane is closed."""
        stage = self.stages[item.flow, item.stage]
        lane_id = self._ids[stage.lane.name]
        if self._spacing[lane_id] is not None and not self.is_closed(lane_id):
            start_at = await until_back("lanes", partial(self._reserved, lane_id, stage.weight))
            await asyncio.sleep((start_at - self._clock.now()).total_seconds())
        if self.is_closed(lane_id):
            raise Closed

    async def _reserved(self, lane_id: int, weight: int) -> datetime:
        async with self._pool.connection() as connection:
            start_at: datetime | None = await fetch_value(connection, RESERVE, {"lane": lane_id, "weight": weight})
        return start_at or self._clock.now()

    async def write_results(self, pool: Pool) -> None:
        """Write the results gathered by `record_result` to the lanes. The committer calls it before it stores the
        results of the items: a claim after that commit finds the lanes updated."""
        if results := list(self._unwritten):
            async with pool.connection() as connection:
                if counted := [one for one in results if one.counts is not None]:
                    # Not retried if the response is lost: a count too few is harmless, one too many is not.
                    self._unwritten[: len(results)] = [one._replace(counts=None) for one in results]
                    for change in await record_results(connection, counted, self._breakers):
                        self._unlogged.put_nowait(change)
                    self.refresh()
                for one in results:
                    if one.until is not None:
                        reason = f"Retry-After: {one.error}"
                        await connection.execute(HOLD, {"lane": one.lane_id, "until": one.until, "reason": reason})
            del self._unwritten[: len(results)]

    async def run(self) -> None:
        """Read the lanes again after every change, by this replica or another, until cancelled."""
        while True:
            await self._outdated.wait()
            self._outdated.clear()
            await until_back("lanes", self._read_again)

    async def log_changes(self) -> None:
        """Log the breakers that this replica opened or closed to the runs that need their lanes, until cancelled."""
        while True:
            await until_back("lanes", partial(self._log_change, await self._unlogged.get()))

    async def _log_change(self, change: Change) -> None:
        async with self._pool.connection() as connection:
            await log_to_runs(connection, *change)

    async def _read_again(self) -> None:
        async with self._pool.connection() as connection:
            await self._read(connection)

    async def _read(self, connection: Connection) -> None:
        """Read the lanes' caps, holds, pauses and breaker counts, and add the results that are not written yet."""
        rows = await fetch_all(connection, Standing, STANDING, (list(self._ids.values()),))
        self.capped = [one.id for one in rows if one.capped]
        self.uncapped = [one.id for one in rows if not one.capped]
        self._spacing = {one.id: one.spacing for one in rows}
        self._closed = {one.id: None if one.paused else one.held_until for one in rows if one.paused or one.held_until}
        self.counting = {
            one.id: FailureStreak(one.failures, one.trips, one.failing_since, frozenset(one.failing))
            for one in rows
            if one.failures
        }
        for end in self._unwritten:
            self._count(end)
        self._apply_holds()

    def _apply_holds(self) -> None:
        """Apply the holds that vendors asked for and that are not written yet, and set a timer for each hold's end."""
        for one in self._unwritten:
            until = self._closed.get(one.lane_id, one.until)
            if one.until is not None and until is not None:
                self._closed[one.lane_id] = max(until, one.until)
        for lane_id, until in self._closed.items():
            if until is not None:
                seconds = max(0.0, (until - self._clock.now()).total_seconds()) + A_MOMENT
                if lane_id in self._opens:
                    self._opens[lane_id].cancel()
                self._opens[lane_id] = asyncio.get_running_loop().call_later(seconds, self.on_change)
        self.on_change()


LIST = """
SELECT l.name, l.max_in_flight, l.max_per_key, l.per_second, coalesce(l.set_burst, l.declared_burst, l.burst) AS burst,
       l.paused_at, l.paused_by, l.paused_reason,
       l.clock_stopped_at, CASE WHEN l.held_until > ecluse_now() THEN l.held_until END AS held_until, l.held_reason,
       CASE WHEN l.trips > 0 THEN l.failing_since END AS down_since, l.last_failure,
       (SELECT coalesce(sum(in_flight), 0)::int FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0) AS in_flight,
       (SELECT count(*) FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL)::int AS waiting
FROM lanes l ORDER BY l.name
"""


async def list_lanes(connection: Connection) -> list[dict[str, Any]]:
    """Return all lanes, ordered by name, with their calls in flight and waiting items. `down_since` is set if the
    breaker has opened and no call has been answered since."""
    return await fetch_all(connection, dict, LIST)
