"""Pusher apps, one per tenant: an id, a public key and a secret. Created when first needed."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Protocol

import psycopg

from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.query import fetch_column, fetch_row

KEY = re.compile(r"[0-9a-f]{20}")
FRESH_SECONDS = 1.0
MANY = 1_000
SECRET = "pusher"  # noqa: S105 - the name of the secret

MAKE = """
INSERT INTO realtime_apps (tenant_id, key, created_at) VALUES (%s, %s, ecluse_now())
ON CONFLICT (tenant_id) DO NOTHING RETURNING app_id
"""
FIND = """
SELECT a.tenant_id, a.app_id, a.key, t.disabled_at IS NOT NULL FROM realtime_apps a JOIN tenants t ON t.id = a.tenant_id
WHERE {condition}
"""
SHUT = "SELECT id FROM tenants WHERE id = ANY(%s) AND disabled_at IS NOT NULL"


class Vault(Protocol):
    """Store of encrypted secrets, by tenant and name."""

    async def put(self, connection: Connection, tenant: str, name: str, value: str) -> None: ...

    async def get(self, connection: Connection, tenant: str, name: str) -> str: ...


@dataclass(frozen=True)
class App:
    """The Pusher app of a tenant."""

    tenant: str
    app_id: str
    key: str
    secret: str = field(repr=False)
    disabled: bool = False  # the tenant is disabled

    @property
    def actor(self) -> str:
        return f"app:{self.app_id}"


async def app_of(connection: Connection, vault: Vault, tenant: str) -> App:
    """Return the app of this tenant; create it if there is none, its row and its secret in one transaction."""
    if (app := await _found(connection, vault, "a.tenant_id = %s", tenant)) is not None:
        return app
    async with connection.transaction():
        made = await connection.execute(MAKE, (tenant, secrets.token_hex(10)))
        if await made.fetchone():  # otherwise another transaction has created it meanwhile
            await vault.put(connection, tenant, SECRET, secrets.token_hex(16))
    app = await _found(connection, vault, "a.tenant_id = %s", tenant)
    assert app is not None  # noqa: S101 - just made
    return app


async def rotate(connection: Connection, vault: Vault, tenant: str) -> App:
    """Replace the secret of the tenant's app; return the app with the new one."""
    app = replace(await app_of(connection, vault, tenant), secret=secrets.token_hex(16))
    await vault.put(connection, tenant, SECRET, app.secret)
    return app


class Apps:
    """Cached look-ups of apps for sockets and publishers, which may come by the hundreds. A result is used for
    `fresh_seconds`, and so are "no such app" and "database unavailable": callers queued behind a failed query do not
    wait for the database again."""

    def __init__(self, vault: Vault, fresh_seconds: float = FRESH_SECONDS) -> None:
        self._vault, self._fresh_seconds = vault, fresh_seconds
        self._known: dict[tuple[str, str | int], tuple[float, App | None]] = {}
        self._away = (0.0, "")
        self._asking = asyncio.Lock()

    async def with_key(self, pool: Pool, key: str) -> App | None:
        """Return the app with this public key; None if there is none."""
        return await self._find(pool, "a.key = %s", key)

    async def with_id(self, pool: Pool, app_id: int) -> App | None:
        """Return the app with this id; None if there is none."""
        return await self._find(pool, "a.app_id = %s", app_id)

    async def _find(self, pool: Pool, condition: str, value: str | int) -> App | None:
        """Return the app that this condition of FIND selects, from the cache or the database. Raise psycopg.Error if
        the database is unavailable."""
        async with self._asking:
            until, app = self._known.get((condition, value), (0.0, None))
            if until <= time.monotonic():
                away_until, why = self._away
                if time.monotonic() < away_until:
                    raise psycopg.OperationalError(why)
                try:
                    async with pool.connection() as connection:
                        app = await _found(connection, self._vault, condition, value)
                except psycopg.Error as error:
                    if is_unavailable(error):
                        self._away = (time.monotonic() + self._fresh_seconds, one_line(error))
                    raise
                if len(self._known) > MANY:  # strangers can ask for as many keys as they like
                    self._known.clear()
                self._known[condition, value] = (time.monotonic() + self._fresh_seconds, app)
            return app


async def _found(connection: Connection, vault: Vault, condition: str, value: str | int) -> App | None:
    """Read the app that this condition of FIND selects, with its secret, from the database."""
    row = await fetch_row(connection, FIND.format(condition=condition), (value,))
    if row is None:
        return None
    tenant, app_id, key, disabled = row
    return App(tenant, str(app_id), key, await vault.get(connection, tenant, SECRET), disabled)


async def shut(connection: Connection, tenants: list[str]) -> set[str]:
    """Return the disabled tenants among the given ones."""
    return set(await fetch_column(connection, SHUT, (tenants,)))
