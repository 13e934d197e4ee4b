"""Cost of lanes that are made at run time: `python -m bench.many_lanes --items 100000 --lanes 1000`.

The same run with all items in one lane, beside lanes in which nothing waits, and with its items spread over as many
lanes. Each case is run several times, in turn; the median counts. Runs of a second (20,000 items) differ by a third,
so a run should take several. BENCH_CAP=1000 gives every lane a cap, as lanes with a rate or a breaker have: claims from
these are made under the lane's lock, and not ahead of free slots.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import uvloop
from pydantic import BaseModel

from bench.harness import fresh_database
from bench.server import server
from ecluse.base import logging
from ecluse.db.connect import Connection, normalise
from ecluse.engine import (
    Done,
    Flow,
    Item,
    Lane,
    NewItem,
    Result,
    Run,
    Stage,
    Start,
    WorkContext,
    put_lanes,
    start_run,
)
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from ecluse.migrations.runner import upgrade

LONG = timedelta(minutes=10)


class Input(BaseModel):
    items: int
    lanes: int = 0


async def work(_: WorkContext, __: Item) -> Result:
    return Done()


def lane(n: int) -> Lane:
    return replace(STAGE.lane, name=f"bench/{n:05d}")


async def targets(_: Connection, run: Run) -> Sequence[NewItem]:
    lanes: list[Lane | None] = [lane(n) for n in range(run.input["lanes"])] or [None]
    return [NewItem(str(n), lane=lanes[n % len(lanes)]) for n in range(run.input["items"])]


CAP = int(os.environ.get("BENCH_CAP", "0")) or None
STAGE = Stage("work", Lane("bench", max_in_flight=CAP), work, max_wait=LONG)


async def story(run: Story) -> None:
    await run.select(targets)
    await run.fan_out(STAGE, targets)
    await run.gate(STAGE)


FLOW = Flow("bench", (STAGE,), story, Input)


async def measure(dsn: str, items: int, *, idle: int = 0, used: int = 0) -> float:
    """Return the items per second of a run, beside `idle` lanes, in one lane or in `used` ones."""
    kit = Kit(dsn=dsn, flows=[FLOW], tenant_share=0.75)
    await kit.start()
    try:
        async with kit.pool.connection() as connection:
            await put_lanes(connection, [lane(n) for n in range(idle)])
        await asyncio.sleep(1)
        begun = time.perf_counter()
        async with kit.pool.connection() as connection:
            given = Start(FLOW, f"bench-{begun}", input={"items": items, "lanes": used})
            run = (await start_run(connection, given)).run
        assert await kit.wait_for_run(run.id, LONG)
        return items / (time.perf_counter() - begun)
    finally:
        await kit.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.many_lanes", description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--lanes", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    logging.configure("ERROR")
    lanes = options.lanes
    cases = {"one lane": (0, 0), f"beside {lanes:,} lanes": (lanes, 0), f"in {lanes:,} lanes": (0, lanes)}
    found: dict[str, list[float]] = {name: [] for name in cases}
    with server(None, None) as (dsn, _):
        for _ in range(options.times):
            for name, (idle, used) in cases.items():
                with fresh_database(dsn) as database:
                    own = normalise(database)
                    upgrade(own, [FLOW])
                    found[name].append(uvloop.run(measure(own, options.items, idle=idle, used=used)))
    first = statistics.median(found["one lane"])
    for name, rates in found.items():
        pace = statistics.median(rates)
        print(f"{name:20} {pace:8,.0f} items/s   {pace / first:6.1%}   ({', '.join(f'{one:,.0f}' for one in rates)})")


if __name__ == "__main__":
    main()
