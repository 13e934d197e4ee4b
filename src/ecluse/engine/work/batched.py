"""Batched queries: items that need the same query at about the same time share one execution of it, whether they start
together or arrive before the next query may be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, Generic, TypeVar

import psycopg

from ecluse.db.connect import Connection
from ecluse.db.outage import is_unavailable
from ecluse.engine.model.flow import Item, Postponed, Result, WorkContext

T = TypeVar("T")
OUTAGE_PAUSE = timedelta(seconds=1)
APART_SECONDS = 0.01  # between two queries; the first item does not wait for others


class BatchedQuery(Generic[T]):
    """Calls `answer` once for all items that have gathered; it returns a value for each, by the item's id."""

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
        answers = await asyncio.shield(self._asking)  # the cancellation of one item must not cancel the shared query
        return answers[item.id]

    async def _answer(self, context: WorkContext, gathered: list[Item]) -> Mapping[int, T]:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._asked_at + APART_SECONDS - now()))
        self._gathering, self._asked_at = None, now()
        async with context.database() as connection:
            return await self._ask(connection, gathered)


def postponing_outages(work: Callable[..., Awaitable[Result]]) -> Callable[..., Awaitable[Result]]:
    """Wrap work that reads the database before its call: while the database is unavailable the item is postponed, and
    no execution is counted."""

    @wraps(work)
    async def postponing(*given: Any) -> Result:
        try:
            return await work(*given)
        except psycopg.Error as error:
            if not is_unavailable(error):
                raise
            context: WorkContext = given[-2]  # the work's last arguments are the context and the item
            return Postponed(context.now() + OUTAGE_PAUSE, "the database is unavailable")

    return postponing
