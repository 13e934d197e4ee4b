"""Batched queries: items that need the same query at about the same time share one execution of it. An item that
arrives while the next query is not yet sent joins that query."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from ecluse.db.connect import Connection
from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.item import Item

T = TypeVar("T")
APART_SECONDS = 0.01  # between two queries; the first item does not wait for others


class BatchedQuery(Generic[T]):
    """A query that items share: `answer` is called once for all items that have gathered, and returns a mapping from
    the item's id to its value. Two queries are at least APART_SECONDS apart."""

    def __init__(self, answer: Callable[[Connection, Sequence[Item]], Awaitable[Mapping[int, T]]]) -> None:
        self._ask = answer
        self._gathering: list[Item] | None = None
        self._asking: asyncio.Task[Mapping[int, T]] | None = None
        self._asked_at = 0.0

    async def look(self, context: WorkContext, item: Item) -> T:
        """Return the value for this item, from the next shared execution of the query. An error of the query is raised
        for every item that shares it."""
        if self._gathering is None or self._asking is None:
            self._gathering = []
            self._asking = asyncio.create_task(self._answer(context, self._gathering))
        self._gathering.append(item)
        answers = await asyncio.shield(self._asking)  # the cancellation of one item must not cancel the shared query
        return answers[item.id]

    async def _answer(self, context: WorkContext, gathered: list[Item]) -> Mapping[int, T]:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._asked_at + APART_SECONDS - now()))
        self._gathering, self._asked_at = None, now()
        async with context.database() as connection:
            return await self._ask(connection, gathered)
