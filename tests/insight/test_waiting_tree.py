"""Why does a run wait? Answered for it and all the runs it waits for, grouped by cause."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import psycopg
import pytest

from ecluse.base.errors import NotFound, PermanentError, TransientError
from ecluse.engine import (
    Done,
    Item,
    NewItem,
    Postponed,
    Result,
    RetryPolicy,
    Waiter,
    WorkContext,
    pause_lane,
    put_waiters,
    resume_lane,
)
from ecluse.engine.work.mates import join_mates
from ecluse.insight import run_queries, waiting
from ecluse.insight.waiting import why, why_run
from tests.insight.test_causes import REPLICA
from tests.support.engine_flows import PATIENCE, flow, open_board, stage, started, until
from tests.support.runs import wait_for_run

PAUSE = "UPDATE lanes SET paused_at = '2026-03-02 10:00Z', paused_by = 'cli:ann', paused_reason = 'invoice'"


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


async def ask(board, run_id, tenant="default"):
    async with board.pool.connection() as connection:
        return await why_run(connection, tenant, run_id)


async def waits_for(board, above, *below):
    async with board.pool.connection() as connection:
        await put_waiters(connection, [Waiter(one.id, above.id, one.event_key) for one in below])


async def family(board, *items):
    """A run that waits for others, with these items each."""
    above = await board.run()
    below = [await board.run(one) for one in items]
    await waits_for(board, above, *below)
    return above, below


async def test_a_run_answers_for_the_runs_it_waits_for_and_for_theirs(board, query):
    await board.lane()
    above, (one, other) = await family(board, ["a", "b"], ["c"])
    deepest, stranger = await board.run(["d"]), await board.run(["e"])
    await waits_for(board, other, deepest)
    query(REPLICA, "one", ["test/work"], 10)
    query(PAUSE)
    found = await ask(board, above.id)
    (group,) = found.groups
    assert (group.cause, group.flow, group.stage, group.lane, group.count) == ("paused", "test", "work", "lane", 4)
    assert (group.first_at, group.last_at) == (None, None)
    assert "lane lane was paused by an operator: invoice (since 2026-03-02 10:00:00Z)" in group.detail
    sample = [(each.run_id, each.key, each.target) for each in group.sample]
    assert (len(sample), sample[0]) == (3, (one.id, "a", "a"))
    assert {each[0] for each in sample} <= {one.id, other.id, deepest.id}
    assert "; resume it with ecluse lanes resume lane" in group.detail
    assert (found.waiting, found.in_flight, found.blocked) == (4, 0, True)
    assert found.summary == f"4 waiting, 0 in flight: {group.detail}"
    assert (await ask(board, deepest.id)).waiting == 1
    assert (await ask(board, stranger.id)).waiting == 1
    async with board.pool.connection() as connection:
        listed = await why(connection, "default", above.id, limit=2, offset=2)
    assert [(each.run_id, each.key, each.lane) for each in listed] == [
        (other.id, "c", "lane"),
        (deepest.id, "d", "lane"),
    ]


async def test_runs_that_have_ended_are_left_out_and_a_circle_comes_to_its_end(board, query):
    await board.lane()
    above, (one, other) = await family(board, ["a"], ["b"])
    await waits_for(board, one, above)
    query(
        "UPDATE runs SET status = 'failed', state = 'failed', selected = 0, successful = 0, failed = 0, ignored = 0,"
        " end_cause = 'operator', ended_at = ecluse_now() WHERE id = %s",
        other.id,
    )
    assert (await ask(board, above.id)).waiting == 1
    assert (await ask(board, one.id)).waiting == 1
    ended = await ask(board, other.id)
    why_not = f"nothing of it waits: it has ended, failed; ecluse runs targets {other.id} --outcome failed lists why"
    assert (ended.summary, ended.groups) == (why_not, ())


async def test_each_cause_has_a_group_with_its_count_the_most_frequent_first(board, query):
    lane = await board.lane(max_per_key=1)
    await board.lane("other")
    above, _ = await family(
        board,
        [NewItem(f"a-{n}", group="a") for n in range(4)],
        ["due later", "free", "retry", "retry too", "locked", "suspect"],
    )
    other = await board.run(["elsewhere"], lane="other")
    await waits_for(board, above, other)
    query(REPLICA, "one", ["test/work"], 10)
    await board.claim(lane, room=1)
    later = "UPDATE items SET due_at = ecluse_now() + interval '1 minute'"
    query(f"{later} WHERE key = 'due later'")
    query(f"{later}, error_code = 'BUSY', error = 'try later' WHERE key IN ('retry', 'retry too')")
    query("UPDATE items SET postponed_cause = 'lease', postponed_why = 'run 7 has it' WHERE key = 'locked'")
    query("UPDATE items SET crashes = 3, suspicion = 1 WHERE key = 'suspect'")
    query(
        "UPDATE lanes SET held_until = ecluse_now() + interval '1 hour', held_reason = 'Retry-After'"
        " WHERE name = 'other'"
    )
    found = await ask(board, above.id)
    counted = [(group.lane, group.cause, group.count) for group in found.groups]
    assert {each[:2]: each[2] for each in counted} == {
        ("lane", "per key"): 3,
        ("lane", "retry"): 2,
        ("lane", "lease"): 1,
        ("lane", "queued"): 1,
        ("lane", "suspect"): 1,
        ("lane", "window"): 1,
        ("other", "held"): 1,
    }
    assert [group.count for group in found.groups] == sorted((each[2] for each in counted), reverse=True)
    assert (found.waiting, found.in_flight, found.blocked) == (10, 1, False)
    assert found.summary.startswith("10 waiting, 1 in flight: 3 of them: 1 of its group are in flight")
    assert found.summary.endswith("; and 4 more causes")
    details = {group.cause: group.detail for group in found.groups}
    assert "BUSY: try later" in details["retry"]
    assert details["lease"].startswith("run 7 has it; checked again at ")


async def test_what_is_held_back_by_a_rate_is_told_its_first_and_its_last_start(board, query):
    await board.lane(per_second=0.5)
    above, _ = await family(board, 3, 7)
    query(REPLICA, "one", ["test/work"], 10)
    (group,) = (await ask(board, above.id)).groups
    assert (group.cause, group.count) == ("throttled", 10)
    assert (group.last_at - group.first_at).total_seconds() == pytest.approx(9 * 2 / 0.98, abs=0.01)


def batches_of(query, most, permits=1):
    query(REPLICA, "one", ["test/work"], 10)
    query("UPDATE replicas SET batches = %s, permits = %s", [most], [permits])


async def test_items_that_share_a_call_count_as_one(board, query):
    await board.lane(max_per_key=1, per_second=0.5)
    await board.run([NewItem(f"x{n}", group="x") for n in range(7)], delay=-60)
    run = await board.run([NewItem(f"{g}{n}", group=g) for n in range(5) for g in "ab"] + ["alone"])
    batches_of(query, most=3, permits=2)
    async with board.pool.connection() as connection:
        found = {one.key: one for one in await why(connection, "default", run.id, limit=50)}
    # Seven of x before it are three calls; the fourth item of a group begins its second call.
    expected = {**{f"a{n}": 3 for n in range(3)}, **{f"b{n}": 4 for n in range(3)}, "alone": 7}
    expected |= {"a3": 5, "a4": 5, "b3": 6, "b4": 6}
    assert {key: one.position for key, one in found.items()} == expected
    assert found["alone"].detail.endswith("; 7 calls before it")
    (group,) = (await ask(board, run.id)).groups
    assert (group.cause, group.count) == ("throttled", 11)
    # Each call takes two permits, as it reads before it writes.
    assert (group.last_at - group.first_at).total_seconds() == pytest.approx(4 * 2 * 2 / 0.98, abs=0.01)


async def test_the_last_of_many_batches_is_told_at_least_the_calls_that_were_counted(board, query, monkeypatch):
    monkeypatch.setattr(waiting, "MOST_COUNTED", 8)
    await board.lane(max_per_key=1, per_second=0.5)
    run = await board.run([NewItem(f"{g}{n}", group=g) for g in "abcdef" for n in range(2)])
    batches_of(query, most=250)
    (group,) = (await ask(board, run.id)).groups
    assert (group.last_at - group.first_at).total_seconds() == pytest.approx(3 * 2 / 0.98, abs=0.01)


async def test_of_another_tenant_no_more_calls_count_than_its_turns(board, query, monkeypatch):
    monkeypatch.setattr(waiting, "MOST_COUNTED", 16)  # eight of each tenant
    await board.lane(max_per_key=1, per_second=0.5)
    await board.run(8, tenant="other", name="other")
    run = await board.run([NewItem(f"{g}{n}", group=g) for g in "abcdef" for n in range(4)])
    batches_of(query, most=4, permits=2)
    (group,) = (await ask(board, run.id)).groups
    # One permit of the other tenant before the first call; five calls of its own before the last, two permits each.
    assert (group.last_at - group.first_at).total_seconds() == pytest.approx(5 * 2 * 2 / 0.98, abs=0.01)
    async with board.pool.connection() as connection:
        found = {one.key: one.position for one in await why(connection, "default", run.id, limit=50)}
    assert (found["a0"], found["b3"], found["c0"]) == (1, 3, None)


async def test_a_batch_in_flight_is_one_call_and_takes_one_slot(board, query):
    lane = await board.lane(max_per_key=1)
    run = await board.run([NewItem(f"a{n}", group="a") for n in range(3)] + ["b"])
    query(REPLICA, "one", ["test/work"], 2)
    (leader,) = await board.claim(lane, room=1)
    async with board.pool.connection() as connection:
        (joined,) = await join_mates(connection, "one", [leader], {("test", "work"): 250})
    assert len(joined.mates) == 2
    found = await ask(board, run.id)
    assert (found.waiting, found.in_flight) == (1, 1)
    assert found.groups[0].detail == "about to be claimed"


async def test_fifty_thousand_waiting_items_are_grouped_in_a_moment(board, query):
    await board.lane(per_second=100)
    above = await board.run()
    query(
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)"
        " SELECT 'default', 'test', 'many-' || n, false, 'running', 'running', now() FROM generate_series(1, 10000) n"
    )
    query("INSERT INTO run_waiters SELECT id, %s, event_key FROM runs WHERE event_key LIKE 'many-%%'", above.id)
    query(
        "INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)"
        " SELECT 'default', r.id, 'test', 'work', n::text, n::text, l.id, now()"
        " FROM runs r, lanes l, generate_series(1, 5) n WHERE r.event_key LIKE 'many-%%'"
    )
    query(REPLICA, "one", ["test/work"], 10)
    query("ANALYZE")
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        found = await ask(board, above.id)
        seconds.append(time.monotonic() - began)
    print(f"50,000 items of 10,001 runs: {min(seconds) * 1000:.0f} ms")
    (group,) = found.groups
    assert (group.cause, group.count, len(group.sample)) == ("throttled", 50_000, 3)
    # Its place is too far behind to be counted one by one: at the earliest, then.
    assert (group.last_at - group.first_at).total_seconds() == pytest.approx(49_999 / 98, rel=0.001)
    assert min(seconds) < 2, "a statement per item would take minutes"


def rows_read(plan, table):
    """How many rows the plan's nodes on this table have looked at."""
    own = plan.get("Relation Name") == table
    removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
    looked = (plan["Actual Rows"] + removed) * plan["Actual Loops"] if own else 0
    return looked + sum(rows_read(below, table) for below in plan.get("Plans", ()))


