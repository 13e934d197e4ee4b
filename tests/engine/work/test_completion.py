"""What is over is told and closed in rounds: at once where there is nothing else to do, else together with the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from ecluse.db.connect import Connection, Pool
from ecluse.db.connect import pool as open_pool
from ecluse.engine import EphemeralEvent, FinishedItem, Item
from ecluse.engine.work import completion
from ecluse.engine.work.completion import CompletionLoop
from ecluse.engine.work.verdict import ItemResult
from tests.support.engine_flows import stage

PATIENCE = 30


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    async with open_pool(dsn, size=1) as connections:
        yield connections


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round is only begun because there is nothing else to do."""
    monkeypatch.setattr(completion, "LEAST_REST_SECONDS", 3_600)


class Heard:
    """The rounds of news, by key."""

    def __init__(self) -> None:
        self.rounds: asyncio.Queue[list[str]] = asyncio.Queue()
        self._stage = stage(news=self._news)

    async def _news(self, _: Connection, over: Sequence[FinishedItem]) -> list[EphemeralEvent]:
        self.rounds.put_nowait([one.item.key for one in over])
        return []

    def finished(self, *keys: str) -> list[ItemResult]:
        items = [Item(n, 1, "default", "test", "work", key, key, None, 0, 0, 0, "key") for n, key in enumerate(keys)]
        return [ItemResult(item, self._stage, 1, 1, "succeeded") for item in items]

    async def next(self) -> list[str]:
        return await asyncio.wait_for(self.rounds.get(), PATIENCE)


async def test_ends_beside_other_work_wait_for_each_other(pool: Pool, endless: None) -> None:
    heard, closer = Heard(), CompletionLoop(pool, {}, lambda _: None)
    closer.committed(heard.finished("a"), busy=True)
    assert await heard.next() == ["a"]
    closer.committed(heard.finished("b", "c"), busy=True)
    closer.committed(heard.finished("d"), busy=True)
    assert heard.rounds.empty()
    closer.committed(heard.finished("e"), busy=False)
    assert await heard.next() == ["b", "c", "d", "e"]
    await closer.finish()


async def test_whoever_stops_tells_what_there_is(pool: Pool, endless: None) -> None:
    heard, closer = Heard(), CompletionLoop(pool, {}, lambda _: None)
    closer.committed(heard.finished("a"), busy=True)
    assert await heard.next() == ["a"]
    closer.committed(heard.finished("b"), busy=True)
    await asyncio.wait_for(closer.finish(), PATIENCE)
    assert heard.rounds.get_nowait() == ["b"]
