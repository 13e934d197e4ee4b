"""Waiting for a run, and reading it as API and pages do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ecluse.engine.kit import Kit
from ecluse.insight import run_queries


async def wait_for_run(kit: Kit, run_id: int, max_wait: timedelta) -> dict[str, Any]:
    """The run after its end, or as it is after `max_wait`."""
    await kit.wait_for_run(run_id, max_wait)
    async with kit.pool.connection() as connection:
        return await run_queries.show_run(connection, None, run_id)
