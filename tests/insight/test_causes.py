"""Why is it waiting? Asked of a real database, in every state an item can wait in."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.base.errors import NotFound, TransientError
from ecluse.engine import Item, Lane, NewItem, Result, RetryPolicy, Start, WorkContext
from ecluse.insight import waiting
from ecluse.insight.waiting import why
from tests.support.engine_flows import flow, keys, open_board, stage, until
from tests.support.runs import start_run

REPLICA = "INSERT INTO replicas (id, host, pid, work, hands) VALUES (%s, 'h', 1, %s, %s)"


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


async def ask(board, run, **options):
    async with board.pool.connection() as connection:
        return await why(connection, run.tenant_id, run.id, **{"limit": 100, **options})


async def test_with_nobody_there_to_work_the_cause_says_so(board, query):
    await board.lane()
    run = await board.run(["a"])
    query(REPLICA, "other", ["test/second"], 10)
    (found,) = await ask(board, run)
    assert (found.cause, found.position, found.expected_at) == ("no worker", 0, None)


LANES = {
    "paused": ("paused", "paused_at = now(), paused_by = 'cli:ann', paused_reason = 'invoice'", "an operator: invoice"),
    "held": (
        "held",
        "held_until = ecluse_now() + interval '1 minute', held_reason = 'Retry-After: 429'",
        "as the vendor asked",
    ),
    "broken": ("breaker", "break_after = 5, failures = 5", "one call at a time"),
    "rated": ("throttled", "per_second = 0.5, next_free_at = ecluse_now() + interval '4 s'", "30 calls a minute"),
    "slowed": (
        "throttled",
        "per_second = 0.5, slowed_to = 0.5, slowed_reason = '429s', slowed_until = ecluse_now() + interval '5 min'",
        "30 calls a minute, 50% of its rate until",
    ),
}


@pytest.mark.req("ENG-53")
@pytest.mark.parametrize("lane", LANES)
async def test_a_lane_that_keeps_an_item_is_named_as_the_cause(board, query, lane):
    cause, change, says = LANES[lane]
    await board.lane()
    run = await board.run(["a", "b"])
    query(REPLICA, "one", ["test/work"], 10)
    query(f"UPDATE lanes SET {change}")  # noqa: S608 - our own
    found = await ask(board, run)
    assert [one.cause for one in found] == [cause, cause]
    assert says in found[0].detail
    if lane == "rated":
        (now,) = query("SELECT ecluse_now()")[0]
        seconds = [(one.expected_at - now).total_seconds() for one in found]
        assert seconds[1] - seconds[0] == pytest.approx(2 / 0.98, abs=0.001)
        assert seconds[0] <= 4


@pytest.mark.req("ENG-52", "ENG-53")
async def test_a_full_cap_is_named_as_the_cause(board, query):
    lane = await board.lane(max_in_flight=2, max_per_key=1)
    run = await board.run([NewItem("a-1", group="a"), NewItem("a-2", group="a"), NewItem("b-1", group="b")])
    query("INSERT INTO replicas (id, host, pid, work, hands) VALUES ('one', 'h', 1, '{test/work}', 10)")
    assert [one.item.key for one in await board.claim(lane, room=1)] == ["a-1"]
    assert [(one.key, one.cause) for one in await ask(board, run)] == [("a-2", "per key"), ("b-1", "queued")]
    assert [one.item.key for one in await board.claim(lane, room=2)] == ["b-1"]
    assert [(one.key, one.cause) for one in await ask(board, run)] == [("a-2", "in flight")]


async def test_an_item_in_line_is_told_its_place_as_tenants_take_turns(board, query):
    await board.lane()
    await board.run(50, tenant="big", delay=-60)
    run = await board.run(5, tenant="small")
    query(REPLICA, "one", ["test/work"], 0)
    found = await ask(board, run)
    assert {one.cause for one in found} == {"queued"}
    assert [one.position for one in found] == [1, 3, 5, 7, 9]
    assert [one.key for one in await ask(board, run, limit=2, offset=1)] == ["t00001", "t00002"]


async def test_a_place_far_behind_is_not_counted(board, query, monkeypatch):
    monkeypatch.setattr(waiting, "MOST_COUNTED", 6)
    await board.lane()
    await board.run(2, tenant="big", delay=-60)
    run = await board.run(5, tenant="small")
    query(REPLICA, "one", ["test/work"], 0)
    found = await ask(board, run)
    assert [one.position for one in found] == [1, 3, 4, None, None]
    assert "at least 5 calls before it" in found[-1].detail


async def test_an_item_that_waits_for_its_retry_says_when_and_after_what(start_kit, dsn, query):
    async def fails(_: WorkContext, item: Item) -> Result:
        raise TransientError("try later", code="BUSY")

    kit = await start_kit(f := flow(stage(fails, retry=RetryPolicy(base=600, longest=600))))
    run = (await start_run(kit, Start(f, "key", input={"targets": ["a"]}))).run
    await until(lambda: query("SELECT 1 FROM attempts"))
    async with open_board(dsn) as board:
        (found,) = await ask(board, run)
        (told,) = await ask(board, run, budgets=kit.budgets)
        async with board.pool.connection() as connection:
            (group,) = (await waiting.why_run(connection, "default", run.id, {"test/work": 2})).groups
    assert found.cause == "retry"
    assert "execution 2 at" in found.detail
    assert "BUSY: try later" in found.detail
    assert f"execution 2 of {RetryPolicy().executions} at" in told.detail
    assert "execution 2 of 2 (the last) at" in group.detail
    assert group.error == "BUSY: try later"
    assert [(found.expected_at,)] == query("SELECT due_at FROM items")


@pytest.mark.req("ENG-53")
async def test_nothing_is_written_by_asking_and_every_waiting_item_has_a_cause(start_kit, dsn, query):
    kit = await start_kit(f := flow(stage(lane=Lane("slow", per_second=0.01), max_wait=timedelta(hours=1))))
    run = (await start_run(kit, Start(f, "key", input={"targets": keys(30)}))).run
    await until(lambda: query("SELECT 1 FROM items WHERE status = 'succeeded'"))
    before = query("SELECT max(xmin::text::bigint) FROM items")
    async with open_board(dsn) as board:
        found = await ask(board, run)
    assert len(found) == 29
    assert all(one.cause == "throttled" and one.detail and one.expected_at for one in found)
    assert [one.position for one in found] == list(range(29))
    assert query("SELECT max(xmin::text::bigint) FROM items") == before
    assert query("SELECT roles, work, hands FROM replicas") == [(["api", "scheduler", "worker"], ["test/work"], 200)]


async def test_a_foreign_run_does_not_exist(board):
    await board.lane()
    run = await board.run(["a"], tenant="mine")
    async with board.pool.connection() as connection:
        assert len(await why(connection, "mine", run.id, limit=1)) == 1
        with pytest.raises(NotFound):
            await why(connection, "theirs", run.id, limit=1)
