"""Requests to confirm a mail address: a delivery with a link, created when a tenant first names the address, and again
on request, at most once in AGAIN_AFTER."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

from ecluse.base.errors import Conflict
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all
from ecluse.engine import Event
from ecluse.notify.dispatch import Recipient, notify
from ecluse.notify.rules import CONFIRM

AGAIN_AFTER = timedelta(hours=1)

ADD = """
INSERT INTO mail_addresses (tenant_id, address, asked_at)
SELECT DISTINCT %s, lower(address), ecluse_now() FROM unnest(%s::text[]) AS given(address)
ON CONFLICT DO NOTHING RETURNING address, asked_at
"""
AGAIN = """
UPDATE mail_addresses SET asked_at = ecluse_now(), token_hash = NULL, expires_at = NULL
WHERE tenant_id = %s AND address = lower(%s) AND confirmed_at IS NULL AND asked_at <= ecluse_now() - %s
RETURNING address, asked_at
"""
SHOW = "SELECT * FROM mail_address_list WHERE tenant_id = %s AND address = lower(%s)"


async def ask(connection: Connection, tenant: str, addresses: Sequence[str]) -> bool:
    """Request a confirmation from each address that is new to the tenant, in the caller's transaction; return False if
    none is new."""
    new = await fetch_all(connection, dict, ADD, (tenant, list(addresses))) if addresses else []
    await _send(connection, tenant, new)
    return bool(new)


async def ask_again(connection: Connection, tenant: str, address: str) -> tuple[Row, bool]:
    """Request a confirmation from an address, new or known, in the caller's transaction; its former link becomes
    invalid. Return its row, and False if nothing was requested because it is confirmed. Raise Conflict if the last
    request was less than AGAIN_AFTER ago."""
    asked = await ask(connection, tenant, [address])
    if not asked and (again := await fetch_all(connection, dict, AGAIN, (tenant, address, AGAIN_AFTER))):
        await _send(connection, tenant, again)
        asked = True
    (row,) = await fetch_all(connection, dict, SHOW, (tenant, address))
    if not asked and row["confirmed_at"] is None:
        when = (row["asked_at"] + AGAIN_AFTER).isoformat(timespec="seconds")
        raise Conflict(
            f"A link was sent to {row['address']} already; another one can be sent at {when}.", code="ASKED_ALREADY"
        )
    return row, asked


async def _send(connection: Connection, tenant: str, asked: Sequence[Row]) -> None:
    """Create the deliveries with the links for these rows of `mail_addresses`."""
    for row in asked:
        name = hashlib.sha256(row["address"].encode()).hexdigest()[:16]
        key = f"confirm-{name}-{int(row['asked_at'].timestamp() * 1000)}"
        event = Event(tenant, key, CONFIRM, f"address:{name}", {"tenant": tenant}, correlation_id=key)
        await notify(connection, [Recipient("mail", row["address"])], event)
