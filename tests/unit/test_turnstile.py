"""A few in each pass of the loop, in their order, whatever becomes of those who wait."""

import asyncio

from ecluse.base.turnstile import Turnstile


async def through(turnstile: Turnstile, names: list[str], passed: list[str]) -> list[asyncio.Task[None]]:
    async def go(name: str) -> None:
        await turnstile.go_through()
        passed.append(name)

    return [asyncio.create_task(go(name)) for name in names]


async def test_no_more_than_a_few_go_through_in_one_pass_and_all_in_the_end_in_their_order():
    turnstile, names, passed = Turnstile(8), [f"{n:02}" for n in range(50)], []
    tasks = await through(turnstile, names, passed)
    growth, before = [], 0
    while len(passed) < len(names):
        await asyncio.sleep(0)
        growth.append(len(passed) - before)
        before = len(passed)
    await asyncio.gather(*tasks)
    assert passed == names
    assert max(growth) == 8
    assert len(growth) < 20


async def test_a_single_coroutine_does_not_wait():
    turnstile = Turnstile(1)
    for _ in range(3):
        going = turnstile.go_through()
        try:
            going.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_cancelled_coroutine_does_not_hold_up_those_behind_it():
    turnstile, passed = Turnstile(1), []
    first, second, *others = await through(turnstile, ["first", "second", "third", "fourth"], passed)
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, *others)
    assert passed == ["first", "third", "fourth"]
