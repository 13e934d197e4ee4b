"""Tokens that confirm mail addresses. An address is first sent a link with a token, and gets no other mail before a
person has followed the link and confirmed. Only the hash of a token is stored; a token is valid once, for
LINK_LASTS."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta
from typing import NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_one

LINK_LASTS = timedelta(days=3)
PATH = "/ui/confirm"

ISSUE = """
UPDATE mail_addresses SET token_hash = %s, expires_at = ecluse_now() + %s
WHERE tenant_id = %s AND address = lower(%s) AND confirmed_at IS NULL
"""
FIND = """
SELECT tenant_id, address FROM mail_addresses
WHERE token_hash = %s AND expires_at > ecluse_now() AND confirmed_at IS NULL
"""
CONFIRM = """
UPDATE mail_addresses SET confirmed_at = ecluse_now(), token_hash = NULL, expires_at = NULL
WHERE token_hash = %s AND expires_at > ecluse_now() AND confirmed_at IS NULL RETURNING tenant_id, address
"""


class PendingConfirmation(NamedTuple):
    """A mail address that is to be confirmed, and the tenant that named it."""

    tenant_id: str
    address: str


async def issue(connection: Connection, tenant: str, address: str) -> str | None:
    """Create a token for the address, in place of its former one, and return it; None if the address is unknown or
    confirmed already."""
    token = secrets.token_urlsafe(32)
    issued = await connection.execute(ISSUE, (_hashed(token), LINK_LASTS, tenant, address))
    return token if issued.rowcount else None


async def find(connection: Connection, token: str) -> PendingConfirmation | None:
    """Return the address that the token was sent to; None if the token is unknown, was used or has expired."""
    return await fetch_one(connection, PendingConfirmation, FIND, (_hashed(token),))


async def confirm(connection: Connection, token: str) -> PendingConfirmation | None:
    """Confirm the address that the token was sent to and return it; None if the token is unknown, was used or has
    expired."""
    return await fetch_one(connection, PendingConfirmation, CONFIRM, (_hashed(token),))


def link(public_url: str, token: str) -> str:
    return f"{public_url.rstrip('/')}{PATH}?token={token}"


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
