"""Set the price of articles in a shop: read each article, then write the wanted price."""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel

from ecluse.flow import AbsoluteWrite, Connection, Flow, Item, Lane, NewItem, Order, RetryPolicy, Row, Run
from ecluse.flow import Stage, Story, WorkContext, vendor


class Article(BaseModel):
    price: str
    version: int


class Input(BaseModel):
    skus: list[str]
    price: str = "9.99"


async def chosen(_: Connection, run: Run) -> list[NewItem]:
    return [NewItem(sku, payload={"price": run.input["price"]}) for sku in run.input["skus"]]


def wanted(item: Item) -> Row:
    return {"price": item.payload["price"]}


async def read(context: WorkContext, item: Item) -> Row:
    article: Article = await context.vendors.call("GET", f"/articles/{item.key}", Article)
    return article.model_dump()


async def send(context: WorkContext, item: Item, order: Order) -> None:
    unchanged = {"If-Match": f'"{order.before["version"]}"'}  # the shop refuses it if the article was changed meanwhile
    await context.vendors.call("PUT", f"/articles/{item.key}/price", Article, json=order.wanted, headers=unchanged)


SHOP = Lane("shop", per_second=50, max_in_flight=20)  # the limits hold over all replicas
WRITE = AbsoluteWrite(wanted=wanted, read=read, send=send, quiet=timedelta(seconds=4))
REPRICE = Stage("reprice", SHOP, WRITE, retry=RetryPolicy(executions=5, base=0.2), poll=timedelta(seconds=5))


async def story(run: Story) -> None:
    await run.select(chosen)  # the targets that the run answers for
    await run.fan_out(REPRICE, chosen)  # one item each, executed by every replica
    await run.gate(REPRICE)  # wait for all of them, at most `max_wait`


SHOP_API = vendor("shop", knob="PRICE_LIST_URL", url="http://127.0.0.1:8089/price-list", deadline=2)
FLOW = Flow("my_flow", (REPRICE,), story, Input, vendors=SHOP_API)
