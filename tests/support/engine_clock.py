"""The database's clock moved under a running engine."""

from __future__ import annotations

from datetime import timedelta

import psycopg


async def move_clock(dsn: str, by: timedelta) -> None:
    """Every process hears of it, and every gate looks again."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute('UPDATE clock_offset SET "offset" = "offset" + %s', (by,))
        await connection.execute("SELECT pg_notify('ecluse_clock', '')")
        await connection.execute(
            "SELECT dbos.send_message(tenant_id || '/' || event_key, 'null'::json, 'gate:work') FROM runs"
        )
