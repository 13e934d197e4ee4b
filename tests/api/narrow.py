"""Keys that see a part of a tenant only."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from tests.support.api_server import Client, new_key


def narrow(
    client: Client,
    dsn: str,
    scope: str,
    groupes: Sequence[str] = (),
    user: str | None = None,
    role: str = "viewer",
) -> Client:
    """The same client with a key of this scope."""
    key = new_key(dsn, role)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE api_keys SET scope = %s, groupes = %s, crm_user_id = %s WHERE hint = %s",
            (scope, list(groupes), user, key[:8]),
        )
    return client.with_key(key)
