"""What an item does, and how a whole batch of results is stored. No retry, no sleep, no status, no commit here."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import to_json

from ecluse.base.errors import PermanentError
from ecluse.db.connect import Connection
from ecluse.engine import Done, Ignored, Item, Result, Saved, WorkContext

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


async def read_price(context: WorkContext, item: Item) -> Result:
    try:
        article = await context.vendors.article(item.key)
    except PermanentError as error:
        if error.code == "NOT_FOUND":
            return Ignored("Article not found (404)", code="NOT_FOUND")
        raise
    return Done({"price": article.price, "currency": article.currency})


async def save_prices(connection: Connection, results: Sequence[Saved]) -> None:
    # Two runs may read the same article in one commit: the later item is the newer price, and a row is written once.
    latest = {(one.item.tenant_id, one.item.key): one for one in sorted(results, key=lambda one: one.item.id)}
    rows = [
        {"tenant_id": tenant, "sku": sku, "run_id": one.item.run_id, **one.result}
        for (tenant, sku), one in sorted(latest.items())
    ]
    await connection.execute(SAVE, (to_json(rows).decode(),))
