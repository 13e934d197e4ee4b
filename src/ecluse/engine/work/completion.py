"""Work after a commit: live events of finished items, and the end of stages and runs that are now complete.

Two replicas that commit the last two items of a stage each see the other's item as open, so each replica checks once
more after its commit. The replica that finds a stage complete wakes its gate or, where no workflow leads the run, ends
the run. A sweep finds runs that a crash between the commit and the check left open.

The checks run in rounds, because many cost little more than one: one round at a time and, while the worker holds other
items, followed by a pause of twice its length.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import structlog

from ecluse.base.crash import crashpoint
from ecluse.base.errors import InvalidInput
from ecluse.base.ids import workflow_id
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import ignoring_outage, is_unavailable
from ecluse.db.query import fetch_column, fetch_rows
from ecluse.engine.lead import durable, gate
from ecluse.engine.model.context import EmitLive
from ecluse.engine.model.flow import FinishedItem, Flow, Run, Stage
from ecluse.engine.model.states import NORMAL, RunEnd
from ecluse.engine.runs import finalize, items, lifecycle
from ecluse.engine.work.verdict import ItemResult

log = structlog.get_logger(__name__)

TOGETHER = 500
LEAST_REST_SECONDS, LONGEST_REST_SECONDS = 0.1, 2.0
NEWS_SECONDS = 2.0

# OFFSET 0 is an optimization fence: the few rows are looked up by key, whatever the planner estimates.
COMPLETE = f"""
SELECT s.run_id, s.stage, r.orchestrated, r.tenant_id || '/' || r.event_key
FROM unnest(%s::bigint[], %s::text[]) AS t(run_id, stage)
CROSS JOIN LATERAL (SELECT * FROM stages s WHERE s.run_id = t.run_id AND s.stage = t.stage OFFSET 0) s
CROSS JOIN LATERAL (SELECT * FROM runs r WHERE r.id = t.run_id OFFSET 0) r
CROSS JOIN LATERAL {items.COUNTS} n
WHERE s.ended_at IS NULL AND r.ended_at IS NULL AND {items.COMPLETE}
"""  # noqa: S608 - our own names

# Self-closing runs are swept page by page: a hundred thousand of them may wait behind a vendor's cap.
PAGE = 2_000
SELF_CLOSING = f"""
SELECT id FROM runs WHERE ended_at IS NULL AND NOT orchestrated AND flow = ANY(%s) AND id > %s ORDER BY id LIMIT {PAGE}
"""  # noqa: S608 - our own number

# No workflow waits at the gates of these runs; their deadlines hold all the same.
OVERDUE = """
SELECT run_id, stage FROM stages WHERE run_id = ANY(%s) AND ended_at IS NULL AND deadline_at <= ecluse_now()
"""


async def wake_gates_or_end_runs(pool: Pool, flows: Mapping[str, Flow], touched: Collection[tuple[int, str]]) -> None:
    """Check the stages in `touched`, given as (run id, stage): wake the gate of each complete stage or, where no
    workflow leads the run, end the run if all its stages are complete."""
    if not touched:
        return
    async with pool.connection() as connection:
        pairs = [run for run, _ in touched], [stage for _, stage in touched]
        complete = await fetch_rows(connection, COMPLETE, pairs)
        for run_id, stage, orchestrated, workflow in complete:
            if orchestrated:
                with log_error_of_run(run_id):
                    await durable.wake(connection, workflow, gate.topic(stage))
        await close_complete(connection, flows, {row[0] for row in complete if not row[2]})


async def close_complete(connection: Connection, flows: Mapping[str, Flow], run_ids: Collection[int]) -> None:
    """End the runs without a story among `run_ids` whose stages are all complete, and wake the gates of parents whose
    last open child has ended."""
    if not run_ids:
        return
    over = await finalize.find_complete_runs(connection, run_ids)
    for name in sorted({run.flow for run in over}):
        mine = [run for run in over if run.flow == name]
        await end_together(connection, flows[name], mine)
        await _wake_parents(connection, mine)


async def end_together(connection: Connection, flow: Flow, over: Sequence[Run], end: RunEnd = NORMAL) -> None:
    """End these runs, all of `flow`, in batches of TOGETHER; if a batch fails, one by one. A run that cannot be ended
    is logged: it does not keep other runs open, and a later sweep tries again. An outage of the database is raised."""
    if len(over) > 1:
        try:
            for start in range(0, len(over), TOGETHER):
                await finalize.end_runs(connection, flow, over[start : start + TOGETHER], end)
        except Exception as error:  # the flow's `ended` may raise anything
            if is_unavailable(error):
                raise
            log.warning(
                "completion: ending runs together failed, ending them one by one",
                runs=len(over),
                error=str(error).strip(),
            )
        else:
            return
    for run in over:
        with log_error_of_run(run.id):
            await finalize.end_runs(connection, flow, [run], end)


# Runs after the commit: of two replicas that end the last two children, at least one sees that none is open.
CHILDLESS = """
WITH parents AS MATERIALIZED (
    SELECT DISTINCT parent_run_id AS id FROM runs WHERE id = ANY(%s) AND parent_run_id IS NOT NULL)
