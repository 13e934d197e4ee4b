"""The upper bound: one table, claim a batch with SKIP LOCKED, complete it with one UPDATE. No runs, fences or log."""

import asyncio
import time
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from bench.harness import Measured

CONNECTIONS = 4
BATCH = 200

TABLE = """
CREATE TABLE items (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status smallint NOT NULL DEFAULT 0,
                    payload jsonb NOT NULL, result jsonb);
CREATE INDEX items_open ON items (id) WHERE status = 0
"""
INSERT = "INSERT INTO items (payload) SELECT value FROM jsonb_array_elements(%s)"
CLAIM = """
UPDATE items SET status = 1 WHERE id IN (
    SELECT id FROM items WHERE status = 0 ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING id, payload
"""
COMPLETE = """
UPDATE items i SET status = 2, result = done.result
FROM jsonb_to_recordset(%s) done(id bigint, result jsonb) WHERE i.id = done.id AND i.status = 1
"""
OPEN = "SELECT count(*) FROM items WHERE status <> 2"


async def _item(row: tuple[Any, ...], io_ms: float, slots: asyncio.Semaphore) -> dict[str, Any]:
    if io_ms:
        async with slots:
            await asyncio.sleep(io_ms / 1000)
    return {"id": row[0], "result": {"n": row[1]["n"]}}


async def _work(connection: psycopg.AsyncConnection, io_ms: float, slots: asyncio.Semaphore) -> None:
    while rows := await (await connection.execute(CLAIM, (BATCH,))).fetchall():
        if io_ms:
            results = await asyncio.gather(*(_item(row, io_ms, slots) for row in rows))
        else:
            results = [await _item(row, io_ms, slots) for row in rows]
        await connection.execute(COMPLETE, (Jsonb(results),))


async def run(dsn: str, items: int, io_ms: float, concurrency: int) -> Measured:
    connections = [await psycopg.AsyncConnection.connect(dsn, autocommit=True) for _ in range(CONNECTIONS)]
    await connections[0].execute(TABLE)
    slots = asyncio.Semaphore(concurrency)
    started = time.perf_counter()
    await connections[0].execute(INSERT, (Jsonb([{"n": n} for n in range(items)]),))
    await asyncio.gather(*(_work(connection, io_ms, slots) for connection in connections))
    row = await (await connections[0].execute(OPEN)).fetchone()
    seconds = time.perf_counter() - started
    assert row == (0,), row
    for connection in connections:
        await connection.close()
    return Measured("raw", items, seconds)
