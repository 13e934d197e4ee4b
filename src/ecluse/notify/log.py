"""Read side of deliveries: message, recipient, state and every attempt. State, attempts and errors are read from the
delivery's run and item; nothing is stored twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, where
from ecluse.notify.rules import message_id, shown_to

# The states of a delivery, each with the run states that it covers.
STATES = {"pending": ["queued", "running"], "delivered": ["succeeded"], "failed": ["failed", "partial", "cancelled"]}
FIND = """
SELECT d.run_id AS id, d.tenant_id, d.endpoint_id, d.kind, d.recipient, d.event_key, d.event_type,
       d.about_run AS about_run_id, r.state, coalesce(i.executions, 0) AS executions,
       coalesce(i.error_code, r.error_code) AS error_code, coalesce(i.error, r.reason) AS error, d.created_at,
       CASE WHEN i.status = 'open' AND r.ended_at IS NULL THEN i.due_at END AS next_attempt_at, r.ended_at{more}
FROM deliveries d JOIN runs r ON r.id = d.run_id LEFT JOIN items i ON i.run_id = d.run_id
WHERE (%(tenant)s::text IS NULL OR d.tenant_id = %(tenant)s) AND {where}
ORDER BY d.run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""
IN_FULL = """, d.message, i.result, (SELECT coalesce(jsonb_agg(jsonb_build_object('execution', a.execution, 'at', a.at,
    'error_code', a.error_code, 'error', a.error, 'retry_at', a.retry_at) ORDER BY a.id), '[]')
    FROM attempts a WHERE a.run_id = d.run_id) AS attempts"""
FILTERS = {
    "endpoint": "d.endpoint_id = %(endpoint)s",
    "states": "r.state = ANY(%(states)s)",
    "delivery": "d.run_id = %(delivery)s",
}


async def list_deliveries(
    connection: Connection,
    tenant: str | None,
    *,
    endpoint_id: int | None = None,
    state: str | None = None,
    limit: int,
    offset: int,
) -> list[Row]:
    """Return deliveries, the newest first. `tenant` None means all tenants; only the command line may pass it."""
    given = {"endpoint": endpoint_id, "states": None if state is None else STATES[state]}
    return await _find(connection, given, {"tenant": tenant, "limit": limit, "offset": offset})


async def show_delivery(connection: Connection, tenant: str | None, run_id: int) -> Row:
    """Return one delivery with its message, every failed attempt, and the final answer. `tenant` as in
    `list_deliveries`. Raises NotFound."""
    rows = await _find(connection, {"delivery": run_id}, {"tenant": tenant, "limit": 1, "offset": 0}, more=IN_FULL)
    if not rows:
        raise NotFound(f"there is no delivery {run_id}")
    return rows[0]


async def _find(
    connection: Connection, given: Mapping[str, Any], parameters: Mapping[str, Any], more: str = ""
) -> list[Row]:
    statement = FIND.format(more=more, where=where(FILTERS, given))
    return [_shown(row) for row in await fetch_all(connection, dict, statement, {**given, **parameters})]


def _shown(row: Row) -> Row:
    """Return the row for readers: the state in the words of deliveries, the id of the message, and the recipient
    without secrets."""
    state = next(word for word, states in STATES.items() if row["state"] in states)
    name = message_id(row["tenant_id"], row["event_key"])
    return {**row, "state": state, "message_id": name, "recipient": shown_to(row["kind"], row["recipient"])}
