"""How much a vendor's Retry-After for one tenant's key slows another tenant: `python -m bench.throttled` or `make
bench-throttled`.

Two tenants call one vendor, each with a key, and so a lane, of its own: at most 50 calls of 100 ms in flight. The pace
of the second one is measured alone, and while the first one's lane is held for 45 s, with as many items waiting in it.
Each case is run several times, in turn; the median counts. Goal: at least 98 %.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

import psycopg
import uvloop
from pydantic import BaseModel

from bench.harness import fresh_database
from bench.server import server
from ecluse.access import tenants
from ecluse.base import logging
from ecluse.base.errors import TransientError
from ecluse.db.connect import Connection, normalise
from ecluse.db.query import fetch_value
from ecluse.engine import Done, Flow, Item, Lane, NewItem, Result, Run, Stage, Start, WorkContext, start_run
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from ecluse.migrations.runner import upgrade

LONG = timedelta(minutes=10)
HELD_SECONDS = 45
CALL_SECONDS, AT_ONCE = 0.1, 50
THROTTLED, OTHER = "throttled", "other"
HELD = "SELECT held_until > ecluse_now() FROM lanes WHERE name = %s"


class Input(BaseModel):
    items: int


async def work(_: WorkContext, item: Item) -> Result:
    if item.tenant_id == THROTTLED:
        raise TransientError("too many requests", code="RATE_LIMIT", retry_after=HELD_SECONDS)
    await asyncio.sleep(CALL_SECONDS)
    return Done()


async def targets(_: Connection, run: Run) -> Sequence[NewItem]:
    lane = Lane(f"vendor/{run.tenant_id}", max_in_flight=AT_ONCE, tenant=run.tenant_id)
    return [NewItem(str(n), lane=lane) for n in range(run.input["items"])]


STAGE = Stage("work", Lane("vendor", max_in_flight=AT_ONCE), work, max_wait=LONG)


async def story(run: Story) -> None:
    await run.select(targets)
    await run.fan_out(STAGE, targets)
    await run.gate(STAGE)


FLOW = Flow("bench", (STAGE,), story, Input)


async def measure(dsn: str, items: int, *, throttled: bool) -> float:
    """Return the calls per second of one tenant, alone or beside one that the vendor has asked to wait."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for tenant in (THROTTLED, OTHER):
            await tenants.create(connection, tenant)
    kit = Kit(dsn=dsn, flows=[FLOW], tenant_share=0.75)
    await kit.start()

    async def start(tenant: str) -> int:
        async with kit.pool.connection() as connection:
            given = Start(FLOW, tenant, tenant_id=tenant, input={"items": items})
            return (await start_run(connection, given)).run.id

    try:
        if throttled:
            await start(THROTTLED)
            await asyncio.sleep(2)
            async with kit.pool.connection() as connection:
                assert await fetch_value(connection, HELD, (f"vendor/{THROTTLED}",))
        begun = time.perf_counter()
        assert await kit.wait_for_run(await start(OTHER), LONG)
        seconds = time.perf_counter() - begun
        assert seconds < HELD_SECONDS, "fewer items: the hold was over before the end"
        return items / seconds
    finally:
        await kit.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.throttled", description=__doc__)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    logging.configure("ERROR")
    cases = {"alone": False, f"another held for {HELD_SECONDS} s": True}
    found: dict[str, list[float]] = {name: [] for name in cases}
    with server(None, None) as (dsn, _):
        for _ in range(options.times):
            for name, throttled in cases.items():
                with fresh_database(dsn) as database:
                    own = normalise(database)
                    upgrade(own, [FLOW])
                    found[name].append(uvloop.run(measure(own, options.items, throttled=throttled)))
    first = statistics.median(found["alone"])
    for name, rates in found.items():
        pace = statistics.median(rates)
        print(f"{name:24} {pace:8,.1f} calls/s   {pace / first:6.1%}   ({', '.join(f'{one:,.1f}' for one in rates)})")


if __name__ == "__main__":
    main()
