"""The candidate Ecluse: a whole run through the kit (select, fan-out, work, group commit, gate, outcomes, status), with
an outcome per item in the database; and figures of Ecluse alone: gate and start latency, idle cost."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psycopg
from pydantic import BaseModel

from bench.harness import Measured
from bench.statements import count_in_log
from ecluse.base import logging
from ecluse.db.connect import Connection, normalise
from ecluse.engine import Done, Flow, Item, Lane, NewItem, Result, Run, Stage, Start, WorkContext, start_run
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from ecluse.insight import run_queries
from ecluse.migrations.runner import upgrade

LONG = timedelta(minutes=10)
IDLE_SECONDS = 20.0
REPEATS = 31


class Input(BaseModel):
    items: int
    io_ms: float = 0


first_call = 0.0  # perf_counter at the first call of the current run


async def work(_: WorkContext, item: Item) -> Result:
    global first_call
    first_call = first_call or time.perf_counter()
    if item.payload["io"]:
        await asyncio.sleep(item.payload["io"])
    return Done({"n": item.payload["n"]})


async def targets(_: Connection, run: Run) -> Sequence[NewItem]:
    io = run.input["io_ms"] / 1000
    return [NewItem(str(n), payload={"n": n, "io": io}) for n in range(run.input["items"])]


STAGE = Stage("work", Lane("bench"), work, max_wait=LONG)


async def story(run: Story) -> None:
    await run.select(targets)
    await run.fan_out(STAGE, targets)
    await run.gate(STAGE)


FLOW = Flow("bench", (STAGE,), story, Input)


async def _started(dsn: str, hands: int) -> Kit:
    logging.configure("WARNING")
    dsn = normalise(dsn)
    await asyncio.to_thread(upgrade, dsn, [FLOW])
    kit = Kit(dsn, [FLOW], hands=hands)
    await kit.start()
    return kit


async def _run(kit: Kit, items: int, io_ms: float, key: str) -> dict[str, object]:
    async with kit.pool.connection() as connection:
        started = await start_run(connection, Start(FLOW, key, input={"items": items, "io_ms": io_ms}))
    await kit.wait_for_run(started.run.id, LONG)
    async with kit.pool.connection() as connection:
        return await run_queries.show_run(connection, started.run.tenant_id, started.run.id)


async def run(dsn: str, items: int, io_ms: float, concurrency: int) -> Measured:
    kit = await _started(dsn, concurrency)
    began = time.perf_counter()
    row = await _run(kit, items, io_ms, "bench")
    seconds = time.perf_counter() - began
    assert (row["status"], row["successful"]) == ("completed", items), row
    await kit.stop()
    return Measured("ecluse", items, seconds)


async def latencies(dsn: str) -> dict[str, float]:
    """Return two medians. start: from the call that starts a single-item run to its first vendor call. gate: from the
    commit of a stage's last item to the end of its gate, both timestamps from the database."""
    global first_call
    kit = await _started(dsn, 200)
    starts: list[float] = []
    for n in range(REPEATS):
        first_call, began = 0.0, time.perf_counter()
        await _run(kit, 1, 0, f"start-{n}")
        starts.append((first_call - began) * 1000)
    for n in range(REPEATS):
        await _run(kit, 50, 5, f"gate-{n}")
    async with kit.pool.connection() as connection:
        cursor = await connection.execute(
            "SELECT extract(epoch FROM s.ended_at - (SELECT max(i.finished_at) FROM items i WHERE i.run_id = s.run_id))"
            " * 1000 FROM stages s JOIN runs r ON r.id = s.run_id WHERE r.event_key LIKE 'gate-%'"
        )
        gates = [float(row[0]) for row in await cursor.fetchall()]
    await kit.stop()
    return {"gate_ms_median": statistics.median(gates), "start_ms_median": statistics.median(starts)}


def size(file: Path | None) -> int:
    return file.stat().st_size if file else 0


async def idle(dsn: str, server_log: Path | None) -> dict[str, float]:
    """Measure an idle replica: statements per second (BEGIN and COMMIT included) and this process's CPU."""
    logging.configure("WARNING")
    await asyncio.to_thread(upgrade, normalise(dsn), [FLOW])
    with psycopg.connect(dsn, autocommit=True) as admin:
        name = admin.info.dbname
        admin.execute(f"ALTER DATABASE \"{name}\" SET log_statement = 'all'")
    kit = Kit(normalise(dsn), [FLOW])
    await kit.start()
    await asyncio.sleep(5)  # exclude the cost of the start
    offset = size(server_log)
    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.sleep(IDLE_SECONDS)
    seconds = time.perf_counter() - began
    found = {"idle_cpu_percent": (time.process_time() - cpu) / seconds * 100}
    if server_log:
        found["idle_statements_s"] = count_in_log(server_log, offset, size(server_log)) / seconds
    await kit.stop()
    return found
