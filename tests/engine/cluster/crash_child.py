"""A replica in a process of its own, to be killed: starts the run, or helps with it, and leaves when it has ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import timedelta

from pydantic_core import to_json

from ecluse.base import logging
from ecluse.base.errors import PermanentError, TransientError
from ecluse.db.connect import Connection
from ecluse.engine import Done, Ignored, Item, Result, RetryPolicy, Saved, Start, WorkContext
from ecluse.engine.kit import Kit
from tests.support.engine_flows import flow, keys, stage
from tests.support.runs import start_run, wait_for_run

TARGETS = 400
SCHEMA = "CREATE TABLE IF NOT EXISTS saved (key text NOT NULL, run_id bigint NOT NULL)"


async def work(_: WorkContext, item: Item) -> Result:
    await asyncio.sleep(0.002)
    number = int(item.key[1:])
    if number % 50 == 7:
        raise PermanentError("refused", code="REFUSED")
    if number % 50 == 9:
        return Ignored("gone", code="NOT_FOUND")
    if number % 20 == 3 and item.executions == 0:
        raise TransientError("busy", code="BUSY")
    return Done({"key": item.key})


async def save(connection: Connection, results: Sequence[Saved]) -> None:
    rows = [{"key": one.item.key, "run_id": one.item.run_id} for one in results]
    await connection.execute(
        "INSERT INTO saved SELECT key, run_id FROM jsonb_to_recordset(%s::jsonb) AS t(key text, run_id bigint)",
        (to_json(rows).decode(),),
    )


FLOW = flow(
    stage(work, save=save, retry=RetryPolicy(executions=3, base=0.05), max_wait=timedelta(minutes=2)), schema=SCHEMA
)


async def main(dsn: str, key: str) -> None:
    kit = Kit(dsn=dsn, flows=[FLOW], hands=20, chunk=50, beat=0.2, dead_after=1.0)
    await kit.start()
    started = await start_run(kit, Start(FLOW, key, input={"targets": keys(TARGETS)}))
    row = await wait_for_run(kit, started.run.id, timedelta(seconds=60))
    await asyncio.sleep(0.5)  # what comes after the end is a place to be killed at, too
    await kit.stop()
    print(row["status"])


if __name__ == "__main__":
    logging.configure("ERROR")
    asyncio.run(main(sys.argv[1], sys.argv[2]))
