"""Measure the guarantees of lanes: `python -m bench.lanes --seconds 8`.

Three worker processes share a lane whose rate equals the hard limit of the vendor; the vendor sends a Retry-After; a
high-priority item competes with thousands of low ones; a tenant with one item competes with one that has 50,000.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar
from urllib.request import Request, urlopen

import psycopg
import uvloop
from pydantic import BaseModel

from bench.harness import ROOT, fresh_database
from bench.server import server
from ecluse.base import logging
from ecluse.base.clock import Clock
from ecluse.db.connect import Connection, normalise
from ecluse.engine import Done, Flow, Item, Lane, NewItem, Priority, Result, RetryPolicy, Stage, Start, WorkContext
from ecluse.engine.kit import Kit
from ecluse.engine.runs.lifecycle import begin
from ecluse.engine.runs.stages import fan_out
from ecluse.engine.runs.start import start_run
from ecluse.engine.runs.targets import select
from ecluse.migrations.runner import upgrade
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceList

N = TypeVar("N", int, float)

WORKERS = 3
RATE = 100
PATIENCE = 2  # seconds of the vendor's Retry-After
LONG = timedelta(hours=1)
NOTICE = 0.1  # seconds in which calls already in flight may still arrive


async def read(context: WorkContext, item: Item) -> Result:
    await context.vendors.article(f"SKU-{int(item.key.split('-')[1]) % 1000 + 1:05d}")
    return Done()


async def other(_: WorkContext, __: Item) -> Result:
    await asyncio.sleep(0.01)
    return Done()


@asynccontextmanager
async def vendors(clock: Clock) -> AsyncIterator[PriceList]:
    http = VendorHttp("price_list", os.environ["BENCH_SANDBOX"] + "/price-list", now=clock.now)
    yield PriceList(http)
    await http.close()


READ = Stage("read", Lane("price-list", per_second=RATE), read, retry=RetryPolicy(executions=5), max_wait=LONG)
OTHER = Stage("other", Lane("other", per_second=RATE), other, max_wait=LONG)


class Nothing(BaseModel):
    pass


FLOW = Flow("lanes", (READ, OTHER), None, Nothing, vendors=vendors)


async def worker(dsn: str) -> None:
    logging.configure("ERROR")
    kit = Kit(dsn=dsn, flows=[FLOW], hands=50)
    await kit.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def sandbox() -> Iterator[str]:
    command = [sys.executable, "-m", "ecluse.sandbox", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def control(url: str, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"{url}/_sandbox/{path}", data=data, method=method), timeout=30) as answer:  # noqa: S310
        return json.load(answer)


def calls(url: str, after: float) -> list[dict[str, Any]]:
    return [one for one in control(url, "GET", "ledger?kind=call")["entries"] if one["at"] > after]


async def dispatch(
    connection: Connection,
    name: str,
    stage: Stage,
    count: int,
    *,
    tenant: str = "default",
    priority: Priority = "normal",
) -> int:
    async with connection.transaction():
        run = (await start_run(connection, Start(FLOW, name, tenant_id=tenant))).run
        items = [NewItem(f"{name}-{n}") for n in range(count)]
        await begin(connection, run, FLOW)
        await select(connection, {run.id: items})
        await fan_out(connection, run, stage, items, chunk=1000, priority=priority)
    return run.id


async def finished(connection: Connection, run_id: int) -> int:
    row = await (
        await connection.execute("SELECT count(*) FROM items WHERE run_id = %s AND status <> 'open'", (run_id,))
    ).fetchone()
    return int(row[0]) if row else 0


async def throttled(url: str, after: float) -> float:
    """Return when a call was answered with a Retry-After; 0 if none was."""
    return next((one["done_at"] or 0.0 for one in calls(url, after) if one["fault"] == "throttle"), 0.0)


async def until(true: Callable[[], Awaitable[N]]) -> N:
    while not (found := await true()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return found


async def measure(dsn: str, url: str, seconds: float) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        control(url, "POST", "limits", {"vendor": "price_list", "per_second": RATE})
        await dispatch(connection, "many", READ, 50_000, tenant="big", priority="low")
        side = await dispatch(connection, "beside", OTHER, 20_000, tenant="big")
        await asyncio.sleep(2)

        begun = time.time()
        await asyncio.sleep(seconds)
        got = [one for one in calls(url, begun) if one["at"] <= begun + seconds]
        refused = sum(one["status"] == 429 for one in got)
        share, late = len(got) / RATE / seconds, refused / max(1, len(got))
        print(f"share of the cap used, {WORKERS} workers, {RATE}/s:   {share:7.1%}   (goal 95 %)")
        print(f"answered 429:                                {late:7.2%}   (goal 0.1 %): {refused} of {len(got)}")

        asked = time.time()
        single = await dispatch(connection, "single", READ, 1, tenant="small", priority="low")
        await until(lambda: finished(connection, single))
        print(f"one item of another tenant behind 50,000:    {time.time() - asked:7.2f} s  (goal 2 s)")

        asked = time.time()
        high = await dispatch(connection, "high", READ, 1, tenant="big", priority="high")
        await until(lambda: finished(connection, high))
        before = len(calls(url, asked)) - 1
        print(f"low ones started after a high one came:      {before:7d}   (what was in hand already)")

        before_hold = await finished(connection, side)
        await asyncio.sleep(PATIENCE)
        pace = await finished(connection, side) - before_hold
        control(url, "POST", "faults", {"kind": "throttle", "retry_after": PATIENCE, "times": 1})
        told = await until(lambda: throttled(url, asked))
        before_hold = await finished(connection, side)
        await asyncio.sleep(max(0.0, told + PATIENCE - time.time()))
        beside = await finished(connection, side) - before_hold
        await asyncio.sleep(1)
        inside = [one for one in calls(url, told) if one["at"] < told + PATIENCE]
        early = sum(one["at"] > told + NOTICE for one in inside)
        again = next(one["at"] for one in calls(url, told + PATIENCE)) - told - PATIENCE
        print(
            f"calls inside a Retry-After of {PATIENCE} s:          {early:7d}   (goal 0), and {len(inside)} under way"
        )
        print(f"first call after it:                         {again:7.3f} s")
        print(f"another lane meanwhile:                      {beside / max(1, pace):7.1%}   of its pace before")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.lanes", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--worker", metavar="DSN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        uvloop.run(worker(options.worker))
        return
    logging.configure("ERROR")
    with server(None, None) as (dsn, _), fresh_database(dsn) as database, sandbox() as url:
        own = normalise(database)
        upgrade(own, [FLOW])
        command = [sys.executable, "-m", "bench.lanes", "--worker", own]
        environment = {**os.environ, "BENCH_SANDBOX": url}
        workers = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(WORKERS)
        ]
        try:
            for one in workers:
                assert one.stdout is not None
                assert one.stdout.readline() == "ready\n"
            uvloop.run(measure(own, url, options.seconds))
        finally:
            for one in workers:
                one.kill()
                one.wait()


if __name__ == "__main__":
    main()
