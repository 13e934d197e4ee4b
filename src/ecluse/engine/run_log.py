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
