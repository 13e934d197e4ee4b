"""Prices of several articles in one call. The vendor's price list has no such call: it is made of one request per
article, so that a fault may leave any part of it applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from ecluse.db.connect import Connection
from ecluse.engine import BatchWrite, Flow, Item, Lane, NewItem, Order, RetryPolicy, Run, Stage, WorkContext
from ecluse.engine.lead.story import Story
from hello_flow.flow import QUIET, price_list
from hello_flow.work import price_at_vendor, set_price

TOGETHER = 5


class Input(BaseModel):
    skus: list[str]


async def chosen(_: Connection, run: Run) -> Sequence[NewItem]:
    """Every run sets another price."""
    price = {"price": f"{run.id + 10}.50"}
    return [NewItem(sku, payload=price, group=str(n // TOGETHER)) for n, sku in enumerate(run.input["skus"])]


async def read(context: WorkContext, items: Sequence[Item]) -> Mapping[str, Any]:
    return {item.key: await price_at_vendor(context, item) for item in items}


async def send(context: WorkContext, orders: Sequence[tuple[Item, Order]]) -> Mapping[str, Any]:
    return {item.key: await set_price(context, item, order) for item, order in orders}


PRICES = Stage(
    "prices",
    Lane("price-list", max_per_key=1),
    BatchWrite(wanted=lambda item: item.payload, read=read, send=send, quiet=QUIET * TOGETHER / 2, most=TOGETHER),
    retry=RetryPolicy(executions=8, base=0.2, multiplier=2, longest=5, jitter=0.2),
    time_limit=timedelta(seconds=15),
    max_wait=timedelta(minutes=5),
    poll=timedelta(seconds=5),
)


async def story(run: Story) -> None:
    await run.select(chosen)
    await run.fan_out(PRICES, chosen)
    await run.gate(PRICES)


FLOW = Flow("batch", (PRICES,), story, Input, vendors=price_list)
