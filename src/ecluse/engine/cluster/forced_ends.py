"""Forced ends that neither an operator nor a story decides: ends of runs that only a forcibly ended run waited for, and
of stale runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ecluse.base.text import span
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_column, fetch_row, fetch_rows
from ecluse.engine.model.flow import Flow
from ecluse.engine.model.states import EndCause, RunEnd
from ecluse.engine.runs import finalize, lifecycle, run_log
from ecluse.engine.runs.waiters import ABANDONED
from ecluse.engine.work import completion

TOGETHER = 200

# One replica at a time ends the runs that a forcibly ended run leaves behind. That run itself is not locked meanwhile:
# it may have a higher id than the runs that it waited for, and runs are locked by id.
FORCED = """
SELECT id, why, pg_try_advisory_xact_lock(hashtextextended('ecluse forced end ' || id, 50))
FROM (SELECT id, coalesce(reason, error_code, end_cause) AS why FROM runs
      WHERE ends_waited_for AND id > %s ORDER BY id LIMIT 1) AS forced
"""
# Runs that only this run waited for when it was ended (`waiters.MARK_ABANDONED`).
MARKED = """
SELECT c.id FROM run_waiters w JOIN runs c ON c.id = w.run_id
WHERE w.waiter_run_id = %(run)s AND c.ending AND c.ended_at IS NULL
"""
SOME = f"{MARKED} AND c.flow = ANY(%(flows)s) AND c.id <> ALL(%(tried)s) ORDER BY c.id LIMIT {TOGETHER}"
STILL = f"SELECT c.id, {ABANDONED} FROM runs c WHERE c.id = ANY(%s) AND c.ended_at IS NULL"  # noqa: S608 - our own words
GO_ON = "UPDATE runs SET ending = false WHERE id = ANY(%s)"
NONE_LEFT = f"""
UPDATE runs SET ends_waited_for = false WHERE id = %(run)s AND ends_waited_for AND NOT EXISTS ({MARKED})
"""  # noqa: S608 - our own words

# Runs that have exceeded their time. `only_overdue`: a live replica leads the run, and it has not had twice its time.
# Time in which the clock of a stage was stopped does not count.
STALE = """
SELECT r.id, r.started_at IS NULL, date_trunc('second', ecluse_now() - b.began), s.most,
       led AND b.began >= ecluse_now() - 2 * s.most AS only_overdue
FROM runs r JOIN unnest(%(flows)s::text[], %(limits)s::interval[]) AS f(flow, given) ON f.flow = r.flow,
LATERAL (SELECT coalesce(r.started_at, r.created_at) AS began) b,
LATERAL (SELECT f.given + clock_stood(r.id) AS most) s,
LATERAL (SELECT EXISTS (
    SELECT 1 FROM dbos.workflow_status w JOIN replicas p ON p.id = w.executor_id AND p.state = 'live'
    WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key AND w.status = 'PENDING') AS led) l
WHERE r.ended_at IS NULL AND r.orchestrated AND b.began < ecluse_now() - f.given AND b.began < ecluse_now() - s.most
"""


async def end_orphans(pool: Pool, flows: Mapping[str, Flow]) -> None:
    """End the runs that only forcibly ended runs waited for, in batches, each in its own transaction. Runs that only
    those waited for are ended in the same pass or a later one. A periodic job; for each forcibly ended run, one replica
    at a time does it."""
    place, tried = 0, list[int]()
    async with pool.connection() as connection:
        while True:
            async with connection.transaction():
                row = await fetch_row(connection, FORCED, (place,))
                if row is None:
                    return
                run_id, why, is_ours = row
                if not is_ours:
                    place, tried = run_id, []
                    continue
                facts = {"run": run_id, "flows": list(flows), "tried": tried}
                some = await fetch_column(connection, SOME, facts)
                if some:
                    await _end_those_left(connection, flows, run_id, why, some)
                    tried += some
                else:
                    await connection.execute(NONE_LEFT, facts)
                    place, tried = run_id, []


async def _end_those_left(
    connection: Connection, flows: Mapping[str, Flow], run_id: int, why: str, some: Collection[int]
) -> None:
    """End the runs among `some` that no open run and no person waits for, under their locks. The run `run_id` waited
    for them and was ended for the reason `why`. A new waiter locks the run that it waits for first, so it is visible
    here: the mark of that run is removed, and it goes on."""
    await lifecycle.lock_runs(connection, some)
    still: dict[int, bool] = dict(await fetch_rows(connection, STILL, (list(some),)))
    await connection.execute(GO_ON, ([one for one, abandoned in still.items() if not abandoned],))
    left = await lifecycle.load_runs(connection, [one for one, abandoned in still.items() if abandoned])
    end = RunEnd("parent", None, f"run {run_id}, which waited for it, ended: {why}", f"run:{run_id}")
    for name in sorted({run.flow for run in left}):
        await completion.end_together(connection, flows[name], [run for run in left if run.flow == name], end)


async def end_stale(pool: Pool, flows: Mapping[str, Flow]) -> None:
    """End stale runs: runs that take longer than their stages may, or that no worker has taken up for as long. The
    cause is a bug, a story that hangs, or a missing worker. A run that a live replica leads gets twice the time; a
    warning is logged to it before."""
    limits = [flow.stale_after for flow in flows.values()]
    async with pool.connection() as connection:
        stale = await fetch_rows(connection, STALE, {"flows": list(flows), "limits": limits})
        for run_id, queued, age, limit, only_overdue in stale:
            how = "not taken up by any worker" if queued else "running"
            why = f"{how} for {span(age)}, longer than the {span(limit)} that its stages may take"
            if only_overdue:
                message = "overdue: still being led"
                await run_log.write(connection, run_id, message, level="warning", once=message, why=why)
            else:
                await end_one(connection, flows, run_id, "stale", "STALE", why)


async def end_one(
    connection: Connection, flows: Mapping[str, Flow], run_id: int, cause: EndCause, code: str, why: str
) -> None:
    """End one run for this cause, with this error code and reason. An error is logged and not raised, so that the
    caller can go on with other runs; but an outage of the database is raised."""
    run = await lifecycle.load_run(connection, run_id)
    with completion.log_error_of_run(run_id):
        await finalize.end_runs(connection, flows[run.flow], [run], RunEnd(cause, code, why))