async def test_what_is_finished_is_not_read_to_say_what_waits(board, dsn, query):
    await board.lane()
    run = await board.run(["a", "b", "c"])
    query(
        "INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, claim_id, status,"
        " finished_at) SELECT 'default', %s, 'test', 'work', 'done-' || n, n::text, l.id, now(), 1, 'succeeded', now()"
        " FROM lanes l, generate_series(1, 20000) n",
        run.id,
    )
    query(REPLICA, "one", ["test/work"], 10)
    query("VACUUM ANALYZE items")
    for statement in (waiting.GROUPS, waiting.PAGE):
        given = {"run": run.id, "limit": 50, "offset": 0}
        with psycopg.connect(dsn) as connection:
            row = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", given).fetchone()
        assert rows_read(row[0][0]["Plan"], "items") == 3
    assert [(group.cause, group.count) for group in (await ask(board, run.id)).groups] == [("queued", 3)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
async def test_examples_of_a_group_are_its_first_and_two_others(board, query, size):
    await board.lane()
    run = await board.run([f"k{n}" for n in range(size)])
    (group,) = (await ask(board, run.id)).groups
    names = [one.key for one in group.sample]
    assert (len(names), names[0]) == (min(size, 3), "k0")
    assert len(set(names)) == len(names)


async def test_finishing_an_item_writes_no_index(start_kit, query):
    kit = await start_kit(f := flow(stage()))
    run_id = await started(kit, f, [f"t{n:03}" for n in range(300)])
    assert (await wait_for_run(kit, run_id, PATIENCE))["state"] == "succeeded"
    updates = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'items'"
    await until(lambda: query(updates)[0][0] == 600)
    (_, hot), *_ = query(updates)
    assert hot > 100, "finishing an item touches no index where its page has room; a claim always does"


async def test_a_run_that_no_replica_leads_says_so(start_kit, board, query):
    run = await board.run(["a"])
    query("DELETE FROM items")
    found = await ask(board, run.id)
    assert [(group.cause, group.lane) for group in found.groups] == [("no worker", None)]
    assert found.blocked
    assert "start one that has flow test" in found.summary
    query("UPDATE runs SET status = 'queued', state = 'queued'")
    assert "start one that has flow test" in (await ask(board, run.id)).summary
    query(REPLICA, "one", ["test/work"], 10)
    found = await ask(board, run.id)
    assert (found.groups[0].cause, found.blocked) == ("queued", False)
    query("UPDATE runs SET status = 'running', state = 'running'")
    assert (await ask(board, run.id)).groups[0].cause == "no worker", "replicas are there, and none leads it"


async def test_a_run_of_which_all_is_in_flight_waits_at_its_gate(start_kit, board, query):
    asked, let = asyncio.Event(), asyncio.Event()

    async def slow(_: WorkContext, item: Item) -> Result:
        asked.set()
        await let.wait()
        return Done(None)

    kit = await start_kit(f := flow(stage(slow)))
    run_id = await started(kit, f, ["a", "b"])
    await asked.wait()
    await until(lambda: query("SELECT 1 FROM claims HAVING sum(in_flight) = 2"))
    found = await ask(board, run_id)
    (group,) = found.groups
    assert (group.cause, group.stage, group.lane, group.count) == ("gate", "work", None, 2)
    assert "2 calls are in flight, the oldest since" in found.summary
    assert [(found.in_flight_since,)] == query("SELECT min(taken_at) FROM claims")
    assert (found.in_flight, found.waiting, found.blocked) == (2, 0, False)
    above = await board.run()
    query(
        "INSERT INTO stages (run_id, stage, budget, started_at, fanned_out_at, deadline_at, progress_at, units)"
        " SELECT %s, 'units', 1, now(), now(), now(), now(), 5",
        above.id,
    )
    async with board.pool.connection() as connection:
        await put_waiters(connection, [Waiter(run_id, above.id)])
        (_, units) = (await run_queries.stages_of(connection, [above.id]))[above.id]
    assert (units["expected"], units["in_flight"], units["waiting"]) == (5, 2, 3)
    assert (await ask(board, above.id)).in_flight == 2
    let.set()
    assert (await wait_for_run(kit, run_id, PATIENCE))["state"] == "succeeded"
    assert not (await ask(board, above.id)).in_flight


async def test_a_gate_that_will_open_another_round_says_when(start_kit, board, query):
    async def fails(_: WorkContext, item: Item) -> Result:
        raise TransientError("busy", code="BUSY")

    one = stage(fails, retry=RetryPolicy(executions=1), rounds=1, poll=timedelta(seconds=5))
    kit = await start_kit(f := flow(one))
    run_id = await started(kit, f, ["a"])
    await until(lambda: query("SELECT 1 FROM stages WHERE next_round_at IS NOT NULL"))
    found = await ask(board, run_id)
    ((at,),) = query("SELECT progress_at + interval '15 s' FROM stages")
    assert found.groups[0].cause == "gate"
    assert f"round 1 opens at {at:%Y-%m-%d %H:%M:%S}Z" in found.summary
    query("UPDATE clock_offset SET \"offset\" = interval '16 s'")
    query("SELECT pg_notify('ecluse_clock', '')")
    await until(lambda: query("SELECT 1 FROM stages WHERE round = 1 AND next_round_at IS NULL"))


async def test_a_round_that_will_not_be_opened_any_more_is_not_announced(start_kit, board, query):
    let = asyncio.Event()

    async def work(_: WorkContext, item: Item) -> Result:
        if item.key == "fails":
            raise TransientError("busy", code="BUSY")
        await let.wait()
        return Done()

    one = stage(work, retry=RetryPolicy(executions=1), rounds=1, poll=timedelta(seconds=5))
    kit = await start_kit(f := flow(one))
    run_id = await started(kit, f, ["fails", "slow"])
    await until(lambda: query("SELECT 1 FROM stages WHERE next_round_at IS NOT NULL"))
    query("UPDATE items SET permanent = true WHERE key = 'fails'")
    await until(lambda: query("SELECT 1 FROM stages WHERE next_round_at IS NULL"))
    assert "opens at" not in (await ask(board, run_id)).summary
    let.set()
    assert (await wait_for_run(kit, run_id, PATIENCE))["failed"] == 1


async def test_an_item_that_is_put_off_says_what_it_waits_for_until_it_has_run(start_kit, board, query):
    held = ["lease"]

    async def work(context: WorkContext, item: Item) -> Result:
        if held:
            return Postponed(context.now() + timedelta(minutes=10), "run 7 has it", held[0])
        raise PermanentError("no", code="NO")

    kit = await start_kit(f := flow(stage(work)))
    run_id = await started(kit, f, ["a"])
    await until(lambda: query("SELECT 1 FROM items WHERE postponed_cause IS NOT NULL"))
    found = await ask(board, run_id)
    assert [(group.cause, group.detail.partition(";")[0]) for group in found.groups] == [("lease", "run 7 has it")]
    assert (found.blocked, found.groups[0].first_at) == (True, None)
    held[:] = ["postponed"]
    query("UPDATE items SET due_at = ecluse_now()")
    query("SELECT pg_notify('ecluse_work', '')")
    await until(lambda: query("SELECT 1 FROM items WHERE postponed_cause = 'postponed'"))
    assert (await ask(board, run_id)).groups[0].cause == "postponed"
    held.clear()
    query("UPDATE items SET due_at = ecluse_now()")
    query("SELECT pg_notify('ecluse_work', '')")
    await wait_for_run(kit, run_id, PATIENCE)
    assert query("SELECT status, executions, postponed_cause, postponed_why FROM items") == [("failed", 1, None, None)]


async def test_the_last_progress_is_that_of_the_tree(board, query):
    lane = await board.lane()
    above, _ = await family(board, ["a", "b"])
    query("UPDATE runs SET created_at = '2026-03-02 10:00Z', started_at = '2026-03-02 10:00Z'")
    query("UPDATE stages SET started_at = '2026-03-02 10:00Z', progress_at = '2026-03-02 10:00Z'")
    assert [((await ask(board, above.id)).progress_at,)] == query("SELECT timestamptz '2026-03-02 10:00Z'")
    (taken,) = await board.claim(lane, room=1)
    await board.finish([taken])
    assert [((await ask(board, above.id)).progress_at,)] == query("SELECT max(finished_at) FROM items")


async def test_a_tenant_is_told_of_its_own_runs_only_and_of_no_operator(board, query):
    await board.lane()
    run = await board.run(["a"], tenant="mine")
    query(PAUSE)
    found = await ask(board, run.id, "mine")
    assert "paused by an operator: invoice" in found.summary
    assert "ann" not in str(found)
    with pytest.raises(NotFound):
        await ask(board, run.id, "theirs")


async def test_a_pause_and_its_end_are_written_to_the_log_of_every_run_that_needs_the_lane(board, query):
    await board.lane()
    await board.lane("other")
    above, (one, two) = await family(board, ["a"], ["b"])
    await board.run(["c"], lane="other")
    done = await board.run(["d"])
    query("DELETE FROM items WHERE run_id = %s", done.id)
    query("DELETE FROM run_log")
    async with board.pool.connection() as connection:
        await pause_lane(connection, "lane", reason="invoice", by="cli:ann")
        await pause_lane(connection, "lane", reason="invoice", by="cli:bob")
        await resume_lane(connection, "lane", reason="paid", by="cli:ann")
        await resume_lane(connection, "lane", reason="paid", by="cli:ann")
    logged = query("SELECT run_id, level, message, data FROM run_log ORDER BY id")
    said = ["Lane lane was paused: invoice", "Lane lane was resumed: paid"]
    assert logged == [(run.id, "warning", message, {"lane": "lane"}) for message in said for run in (above, one, two)]


async def test_a_breaker_says_since_when_the_vendor_is_down_and_the_last_error_of_its_items(board, query):
    await board.lane()
    run = await board.run(["a", "b", "c"])
    query(REPLICA, "one", ["test/work"], 10)
    query("UPDATE lanes SET trips = 1, failing_since = '2026-03-02 10:00:00Z', break_after = 5, failures = 5")
    query("UPDATE items SET error_code = 'TIMEOUT', error = 'no answer' WHERE key = 'b'")
    (group,) = (await ask(board, run.id)).groups
    assert (group.cause, group.count, group.error) == ("breaker", 3, "TIMEOUT: no answer")
    assert group.since is not None
    assert group.since.isoformat().startswith("2026-03-02T10:00:00")
