"""After a commit: what is told of items that are over, and whose stage may now be complete. In rounds, because many are
little dearer than one: one at a time and, while there is other work in hand, with twice as long a rest after each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psycopg
import structlog

from ecluse.base.crash import crashpoint
from ecluse.db.connect import Pool, is_away
from ecluse.engine.model.flow import EmitLive, Flow
from ecluse.engine.work import completion, item_news
from ecluse.engine.work.committer import ItemResult

log = structlog.get_logger(__name__)

LEAST_REST_SECONDS, LONGEST_REST_SECONDS = 0.1, 2.0


class CompletionLoop:
    def __init__(self, pool: Pool, flows: Mapping[str, Flow], tell: EmitLive) -> None:
        self._pool = pool
        self._flows = flows
        self._tell = tell
        self._pairs: set[tuple[int, str]] = set()  # run and stage, of which nothing is in hand any more
        self._over: list[ItemResult] = []  # items whose stage has news of them
        self._nothing_left = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        self._leaving = False

    def add(self, run_id: int, stage: str) -> None:
        self._pairs.add((run_id, stage))

    def committed(self, over: Sequence[ItemResult], busy: bool) -> None:
        self._over += over
        if not busy:
            self._nothing_left.set()
        if (self._pairs or self._over) and (self._rounds is None or self._rounds.done()):
            self._rounds = asyncio.create_task(self._close())

    async def finish(self) -> None:
        self._leaving = True
        self._nothing_left.set()
        if self._rounds is not None:
            await self._rounds

    async def _close(self) -> None:
        while self._pairs or self._over:
            pairs, self._pairs, over, self._over = self._pairs, set(), self._over, []
            self._nothing_left.clear()
            began = time.monotonic()
            await item_news.tell(self._pool, over, self._tell)  # first: of an item before its run
            try:
                await completion.close(self._pool, self._flows, pairs)
                crashpoint("after hint")
            except psycopg.Error as error:
                if not is_away(error):
                    raise
                log.warning("closing: database away, the sweep or the gate will look", error=str(error).strip())
            if not self._leaving:
                rest = max(LEAST_REST_SECONDS, min(2 * (time.monotonic() - began), LONGEST_REST_SECONDS))
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._nothing_left.wait()
