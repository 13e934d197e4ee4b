"""Schedules and ticks on the database of a test, at times that the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from ecluse.db.connect import pool as open_pool
from ecluse.engine import Flow, NewSchedule
from ecluse.engine.schedule import schedules as rows
from ecluse.engine.schedule.slot_decisions import FiringLimits
from ecluse.engine.schedule.ticks import TickResult, tick
from tests.support.engine_flows import flow, stage

FLOW = flow(stage())
OTHER = flow(stage(), "other")
RULES = FiringLimits(look_back=timedelta(minutes=20), catch_up_within=timedelta(hours=24))
HOURLY = NewSchedule(FLOW, "hourly", "0 * * * *", input={"targets": ["a"]})
BEGIN = datetime(2030, 5, 6, 7, 30, tzinfo=UTC)


class World:
    def __init__(self, dsn: str, pool: Any, query: Callable[..., list[Any]]) -> None:
        self.dsn, self.pool, self.query = dsn, pool, query
        self.flows: dict[str, Flow] = {"test": FLOW, "other": OTHER}

    def at(self, now: datetime) -> None:
        """It is this late, and time passes as ever."""
        self.query('UPDATE clock_offset SET "offset" = %s - clock_timestamp()', now)

    async def do(self, what: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        async with self.pool.connection() as connection:
            return await what(connection, *arguments, **options)

    async def create(self, new: NewSchedule = HOURLY, now: datetime = BEGIN) -> int:
        self.at(now)
        return int(await self.do(rows.create_schedule, new))

    async def tick(self, now: datetime, rules: FiringLimits = RULES) -> list[TickResult]:
        self.at(now)
        return sorted(await tick(self.pool, self.flows, rules))

    def slots(self) -> list[tuple[str, str, str | None]]:
        found = self.query("SELECT due_at, state, reason FROM schedule_slots ORDER BY schedule_id, due_at")
        return [(f"{due:%d %H:%M}", state, reason) for due, state, reason in found]

    def states(self) -> list[tuple[str, str]]:
        return [(due, state) for due, state, _ in self.slots()]

    def end_runs(self) -> None:
        self.query(
            "UPDATE runs SET status = 'completed', state = 'succeeded', selected = 0, successful = 0, failed = 0,"
            " ignored = 0, end_cause = 'normal', ended_at = ecluse_now() WHERE ended_at IS NULL"
        )


@asynccontextmanager
async def tick_world(dsn: str, query: Callable[..., list[Any]]) -> AsyncIterator[World]:
    async with open_pool(dsn, size=6) as pool:
        yield World(dsn, pool, query)


def hour(h: float) -> datetime:
    return BEGIN.replace(hour=0, minute=0) + timedelta(hours=h)
