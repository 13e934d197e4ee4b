"""Open a stage of many runs at once, for runs that are only items: in the transaction that inserts them, or in the
commit of the stage before. A handful of statements, however many runs. Idempotent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from pydantic_core import to_json

from ecluse.base.ids import item_event_id
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.engine.model.flow import NewItem, Run, Stage
from ecluse.engine.runs import targets
from ecluse.engine.runs.fan_out import HEAD_START, SAMPLE, Priority
from ecluse.engine.runs.lifecycle import CLOSING_CHANNEL, LOCK_RUNS

# Nothing is dispatched into a run that has ended. The lane is created if no worker has registered it yet; the first
# worker to start sets its caps.
OPEN = """
WITH lane AS (
    INSERT INTO lanes (name) SELECT %(lane)s WHERE NOT EXISTS (SELECT 1 FROM lanes WHERE name = %(lane)s)
    ON CONFLICT DO NOTHING),
run AS MATERIALIZED (
    SELECT id FROM runs WHERE id = ANY(%(runs)s) AND ended_at IS NULL ORDER BY id FOR NO KEY UPDATE),
opened AS (
    INSERT INTO stages (run_id, stage, budget, started_at, fanned_out_at, deadline_at, progress_at, expected)
    SELECT run.id, %(stage)s, %(budget)s, now, now, now + %(max_wait)s, now, n.items
    FROM run JOIN unnest(%(runs)s::bigint[], %(items)s::int[]) AS n(id, items) ON n.id = run.id,
         (SELECT ecluse_now() AS now) AS instant
    ON CONFLICT DO NOTHING RETURNING run_id, expected),
noted AS (
    INSERT INTO run_log (run_id, at, level, message, data)
    SELECT run_id, ecluse_now(), 'info', 'FAN-OUT: ' || %(flow)s || '/' || %(stage)s || ' x' || expected,
           jsonb_build_object('items', expected) FROM opened)
SELECT run_id FROM opened
"""
PUT = """
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, group_key, due_at, order_at, payload)
SELECT tenant, run, %(flow)s, %(stage)s, key, target, (SELECT id FROM lanes WHERE name = %(lane)s), "group", now,
       now - %(head_start)s, payload
FROM jsonb_to_recordset(%(rows)s::jsonb)
     AS t(tenant text, run bigint, key text, target text, payload jsonb, "group" text),
     (SELECT ecluse_now() AS now) AS instant
"""


# Fail items under a closed claim, like items that ran and failed: counted, and never run.
GIVE_UP = """
WITH late AS (
    SELECT id, run_id, lane_id FROM items
    WHERE run_id = ANY(%(runs)s) AND stage = %(stage)s AND status = 'open' AND claim_id IS NULL
      AND due_at <= coalesce(%(due_before)s, 'infinity'::timestamptz)
    ORDER BY id FOR UPDATE),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT 'given up', run_id, %(stage)s, lane_id, count(*), count(*), ecluse_now() FROM late GROUP BY run_id, lane_id
    RETURNING id, run_id, lane_id)
UPDATE items i SET claim_id = c.id, status = 'failed', permanent = true, error_code = %(code)s, error = %(error)s,
    finished_at = ecluse_now()
FROM late JOIN claim c ON c.run_id = late.run_id AND c.lane_id = late.lane_id WHERE i.id = late.id
"""


async def give_up(
    connection: Connection,
    run_ids: Sequence[int],
    stage: str,
    code: str,
    error: str,
    *,
    due_before: datetime | None = None,
) -> int:
    """Fail the unclaimed items in a stage of these runs; a sweep then ends the runs. Return how many items."""
    async with connection.transaction():
        await connection.execute(LOCK_RUNS, (list(run_ids),))
        facts = {"runs": list(run_ids), "stage": stage, "code": code, "error": error, "due_before": due_before}
        given_up = (await connection.execute(GIVE_UP, facts)).rowcount
        await connection.execute("SELECT pg_notify(%s, '')", (CLOSING_CHANNEL,))
    return given_up


async def wake_workers(connection: Connection) -> None:
    await connection.execute("SELECT pg_notify('ecluse_work', '')")


async def open_stage(
    connection: Connection,
    stage: Stage,
    wanted: Sequence[tuple[Run, Sequence[NewItem]]],
    *,
    select: bool = False,
    priority: Priority = "normal",
    max_wait: timedelta | None = None,
    chunk: int = 200,
) -> None:
    """Open the stage for runs of one flow, in the caller's transaction. `select`: the runs answer for the items'
    targets."""
    if not wanted:
        return
    wanted = sorted(wanted, key=lambda one: one[0].id)
    if select:
        await targets.select(connection, {run.id: items for run, items in wanted})
    names = {"flow": wanted[0][0].flow, "stage": stage.name, "lane": stage.lane.name}
    facts = {"runs": [run.id for run, _ in wanted], "items": [len(items) for _, items in wanted]}
    limits = {"budget": stage.retry.executions, "max_wait": max_wait or stage.max_wait}
    cursor = await connection.execute(OPEN, {**names, **facts, **limits})
    opened = {row[0] for row in await cursor.fetchall()}
    rows = [
        {
            "tenant": run.tenant_id,
            "run": run.id,
            "key": item.key,
            "target": item.key if item.target is None else item.target,
        }
        | {"payload": item.payload, "group": item.group}
        for run, items in wanted
        if run.id in opened
        for item in items
    ]
    names_too = {**names, "head_start": HEAD_START[priority]}
    for start in range(0, len(rows), chunk):
        await connection.execute(PUT, {**names_too, "rows": to_json(rows[start : start + chunk]).decode()})
    if rows:
        await wake_workers(connection)
    for run, items in wanted:
        if run.id in opened:
            ids = [storable(item_event_id(run.flow, run.id, stage.name, item.key, 0)) for item in items[:SAMPLE]]
            run.trace.fan_out(f"{run.flow}/{stage.name}", len(items), ids, refused=0)
