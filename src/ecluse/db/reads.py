"""Quick reads: their connections are not checked before use, because a check costs a round trip each time.

If a connection turns out to be dead, the read is repeated once on a pool that checks its connections, so it must be
repeatable. A read that failed for lack of resources or a lock is not repeated. A tenant may use only its share of the
connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar

import psycopg
from psycopg_pool import PoolTimeout

from ecluse.base.errors import EcluseError
from ecluse.db.connect import Connection, Pool, doubt_all
from ecluse.db.outage import is_unavailable
from ecluse.db.shares import Shares

R = TypeVar("R")
READ_SECONDS = 5
READ_SETTINGS = {"statement_timeout": f"{READ_SECONDS}s"}
TOO_MUCH = ("53", "55P03")  # resources, lock


class ReadTimeout(EcluseError):
    """A read took longer than READ_SECONDS and was cancelled."""

    code = "READ_TIMEOUT"


class Reads:
    """Runs reads on `quick`, an unchecked pool with READ_SETTINGS, and repeats them on `checked` if a connection is
    dead. With `shares`, reads are run for a tenant: `reads.of(tenant)(ask)`."""

    def __init__(self, quick: Pool, checked: Pool, shares: Shares | None = None, tenant: str = "") -> None:
        self._quick, self._checked, self.shares, self._tenant = quick, checked, shares, tenant

    def of(self, tenant: str) -> Reads:
        return Reads(self._quick, self._checked, self.shares, tenant)

    async def __call__(self, ask: Callable[[Connection], Awaitable[R]]) -> R:
        """Run the read `ask` on a connection and return its result. Raise ReadTimeout if it takes longer than
        READ_SECONDS, Busy if the tenant's share is in use."""
        async with self.shares.held(self._tenant) if self.shares else nullcontext():
            return await self._read(ask)

    async def to_the_end(self, ask: Callable[[Connection], Awaitable[R]]) -> R:
        """Run the read `ask` to its end although the caller is cancelled: that of a stream whose client hangs up is
        cancelled again and again, also while psycopg ends the statement, and the connection would be lost."""
        return await asyncio.shield(self(ask))

    async def _read(self, ask: Callable[[Connection], Awaitable[R]]) -> R:
        try:
            async with self._quick.connection() as connection:
                return await ask(connection)
        except psycopg.errors.QueryCanceled as error:
            raise ReadTimeout(f"The read takes longer than {READ_SECONDS} s: ask for less, or later.") from error
        except psycopg.Error as error:
            if (
                isinstance(error, PoolTimeout)
                or not is_unavailable(error)
                or (error.sqlstate or "").startswith(TOO_MUCH)
            ):
                raise
        doubt_all()
        async with self._checked.connection() as connection:
            return await ask(connection)