SELECT r.tenant_id || '/' || r.event_key, s.stage
FROM parents p JOIN runs r ON r.id = p.id JOIN stages s ON s.run_id = p.id
WHERE r.ended_at IS NULL AND s.units IS NOT NULL AND s.ended_at IS NULL AND NOT EXISTS (
    SELECT 1 FROM runs o WHERE o.parent_run_id = p.id AND o.ended_at IS NULL)
"""


async def _wake_parents(connection: Connection, ended: Sequence[Run]) -> None:
    """Wake the gate of each parent of the runs in `ended` that has no open child any more."""
    for workflow, stage in await fetch_rows(connection, CHILDLESS, ([run.id for run in ended],)):
        await durable.wake(connection, workflow, gate.topic(stage))


@contextmanager
def log_error_of_run(run_id: int) -> Iterator[None]:
    """Log an error of the body instead of raising it, so that other runs can go on. An outage of the database is
    raised."""
    try:
        yield
    except Exception as error:  # any error: the other runs go on
        if is_unavailable(error):
            raise
        log.exception("completion: run could not be closed", run_id=run_id)


WAITING = "SELECT stage FROM stages WHERE run_id = %s AND ended_at IS NULL"


async def end_by_operator(
    connection: Connection,
    flow: Flow,
    run: Run,
    reason: str,
    *,
    by: str,
    record: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """End the run at once on behalf of the operator `by`, in one transaction (`record` is called in it), and wake its
    workflow, which waits at a gate. A sweep ends the runs that only this one waited for. Return False if the run had
    already ended. Raise InvalidInput if the reason is empty."""
    if not reason.strip():
        raise InvalidInput("reason: required to end a run; it is stored with the run")
    gates = await fetch_column(connection, WAITING, (run.id,))
    end = RunEnd("operator", reason=reason.strip(), by=by)
    ended = await finalize.end_runs(connection, flow, [run], end, record) == 1
    for stage in gates if ended and flow.story is not None else ():
        await durable.wake(connection, workflow_id(run.tenant_id, run.event_key), gate.topic(stage))
    return ended


OPEN_STAGES = """
SELECT s.stage, r.tenant_id, r.event_key FROM stages s JOIN runs r ON r.id = s.run_id
WHERE s.run_id = ANY(%s) AND s.ended_at IS NULL AND r.orchestrated ORDER BY s.run_id
"""


async def end_all_by_operator(
    connection: Connection, flows: Mapping[str, Flow], tenant: str, reason: str, *, by: str
) -> int:
    """End all open runs of a tenant whose flow is loaded, on behalf of the operator `by`, and wake their workflows;
    return the number of runs ended. A run that cannot be ended is logged, and stays open."""
    is_open = "SELECT id FROM runs WHERE tenant_id = %s AND ended_at IS NULL AND flow = ANY(%s) ORDER BY id"
    ids = await fetch_column(connection, is_open, (tenant, list(flows)))
    end = RunEnd("operator", reason=reason.strip(), by=by)
    await lifecycle.lock_runs(connection, ids)  # in one order, before the runs of each flow are locked
    gates = await fetch_rows(connection, OPEN_STAGES, (ids,))
    runs = await lifecycle.load_runs(connection, ids)
    for name in sorted({run.flow for run in runs}):
        await end_together(connection, flows[name], [run for run in runs if run.flow == name], end)
    for stage, tenant_id, event_key in gates:
        await durable.wake(connection, workflow_id(tenant_id, event_key), gate.topic(stage))
    return len(ids) - len(await fetch_column(connection, is_open, (tenant, list(flows))))


async def sweep(pool: Pool, flows: Mapping[str, Flow], after: int = 0) -> int:
    """Close the complete and overdue runs without a story of one page, which begins above the id `after`. Return the id
    after which the next page begins; 0 after the last page."""
    async with pool.connection() as connection:
        page = await fetch_column(connection, SELF_CLOSING, (list(flows), after))
        for run_id, stage in await fetch_rows(connection, OVERDUE, (page,)) if page else ():
            with log_error_of_run(run_id):
                run = await lifecycle.load_run(connection, run_id)
                await gate.end(connection, run, flows[run.flow].stage(stage), "timeout")
                await finalize.end_runs(connection, flows[run.flow], [run])
        await close_complete(connection, flows, page)
    return page[-1] if len(page) == PAGE else 0


async def _send_news(pool: Pool, finished: Sequence[ItemResult], emit: EmitLive) -> None:
    """Send the live events of finished items to realtime subscribers, after the commit. Best effort: an error, or
    taking longer than NEWS_SECONDS, is logged, and the events are dropped."""
    if not finished:
        return
    by_stage: dict[int, tuple[Stage, list[FinishedItem]]] = {}
    for one in finished:
        over = FinishedItem(one.item, one.status, one.result, one.error_code, one.error)  # type: ignore[arg-type]
        by_stage.setdefault(id(one.stage), (one.stage, []))[1].append(over)
    try:
        async with asyncio.timeout(NEWS_SECONDS), pool.connection() as connection:
            for stage, over_there in by_stage.values():
                if stage.news is not None:
                    emit(await stage.news(connection, over_there))
    except Exception as error:  # noqa: BLE001 - ephemeral events may be lost
        log.warning(
            "completion: live events of items dropped", items=len(finished), error=f"{type(error).__name__}: {error}"
        )


class CompletionLoop:
    """The background task of a worker that, after commits, emits live events and checks whether the stages of the
    committed items are complete."""

    def __init__(self, pool: Pool, flows: Mapping[str, Flow], emit: EmitLive) -> None:
        self._pool = pool
        self._flows = flows
        self._emit = emit
        self._pairs: set[tuple[int, str]] = set()  # (run, stage) of which this worker holds no item any more
        self._over: list[ItemResult] = []  # finished items whose stage emits live events
        self._nothing_left = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        self._leaving = False

    def add(self, run_id: int, stage: str) -> None:
        """Queue the stage for a check in the next round, because the worker holds no item of it any more."""
        self._pairs.add((run_id, stage))

    def committed(self, over: Sequence[ItemResult], busy: bool) -> None:
        """Start rounds of checks after a commit, unless they are running. `over`: finished items whose stage emits live
        events; `busy`: the worker holds other items, so that the pause between two rounds is not cut short."""
        self._over += over
        if not busy:
            self._nothing_left.set()
        if (self._pairs or self._over) and (self._rounds is None or self._rounds.done()):
            self._rounds = asyncio.create_task(self._close())

    async def finish(self) -> None:
        """Finish the pending checks without further pauses, at the stop of the process."""
        self._leaving = True
        self._nothing_left.set()
        if self._rounds is not None:
            await self._rounds

    async def _close(self) -> None:
        while self._pairs or self._over:
            pairs, self._pairs, over, self._over = self._pairs, set(), self._over, []
            self._nothing_left.clear()
            began = time.monotonic()
            await _send_news(self._pool, over, self._emit)  # first: events of an item come before those of its run
            with ignoring_outage("completion"):  # a sweep or the gate's poll finds the stages
                await wake_gates_or_end_runs(self._pool, self._flows, pairs)
                crashpoint("after hint")
            if not self._leaving:
                rest = max(LEAST_REST_SECONDS, min(2 * (time.monotonic() - began), LONGEST_REST_SECONDS))
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._nothing_left.wait()
