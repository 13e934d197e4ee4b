"""The runs that only a forcibly ended run waited for: found by any replica, ended for good, and no others."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import psycopg
import pytest

from ecluse.engine import NewItem, Waiter, load_run, lock_open, put_waiters, select_targets
from ecluse.engine.cluster.forced_ends import end_orphans
from ecluse.engine.work.completion import end_by_operator
from ecluse.insight import run_queries
from ecluse.insight.previews import preview_end
from tests.support.engine_flows import flow, keys, open_board, stage, until

REASON = "wrong day"
FLOW = flow(stage())
OPEN = "SELECT id FROM runs WHERE ended_at IS NULL ORDER BY id"
STANDS = "SELECT state, end_cause, ended_by, reason, cancelled FROM runs WHERE id = %s"


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        await board.lane()
        yield board


async def waits(board, waiter, *waited_for, target=""):
    async with board.pool.connection() as connection:
        await put_waiters(connection, [Waiter(run.id, waiter.id if waiter else None, target) for run in waited_for])


async def answers_for(board, run, *targets):
    async with board.pool.connection() as connection:
        await select_targets(connection, {run.id: [NewItem(target) for target in targets]})
    return run


async def end(board, run, by="laptop"):
    async with board.pool.connection() as connection:
        assert await end_by_operator(connection, FLOW, await load_run(connection, run.id), REASON, by=by)


@pytest.mark.req("G-89")
async def test_a_process_that_dies_right_after_the_end_leaves_the_tree_to_another_replica(board, start_kit, query):
    """The end is committed, and nothing sweeps: the next replica to start ends the rest, generation by generation."""
    parent, child, grandchild = [await answers_for(board, await board.run(3), *keys(3)) for _ in range(3)]
    await waits(board, parent, child)
    await waits(board, child, grandchild)
    await end(board, parent)
    assert query(OPEN) == [(child.id,), (grandchild.id,)]
    assert query("SELECT id FROM runs WHERE ends_waited_for") == [(parent.id,)]
    kit = await start_kit(FLOW, roles=frozenset({"scheduler"}))
    await until(lambda: query(OPEN) == [], 3)
    why = f"run {parent.id}, which waited for it, ended: {REASON}"
    assert query(STANDS, child.id) == [("cancelled", "parent", f"run:{parent.id}", why, 3)]
    why = f"run {child.id}, which waited for it, ended: {why}"
    assert query(STANDS, grandchild.id) == [("cancelled", "parent", f"run:{child.id}", why, 3)]
    assert query("SELECT DISTINCT error_code, reason FROM outcomes WHERE run_id = %s", grandchild.id) == [
        ("CANCELLED", f"Cancelled: {why}")
    ]
    await until(lambda: query("SELECT id FROM runs WHERE ends_waited_for") == [], 3)
    assert not kit.broken.is_set()


@pytest.mark.req("G-89", "G-82")
async def test_only_what_no_person_and_no_open_run_waits_for_is_ended(board, query):
    names = ("parent", "other", "ended", "alone", "shared", "asked for", "left behind", "stranger")
    runs = {name: await board.run(1) for name in names}
    waited = ("alone", "shared", "asked for", "left behind")
    await waits(board, runs["parent"], *(runs[name] for name in waited))
    await waits(board, runs["other"], runs["shared"], runs["stranger"])
    await waits(board, None, runs["asked for"])
    await waits(board, runs["ended"], runs["left behind"])
    query("UPDATE runs SET status = 'completed', state = 'succeeded', selected = 0, successful = 0, failed = 0,"
          " ignored = 0, end_cause = 'normal', ended_at = ecluse_now() WHERE id = %s", runs["ended"].id)  # fmt: skip
    await end(board, runs["parent"])
    await end_orphans(board.pool, {"test": FLOW})
    found = {name for name, run in runs.items() if query(STANDS, run.id)[0][1] == "parent"}
    assert found == {"alone", "left behind"}
    assert query("SELECT id FROM runs WHERE ends_waited_for") == []
    await end_orphans(board.pool, {"test": FLOW})
    assert len(query(OPEN)) == 4


@pytest.mark.req("G-89")
async def test_from_the_commit_of_the_end_on_nothing_of_the_tree_is_claimed(board, query):
    lane = await board.lane("vendor")
    parent, child, other = [await board.run(2, lane="vendor") for _ in range(3)]
    await waits(board, parent, child)
    await waits(board, other, await board.run(1, lane="vendor"))
    await end(board, parent)
    claimed = [one.item.run_id for one in await board.claim(lane)]
    assert (child.id in claimed, claimed.count(other.id)) == (False, 2)
    await waits(board, None, child)
    assert await board.claim(lane) == [], "it is marked until the sweep has looked at it once more"
    await end_orphans(board.pool, {"test": FLOW})
    assert [one.item.run_id for one in await board.claim(lane)] == [child.id] * 2
    assert query("SELECT id FROM runs WHERE ends_waited_for") == []


async def test_many_are_ended_in_batches_and_one_that_cannot_be_keeps_nobody_else(board, query):
    parent = await board.run(1)
    children = [await board.run(2) for _ in range(210)]
    await waits(board, parent, *children)
    await end(board, parent)
    culprit = children[5].id
    query(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'cannot be written'; END $$;"
        f" CREATE TRIGGER broken BEFORE UPDATE ON runs FOR EACH ROW WHEN (old.id = {culprit})"
        " EXECUTE FUNCTION broken()"
    )
    for _ in range(2):  # the second time it is the only one left
        await end_orphans(board.pool, {"test": FLOW})
        assert query(OPEN) == [(culprit,)]
        assert query("SELECT id FROM runs WHERE ends_waited_for") == [(parent.id,)], "it is tried again"
    query("DROP TRIGGER broken ON runs")
    await end_orphans(board.pool, {"test": FLOW})
    assert (query(OPEN), query("SELECT 1 FROM runs WHERE ends_waited_for")) == ([], [])


async def test_a_transaction_that_locks_runs_by_id_and_the_sweep_do_not_wait_for_each_other(board, dsn, query):
    """A run may wait for one that was started before it."""
    child, parent = await board.run(1), await board.run(1)
    await waits(board, parent, child)
    await end(board, parent)
    lock = "SELECT 1 FROM runs WHERE id = %s FOR NO KEY UPDATE"
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        async with connection.transaction():
            await connection.execute(lock, (child.id,))
            sweeping = asyncio.create_task(end_orphans(board.pool, {"test": FLOW}))
            await until(lambda: query("SELECT 1 FROM pg_locks WHERE NOT granted"))
            await connection.execute("SET LOCAL lock_timeout = '500ms'")
            await connection.execute(lock, (parent.id,))
        await sweeping
    assert query(OPEN) == []


async def test_a_run_of_a_flow_that_is_not_loaded_waits_for_a_replica_that_has_it(board, query):
    parent, child = await board.run(1), await board.run(1, name="elsewhere")
    await waits(board, parent, child)
    await end(board, parent)
    await end_orphans(board.pool, {"test": FLOW})
    assert query(OPEN) == [(child.id,)]
    await end_orphans(board.pool, {"elsewhere": flow(stage(), "elsewhere")})
    assert query(OPEN) == []


@pytest.mark.req("G-89")
async def test_a_run_that_somebody_begins_to_wait_for_at_that_moment_goes_on(board, dsn, query):
    """It is locked by whoever begins to wait, and looked at again once that is known."""
    parent, child = await board.run(1), await board.run(1)
    await waits(board, parent, child)
    await end(board, parent)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        async with connection.transaction():
            assert await lock_open(connection, [child.id]) == {child.id}
            await put_waiters(connection, [Waiter(child.id, None)])
            sweeping = asyncio.create_task(end_orphans(board.pool, {"test": FLOW}))
            await until(lambda: query("SELECT 1 FROM pg_locks WHERE NOT granted"))
            assert not sweeping.done()
        await sweeping
        assert query(OPEN) == [(child.id,)]
        await end(board, child)
        assert await lock_open(connection, [child.id]) == set(), "who comes later is told, and starts anew"


async def test_what_an_end_would_do_is_said_before_it_is_done(board, query):
    one = stage(last=True)
    parent = await board.run(work := ["done", "failed", "in hand", "waiting"], one=one)
    await answers_for(board, parent, *work, "of a child")
    only, shared = await board.run(1), await board.run(1)
    await waits(board, parent, only, target="of a child")
    await waits(board, parent, shared, target="waiting")
    await waits(board, None, shared)
    taken = await board.claim(1, room=4)
    assert {item.item.key for item in taken} == {"done", "failed", "in hand", "waiting"}
    await board.finish([item for item in taken if item.item.key == "done"])
    query("UPDATE claims SET released = released + 1")
    query("UPDATE items SET claim_id = NULL WHERE key = 'waiting'")
    query("WITH f AS (UPDATE items SET status = 'failed', error_code = 'NO', error = 'no', finished_at = ecluse_now()"
          " WHERE key = 'failed') UPDATE claims SET failed = failed + 1")  # fmt: skip
    query("WITH c AS (INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at)"
          " VALUES ('one', %s, 'work', 1, 1, now()) RETURNING id)"
          " UPDATE items SET claim_id = c.id FROM c WHERE run_id = %s", only.id, only.id)  # fmt: skip
    async with board.pool.connection() as connection:
        before = await preview_end(connection, FLOW, await load_run(connection, parent.id))
    assert before == {
        "run_id": str(parent.id),
        "flow": "test",
        "status": "running",
        "state": "running",
        "ended": False,
        "selected": 5,
        "finished": 2,
        "in_flight": 2,
        "waiting": 1,
        "children_that_end": 1,
        "children_that_go_on": 1,
        "calls_in_flight": 2,
    }
    await end(board, parent)
    await end_orphans(board.pool, {"test": FLOW})
    row = query("SELECT status, successful, failed, cancelled FROM runs WHERE id = %s", parent.id)
    assert row == [("partial", 1, 4, 3)]
    assert query(OPEN) == [(shared.id,)]


async def test_a_run_that_has_ended_is_in_no_phase_and_its_stages_are_as_they_were(board, query):
    run = await board.run(6)
    query("UPDATE runs SET phase = 'finalizing'")
    taken = await board.claim(1, room=4)
    await board.finish(taken[:3])
    await end(board, run)
    async with board.pool.connection() as connection:
        shown = await run_queries.show_run(connection, run.tenant_id, run.id)
    assert (shown["phase"], shown["error_details"]) == (None, {"phase": "finalizing"})
    (counted,) = shown["stages"]
    figures = {name: counted[name] for name in ("expected", "done", "failed", "unfinished", "in_flight", "waiting")}
    assert figures == {"expected": 6, "done": 3, "failed": 0, "unfinished": 3, "in_flight": 0, "waiting": 0}
    assert timedelta(0) < shown["ended_at"] - shown["started_at"]
