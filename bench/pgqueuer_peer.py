"""The candidate pgqueuer 1.6 at its fastest fair settings: a durable queue without runs, gates or results.

Settings chosen by measurement, always in favour of pgqueuer:
- all tables logged (its default): Ecluse is durable, too;
- batch_size 200 is both its claim and its completion batch;
- no limit in SQL. `concurrency_limit` and `max_concurrent_tasks` count picked rows, so a full worker polls again only
  after 0.1 s, and the latter must be twice the batch. A semaphore in the handler keeps the same number of items in
  flight and was no slower;
- its psycopg driver waits for NOTIFY on the connection it queries with and holds that connection's lock for up to a
  second, so queries stall. `Split` listens on a second connection; the driver as shipped is `pgqueuer_shipped`.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Self

import asyncpg  # type: ignore[import-untyped]
import psycopg
from pgqueuer.core.qm import QueueManager
from pgqueuer.db import AsyncpgPoolDriver, Driver, PsycopgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.harness import Measured

BATCH = 200
# enqueued in slices, so that the worker starts while the rest is inserted
ENQUEUE_SLICE = 5_000
ENTRYPOINT = "item"
LEFT = "SELECT count(*) FROM pgqueuer"
LOGGED = "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"


class Split(PsycopgDriver):
    """The psycopg driver with a connection of its own for LISTEN, as asyncpg's pool driver has."""

    def __init__(self, connection: psycopg.AsyncConnection, listening: psycopg.AsyncConnection) -> None:
        super().__init__(connection)
        self._listening = PsycopgDriver(listening)

    async def add_listener(self, channel: str, callback: Callable[[str | bytes | bytearray], None]) -> None:
        await self._listening.add_listener(channel, callback)

    async def remove_listener(self, channel: str, callback: Callable[[str | bytes | bytearray], None]) -> None:
        await self._listening.remove_listener(channel, callback)

    async def __aenter__(self) -> Self:
        await self._listening.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listening.__aexit__(*error)


async def _count(connection: psycopg.AsyncConnection, query: str) -> int:
    row = await (await connection.execute(query.encode())).fetchone()
    assert row is not None
    return int(row[0])


async def _measure(
    name: str, drivers: list[Driver], enqueuer: Driver, dsn: str, items: int, io_ms: float, concurrency: int
) -> Measured:
    await Queries(enqueuer).install()
    slots = asyncio.Semaphore(concurrency)
    all_ran = asyncio.Event()
    ran = 0

    async def handle(_job: Job) -> None:
        nonlocal ran
        if io_ms:
            async with slots:
                await asyncio.sleep(io_ms / 1000)
        ran += 1
        if ran >= items:
            all_ran.set()

    managers = [QueueManager(Queries(driver)) for driver in drivers]
    for manager in managers:
        manager.entrypoint(ENTRYPOINT)(handle)
    workers = [asyncio.create_task(m.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=1))) for m in managers]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as observer:
        for manager in managers:
            # pgqueuer's own probe over NOTIFY: the worker listens before the clock starts
            await asyncio.sleep(0.5)
            await manager.listener_healthy()
        started = time.perf_counter()
        for first in range(0, items, ENQUEUE_SLICE):
            payloads: list[bytes | None] = [b'{"n": %d}' % n for n in range(first, min(first + ENQUEUE_SLICE, items))]
            many = len(payloads)
            await Queries(enqueuer).enqueue([ENTRYPOINT] * many, payloads, [0] * many)
        await all_ran.wait()
        while await _count(observer, LEFT):  # noqa: ASYNC110 - polls: only the table shows the end
            await asyncio.sleep(0.005)
        seconds = time.perf_counter() - started
        assert await _count(observer, LOGGED) == ran == items, ran
    for manager in managers:
        manager.shutdown.set()
    await asyncio.gather(*workers)
    return Measured(name, items, seconds)


async def _psycopg(name: str, shipped: bool, dsn: str, items: int, io_ms: float, concurrency: int) -> Measured:
    async with AsyncExitStack() as stack:

        async def connect() -> psycopg.AsyncConnection:
            return await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn, autocommit=True))

        # two managers, because each claims and completes on a single connection; four were not measurably faster
        drivers: list[Driver] = [
            PsycopgDriver(await connect()) if shipped else Split(await connect(), await connect()) for _ in range(2)
        ]
        return await _measure(name, drivers, PsycopgDriver(await connect()), dsn, items, io_ms, concurrency)


async def run(dsn: str, items: int, io_ms: float, concurrency: int) -> Measured:
    """Measure with psycopg, listening on a connection of its own."""
    return await _psycopg("pgqueuer", False, dsn, items, io_ms, concurrency)


async def run_shipped(dsn: str, items: int, io_ms: float, concurrency: int) -> Measured:
    """Measure with psycopg exactly as pgqueuer ships it."""
    return await _psycopg("pgqueuer_shipped", True, dsn, items, io_ms, concurrency)


async def run_asyncpg(dsn: str, items: int, io_ms: float, concurrency: int) -> Measured:
    """Measure with asyncpg's pool driver, which the manual recommends for throughput."""
    async with asyncpg.create_pool(dsn, min_size=5, max_size=5) as pool:
        driver = AsyncpgPoolDriver(pool)
        return await _measure("pgqueuer_asyncpg", [driver], driver, dsn, items, io_ms, concurrency)
