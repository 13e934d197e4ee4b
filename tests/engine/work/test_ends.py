"""`Stage.on_end`: a flow's own rows change in the commit that stores the end of an execution, however it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ecluse.base.errors import PermanentError, TransientError
from ecluse.db.connect import Connection
from ecluse.db.query import as_json
from ecluse.engine import Done, Ignored, Item, ItemEnd, NewItem, Result, Run, WorkContext, load_runs, open_stage
from ecluse.engine.kit import Kit
from tests.support.engine_flows import flow, given_targets, keys, run_to_end, stage

SCHEMA = """
CREATE TABLE IF NOT EXISTS ends (
    key text, status text, executions int, code text, error text, retry_at timestamptz, xid xid8);
"""
ADD = """
INSERT INTO ends SELECT t.*, pg_current_xact_id()
FROM jsonb_to_recordset(%s::jsonb)
    AS t(key text, status text, executions int, code text, error text, retry_at timestamptz)
"""


async def heard(connection: Connection, ends: Sequence[ItemEnd]) -> None:
    names = ("status", "executions", "error", "retry_at")
    rows = [{"key": e.item.key, "code": e.error_code, **{n: getattr(e, n) for n in names}} for e in ends]
    await connection.execute(ADD, (as_json(rows),))


async def work(_: WorkContext, item: Item) -> Result:
    if item.key == "failing":
        raise PermanentError("refused", code="REFUSED")
    if item.key == "flaky" and item.executions == 0:
        raise TransientError("busy", code="BUSY")
    return Ignored("gone") if item.key == "gone" else Done({"key": item.key})


async def test_success_failure_and_a_retry_to_come_are_heard_in_the_commit(start_kit, query):
    kit: Kit = await start_kit(f := flow(stage(work, on_end=heard), schema=SCHEMA))
    await run_to_end(kit, f, ["well", "failing", "flaky", "gone"])
    assert query("SELECT key, status, executions, code, retry_at IS NULL FROM ends ORDER BY key, executions") == [
        ("failing", "failed", 1, "REFUSED", True),
        ("flaky", "open", 1, "BUSY", False),
        ("flaky", "succeeded", 2, None, True),
        ("gone", "ignored", 1, "IGNORED", True),
        ("well", "succeeded", 1, None, True),
    ]
    same = "SELECT count(*) FROM ends e JOIN items i ON i.key = e.key AND i.xmin = e.xid::xid WHERE e.status <> 'open'"
    assert query(same) == [(4,)], "in the transaction that stored the item"


async def test_all_ends_of_a_commit_are_heard_in_one_call(start_kit):
    calls: list[int] = []

    async def count(_: Connection, ends: Sequence[ItemEnd]) -> None:
        calls.append(len(ends))

    kit = await start_kit(f := flow(stage(work, on_end=count)))
    await run_to_end(kit, f, keys(100))
    assert sum(calls) == 100
    assert len(calls) < 50


async def test_an_item_that_its_gate_has_given_up_on_is_heard_as_failed(start_kit, query):
    """It fails in flight, past the deadline: there is no retry."""
    late = asyncio.Event()

    async def slow(_: WorkContext, __: Item) -> Result:
        await late.wait()
        raise TransientError("busy", code="BUSY")

    kit = await start_kit(f := flow(stage(slow, on_end=heard), schema=SCHEMA))
    running = asyncio.create_task(run_to_end(kit, f, ["a"]))
    while not query("SELECT 1 FROM items WHERE claim_id IS NOT NULL"):
        await asyncio.sleep(0.02)
    query("UPDATE items SET permanent = true RETURNING id")  # as the gate does at its deadline
    late.set()
    await running
    assert query("SELECT status, code, retry_at FROM ends") == [("failed", "BUSY", None)]


async def test_a_hook_that_refuses_an_end_fails_its_item_and_no_other(start_kit, query):
    async def refuses(connection: Connection, ends: Sequence[ItemEnd]) -> None:
        await heard(connection, ends)
        if any(one.item.key == "bad" for one in ends):
            raise ValueError("not this one")

    kit = await start_kit(f := flow(stage(work, on_end=refuses), schema=SCHEMA))
    await run_to_end(kit, f, ["a", "bad", "b"])
    assert query("SELECT key, status, error_code FROM items ORDER BY key") == [
        ("a", "succeeded", None),
        ("b", "succeeded", None),
        ("bad", "failed", "STORE_FAILED"),
    ]
    assert query("SELECT key FROM ends ORDER BY key") == [("a",), ("b",)]


async def test_a_failure_may_open_the_next_stage(start_kit):
    reached: list[str] = []

    async def then(_: WorkContext, item: Item) -> Result:
        reached.append(item.key)
        return Done()

    async def open_next(connection: Connection, ends: Sequence[ItemEnd]) -> None:
        over = {one.item.run_id: one.item.key for one in ends if one.status != "open"}
        runs = await load_runs(connection, list(over))
        await open_stage(connection, second, [(run, [NewItem(over[run.id])]) for run in runs])

    async def begin(connection: Connection, runs: Sequence[Run]) -> None:
        wanted = [(run, await given_targets(connection, run)) for run in runs]
        await open_stage(connection, first, wanted, select=True)

    first, second = stage(work, on_end=open_next, opens=True), stage(then, name="second")
    kit = await start_kit(f := flow(first, stages=(first, second), story=None, begin=begin))
    await run_to_end(kit, f, ["failing"])
    assert reached == ["failing"]
