"""Items that ask the database about the same thing at about the same moment share one question: those that start
together, and those that come while it is too early for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from ecluse.db.connect import Connection
from ecluse.engine.model.flow import Item, WorkContext

T = TypeVar("T")
APART_SECONDS = 0.01  # between two questions; whoever comes first does not wait for others


class BatchedQuery(Generic[T]):
    """`answer` is asked once for all that have gathered, and says something of each, by the item's id."""

    def __init__(self, answer: Callable[[Connection, Sequence[Item]], Awaitable[Mapping[int, T]]]) -> None:
        self._ask = answer
        self._gathering: list[Item] | None = None
        self._asking: asyncio.Task[Mapping[int, T]] | None = None
        self._asked_at = 0.0

    async def look(self, context: WorkContext, item: Item) -> T:
        if self._gathering is None or self._asking is None:
            self._gathering = []
            self._asking = asyncio.create_task(self._answer(context, self._gathering))
        self._gathering.append(item)
        answers = await asyncio.shield(self._asking)  # whoever is interrupted does not interrupt the others
        return answers[item.id]

    async def _answer(self, context: WorkContext, gathered: list[Item]) -> Mapping[int, T]:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._asked_at + APART_SECONDS - now()))
        self._gathering, self._asked_at = None, now()
        async with context.database() as connection:
            return await self._ask(connection, gathered)
