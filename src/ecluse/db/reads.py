"""Connections for reads that must be quick: handed out unasked, because asking first costs a round trip each time.

A connection that turns out to be dead costs one repetition, through the pool that does ask. Only for what may be
asked twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg
from psycopg_pool import PoolTimeout

from ecluse.db.connect import Connection, Pool, is_away

R = TypeVar("R")


class Reads:
    def __init__(self, quick: Pool, checked: Pool) -> None:
        self._quick, self._checked = quick, checked

    async def __call__(self, ask: Callable[[Connection], Awaitable[R]]) -> R:
        try:
            async with self._quick.connection() as connection:
                return await ask(connection)
        except psycopg.Error as error:
            if isinstance(error, PoolTimeout) or not is_away(error):
                raise
        async with self._checked.connection() as connection:
            return await ask(connection)
