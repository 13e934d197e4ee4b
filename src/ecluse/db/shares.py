"""A share per tenant of a resource that all tenants use: the number of requests that it may have in flight. A request
beyond that waits for a short time, and is then refused; other tenants are not affected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from psycopg_pool import PoolTimeout

from ecluse.base.errors import EcluseError
from ecluse.db.connect import Connection, Pool

PATIENCE_SECONDS = 3.0
# Requests write single rows of tables that grow. A plan is kept: one made while a table was small would read all of it
# when it is large, until its statistics are renewed.
WRITE_SETTINGS = {"enable_seqscan": "off"}


class Busy(EcluseError):
    """A tenant uses its whole share. `limit` is the name of the limit, `most` the size of the share."""

    code = "TOO_MANY_AT_ONCE"

    def __init__(self, limit: str, most: int) -> None:
        message = f"This tenant has {most} requests of this kind in flight, as many as allowed ({limit})."
        super().__init__(f"{message} Try again later.")
        self.limit = limit


class AllBusy(EcluseError):
    """The tenants together use all connections of a pool, each within its share."""

    code = "SERVER_BUSY"


class _Line(asyncio.Semaphore):
    """The share of one tenant, of which `held` requests are in flight."""

    held = 0


class Shares:
    """Lets each tenant have at most `most` requests in flight. `limit` is the name of the limit for callers, `patience`
    the seconds that a further request waits; None: for as long as it takes."""

    def __init__(self, limit: str, most: int, patience: float | None = PATIENCE_SECONDS) -> None:
        self.limit, self.most, self._patience = limit, most, patience
        self._lines: WeakValueDictionary[str, _Line] = WeakValueDictionary()

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """Count one request against the tenant's share while the body runs; raise Busy if the share stays used up for
        the seconds of `patience`."""
        line = self._lines.get(tenant) or self._lines.setdefault(tenant, _Line(self.most))
        try:
            async with asyncio.timeout(self._patience if line.locked() else None):
                await line.acquire()
        except TimeoutError as error:
            raise Busy(self.limit, self.most) from error
        line.held += 1
        try:
            yield
        finally:
            line.held -= 1
            line.release()

    def used(self, tenant: str) -> int:
        """Return how many requests of the tenant are in flight."""
        line = self._lines.get(tenant)
        return line.held if line else 0


class Writes:
    """The pool of connections for the writes of API requests, separate from the engine's, with a share per tenant."""

    def __init__(self, pool: Pool, shares: Shares) -> None:
        self.pool, self.shares = pool, shares
        self._used = 0

    @asynccontextmanager
    async def connection(self, tenant: str) -> AsyncIterator[Connection]:
        """Yield a connection for a request of the tenant. Raise Busy if the tenant's share stays in use, AllBusy if all
        connections do, PoolTimeout if the database gives none."""
        async with self.shares.held(tenant), AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self.pool.connection())
            except PoolTimeout as error:
                if self._used < self.pool.max_size:
                    raise  # the database gives no connection
                message = "The server is writing for as many other requests as it can at once. Try again later."
                raise AllBusy(message) from error
            self._used += 1
            try:
                yield connection
            finally:
                self._used -= 1
