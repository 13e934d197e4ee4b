"""Sweeps: most of them find and continue work that a crash, a lost signal or a restart of the database has left behind
(`periodic_jobs.py` has their intervals)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import structlog

from ecluse.base.clock import Clock
from ecluse.db.connect import Pool
from ecluse.db.query import fetch_column, fetch_now, fetch_rows
from ecluse.engine.cluster import forced_ends
from ecluse.engine.lead import durable
from ecluse.engine.model.flow import Flow
from ecluse.engine.work import completion
from ecluse.engine.work.worker import Worker

log = structlog.get_logger(__name__)

ENDED = "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at IS NOT NULL"

UNLED = """
SELECT r.id, w.status FROM runs r JOIN dbos.workflow_status w ON w.workflow_uuid = r.tenant_id || '/' || r.event_key
WHERE r.ended_at IS NULL AND r.orchestrated AND r.flow = ANY(%s)
  AND w.status NOT IN ('PENDING', 'ENQUEUED', 'DELAYED')
  AND w.updated_at < extract(epoch FROM now() - interval '2 seconds') * 1000
"""


async def set_clock(pool: Pool, clock: Clock) -> None:
    """Set the clock of this process to the database's time, `ecluse_now()`."""
    async with pool.connection() as connection:
        asked = datetime.now(UTC)
        # The database's clock counts: a host whose clock is fast or slow must not retry early or late.
        now = await fetch_now(connection)
    clock.offset = now - (asked + (datetime.now(UTC) - asked) / 2)


async def drop_ended(pool: Pool, worker: Worker) -> None:
    """Have the worker drop the items of ended runs that it holds, in case the notification of an end was lost."""
    if in_hand := worker.runs_in_hand:
        async with pool.connection() as connection:
            worker.drop(await fetch_column(connection, ENDED, (list(in_hand),)))


async def end_unled(pool: Pool, flows: Mapping[str, Flow]) -> None:
    """End open runs whose workflow has been over for two seconds or more: no replica will ever lead them again."""
    async with pool.connection() as connection:
        for run_id, state in await fetch_rows(connection, UNLED, (list(flows),)):
            why = f"its workflow is {state}, though the run had not ended; see the server's log of that time"
            await forced_ends.end_one(connection, flows, run_id, "catastrophic", "NO_WORKFLOW", why)


class InterruptedWorkflows:
    """Resumes workflows of this replica that a database outage interrupted."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._found: set[str] = set()

    async def resume(self, pool: Pool) -> None:
        """Resume the workflows that both this pass and the previous one found interrupted. One pass is not enough: a
        workflow that was dequeued a moment ago is about to run and looks the same."""
        async with pool.connection() as connection:
            found = await durable.interrupted(connection, self._replica)
        if overdue := found & self._found:
            log.warning("sweep: resuming interrupted workflows", workflows=sorted(overdue))
            await durable.resume(sorted(overdue))
        self._found = found - overdue


class SelfClosingRuns:
    """Closes complete and overdue runs without a story, one page of runs per call."""

    def __init__(self, flows: Mapping[str, Flow]) -> None:
        self._flows = flows
        self._place = 0

    async def close(self, pool: Pool) -> None:
        """Close the complete and overdue runs of the next page; after the last page, the next call begins with the
        first one."""
        self._place = await completion.sweep(pool, self._flows, self._place)


async def run_flow_watch(pool: Pool, flow: Flow) -> None:
    """Call the flow's own sweep (`Flow.watch`), if it has one."""
    if flow.watch is not None:
        async with pool.connection() as connection:
            await flow.watch(connection)
