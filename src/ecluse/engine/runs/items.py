"""The items of stages: insert them, fail waiting ones, count them.

Items are inserted set-based, a bounded number of rows per statement, so that a failing statement affects few. An item
that cannot be stored is a failed item, not a failed run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

import psycopg
import structlog
from pydantic_core import PydanticSerializationError

from ecluse.base.crash import crashpoint
from ecluse.base.ids import item_event_id
from ecluse.base.text import LONGEST_KEY, storable
from ecluse.db.connect import Connection, together
from ecluse.db.outage import is_unavailable
from ecluse.db.query import as_json, fetch_value
from ecluse.engine.model.flow import NewItem
from ecluse.engine.runs import run_log

log = structlog.get_logger(__name__)

WORK_CHANNEL = "ecluse_work"
STATEMENTS_AHEAD = 10

# For LATERAL: the counts of stage `s`, summed up from its claims, without reading its items. `unfinished` is the part
# of `failed` that was open when the run ended.
COUNTS = """(
    SELECT coalesce(sum(c.succeeded), 0)::int AS succeeded, coalesce(sum(c.ignored), 0)::int AS ignored,
           coalesce(sum(c.failed), 0)::int AS failed, coalesce(sum(c.in_flight), 0)::int AS in_flight,
           coalesce(sum(c.failed) FILTER (WHERE c.replica_id = 'end of run'), 0)::int AS unfinished
    FROM claims c WHERE c.run_id = s.run_id AND c.stage = s.stage)"""
# Condition on stage `s` and its counts `n`: all items are dispatched and finished.
COMPLETE = "(s.fanned_out_at IS NOT NULL AND s.expected = n.succeeded + n.failed + n.ignored)"

# The rows of the runs are locked FOR SHARE during the statement: nothing is dispatched into a run that has ended.
INSERT = """
WITH inp AS (SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb)
             AS t(run bigint, key text, target text, payload jsonb, "group" text, lane integer)),
run AS MATERIALIZED (SELECT id, tenant_id, ecluse_now() AS now, (SELECT id FROM lanes WHERE name = %(lane)s) AS lane_id
                     FROM runs WHERE id = ANY(%(runs)s) AND ended_at IS NULL ORDER BY id FOR SHARE),
put AS (
    INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, group_key, due_at, order_at, payload)
    SELECT tenant_id, id, %(flow)s, %(stage)s, key, coalesce(target, key), coalesce(lane, lane_id), "group", now,
           now - %(head_start)s, payload
    FROM inp JOIN run ON run.id = inp.run
    ON CONFLICT ON CONSTRAINT items_key DO NOTHING
    RETURNING 1)
