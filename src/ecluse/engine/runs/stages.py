"""The stages of runs: open one, dispatch its items, give up waiting items. All of it is idempotent.

A story dispatches the items of its run in statements that commit one by one, so that the first items are executed while
the rest is still being inserted. Runs that are only items have a stage opened in the transaction that inserts them, or
in the commit of the previous stage: a few statements, however many runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Literal

from ecluse.base.ids import item_event_id
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_column, fetch_rows
from ecluse.engine.lanes.rows import put_lanes
from ecluse.engine.model.flow import Flow, Lane, NewItem, Run, Stage
from ecluse.engine.runs import items, lifecycle, targets

SAMPLE = 3
Priority = Literal["high", "normal", "low"]
# Priority shifts the place in line by an hour; it does not rank, so that low-priority items cannot starve.
HEAD_START = {"high": timedelta(hours=1), "normal": timedelta(0), "low": -timedelta(hours=1)}

# Nothing is opened in a run that has ended. The lane is created if no worker has registered it yet; the first worker to
# start sets its caps. A stage whose work is done by other runs has units instead of items, and dispatches nothing.
OPEN = """
WITH lane AS (
    INSERT INTO lanes (name) SELECT %(lane)s
    WHERE %(units)s::int IS NULL AND NOT EXISTS (SELECT 1 FROM lanes WHERE name = %(lane)s) ON CONFLICT DO NOTHING),
run AS MATERIALIZED (
    SELECT id, ecluse_now() AS now FROM runs WHERE id = ANY(%(runs)s) AND ended_at IS NULL ORDER BY id FOR SHARE)
INSERT INTO stages (run_id, stage, budget, rounds, started_at, fanned_out_at, deadline_at, progress_at, units)
SELECT id, %(stage)s, %(budget)s, %(rounds)s, now, CASE WHEN %(units)s::int IS NOT NULL THEN now END,
       now + %(max_wait)s, now, %(units)s::int
FROM run ON CONFLICT DO NOTHING RETURNING run_id
"""
CLOSE_DISPATCH = """
WITH closed AS (
    UPDATE stages s SET fanned_out_at = coalesce(s.fanned_out_at, ecluse_now()),
        expected = (SELECT count(*) FROM items i WHERE i.run_id = s.run_id AND i.stage = %(stage)s)
    FROM jsonb_to_recordset(%(samples)s::jsonb) AS d(run bigint, event_ids jsonb)
    WHERE s.run_id = d.run AND s.stage = %(stage)s RETURNING s.run_id, s.expected, d.event_ids),
noted AS (
    INSERT INTO run_log (run_id, at, level, message, data)
    SELECT run_id, ecluse_now(), 'info', 'FAN-OUT: ' || %(event)s || ' x' || expected,
           jsonb_build_object('items', expected, 'event_ids', event_ids)
    FROM closed ORDER BY run_id)
SELECT run_id, expected FROM closed
"""
RAISE_BUDGETS = """
UPDATE stages s SET budget = b.budget FROM runs r, unnest(%s::text[], %s::text[], %s::int[]) AS b(flow, stage, budget)
WHERE r.id = s.run_id AND r.ended_at IS NULL AND b.flow = r.flow AND b.stage = s.stage AND s.budget < b.budget
"""


def event_of(run: Run, stage: Stage) -> str:
    """Return the name of the stage's fan-out in logs."""
    return stage.event or f"{run.flow}/{stage.name}"


async def fan_out(
    connection: Connection,
    run: Run,
    stage: Stage,
    new: Sequence[NewItem],
    *,
    chunk: int,
    priority: Priority = "normal",
) -> int:
    """Open the stage of a run with a story and dispatch its items, `chunk` rows per statement; return the number of
    items that it then has. A replay adds the missing items. Raise RunEnded if the run has ended."""
    is_new = await _open_in_story(connection, run, stage)
    return (await _dispatch(connection, stage, [(run, new)], is_new, chunk, priority))[run.id]


async def open_units(connection: Connection, run: Run, stage: Stage) -> None:
    """Open a stage whose work is done by other runs, in a run with a story: it has units instead of items. Raise
    RunEnded if the run has ended."""
    await _open_in_story(connection, run, stage, units=0)


async def open_stage(
    connection: Connection,
    stage: Stage,
    wanted: Sequence[tuple[Run, Sequence[NewItem]]],
    *,
    select: bool = False,
    priority: Priority = "normal",
    chunk: int = 200,
) -> None:
    """Open the stage for runs of one flow that are only items, and dispatch the items of each, in the caller's
    transaction, which has inserted the runs or locked them (`Stage.opens`). `select`: the items' targets become the
    targets of the runs. Runs that have ended or have the stage already are left out."""
    if not wanted:
        return
    wanted = sorted(wanted, key=lambda one: one[0].id)
    if select:
        await targets.select(connection, {run.id: new for run, new in wanted})
    opened = await _open(connection, [run.id for run, _ in wanted], stage)
    if opened:
        here = [(run, new) for run, new in wanted if run.id in opened]
        await _dispatch(connection, stage, here, True, chunk, priority)


