"""Hello, Ecluse: a run over articles of a price list.

Each article is a target: the run must give it an outcome. Its item waits in the price list's lane until a worker with a
free slot reads the price, which is stored in the commit that finishes the item. If the input asks for it, the price is
then raised, and a twin of the article created, at the vendor: one write of each of the two kinds. An article that is
gone upstream is ignored; an item that does not succeed within its retry budget fails; the run ends completed, partial
or failed accordingly."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal

from pydantic import BaseModel, ConfigDict, Field

from ecluse.base.clock import Clock
from ecluse.db.connect import Connection
from ecluse.engine import (
    AbsoluteWrite,
    Flow,
    KeyedWrite,
    Lane,
    NewItem,
    RetryPolicy,
    Run,
    Save,
    Stage,
    Work,
    Write,
    open_targets,
)
from ecluse.engine.lead.story import Story
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceList

from .work import (
    SCHEMA,
    create_twin,
    price_at_vendor,
    prices_of,
    read_price,
    save_prices,
    save_raised_prices,
    set_price,
    twin,
    wanted_price,
)

# The vendor answers within the deadline or never; for as long again it may still apply a write that it received.
DEADLINE = timedelta(seconds=2)
QUIET = 2 * DEADLINE


def stage(name: str, work: Work | Write, save: Save | None = None) -> Stage:
    return Stage(
        name,
        Lane("price-list"),
        work,
        save,
        retry=RetryPolicy(executions=8, base=0.2, multiplier=2, longest=5, jitter=0.2),
        time_limit=timedelta(seconds=15),
        max_wait=timedelta(minutes=5),
        poll=timedelta(seconds=5),
    )


READ = stage("read", read_price, save_prices)
REPRICE = stage(
    "reprice",
    AbsoluteWrite(wanted=wanted_price, read=price_at_vendor, send=set_price, quiet=QUIET),
    save_raised_prices,
)
TWIN = stage("twin", KeyedWrite(wanted=twin, send=create_twin, quiet=QUIET, remembered=timedelta(hours=24)))


class Input(BaseModel):
    """The input of a run: the first `articles` of the catalogue, or exactly the `skus` given. Nothing is written at the
    vendor unless prices are to be raised (`raise_percent`) or twins to be created (`twins`)."""

    model_config = ConfigDict(extra="forbid")  # a typo must not silently become a default

    articles: int = Field(100, ge=0, le=100_000)
    skus: list[str] = []
    raise_percent: Decimal = Field(Decimal(0), ge=-99, le=1000)
    twins: bool = False


async def chosen(_: Connection, run: Run) -> Sequence[NewItem]:
    given = Input.model_validate(run.input)
    return [NewItem(sku) for sku in given.skus or [f"SKU-{n:05d}" for n in range(1, given.articles + 1)]]


async def raised(connection: Connection, run: Run) -> Sequence[NewItem]:
    """Return one item per open target with its new price, which is computed once, from the price that was read, and
    stored with the item."""
    factor = 1 + Input.model_validate(run.input).raise_percent / 100
    prices = await prices_of(connection, run, [item.key for item in await open_targets(connection, run)])
    return [NewItem(sku, payload={"price": str(round(price * factor, 2))}) for sku, price in prices]


async def story(run: Story) -> None:
    await run.phase("selecting")
    await run.select(chosen)
    await run.phase("reading")
    await run.fan_out(READ)
    await run.gate(READ)
    if run.input.raise_percent:
        await run.phase("repricing")
        await run.fan_out(REPRICE, raised)
        await run.gate(REPRICE)
    if run.input.twins:
        await run.phase("creating twins")
        await run.fan_out(TWIN)
        await run.gate(TWIN)


@asynccontextmanager
async def price_list(clock: Clock) -> AsyncIterator[PriceList]:
    url = os.environ.get("PRICE_LIST_URL", "http://127.0.0.1:8089/price-list")
    http = VendorHttp("price list", url, deadline=DEADLINE.total_seconds(), now=clock.now)
    try:
        yield PriceList(http)
    finally:
        await http.close()


FLOW = Flow(name="hello", stages=(READ, REPRICE, TWIN), story=story, input=Input, schema=SCHEMA, vendors=price_list)
