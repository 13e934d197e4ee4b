"""Time from the API's answer to the first vendor call of a single-item run: `python -m bench.start`.

Measured with one process that has all roles, and with three processes: one serves the API, two work. The runs are
started one after the other, by HTTP; the processes share the machine, hence the monotonic clock.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence

import aiohttp
import psycopg
import uvloop
from pydantic import BaseModel

from bench.harness import fresh_database
from bench.reads import process, ready
from bench.server import server
from ecluse.access import keys
from ecluse.db.connect import Connection, normalise
from ecluse.db.query import fetch_value
from ecluse.engine import Done, Flow, Item, Lane, NewItem, Result, Run, Stage, WorkContext
from ecluse.engine.lead.story import Story
from ecluse.migrations.runner import upgrade

# By name, the roles of each process; none: all of them.
WORKER = ("worker", "scheduler")
REPLICAS: dict[str, list[tuple[str, ...]]] = {"one": [()], "three": [("api",), WORKER, WORKER]}
CALLED = "SELECT result FROM items WHERE run_id = %s AND status = 'succeeded'"


class Input(BaseModel):
    pass


async def call(_: WorkContext, __: Item) -> Result:
    return Done(time.monotonic())


async def target(_: Connection, __: Run) -> Sequence[NewItem]:
    return [NewItem("target")]


STAGE = Stage("call", Lane("bench"), call)


async def story(run: Story) -> None:
    await run.select(target)
    await run.fan_out(STAGE)
    await run.gate(STAGE)


FLOW = Flow("start", (STAGE,), story, Input)


async def measure(dsn: str, replicas: Sequence[tuple[str, ...]], runs: int) -> list[float]:
    """Return the milliseconds of each run."""
    chance = random.Random(1)  # noqa: S311 - repeatable, not secret
    found = []
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        _, key = await keys.create(connection, "default", "operator", "bench")
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(process(dsn, *roles, flow="bench.start:FLOW")) for roles in replicas]
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(f"http://127.0.0.1:{ports[0]}", headers=headers) as session:
                for port in ports:
                    await ready(session, f"http://127.0.0.1:{port}")
                for _ in range(runs):
                    await asyncio.sleep(chance.uniform(0.05, 0.15))
                    async with session.post("/api/runs", json={"flow": FLOW.name}) as answer:
                        run_id = int((await answer.json())["run_id"])
                        answered = time.monotonic()
                    while (called := await fetch_value(connection, CALLED, (run_id,))) is None:  # noqa: ASYNC110 - polls
                        await asyncio.sleep(0.01)
                    found.append((called - answered) * 1000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.start", description=__doc__)
    parser.add_argument("--dsn")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server(options.dsn, None) as (dsn, _):
        for name, replicas in REPLICAS.items():
            with fresh_database(dsn) as own:
                upgrade(normalise(own), [FLOW])
                found = sorted(uvloop.run(measure(own, replicas, options.runs)))
            figures = {
                "median_ms": statistics.median(found),
                "p95_ms": found[int(len(found) * 0.95)],
                "max_ms": found[-1],
            }
            if options.json:
                print(json.dumps({"replicas": name, **figures}))
            else:
                print(f"{name:<8}", *(f"{what} {value:.1f}" for what, value in figures.items()))


if __name__ == "__main__":
    main()
