"""Start runs, end them and wait for them, as API and command line do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ecluse import engine
from ecluse.engine import NewItem, Stage, Start, Started
from ecluse.engine.kit import Kit
from ecluse.engine.runs.lifecycle import begin_runs
from ecluse.engine.runs.stages import fan_out
from ecluse.engine.runs.targets import select
from ecluse.engine.work.completion import end_by_operator
from ecluse.insight import run_queries


async def wait_for_run(kit: Kit, run_id: int, max_wait: timedelta) -> dict[str, Any]:
    """The run after its end, or as it is after `max_wait`."""
    await kit.wait_for_run(run_id, max_wait)
    async with kit.pool.connection() as connection:
        run = await engine.load_run(connection, run_id)
        return await run_queries.show_run(connection, run.tenant_id, run_id)


async def start_run(kit: Kit, start: Start) -> Started:
    async with kit.pool.connection() as connection:
        return await engine.start_run(connection, start)


async def start_items(kit: Kit, start: Start, stage: Stage, items: Sequence[NewItem]) -> Started:
    """Start a run that is only these items, of a flow without `begin`."""
    async with kit.pool.connection() as connection, connection.transaction():
        started = await engine.start_run(connection, start)
        if not started.deduplicated:
            await begin_runs(connection, start.flow, [started.run])
            await select(connection, {started.run.id: items})
            await fan_out(connection, started.run, stage, items, chunk=kit.chunk)
    return started


async def end_run(kit: Kit, run_id: int, reason: str, by: str = "operator") -> bool:
    """End the run as an operator does; return False if it had ended already."""
    async with kit.pool.connection() as connection:
        run = await engine.load_run(connection, run_id)
        return await end_by_operator(connection, kit.flow(run.flow), run, reason, by=by)
