"""Requests in groups: the first is done at once, those that come meanwhile together, and none fails for another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import psycopg
import pytest

from ecluse.db import groups
from ecluse.db.groups import Groups


class Work:
    """What is done in groups; each group waits for the gate, and numbers below zero are refused."""

    def __init__(self) -> None:
        self.done: list[tuple[str, list[int]]] = []
        self.gate = asyncio.Event()
        self.error: Exception = ValueError("refused")
        self.groups = Groups[str, int, int](self.do)

    async def do(self, key: str, asked: Sequence[int]) -> list[int]:
        self.done.append((key, list(asked)))
        await self.gate.wait()
        if any(one < 0 for one in asked):
            raise self.error
        return [one * 10 for one in asked]

    async def ask(self, *asked: int, key: str = "a") -> list[int | BaseException]:
        calls = [asyncio.create_task(self.groups.ask(key, one)) for one in asked]
        await asyncio.sleep(0)
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
async def work() -> Work:
    return Work()


async def test_what_comes_meanwhile_is_the_next_group(work: Work) -> None:
    first = asyncio.create_task(work.ask(1))
    while not work.done:
        await asyncio.sleep(0)
    others = asyncio.create_task(work.ask(2, 3, 4))
    await asyncio.sleep(0)
    work.gate.set()
    assert (await first, await others) == ([10], [20, 30, 40])
    assert work.done == [("a", [1]), ("a", [2, 3, 4])]


async def test_a_group_has_a_largest_size(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MOST", 2)
    work.gate.set()
    assert await work.ask(1, 2, 3, 4, 5) == [10, 20, 30, 40, 50]
    assert [asked for _, asked in work.done] == [[1, 2], [3, 4], [5]]


async def test_keys_do_not_wait_for_each_other(work: Work) -> None:
    asked = [asyncio.create_task(work.ask(one, key=key)) for one, key in ((1, "a"), (2, "b"))]
    while len(work.done) < 2:
        await asyncio.sleep(0)
    work.gate.set()
    assert await asyncio.gather(*asked) == [[10], [20]]


async def test_one_that_is_refused_does_not_fail_the_others(work: Work) -> None:
    work.gate.set()
    good, bad, also_good = await work.ask(1, -2, 3)
    assert (good, bad, also_good) == (10, work.error, 30)
    assert [asked for _, asked in work.done] == [[1, -2, 3], [1], [-2], [3]]


async def test_an_unavailable_database_is_not_asked_again_for_each(work: Work) -> None:
    work.gate.set()
    work.error = psycopg.OperationalError("connection lost")
    assert await work.ask(1, -2, 3) == [work.error] * 3
    assert len(work.done) == 1


@pytest.mark.parametrize("error", [psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected])
async def test_a_group_that_waited_too_long_for_a_lock_or_deadlocked_is_repeated(
    work: Work, error: type[Exception]
) -> None:
    work.gate.set()
    work.error = error("the lock was not granted")
    assert await work.ask(1, -2) == [work.error] * 2
    assert [asked for _, asked in work.done] == [[1, -2]] * groups.TRIES


async def test_a_caller_that_has_gone_leaves_the_group_alone(work: Work) -> None:
    gone, stays = (asyncio.create_task(work.groups.ask("a", one)) for one in (1, 2))
    while not work.done:
        await asyncio.sleep(0)
    gone.cancel()
    work.gate.set()
    assert await stays == 20
    assert gone.cancelled()
