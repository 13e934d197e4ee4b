"""Permits for further calls of items that are being executed. Every reservation locks the lane's row until it is
committed, so items of one process that ask meanwhile share the next reservation: a process waits for the row once, with
one connection, however many of its items ask."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from ecluse.db.connect import Pool
from ecluse.db.outage import until_back
from ecluse.db.query import fetch_one

# Computed from the row alone: a statement that had to wait for the row's lock reads its current values.
RESERVE = """
UPDATE lanes SET next_free_at = greatest(next_free_at, ecluse_now() - (burst - 1) * spacing) + %(weight)s * spacing
WHERE id = %(lane)s AND spacing IS NOT NULL RETURNING next_free_at - %(weight)s * spacing AS first_at, spacing
"""


class Reserved(NamedTuple):
    """Consecutive permits: the instant of the first one, and the time between two."""

    first_at: datetime
    spacing: timedelta


class Gathering:
    """The number of permits of one lane that the next reservation asks for, and the task that makes it (its result is
    None if the lane has no rate)."""

    def __init__(self) -> None:
        self.weight = 0
        self.reserved: asyncio.Task[Reserved | None] | None = None


class Permits:
    """Reserves permits for the items of one process, with one shared reservation per lane at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._gathering: dict[int, Gathering] = {}
        self._turns = defaultdict[int, asyncio.Lock](asyncio.Lock)

    async def reserve(self, lane_id: int, weight: int) -> datetime | None:
        """Reserve `weight` permits of the lane, and return the instant of the first one; None if the lane has no rate.
        Waits while the database is unavailable."""
        asked = self._gathering.setdefault(lane_id, Gathering())
        if asked.reserved is None:
            asked.reserved = asyncio.create_task(self._reserved(lane_id, asked))
        place, asked.weight = asked.weight, asked.weight + weight
        found = await asyncio.shield(asked.reserved)  # the cancellation of one item must not cancel the others'
        return None if found is None else found.first_at + place * found.spacing

    async def _reserved(self, lane_id: int, asked: Gathering) -> Reserved | None:
        async with self._turns[lane_id]:
            del self._gathering[lane_id]
            return await until_back("lanes", partial(self._take, {"lane": lane_id, "weight": asked.weight}))

    async def _take(self, given: dict[str, int]) -> Reserved | None:
        async with self._pool.connection() as connection:
            return await fetch_one(connection, Reserved, RESERVE, given)
