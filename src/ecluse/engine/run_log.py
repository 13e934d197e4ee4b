"""A run's own account: dispatches, progress, stalls, moves and failures; never a row per succeeded item."""

from __future__ import annotations

from typing import Any, Literal

from psycopg.types.json import Jsonb

from ecluse.base.text import storable
from ecluse.db.connect import Connection


async def write(
    connection: Connection,
    run_id: int,
    message: str,
    *,
    level: Literal["info", "warning", "error"] = "info",
    event_id: str | None = None,
    **data: Any,
) -> None:
    await connection.execute(
        "INSERT INTO run_log (run_id, at, level, message, event_id, data) VALUES (%s, ecluse_now(), %s, %s, %s, %s)",
        (run_id, level, storable(message), event_id, Jsonb(data) if data else None),
    )


async def write_once(connection: Connection, run_id: int, message: str, **data: Any) -> bool:
    """A warning that stays true: said once, however often somebody notices. Was it this time?"""
    said = await connection.execute("SELECT 1 FROM run_log WHERE run_id = %s AND message = %s", (run_id, message))
    if await said.fetchone() is not None:
        return False
    await write(connection, run_id, message, level="warning", **data)
    return True
