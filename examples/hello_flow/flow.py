"""Hello, Ecluse: the path of one article.

It is selected (so the run answers for it), waits in the price list's lane, is read by whichever worker has a hand
free, and its price is stored in the same commit that finishes it. An article that is gone upstream is ignored; one that
cannot be read within its budget fails; the run ends completed, partial or failed accordingly.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field

from ecluse.base.clock import Clock
from ecluse.db.connect import Connection
from ecluse.engine import Flow, Lane, NewItem, RetryPolicy, Run, Stage, Story
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceList

from .work import SCHEMA, read_price, save_prices

READ = Stage(
    name="read",
    lane=Lane("price-list"),
    work=read_price,
    save=save_prices,
    retry=RetryPolicy(executions=6, base=0.2, multiplier=2, longest=5, jitter=0.2),
    time_limit=timedelta(seconds=15),
    max_wait=timedelta(minutes=5),
    poll=timedelta(seconds=5),
)


class Input(BaseModel):
    """The first `articles` of the catalogue, or exactly the `skus` given."""

    model_config = ConfigDict(extra="forbid")  # a typo must not silently become a default

    articles: int = Field(100, ge=0, le=100_000)
    skus: list[str] = []


async def chosen(_: Connection, run: Run) -> Sequence[NewItem]:
    given = Input.model_validate(run.input)
    return [NewItem(sku) for sku in given.skus or [f"SKU-{n:05d}" for n in range(1, given.articles + 1)]]


async def story(run: Story) -> None:
    await run.phase("selecting")
    await run.select(chosen)
    await run.phase("reading")
    await run.fan_out(READ)
    await run.gate(READ)


@asynccontextmanager
async def price_list(clock: Clock) -> AsyncIterator[PriceList]:
    url = os.environ.get("PRICE_LIST_URL", "http://127.0.0.1:8089/price-list")
    http = VendorHttp("price list", url, deadline=10, now=clock.now)
    try:
        yield PriceList(http)
    finally:
        await http.close()


FLOW = Flow(name="hello", stages=(READ,), story=story, input=Input, schema=SCHEMA, vendors=price_list)
