"""Closing a stage: two replicas that commit the last two items each see the other's as open, so somebody has to look
once more after the commit. Whoever finds a stage complete sends its gate a hint, or, where no workflow leads the run,
ends the run itself. A sweep finds what a crash between commit and look left behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

import psycopg
import structlog

from ecluse.base.errors import InvalidInput
from ecluse.base.ids import workflow_id
from ecluse.db.connect import Connection, Pool, is_away
from ecluse.engine import ending, gate, orchestration, runs
from ecluse.engine.flow import Flow, Run
from ecluse.engine.story import gate_topic

log = structlog.get_logger(__name__)

COMPLETE = """
SELECT s.run_id, s.stage, r.orchestrated, r.flow, r.tenant_id || '/' || r.event_key
FROM unnest(%s::bigint[], %s::text[]) AS t(run_id, stage)
JOIN stages s ON s.run_id = t.run_id AND s.stage = t.stage JOIN runs r ON r.id = s.run_id
WHERE s.fanned_out_at IS NOT NULL AND s.ended_at IS NULL AND r.ended_at IS NULL
  AND s.expected = (SELECT coalesce(sum(c.succeeded + c.failed + c.ignored), 0) FROM claims c
                    WHERE c.run_id = s.run_id AND c.stage = s.stage)
"""

SELF_CLOSING = """
SELECT s.run_id, s.stage FROM runs r JOIN stages s ON s.run_id = r.id
WHERE r.ended_at IS NULL AND NOT r.orchestrated AND s.ended_at IS NULL AND r.flow = ANY(%s)
"""

# Nobody waits at their gate; its time is up all the same.
OVERDUE = SELF_CLOSING + " AND s.deadline_at <= ecluse_now()"


async def close(pool: Pool, flows: Mapping[str, Flow], touched: Collection[tuple[int, str]]) -> None:
    """Look at the (run, stage) pairs that may just have become complete."""
    async with pool.connection() as connection:
        cursor = await connection.execute(COMPLETE, ([run for run, _ in touched], [stage for _, stage in touched]))
        for run_id, stage, orchestrated, flow, workflow in await cursor.fetchall():
            try:
                if orchestrated:
                    await _hint(connection, workflow, gate_topic(stage))
                else:
                    await _end(connection, flows[flow], run_id)
            except Exception as error:  # one run that cannot be closed must not keep the others open
                if is_away(error):
                    raise
                log.exception("closing failed", run_id=run_id, stage=stage)


WAITING = "SELECT stage FROM stages WHERE run_id = %s AND ended_at IS NULL"


async def end_by_operator(
    connection: Connection, flow: Flow, run: Run, reason: str, record: Callable[[], Awaitable[None]] | None = None
) -> bool:
    """At once, together with what `record` writes. The workflow that waits at a gate is told to look. False if the run
    had ended already."""
    if not reason.strip():
        raise InvalidInput("say why the run is ended: the reason stays with it")
    gates = await (await connection.execute(WAITING, (run.id,))).fetchall()
    ended = await ending.end(connection, flow, run, cause="operator", reason=reason.strip(), record=record)
    for (stage,) in gates if ended and flow.story is not None else ():
        await _hint(connection, workflow_id(run.tenant_id, run.event_key), gate_topic(stage))
    return ended


async def sweep(pool: Pool, flows: Mapping[str, Flow]) -> None:
    async with pool.connection() as connection:
        for run_id, stage in await (await connection.execute(OVERDUE, (list(flows),))).fetchall():
            try:
                run = await runs.load(connection, run_id)
                await gate.end(connection, run, flows[run.flow].stage(stage), "timeout")
                await ending.end(connection, flows[run.flow], run)
            except Exception as error:  # nor must one whose time is up
                if is_away(error):
                    raise
                log.exception("closing failed", run_id=run_id, stage=stage)
        rows = await (await connection.execute(SELF_CLOSING, (list(flows),))).fetchall()
    if rows:
        await close(pool, flows, [(run, stage) for run, stage in rows])


async def _hint(connection: Connection, workflow: str, topic: str) -> None:
    try:
        await orchestration.hint(connection, workflow, topic)
    except psycopg.errors.ForeignKeyViolation:
        log.warning("no workflow to hint: its gate will look by itself", workflow=workflow)


async def _end(connection: Connection, flow: Flow, run_id: int) -> None:
    run = await runs.load(connection, run_id)
    row = await (
        await connection.execute(
            "SELECT bool_and(s.fanned_out_at IS NOT NULL AND s.expected = (SELECT coalesce(sum(c.succeeded + c.failed"
            " + c.ignored), 0) FROM claims c WHERE c.run_id = s.run_id AND c.stage = s.stage))"
            " FROM stages s WHERE s.run_id = %s",
            (run_id,),
        )
    ).fetchone()
    if row and row[0]:
        await ending.end(connection, flow, run)
