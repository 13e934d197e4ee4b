"""Mistakes of flows and oddities of deployments: each hits the run that made it, and nobody else."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ecluse.engine import Done, Flow, Item, Result, RetryPolicy, Start, State, StatusMap, WorkContext
from ecluse.engine.lead.story import Story
from tests.support.engine_flows import PATIENCE, Targets, flow, given_targets, keys, open_board, run_to_end, stage
from tests.support.runs import start_run, wait_for_run

ONCE = RetryPolicy(executions=1)


async def returns_nothing(_: WorkContext, item: Item) -> Result:
    return None if item.key == "t00003" else Done()  # type: ignore[return-value]


async def cancels_itself(_: WorkContext, item: Item) -> Result:
    if item.key == "t00003":
        inner = asyncio.create_task(asyncio.sleep(60))
        inner.cancel()
        await inner
    return Done()


@pytest.mark.parametrize("work", [returns_nothing, cancels_itself])
async def test_a_bug_in_the_work_is_that_item_s_failure(start_kit, query, work):
    kit = await start_kit(f := flow(stage(work, retry=ONCE)), hands=3)
    row = await run_to_end(kit, f, keys(30))
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 29, 1)
    assert query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'") == [("t00003", "BUG")]
    assert not kit.broken.is_set()


async def test_work_that_will_not_be_cancelled_keeps_its_result_and_the_engine_can_stop(start_kit):
    async def stubborn(_: WorkContext, item: Item) -> Result:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return Done()

    kit = await start_kit(f := flow(stage(stubborn, time_limit=timedelta(milliseconds=100))), hands=2)
    row = await run_to_end(kit, f, keys(4))
    assert (row["status"], row["successful"]) == ("completed", 4)
    async with asyncio.timeout(10):
        await kit.stop()


async def test_a_story_without_a_word_for_its_end_is_ended_as_a_failure(start_kit):
    words = StatusMap(
        meaning={"queued": State.QUEUED, "running": State.RUNNING, "well": State.SUCCEEDED, "failed": State.FAILED},
        moves={"queued": frozenset({"running"}), "running": frozenset({"well", "failed"})},
        initial="queued",
    )
    kit = await start_kit(f := flow(stage(returns_nothing, retry=ONCE), statuses=words))
    row = await run_to_end(kit, f, keys(5))
    assert (row["status"], row["end_cause"], row["error_code"]) == ("failed", "catastrophic", "FORBIDDEN_TRANSITION")


async def test_a_run_whose_workflow_is_over_is_ended_and_says_so(start_kit, query):
    never = asyncio.Event()

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await never.wait()

    kit = await start_kit(f := Flow("test", (stage(),), story, Targets), sweep_every=0.2)
    run = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    assert (await wait_for_run(kit, run.run.id, timedelta(milliseconds=300)))["selected"] == 1
    query("UPDATE dbos.workflow_status SET status = 'ERROR', updated_at = 0")
    row = await wait_for_run(kit, run.run.id, PATIENCE)
    assert (row["status"], row["error_code"], row["failed"]) == ("failed", "NO_WORKFLOW", 1)


async def test_a_self_closing_run_of_a_flow_that_is_not_loaded_here_is_left_alone(start_kit, dsn, one):
    async with open_board(dsn) as board:
        await board.run(["x"], name="elsewhere")
    one("UPDATE runs SET orchestrated = false RETURNING id")
    one(
        "WITH i AS (UPDATE items SET claim_id = 0, status = 'succeeded', finished_at = now()) "
        "INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, succeeded, taken_at) "
        "SELECT 'r', id, 'work', 1, 1, 1, now() FROM runs RETURNING id"
    )
    kit = await start_kit(f := flow(stage()))
    await asyncio.sleep(4)
    assert not kit.broken.is_set()
    assert (await run_to_end(kit, f, ["a"]))["status"] == "completed"


async def test_whoever_was_declared_dead_claims_nothing(dsn, query):
    async with open_board(dsn) as board:
        lane = await board.lane()
        await board.run(3)
        assert len(await board.claim(free=[lane], room=1, replica="ghost")) == 1
        query("UPDATE replicas SET state = 'dead' WHERE id = 'ghost'")
        assert await board.claim(free=[lane], replica="ghost") == []


async def test_claims_of_a_replica_nobody_remembers_are_taken_over(start_kit, dsn, query, one):
    f = flow(stage())
    kit = await start_kit(f)
    await kit.stop()
    async with open_board(dsn) as board:
        run = await board.run(4)
        query("UPDATE runs SET orchestrated = false, selected = 4")
        query("INSERT INTO outcomes (run_id, target) SELECT run_id, target FROM items")
        assert len(await board.claim(free=[1], replica="forgotten")) == 4
        query("DELETE FROM replicas")
    kit = await start_kit(f)
    row = await wait_for_run(kit, run.id, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 4)
    assert not kit.broken.is_set()


@pytest.mark.parametrize("room", [1, 200])
async def test_tenants_that_wait_for_a_later_instant_take_nobody_s_turn(dsn, room):
    async with open_board(dsn) as board:
        lane = await board.lane(max_in_flight=room)
        for n in range(30):
            await board.run(["later"], tenant=f"waits-{n}", delay=3600)
        await board.run(room, tenant="busy")
        assert len(await board.claim(lane, room=room)) == room


async def test_a_stage_that_is_not_in_the_flow_is_not_claimed(start_kit, query):
    """A story of a newer version, or one that fans out a stage its flow does not list."""
    extra = stage(name="extra")
    known = stage()

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await run.fan_out(extra, given_targets)
        await run.fan_out(known, given_targets)
        await run.gate(known)

    kit = await start_kit(f := Flow("test", (known,), story, Targets), hands=2)
    row = await run_to_end(kit, f, keys(5))
    assert (row["failed"], kit.broken.is_set()) == (5, False)
    assert query("SELECT DISTINCT error_code FROM outcomes") == [("INCOMPLETE",)]
