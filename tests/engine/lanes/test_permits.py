"""Permits for further calls of items: those of one process are reserved together."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import pairwise

import pytest

from ecluse.db.connect import pool as open_pool
from ecluse.engine.lanes.permits import Permits
from tests.support.engine_flows import open_board

ITEMS = 30


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


@pytest.mark.req("ENG-50")
async def test_many_items_that_ask_at_once_take_one_connection_of_the_pool(board, dsn, one):
    """While the lane's row is locked, as by another replica's reservation, other queries still find a connection."""
    lane = await board.lane(per_second=100)
    async with open_pool(dsn, size=2) as pool, board.pool.connection() as other:
        permits = Permits(pool)
        async with other.transaction():
            await other.execute("SELECT FROM lanes WHERE id = %s FOR UPDATE", (lane,))
            asked = [asyncio.create_task(permits.reserve(lane, 1)) for _ in range(ITEMS)]
            await asyncio.sleep(0)
            async with pool.connection(timeout=2) as connection:
                await connection.execute("SELECT 1")
        instants = await asyncio.gather(*asked)
    spacing = one("SELECT spacing FROM lanes WHERE id = %s", lane)
    assert [b - a for a, b in pairwise(instants)] == [spacing] * (ITEMS - 1)
    assert one("SELECT next_free_at FROM lanes WHERE id = %s", lane) == instants[-1] + spacing


async def test_a_cancelled_item_does_not_cost_the_others_their_permits(board):
    lane = await board.lane(per_second=100)
    permits = Permits(board.pool)
    first, second = [asyncio.create_task(permits.reserve(lane, weight)) for weight in (3, 1)]
    await asyncio.sleep(0)
    first.cancel()
    assert await second is not None
    third = await permits.reserve(lane, 1)
    assert third - await second >= timedelta(milliseconds=9)


async def test_a_lane_without_a_rate_has_no_permits(board):
    lane = await board.lane()
    assert await Permits(board.pool).reserve(lane, 1) is None
