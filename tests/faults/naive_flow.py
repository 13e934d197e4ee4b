"""How not to do it: prices are computed from whatever is read and written without looking back, and every try creates
its article under a key of its own. The positive control: whatever checks our flows must catch this one."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from typing import Any

import aiohttp
from pydantic import BaseModel

from ecluse.base.clock import Clock
from ecluse.base.errors import TransientError
from ecluse.db.connect import Connection
from ecluse.engine import Done, Flow, Item, Lane, NewItem, Result, RetryPolicy, Run, Stage, WorkContext
from ecluse.engine.lead.story import Story


class Input(BaseModel):
    skus: list[str]


async def chosen(_: Connection, run: Run) -> Sequence[NewItem]:
    return [NewItem(sku) for sku in run.input["skus"]]


async def call(session: aiohttp.ClientSession, method: str, path: str, **request: Any) -> dict[str, Any]:
    try:
        async with session.request(method, os.environ["PRICE_LIST_URL"] + path, **request) as answer:
            if answer.status >= 400:
                raise TransientError(f"{method} {path}: {answer.status}")
            return dict(await answer.json())
    except aiohttp.ClientError as error:
        raise TransientError(f"{method} {path}: {error!r}") from error


async def raise_price(context: WorkContext, item: Item) -> Result:
    article = await call(context.vendors, "GET", f"/articles/{item.key}")
    price = round(Decimal(article["price"]) * Decimal("1.1"), 2)
    await call(context.vendors, "PUT", f"/articles/{item.key}/price", json={"price": str(price)})
    return Done()


async def create_twin(context: WorkContext, item: Item) -> Result:
    wanted = {"name": f"{item.key} twin", "price": "1.00"}
    await call(context.vendors, "POST", "/articles", json=wanted, headers={"Idempotency-Key": str(uuid.uuid4())})
    return Done()


def stage(name: str, work: Any) -> Stage:
    patient = RetryPolicy(executions=10, base=0.1)
    return Stage(
        name, Lane("price-list"), work, retry=patient, max_wait=timedelta(minutes=2), poll=timedelta(seconds=5)
    )


PRICE, TWIN = stage("price", raise_price), stage("twin", create_twin)


async def story(run: Story) -> None:
    await run.select(chosen)
    for one in (PRICE, TWIN):
        await run.fan_out(one)
        await run.gate(one)


@asynccontextmanager
async def vendors(_: Clock) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield session


FLOW = Flow(name="naive", stages=(PRICE, TWIN), story=story, input=Input, vendors=vendors)
