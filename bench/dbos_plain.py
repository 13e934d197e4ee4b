"""DBOS as its manual shows it: one queued child workflow with one step per item, started and awaited by a parent."""

import asyncio
import time

from dbos import DBOS, DBOSConfig

from bench.harness import Measured

# DBOS does about 50 items/s: more items would only take longer
MOST_ITEMS = 500
QUEUE = "items"


@DBOS.step()
async def work(n: int, io_ms: float) -> int:
    if io_ms:
        await asyncio.sleep(io_ms / 1000)
    return n


@DBOS.workflow()
async def item(n: int, io_ms: float) -> int:
    return await work(n, io_ms)


@DBOS.workflow()
async def fan_out(items: int, io_ms: float) -> int:
    handles = [await DBOS.enqueue_workflow_async(QUEUE, item, n, io_ms) for n in range(items)]
    # awaited in turn, not gathered: one waiter polls instead of 500, and most children have ended when their turn comes
    return len([await handle.get_result(polling_interval_sec=0.05) for handle in handles])


async def run(dsn: str, items: int, io_ms: float, concurrency: int) -> Measured:
    items = min(items, MOST_ITEMS)
    config: DBOSConfig = {
        "name": "bench-dbos",
        "system_database_url": dsn,
        "log_level": "WARNING",
        "application_version": "bench",
        "scheduler_polling_interval_sec": 3600.0,
    }
    DBOS(config=config)
    # launched inside the running loop, so the children share it (and its uvloop) with the parent
    DBOS.launch()
    await DBOS.register_queue_async(QUEUE, worker_concurrency=concurrency, polling_interval_sec=0.1)
    started = time.perf_counter()
    handle = await DBOS.start_workflow_async(fan_out, items, io_ms)
    done = await handle.get_result()
    seconds = time.perf_counter() - started
    assert done == items, done
    DBOS.destroy()
    return Measured("dbos", items, seconds)
