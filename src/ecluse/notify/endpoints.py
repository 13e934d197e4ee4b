"""Notification endpoints: recipients, and the events that they subscribe to. An endpoint of another tenant is not
found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecluse.base.errors import NotFound
from ecluse.base.masking import origin_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one
from ecluse.notify.rules import Kind, shown_to
from ecluse.notify.webhook_signature import old_name

COLUMNS = """
id, tenant_id, kind, url, addresses, events, description, is_active, disabled_reason, created_at, updated_at
"""
INSERT = f"""
INSERT INTO notification_endpoints (tenant_id, kind, url, addresses, events, description, is_active, created_at,
                                    updated_at)
VALUES (%(tenant)s, %(kind)s, %(url)s, %(addresses)s, %(events)s, %(description)s, %(is_active)s, ecluse_now(),
        ecluse_now())
RETURNING {COLUMNS}
"""  # noqa: S608 - our own names
SHOW = f"SELECT {COLUMNS} FROM notification_endpoints WHERE tenant_id = %(tenant)s AND id = %(endpoint)s"  # noqa: S608
UPDATE = f"""
UPDATE notification_endpoints SET {{sets}}, updated_at = ecluse_now(),
    disabled_reason = CASE WHEN %(is_active)s::boolean IS NULL THEN disabled_reason END
WHERE tenant_id = %(tenant)s AND id = %(endpoint)s RETURNING {COLUMNS}
"""  # noqa: S608 - our own names
GONE = """
UPDATE notification_endpoints SET is_active = false, disabled_reason = %s, updated_at = ecluse_now()
WHERE tenant_id = %s AND id = %s AND is_active
"""
WITH_SECRET = frozenset({"webhook", "pagerduty"})
CHANGEABLE = ("url", "addresses", "events", "description", "is_active")


def secret_name(endpoint_id: int) -> str:
    """Return the name under which the signing secret of a webhook, or the routing key of PagerDuty, is stored
    encrypted."""
    return f"webhook:{endpoint_id}"


def old_secret_name(endpoint_id: int) -> str:
    """Return the name under which the replaced signing secret of an endpoint is stored encrypted."""
    return old_name(secret_name(endpoint_id))


def url_name(endpoint_id: int) -> str:
    """Return the name under which the URL of an endpoint is stored encrypted; its row has the origin only."""
    return f"webhook:{endpoint_id}:url"


async def create(
    connection: Connection,
    tenant: str,
    kind: Kind,
    *,
    url: str | None = None,
    addresses: list[str] | None = None,
    events: list[str],
    description: str | None = None,
    is_active: bool = True,
) -> Row:
    """Create an endpoint and return its row. A mail endpoint has addresses, every other kind a URL; the row has only
    the origin of the URL, and the caller must store the URL encrypted (`url_name`)."""
    given = {
        "tenant": tenant,
        "kind": kind,
        "url": None if url is None else origin_of(url),
        "addresses": addresses or [],
        "events": events,
        "description": description,
        "is_active": is_active,
    }
    (row,) = await fetch_all(connection, dict, INSERT, given)
    return row


async def show(connection: Connection, tenant: str, endpoint_id: int, *, lock: bool = False) -> Row:
    """Return the row of an endpoint; raise NotFound if the tenant has no such endpoint. `lock`: lock it until the end
    of the transaction."""
    statement = SHOW + (" FOR NO KEY UPDATE" if lock else "")
    return await _the_one(connection, statement, {"tenant": tenant, "endpoint": endpoint_id})


async def update(connection: Connection, tenant: str, endpoint_id: int, changes: Mapping[str, Any]) -> Row:
    """Change the given columns of an endpoint and return its row; raise NotFound if the tenant has no such endpoint. Of
    a new URL only the origin is stored: the caller must store the URL encrypted. A given `is_active` clears
    `disabled_reason`."""
    if "url" in changes:
        changes = {**changes, "url": origin_of(changes["url"])}
    sets = ", ".join(f"{name} = %({name})s" for name in CHANGEABLE if name in changes) or "kind = kind"
    given = {"is_active": None, **changes, "tenant": tenant, "endpoint": endpoint_id}
    return await _the_one(connection, UPDATE.format(sets=sets), given)


async def delete(connection: Connection, tenant: str, endpoint_id: int) -> None:
    """Delete an endpoint; raise NotFound if the tenant has no such endpoint. Its pending deliveries are not sent; past
    ones stay in the log."""
    cursor = await connection.execute(
        "DELETE FROM notification_endpoints WHERE tenant_id = %s AND id = %s", (tenant, endpoint_id)
    )
    if not cursor.rowcount:
        raise _unknown(endpoint_id)


async def switch_off(connection: Connection, tenant: str, endpoint_id: int, why: str) -> None:
    """Disable an endpoint and store the reason; nothing happens if it is disabled already."""
    await connection.execute(GONE, (why, tenant, endpoint_id))


def shown(row: Row) -> Row:
    """Return the row as it is shown to people and API callers: only the origin of its URL, which may contain a
    token."""
    return {**row, "url": None if row["url"] is None else shown_to("webhook", row["url"])}


async def _the_one(connection: Connection, statement: str, given: Row) -> Row:
    """Return the row of a statement about one endpoint; raise NotFound if there is none."""
    row = await fetch_one(connection, dict, statement, given)
    if row is None:
        raise _unknown(given["endpoint"])
    return row


def _unknown(endpoint_id: int) -> NotFound:
    return NotFound(f"There is no endpoint {endpoint_id}.")
