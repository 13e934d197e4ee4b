"""Many instants, one timer; on either loop, since servers run on the faster one."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from ecluse.base.alarm import Alarm


async def rings(*instants: float) -> tuple[float, list[float]]:
    loop = asyncio.get_running_loop()
    rung: list[float] = []
    alarm = Alarm(lambda: rung.append(loop.time()))
    begun = loop.time()
    for seconds in instants:
        alarm.set(seconds)
    async with asyncio.timeout(10):
        while not rung or rung[-1] < begun + max(instants):
            await asyncio.sleep(0.01)
    return begun, rung


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_it_rings_at_every_instant_with_one_timer(run):
    begun, rung = run(rings(0.3, 0.1, -5, 0.2, 0.3))
    assert 1 < len(rung) <= 9
    assert rung[-1] >= begun + 0.3


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_however_the_clock_rounds_it_rings_once_per_instant(run):
    """A loop whose clock goes by milliseconds was asked again and again until the next one came."""
    _, rung = run(rings(*(n / 7000 for n in range(1, 400))))
    assert len(rung) <= 399


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_is_due_at_once_can_be_set_again_and_again(run):
    _, rung = run(rings(-1, 0, -1, 0, 0.05))
    assert rung
