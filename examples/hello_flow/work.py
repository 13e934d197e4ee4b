"""The work on one item, and the saving of a batch of results. Retries, waiting, status and commits are left to the
engine."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from pydantic_core import to_json

from ecluse.base.errors import PermanentError
from ecluse.db.connect import Connection
from ecluse.engine import Done, Ignored, Item, Order, Result, Run, Saved, WorkContext
from ecluse.vendors.price_list import as_text

SCHEMA = """
CREATE TABLE IF NOT EXISTS hello_prices (
    tenant_id text NOT NULL,
    sku       text NOT NULL,
    price     numeric NOT NULL CHECK (price >= 0),
    currency  text NOT NULL,
    run_id    bigint NOT NULL,
    PRIMARY KEY (tenant_id, sku)
)
"""

SAVE = """
INSERT INTO hello_prices (tenant_id, sku, price, currency, run_id)
SELECT tenant_id, sku, price, currency, run_id FROM jsonb_to_recordset(%s::jsonb)
    AS t(tenant_id text, sku text, price numeric, currency text, run_id bigint)
ON CONFLICT (tenant_id, sku) DO UPDATE SET price = excluded.price, currency = excluded.currency,
    run_id = excluded.run_id
"""


RAISE = """
UPDATE hello_prices p SET price = t.price, run_id = t.run_id
FROM jsonb_to_recordset(%s::jsonb) AS t(tenant_id text, sku text, price numeric, run_id bigint)
WHERE p.tenant_id = t.tenant_id AND p.sku = t.sku
"""


async def read_price(context: WorkContext, item: Item) -> Result:
    try:
        article = await context.vendors.article(item.key)
    except PermanentError as error:
        if error.code == "NOT_FOUND":
            return Ignored("Article not found (404)", code="NOT_FOUND")
        raise
    return Done({"price": article.price, "currency": article.currency})


# Setting the price: a write whose state can be read back. With the version, the vendor refuses it if another client has
# changed the article since.


def wanted_price(item: Item) -> Any:
    return {"price": as_text(Decimal(item.payload["price"]))}  # in the format in which it is read back


async def price_at_vendor(context: WorkContext, item: Item) -> Any:
    article = await context.vendors.article(item.key)
    return {"price": as_text(article.price), "version": article.version}


async def set_price(context: WorkContext, item: Item, order: Order) -> Any:
    article = await context.vendors.set_price(
        item.key, Decimal(order.wanted["price"]), version=order.before["version"], idempotency_key=order.key
    )
    return {"price": as_text(article.price)}


# Creating a twin: a write that the vendor applies once per idempotency key.


def twin(item: Item) -> Any:
    return {"name": f"{item.key} twin", "price": "1.00"}


async def create_twin(context: WorkContext, _: Item, order: Order) -> Any:
    article = await context.vendors.create(order.wanted["name"], Decimal(order.wanted["price"]), order.key)
    return {"sku": article.sku}


async def prices_of(connection: Connection, run: Run, skus: Sequence[str]) -> list[tuple[str, Decimal]]:
    cursor = await connection.execute(
        "SELECT sku, price FROM hello_prices WHERE tenant_id = %s AND sku = ANY(%s) ORDER BY sku",
        (run.tenant_id, list(skus)),
    )
    return await cursor.fetchall()


async def save_prices(connection: Connection, results: Sequence[Saved]) -> None:
    await connection.execute(SAVE, (_rows(results),))


async def save_raised_prices(connection: Connection, results: Sequence[Saved]) -> None:
    await connection.execute(RAISE, (_rows(results),))


def _rows(results: Sequence[Saved]) -> str:
    # Two runs may have the same article in one commit: keep the later item, a statement may write a row only once.
    latest = {(one.item.tenant_id, one.item.key): one for one in sorted(results, key=lambda one: one.item.id)}
    rows = [
        {"tenant_id": tenant, "sku": sku, "run_id": one.item.run_id, **one.result}
        for (tenant, sku), one in sorted(latest.items())
    ]
    return to_json(rows).decode()
