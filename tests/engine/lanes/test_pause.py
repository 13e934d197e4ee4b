"""A lane that an operator pauses: the time of the stages that need it goes on, and somebody is told what will fail and
when; or it stands still, and goes on where it was. Time is moved, never waited for."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ecluse.engine import Lane, Start, needing_lane, pause_lane, resume_lane
from ecluse.engine.cluster.forced_ends import STALE
from ecluse.insight.waiting import why
from tests.support.engine_clock import move_clock
from tests.support.engine_flows import PATIENCE, flow, keys, stage, until
from tests.support.runs import start_run, wait_for_run

MINUTE = timedelta(minutes=1)
WORK = {"lane": Lane("vendor"), "max_wait": 10 * MINUTE, "poll": timedelta(milliseconds=200)}
PAUSED = {"reason": "invoice", "by": "cli:ann"}


async def say(kit, what, *arguments, **options):
    async with kit.pool.connection() as connection:
        return await what(connection, *arguments, **options)


async def begun(kit, f, one, count=3, key="key"):
    run = await start_run(kit, Start(f, key, input={"targets": keys(count)}))
    await until(lambda: one("SELECT count(*) FROM items WHERE run_id = %s", run.run.id) == count)
    await until(lambda: one("SELECT count(*) FROM stages WHERE fanned_out_at IS NOT NULL AND run_id = %s", run.run.id))
    return run.run.id


def nearly(found, wanted):
    assert abs((found - wanted).total_seconds()) < 20, (found, wanted)


async def test_without_the_clock_the_stages_that_will_fail_and_when_are_known_before(start_kit, dsn, one):
    kit = await start_kit(f := flow(stage(**WORK)))
    assert await say(kit, needing_lane, "vendor") == []
    await say(kit, pause_lane, "vendor", **PAUSED)
    run_id = await begun(kit, f, one)
    (found,) = await say(kit, needing_lane, "vendor")
    deadline = one("SELECT deadline_at FROM stages")
    assert found == (run_id, "default", "test", "work", 3, deadline)
    await move_clock(dsn, 11 * MINUTE)
    row = await wait_for_run(kit, run_id, PATIENCE)
    assert (row["status"], row["failed"]) == ("failed", 3)
    assert await say(kit, resume_lane, "vendor", **PAUSED) == []


async def test_a_stage_whose_clock_stands_still_does_not_time_out_and_has_its_time_back(start_kit, dsn, query, one):
    kit = await start_kit(f := flow(stage(**WORK)))
    await say(kit, pause_lane, "vendor", stop_clock=True, **PAUSED)
    run_id = await begun(kit, f, one)
    deadline, progress = one("SELECT deadline_at, progress_at FROM stages")
    looks = "SELECT count(*) FROM dbos.operation_outputs WHERE function_name LIKE 'poll-work-%%'"
    await move_clock(dsn, 60 * MINUTE)
    seen = one(looks)
    await until(lambda: one(looks) > seen + 3)
    assert one(looks) < seen + 40, "a gate whose time is up is not busy"
    assert query("SELECT ended_at FROM stages") == [(None,)]
    (waits,) = await say(kit, why, "default", run_id, limit=1)
    assert waits.detail.startswith("lane vendor was paused by an operator: invoice (since ")
    assert "; the clock of its stage is stopped" in waits.detail
    await say(kit, pause_lane, "vendor", reason="still", by="cli:bob")
    (moved,) = await say(kit, resume_lane, "vendor", **PAUSED)
    assert moved[:4] == (run_id, "default", "test", "work")
    nearly(moved.deadline_at, deadline + 60 * MINUTE)
    assert moved.deadline_at - moved.by == deadline
    assert one("SELECT deadline_at, clock_stopped FROM stages") == (moved.deadline_at, moved.by)
    assert one("SELECT progress_at FROM stages") >= progress + 59 * MINUTE
    row = await wait_for_run(kit, run_id, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 3)
    assert one("SELECT count(*) FROM lanes WHERE clock_stopped_at IS NOT NULL") == 0


async def test_afterwards_time_goes_on_as_ever(start_kit, dsn, one):
    """What is left of it is what was left."""
    kit = await start_kit(f := flow(stage(**WORK)))
    await say(kit, pause_lane, "vendor", stop_clock=True, **PAUSED)
    run_id = await begun(kit, f, one)
    await move_clock(dsn, 30 * MINUTE)
    await say(kit, resume_lane, "vendor", **PAUSED)
    row = await wait_for_run(kit, run_id, PATIENCE)
    assert row["successful"] == 3
    await say(kit, pause_lane, "vendor", **PAUSED)
    late = await begun(kit, f, one, key="late")
    await move_clock(dsn, 11 * MINUTE)
    assert (await wait_for_run(kit, late, PATIENCE))["failed"] == 3


async def test_two_resumes_at_once_give_the_time_back_once(start_kit, dsn, query, one):
    kit = await start_kit(f := flow(stage(**WORK)))
    await say(kit, pause_lane, "vendor", stop_clock=True, **PAUSED)
    await begun(kit, f, one)
    deadline = one("SELECT deadline_at FROM stages")
    await move_clock(dsn, 30 * MINUTE)
    async with kit.pool.connection() as first:
        async with first.transaction():
            assert len(await resume_lane(first, "vendor", **PAUSED)) == 1
            second = asyncio.create_task(say(kit, resume_lane, "vendor", **PAUSED))
            await until(lambda: query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        assert await second is None
    nearly(one("SELECT deadline_at FROM stages"), deadline + 30 * MINUTE)
    nearly(one("SELECT now() + clock_stopped FROM stages"), one("SELECT now()") + 30 * MINUTE)


async def test_pauses_of_two_lanes_that_overlap_give_no_instant_back_twice(start_kit, dsn, query, one):
    kit = await start_kit(f := flow(stage(**WORK)), flow(stage(lane=Lane("other")), "other"))
    await say(kit, pause_lane, "vendor", stop_clock=True, **PAUSED)
    run_id = await begun(kit, f, one)
    deadline = one("SELECT deadline_at FROM stages")
    query("UPDATE items SET lane_id = (SELECT id FROM lanes WHERE name = 'other') WHERE key = 't00001'")
    await move_clock(dsn, 10 * MINUTE)
    await say(kit, pause_lane, "other", stop_clock=True, **PAUSED)
    await move_clock(dsn, 10 * MINUTE)
    await say(kit, resume_lane, "vendor", **PAUSED)
    nearly(one("SELECT deadline_at FROM stages"), deadline + 20 * MINUTE)
    await move_clock(dsn, 10 * MINUTE)
    assert query("SELECT ended_at FROM stages") == [(None,)]
    await say(kit, resume_lane, "other", **PAUSED)
    nearly(one("SELECT deadline_at FROM stages"), deadline + 30 * MINUTE)
    nearly(one("SELECT now() + clock_stopped FROM stages"), one("SELECT now()") + 30 * MINUTE)
    query("SELECT pg_notify('ecluse_work', '')")
    assert (await wait_for_run(kit, run_id, PATIENCE))["ended_at"] is not None


@pytest.mark.parametrize("stop_clock", [True, False])
async def test_a_run_is_not_stale_for_time_in_which_its_clock_stood_still(start_kit, dsn, query, one, stop_clock):
    kit = await start_kit(f := flow(stage(**{**WORK, "max_wait": 60 * MINUTE})), roles=frozenset({"worker"}))
    await say(kit, pause_lane, "vendor", stop_clock=stop_clock, **PAUSED)
    run_id = await begun(kit, f, one)
    await kit.stop()  # nobody leads it: once it is stale, it is ended
    query('UPDATE clock_offset SET "offset" = %s', 50 * MINUTE)
    facts = [["test"], [30 * MINUTE]]
    stale = STALE % {"flows": "%s", "limits": "%s"}
    assert [row[0] for row in query(stale, *facts)] == ([] if stop_clock else [run_id])
    query("UPDATE lanes SET paused_at = NULL, paused_reason = NULL, clock_stopped_at = NULL")
    query("UPDATE stages SET clock_stopped = '49 minutes'")
    assert query(stale, *facts) == []
    query('UPDATE clock_offset SET "offset" = %s', 90 * MINUTE)
    assert [row[0] for row in query(stale, *facts)] == [run_id]


async def test_a_pause_repeated_without_it_does_not_start_a_clock_that_was_stopped(start_kit, one):
    kit = await start_kit(flow(stage(**WORK)))
    await say(kit, pause_lane, "vendor", stop_clock=True, **PAUSED)
    since = one("SELECT clock_stopped_at FROM lanes")
    await say(kit, pause_lane, "vendor", **PAUSED)
    assert one("SELECT clock_stopped_at FROM lanes") == since
    await say(kit, resume_lane, "vendor", **PAUSED)
    assert one("SELECT clock_stopped_at FROM lanes") is None
