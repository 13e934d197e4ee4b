"""Fan-out: insert a stage's items set-based, a bounded number of rows per statement, so that the first items are
worked on while the rest is still being inserted and a failing statement affects few. Idempotent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import psycopg
import structlog
from pydantic_core import PydanticSerializationError, to_json

from ecluse.base.crash import crashpoint
from ecluse.base.ids import item_event_id
from ecluse.base.text import LONGEST_KEY, storable
from ecluse.db.connect import Connection, together
from ecluse.db.outage import is_unavailable
from ecluse.engine.model.flow import NewItem, Run, Stage
from ecluse.engine.runs import lifecycle, run_log

log = structlog.get_logger(__name__)

WORK_CHANNEL = "ecluse_work"
SAMPLE = 3
Priority = Literal["high", "normal", "low"]
# Priority shifts the place in line by an hour; it does not rank, so that low-priority items cannot starve.
HEAD_START = {"high": timedelta(hours=1), "normal": timedelta(0), "low": -timedelta(hours=1)}
STATEMENTS_AHEAD = 10

OPEN_STAGE = """
INSERT INTO stages (run_id, stage, budget, rounds, started_at, deadline_at, progress_at)
SELECT id, %(stage)s, %(budget)s, %(rounds)s, now, now + %(max_wait)s, now
FROM (SELECT id, ecluse_now() AS now FROM runs WHERE id = %(run)s AND ended_at IS NULL FOR SHARE) run
ON CONFLICT DO NOTHING
"""

# The run's row is locked FOR SHARE during the statement: nothing is dispatched into a run that has ended.
INSERT = """
WITH inp AS (SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb)
             AS t(key text, target text, payload jsonb, "group" text)),
run AS MATERIALIZED (SELECT ecluse_now() AS now, (SELECT id FROM lanes WHERE name = %(lane)s) AS lane_id
                     FROM runs WHERE id = %(run)s AND ended_at IS NULL FOR SHARE),
put AS (
    INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, group_key, due_at, order_at,
                       payload)
    SELECT %(tenant)s, %(run)s, %(flow)s, %(stage)s, key, coalesce(target, key), lane_id, "group", now,
           now - %(head_start)s, payload
    FROM inp, run
    ON CONFLICT ON CONSTRAINT items_key DO NOTHING
    RETURNING 1)
SELECT count(*), pg_notify('ecluse_work', '') FROM put
"""
# A new stage has no items to conflict with, and leaving out ON CONFLICT saves a third of the work.
INSERT_NEW = INSERT.replace("ON CONFLICT ON CONSTRAINT items_key DO NOTHING", "")

# An item that cannot be stored still counts: as a failed item under a closed claim, like one that ran and failed.
INSERT_REFUSED = """
WITH lane AS (SELECT id FROM lanes WHERE name = %(lane)s),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT 'dispatch', %(run)s, %(stage)s, lane.id, 1, 1, ecluse_now() FROM lane
    WHERE NOT EXISTS (SELECT 1 FROM items WHERE run_id = %(run)s AND stage = %(stage)s AND key = %(key)s)
      AND EXISTS (SELECT 1 FROM runs WHERE id = %(run)s AND ended_at IS NULL)
    RETURNING id, lane_id)
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, claim_id, status, permanent,
                   error_code, error, finished_at)
SELECT %(tenant)s, %(run)s, %(flow)s, %(stage)s, %(key)s, %(target)s, lane_id, ecluse_now(), id, 'failed', true,
       'DISPATCH_FAILED', %(error)s, ecluse_now() FROM claim
"""

CLOSE_DISPATCH = """
UPDATE stages SET fanned_out_at = coalesce(fanned_out_at, ecluse_now()),
    expected = (SELECT count(*) FROM items WHERE run_id = %(run)s AND stage = %(stage)s)
WHERE run_id = %(run)s AND stage = %(stage)s RETURNING expected
"""


def event_of(run: Run, stage: Stage) -> str:
    return stage.event or f"{run.flow}/{stage.name}"


async def fan_out(
    connection: Connection,
    run: Run,
    stage: Stage,
    items: Sequence[NewItem],
    *,
    chunk: int,
    priority: Priority = "normal",
) -> int:
    """Open the stage and insert its items; return how many items it now has."""
    names: dict[str, Any] = {
        "run": run.id,
        "flow": run.flow,
        "stage": stage.name,
        "tenant": run.tenant_id,
        "lane": stage.lane.name,
        "head_start": HEAD_START[priority],
    }
    limits = {"max_wait": stage.max_wait, "budget": stage.retry.executions, "rounds": stage.rounds}
    opened = await connection.execute(OPEN_STAGE, {**names, **limits})
    if not opened.rowcount and await lifecycle.has_ended(connection, run.id):
        raise lifecycle.RunEnded
    insert = INSERT_NEW if opened.rowcount else INSERT
    long = [item for item in items if len(item.key) > LONGEST_KEY or len(item.target or "") > LONGEST_KEY]
    for item in long:
        await _refuse(connection, names, item, f"its key or target is longer than {LONGEST_KEY} characters")
    if long:
        items = [item for item in items if len(item.key) <= LONGEST_KEY and len(item.target or "") <= LONGEST_KEY]
    refused = len(long)
    for start in range(0, len(items), chunk * STATEMENTS_AHEAD):
        refused += await _insert(connection, names, items[start : start + chunk * STATEMENTS_AHEAD], chunk, insert)
        crashpoint("in fan-out")
    row = await (await connection.execute(CLOSE_DISPATCH, names)).fetchone()
    expected = row[0] if row else 0
    sample = [storable(item_event_id(run.flow, run.id, stage.name, item.key, 0)) for item in items[:SAMPLE]]
    await run_log.write(
        connection, run.id, f"FAN-OUT: {event_of(run, stage)} x{expected}", items=expected, event_ids=sample
    )
    run.trace.fan_out(event_of(run, stage), expected, sample, refused=refused)
    return expected


async def _insert(
    connection: Connection, names: dict[str, Any], items: Sequence[NewItem], chunk: int, insert: str
) -> int:
    """Insert items in pipelined statements of at most `chunk` rows. If the data of one is refused, none of these items
    is stored, and halves are tried until the culprit is alone. Return how many items were refused."""
    try:
        async with together(connection):
            for start in range(0, len(items), chunk):
                rows = to_json([item._asdict() for item in items[start : start + chunk]])
                await connection.execute(insert, {**names, "rows": rows.decode()}, prepare=True)
        return 0
    except psycopg.errors.UniqueViolation:
        return await _insert(connection, names, items, chunk, INSERT)
    except (psycopg.Error, PydanticSerializationError) as error:
        if is_unavailable(error):
            raise
        if len(items) == 1:
            await _refuse(connection, names, items[0], str(error).strip())
            return 1
        middle = len(items) // 2
        refused = await _insert(connection, names, items[:middle], chunk, INSERT)
        return refused + await _insert(connection, names, items[middle:], chunk, INSERT)


async def _refuse(connection: Connection, names: dict[str, Any], item: NewItem, error: str) -> None:
    why = storable(f"The item could not be dispatched: {error}")
    key, target = storable(item.key, LONGEST_KEY), storable(item.target or item.key, LONGEST_KEY)
    await connection.execute(INSERT_REFUSED, {**names, "key": key, "target": target, "error": why})
    event_id = item_event_id(names["flow"], names["run"], names["stage"], key, 0)
    await run_log.write_failure(connection, names["run"], names["stage"], "DISPATCH_FAILED", why, target, event_id)
    log.error("fan-out: item refused", run_id=names["run"], event_id=event_id, error=why, code="DISPATCH_FAILED")
