"""Taking queued runs: their workflows are started, each on one replica, and the runs begin. The start of a run only
inserts its row and notifies; the worker that locks the row first leads the run. After a crash in between, another
worker finds the run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ecluse.base.crash import crashpoint
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_all
from ecluse.engine.lead import durable
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.roles import RUNS_AT_ONCE
from ecluse.engine.model.shares import share_left
from ecluse.engine.runs import lifecycle

# Runs per transaction: the story of a run waits for the commit that releases its row.
TOGETHER = 20
# How many runs a replica looks at to find some that no other replica has locked.
LOOK_AHEAD = 200

QUEUED = "r.ended_at IS NULL AND r.orchestrated AND r.state = 'queued'"
# Tenants take turns, beginning after the one that came last. The lock keeps a run from being taken twice. A replica
# whose snapshot is older than the other's commit may still try; a workflow id that exists is not started again.
TAKE = f"""
WITH RECURSIVE tenants AS (
    (SELECT r.tenant_id FROM runs r WHERE {QUEUED} ORDER BY r.tenant_id LIMIT 1)
    UNION ALL
    SELECT (SELECT r.tenant_id FROM runs r WHERE {QUEUED} AND r.tenant_id > t.tenant_id ORDER BY r.tenant_id LIMIT 1)
    FROM tenants t WHERE t.tenant_id IS NOT NULL),
line AS MATERIALIZED (
    SELECT n.id, t.tenant_id AS tenant, row_number() OVER (PARTITION BY t.tenant_id ORDER BY n.id) AS turn
    FROM tenants t CROSS JOIN LATERAL (
        SELECT r.id FROM runs r WHERE {QUEUED} AND r.tenant_id = t.tenant_id AND r.flow = ANY(%(flows)s)
        ORDER BY r.id LIMIT (SELECT 1 + {LOOK_AHEAD} / count(*) FROM tenants)) n
    WHERE t.tenant_id <> ALL(%(full)s)
    ORDER BY turn, t.tenant_id <= %(after)s, t.tenant_id LIMIT {LOOK_AHEAD})
SELECT {lifecycle.RUN} FROM line JOIN runs r USING (id)
WHERE {QUEUED}
AND NOT EXISTS (SELECT 1 FROM dbos.workflow_status w WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key)
ORDER BY line.turn, line.tenant <= %(after)s, line.tenant LIMIT %(room)s FOR NO KEY UPDATE OF r SKIP LOCKED
"""  # noqa: S608 - our own names


class NewRuns:
    """Takes queued runs of these flows. `share`: how much of the room for runs that other tenants leave one tenant may
    use."""

    def __init__(self, flows: Mapping[str, Flow], share: float = 1.0) -> None:
        self._flows = flows
        self._share = share
        self._last = ""  # the tenant of the run that was taken last
        self._taking: dict[int, tuple[Run, asyncio.Future[bool]]] = {}

    async def take(self, pool: Pool) -> None:
        """Start the workflows of queued runs and begin the runs, until none is left that this replica may lead. The
        rows of up to TOGETHER runs stay locked meanwhile; starting a workflow does not wait for these locks, and its
        story waits for the commit (`begun`)."""
        async with pool.connection() as connection:
            while await self._take_some(connection):
                pass

    async def begun(self, run_id: int) -> Run | None:
        """Return the run if this replica is taking it, as soon as the transaction that begins it is committed. None:
        the run is not being taken here, or the transaction failed; then its story begins it."""
        if run_id not in self._taking:
            return None
        run, committed = self._taking[run_id]
        return run if await asyncio.shield(committed) else None

    async def _take_some(self, connection: Connection) -> bool:
        """Take up to TOGETHER runs in one transaction; return False if there was none to take."""
        led = durable.led()
        room = min(TOGETHER, RUNS_AT_ONCE - led.total())
        if room <= 0:
            return False
        full = [one for one, own in led.items() if share_left(self._share, RUNS_AT_ONCE, own, led.total() - own) <= 0]
        committed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        taken: list[Run] = []
        try:
            async with connection.transaction():
                given = {"flows": list(self._flows), "full": full, "after": self._last, "room": room}
                taken = await fetch_all(connection, Run, TAKE, given)
                self._taking |= {run.id: (run, committed) for run in taken}
                crashpoint("before workflow start")
                await asyncio.gather(*(durable.start(run) for run in taken))
                crashpoint("after workflow start")
                for name in {run.flow for run in taken}:
                    await lifecycle.begin_runs(connection, self._flows[name], [r for r in taken if r.flow == name])
            crashpoint("after take")
            committed.set_result(True)
        finally:
            if not committed.done():
                committed.set_result(False)
            for run in taken:
                del self._taking[run.id]
        self._last = taken[-1].tenant_id if taken else self._last
        return bool(taken)