SELECT count(*), pg_notify('ecluse_work', '') FROM put
"""
# A new stage has no items to conflict with, and leaving out ON CONFLICT saves a third of the work.
INSERT_NEW = INSERT.replace("ON CONFLICT ON CONSTRAINT items_key DO NOTHING", "")


class Dispatch(NamedTuple):
    """The values that the items of one dispatch have in common. `head_start`: how much earlier than now their place in
    the queue is (negative: later). `lane`: the lane of items that name none; `lane_ids`: the ids of the lanes that
    items name, by name."""

    flow: str
    stage: str
    lane: str
    head_start: timedelta
    lane_ids: Mapping[str, int]


Row = tuple[int, NewItem]  # the id of a run, and an item of it


async def insert(
    connection: Connection, dispatch: Dispatch, rows: Sequence[Row], *, chunk: int, new: bool
) -> Counter[int]:
    """Insert items, `chunk` rows per statement, except those that exist already. Items that cannot be stored are
    refused: stored as failed, without their payload. `new`: as far as the caller knows, none exists (which is faster).
    Return the number of refused items by run id."""
    good, refused = [], []
    for row in rows:
        if max(len(row[1].key), len(row[1].target or "")) > LONGEST_KEY:
            why = f"its key or target is longer than {LONGEST_KEY} characters"
            refused.append(await _refuse(connection, dispatch, row, why))
        else:
            good.append(row)
    for start in range(0, len(good), chunk * STATEMENTS_AHEAD):
        some = good[start : start + chunk * STATEMENTS_AHEAD]
        refused += await _insert(connection, dispatch, some, chunk, INSERT_NEW if new else INSERT)
        crashpoint("in fan-out")
    return Counter(refused)


async def _insert(
    connection: Connection, dispatch: Dispatch, rows: Sequence[Row], chunk: int, statement: str
) -> list[int]:
    """Insert items in pipelined statements of at most `chunk` rows. If the database refuses the data, halves are tried
    until the invalid item is alone, and that item is refused. Return the run ids of the refused items."""
    try:
        async with together(connection):
            for start in range(0, len(rows), chunk):
                await connection.execute(statement, _given(dispatch, rows[start : start + chunk]), prepare=True)
        return []
    except psycopg.errors.UniqueViolation:
        return await _insert(connection, dispatch, rows, chunk, INSERT)
    except (psycopg.Error, PydanticSerializationError) as error:
        if is_unavailable(error):
            raise
        if len(rows) == 1:
            return [await _refuse(connection, dispatch, rows[0], str(error).strip())]
        middle = len(rows) // 2
        refused = await _insert(connection, dispatch, rows[:middle], chunk, INSERT)
        return refused + await _insert(connection, dispatch, rows[middle:], chunk, INSERT)


def _given(dispatch: Dispatch, rows: Sequence[Row]) -> dict[str, Any]:
    items = [
        {
            "run": run_id,
            "key": item.key,
            "target": item.target,
            "payload": item.payload,
            "group": item.group,
            "lane": dispatch.lane_ids[item.lane.name] if item.lane else None,
        }
        for run_id, item in rows
    ]
    return {**dispatch._asdict(), "runs": list({run_id for run_id, _ in rows}), "rows": as_json(items)}


async def _refuse(connection: Connection, dispatch: Dispatch, row: Row, error: str) -> int:
    """Store an item that cannot be stored as it is: as failed, and without its payload. Log it, and return the id of
    its run."""
    run_id, item = row
    why = storable(f"The item could not be dispatched: {error}")
    key, target = storable(item.key, LONGEST_KEY), storable(item.target or item.key, LONGEST_KEY)
    event_id = item_event_id(dispatch.flow, run_id, dispatch.stage, key, 0)
    async with connection.transaction():
        if await fetch_value(connection, INSERT, _given(dispatch, [(run_id, NewItem(key, target, lane=item.lane))])):
            code = "DISPATCH_FAILED"
            await fail_waiting(connection, [run_id], dispatch.stage, code, why, by="dispatch", key=key)
            await run_log.write_failure(connection, run_id, dispatch.stage, code, why, target, event_id)
    log.error("fan-out: item refused", run_id=run_id, event_id=event_id, error=why, code="DISPATCH_FAILED")
    return run_id


FailedBy = Literal["dispatch", "gate", "given up", "end of run"]
WAITING = "i.stage = %(stage)s AND i.claim_id IS NULL"
# By cause: which open items are failed, and with which error. The end of a run fails items in flight as well.
# An item that waits for a budget at the deadline of its stage fails for that reason.
FAILED_BY: dict[FailedBy, tuple[str, str]] = {
    "dispatch": (f"{WAITING} AND i.key = %(key)s", "%(error)s"),
    "gate": (
        WAITING,
        """%(error)s || coalesce(': lane ' || l.name || ' was paused: ' || l.paused_reason,
            CASE WHEN i.postponed_cause = 'budget' THEN ': ' || i.postponed_why END, ': ' || i.error, '')""",
    ),
    "given up": (
        f"""{WAITING} AND i.due_at <= coalesce(%(due_before)s, 'infinity'::timestamptz)
            AND (%(keys)s::text[] IS NULL OR i.key = ANY(%(keys)s))""",
        "%(error)s",
    ),
    "end of run": ("true", "coalesce(i.error, %(error)s)"),
}
# The items get a closed claim, so that they are counted like items that ran and failed, and never run.
FAIL = """
WITH late AS (
    SELECT i.id, i.run_id, i.stage, i.lane_id FROM items i
    WHERE i.run_id = ANY(%(runs)s) AND i.status = 'open' AND {which} ORDER BY i.id FOR UPDATE),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT '{by}', run_id, stage, lane_id, count(*), count(*), ecluse_now() FROM late GROUP BY run_id, stage, lane_id
    RETURNING id, run_id, stage, lane_id)
UPDATE items i SET claim_id = c.id, status = 'failed', permanent = true, error = {error}, finished_at = ecluse_now(),
    error_code = CASE WHEN '{by}' = 'gate' AND i.postponed_cause = 'budget' THEN 'BUDGET_EXCEEDED' ELSE %(code)s END
FROM late JOIN claim c ON c.run_id = late.run_id AND c.stage = late.stage AND c.lane_id = late.lane_id
LEFT JOIN lanes l ON l.id = late.lane_id WHERE i.id = late.id
"""


async def fail_waiting(
    connection: Connection,
    run_ids: Collection[int],
    stage: str | None,
    code: str,
    error: str,
    *,
    by: FailedBy,
    key: str | None = None,
    due_before: datetime | None = None,
    keys: Collection[str] | None = None,
) -> int:
    """Fail the waiting items of these runs for good with this error, in one stage or, at the end of the runs, in all
    stages and including items in flight; return their number. `by` names the cause, which decides by FAILED_BY whether
    `key` and `keys` (only these items) and `due_before` (only items due by then) apply. The caller has taken the locks
    (see `lifecycle`)."""
    given: dict[str, Any] = {"runs": list(run_ids), "stage": stage, "code": code, "error": error, "key": key}
    given |= {"due_before": due_before, "keys": None if keys is None else list(keys)}
    which, text = FAILED_BY[by]
    return (await connection.execute(FAIL.format(by=by, which=which, error=text), given)).rowcount
