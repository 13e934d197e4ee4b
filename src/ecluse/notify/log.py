"""Queries about deliveries: message, recipient, state and every attempt. State, attempts and errors are read from the
delivery's run and item; nothing is stored twice."""

from __future__ import annotations

from typing import Literal

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_one
from ecluse.notify.rules import message_id, shown_to

DeliveryState = Literal["pending", "delivered", "failed"]
SHOW = """
SELECT d.*, (SELECT coalesce(jsonb_agg(jsonb_build_object('execution', a.execution, 'at', a.at,
           'error_code', a.error_code, 'error', a.error, 'retry_at', a.retry_at) ORDER BY a.id), '[]')
       FROM attempts a WHERE a.run_id = d.id) AS attempts
FROM delivery_list d WHERE d.tenant_id = %s AND d.id = %s
"""


async def show_delivery(connection: Connection, tenant: str, run_id: int) -> Row:
    """Return one delivery with its message, every failed attempt, and the receiver's answer; raise NotFound if the
    tenant has no such delivery."""
    row = await fetch_one(connection, dict, SHOW, (tenant, run_id))
    if row is None:
        raise NotFound(f"There is no delivery {run_id}.")
    return shown(row)


def shown(row: Row) -> Row:
    """Return the row as it is shown to people and API callers: with the id of its message, and only the origin of a
    URL."""
    name = message_id(row["tenant_id"], row["event_key"])
    return {**row, "message_id": name, "recipient": shown_to(row["kind"], row["recipient"])}
