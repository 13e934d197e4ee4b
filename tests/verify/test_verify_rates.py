"""What the engine really sends, over several replicas and to a vendor with a hard limit, judged by its ledger."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ecluse.engine import Done, Item, Lane, Result, Start, WorkContext
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceList
from ecluse.verify import audit
from tests.support.engine_flows import PATIENCE, flow, keys, stage, until
from tests.support.runs import start_run, wait_for_run

RATE = 40


@pytest.mark.alone
@pytest.mark.req("ENG-50", "ENG-52")
async def test_neither_the_vendors_limit_nor_its_patience_is_overrun_by_more_replicas(start_kit, dsn, sandbox):
    @asynccontextmanager
    async def vendors(clock):
        http = VendorHttp("price_list", f"{sandbox.url}/price-list", now=clock.now)
        yield PriceList(http)
        await http.close()

    async def read(context: WorkContext, item: Item) -> Result:
        await context.vendors.article(f"SKU-{int(item.key[1:]) + 1:05d}")
        return Done()

    sandbox.set_limits({"vendor": "price_list", "per_second": RATE})
    f = replace(flow(stage(read, lane=Lane("price-list", per_second=RATE))), vendors=vendors)
    kits = [await start_kit(f) for _ in range(3)]
    started = await start_run(kits[0], Start(f, "key", input={"targets": keys(150)}))
    await until(lambda: len(sandbox.ledger(kind="call")) > 40)
    sandbox.set_faults([{"kind": "throttle", "retry_after": 2, "times": 1}])
    assert (await wait_for_run(kits[0], started.run.id, PATIENCE))["successful"] == 150
    report = await asyncio.to_thread(audit, dsn, sandbox.url)
    assert report.violations == [], report.text()
    assert report.checked["I-14"] == 151
    assert sandbox.stats()["price_list"]["by_status"] == {"200": 150, "429": 1}
