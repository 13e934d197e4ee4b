"""Shares: so much at once for each tenant, in line, and no longer than the patience."""

from __future__ import annotations

import asyncio

import pytest

from ecluse.db.shares import Busy, Shares


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
