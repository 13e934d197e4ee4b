"""Starting the workflows of queued runs, each on one replica. The start of a run only inserts its row and notifies; the
worker that locks the row first leads the run. After a crash in between, another worker finds the run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ecluse.base.crash import crashpoint
from ecluse.db.connect import Pool
from ecluse.db.query import fetch_all
from ecluse.engine.lead import durable
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.runs import lifecycle

# Runs per transaction: the first step of a run waits for the commit that releases its row.
TOGETHER = 20

# The lock keeps a run from being taken twice. A replica whose snapshot is older than the other's commit may still try;
# a workflow id that exists is not started again.
TAKE = f"""
SELECT {lifecycle.RUN} FROM runs r
WHERE r.ended_at IS NULL AND r.orchestrated AND r.state = 'queued' AND r.flow = ANY(%s)
AND NOT EXISTS (SELECT 1 FROM dbos.workflow_status w WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key)
ORDER BY r.id LIMIT %s FOR NO KEY UPDATE OF r SKIP LOCKED
"""  # noqa: S608 - our own names


async def take_new_runs(pool: Pool, flows: Mapping[str, Flow]) -> None:
    """Start the workflows of the queued runs of these flows until none is left, or this replica leads RUNS_AT_ONCE
    runs. The rows of up to TOGETHER runs stay locked while their workflows are started; that does not wait for these
    locks."""
    async with pool.connection() as connection:
        while (room := min(TOGETHER, durable.room())) > 0:
            async with connection.transaction():
                taken = await fetch_all(connection, Run, TAKE, (list(flows), room))
                if not taken:
                    return
                crashpoint("before workflow start")
                await asyncio.gather(*(durable.start(run) for run in taken))
                crashpoint("after workflow start")
