"""Shares: so much at once for each tenant, in line, and no longer than the patience."""

from __future__ import annotations

import asyncio

import pytest
from psycopg_pool import PoolTimeout

from ecluse.db.connect import pool as open_pool
from ecluse.db.shares import AllBusy, Busy, Shares, Writes


async def test_a_share_is_a_tenants_own():
    shares = Shares("reads_at_once", 1, patience=0.01)
    async with shares.held("acme"), shares.held("rival"):
        with pytest.raises(Busy) as busy:
            async with shares.held("acme"):
                pass
    assert (busy.value.code, busy.value.limit) == ("TOO_MANY_AT_ONCE", "reads_at_once")
    async with shares.held("acme"):
        pass


async def test_waiting_callers_come_in_turn():
    shares, order = Shares("reads_at_once", 1, patience=10), []

    async def hold(name: int) -> None:
        async with shares.held("acme"):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(hold(n) for n in range(20)))
    assert order == list(range(20))


async def test_a_pool_that_is_busy_is_not_a_database_that_is_away(dsn):
    pool = open_pool(dsn, size=1)
    pool.timeout = 0.05
    async with pool:
        writes = Writes(pool, Shares("writes_at_once", 1))
        async with writes.connection("acme"):
            with pytest.raises(AllBusy):
                async with writes.connection("rival"):
                    pass
        async with pool.connection():  # not one of the requests: for them, there is no connection
            with pytest.raises(PoolTimeout):
                async with writes.connection("rival"):
                    pass
