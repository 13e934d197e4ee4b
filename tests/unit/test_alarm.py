"""Many instants, one timer."""

from __future__ import annotations

import asyncio

from ecluse.base.alarm import Alarm


async def test_it_rings_at_every_instant_with_one_timer():
    loop = asyncio.get_running_loop()
    rung: list[float] = []
    alarm = Alarm(lambda: rung.append(loop.time()))
    begun = loop.time()
    for seconds in (0.3, 0.1, -5, 0.2, 0.3):
        alarm.set(seconds)
    async with asyncio.timeout(10):
        while not rung or rung[-1] < begun + 0.3:
            await asyncio.sleep(0.01)
    assert 1 < len(rung) <= 5