async def give_up(
    connection: Connection,
    run_ids: Collection[int],
    stage: str,
    code: str,
    error: str,
    *,
    due_before: datetime | None = None,
    keys: Collection[str] | None = None,
) -> int:
    """Fail the waiting (unclaimed) items in a stage of these runs, with this error code and text; return their number.
    A sweep then ends the runs without a story that are complete; a story learns of it at the next poll of its gate.
    `due_before`: only items that are due by then; `keys`: only items with these keys."""
    async with connection.transaction():
        await lifecycle.lock_runs(connection, run_ids)
        given_up = await items.fail_waiting(
            connection, run_ids, stage, code, error, by="given up", due_before=due_before, keys=keys
        )
        await connection.execute("SELECT pg_notify(%s, '')", (lifecycle.CLOSING_CHANNEL,))
    return given_up


async def wake_workers(connection: Connection) -> None:
    """Notify all workers to claim items at once, when the caller's transaction is committed."""
    await connection.execute("SELECT pg_notify(%s, '')", (items.WORK_CHANNEL,))


async def raise_budgets(connection: Connection, flows: Iterable[Flow]) -> None:
    """Raise the retry budgets of the stages of open runs to the budgets that these flows declare: another version of
    this program may have opened them with smaller ones. Called when a worker starts."""
    budgets = [(flow.name, stage.name, stage.retry.executions) for flow in flows for stage in flow.stages]
    columns = [list(column) for column in zip(*budgets, strict=True)] or [[], [], []]
    await connection.execute(RAISE_BUDGETS, columns)


async def _open_in_story(connection: Connection, run: Run, stage: Stage, units: int | None = None) -> bool:
    """Open the stage of a run with a story. Return False if the stage exists: this is a replay. Raise RunEnded if the
    run has ended."""
    opened = await _open(connection, [run.id], stage, rounds=stage.rounds, units=units)
    if not opened and await lifecycle.has_ended(connection, run.id):
        raise lifecycle.RunEnded
    return bool(opened)


async def _open(
    connection: Connection, run_ids: Sequence[int], stage: Stage, *, rounds: int = 0, units: int | None = None
) -> set[int]:
    """Insert the stage for the open runs among `run_ids` that do not have it; return their ids. `rounds`: the number of
    further rounds, which only the gate of a story opens; `units`: the number of units, for a stage without items."""
    limits = {"budget": stage.retry.executions, "rounds": rounds, "max_wait": stage.max_wait, "units": units}
    given = {"runs": list(run_ids), "stage": stage.name, "lane": stage.lane.name, **limits}
    return set(await fetch_column(connection, OPEN, given))


async def _dispatch(
    connection: Connection,
    stage: Stage,
    wanted: Sequence[tuple[Run, Sequence[NewItem]]],
    is_new: bool,
    chunk: int,
    priority: Priority,
) -> dict[int, int]:
    """Insert the items of an open stage, for one or many runs, and log it; return the number of items that each run
    then has, by run id. `is_new`: the stage has just been opened, and has no items."""
    flow, event = wanted[0][0].flow, event_of(wanted[0][0], stage)
    rows = [(run.id, item) for run, new in wanted for item in new]
    lane_ids = await put_lanes(connection, _lanes_of(stage, wanted))
    dispatch = items.Dispatch(flow, stage.name, stage.lane.name, HEAD_START[priority], lane_ids)
    refused = await items.insert(connection, dispatch, rows, chunk=chunk, new=is_new)
    samples = {
        run.id: [storable(item_event_id(flow, run.id, stage.name, item.key, 0)) for item in new[:SAMPLE]]
        for run, new in wanted
    }
    listed = as_json([{"run": run_id, "event_ids": ids} for run_id, ids in samples.items()])
    given = {"stage": stage.name, "event": event, "samples": listed}
    expected: dict[int, int] = dict(await fetch_rows(connection, CLOSE_DISPATCH, given))
    for run, _ in wanted:
        run.trace.fan_out(event, expected[run.id], samples[run.id], refused=refused[run.id])
    return expected


def _lanes_of(stage: Stage, wanted: Iterable[tuple[Run, Sequence[NewItem]]]) -> set[Lane]:
    """Return the lanes that the items name. Raise ValueError if one is not beneath the stage's lane, or belongs to
    another tenant than its run."""
    found = {(run.tenant_id, item.lane) for run, new in wanted for item in new if item.lane is not None}
    for tenant, lane in found:
        if not lane.name.startswith(f"{stage.lane.name}/"):
            raise ValueError(f"stage {stage.name}: lane {lane.name} is not beneath {stage.lane.name}")
        if lane.tenant not in (None, tenant):
            raise ValueError(f"stage {stage.name}: lane {lane.name} belongs to another tenant than the run")
    return {lane for _, lane in found}
