"""Gates and retries through the engine: bounded waits, stalls and rounds, lost hints, waits that outlive a process."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ecluse.base.errors import PermanentError, TransientError
from ecluse.engine import Done, Item, Result, RetryPolicy, Start, WorkContext
from tests.support.engine_clock import move_clock
from tests.support.engine_flows import PATIENCE, flow, keys, run_to_end, stage, until
from tests.support.runs import start_run, wait_for_run

SHORT = {"poll": timedelta(milliseconds=100), "max_wait": timedelta(seconds=20)}


@pytest.mark.req("ENG-91", "ENG-03")
async def test_a_gate_ends_at_its_maximum_wait_with_a_stated_reason_for_each_target(start_kit, dsn, query, one):
    started_all = asyncio.Event()

    async def never(_: WorkContext, item: Item) -> Result:
        started_all.set()
        await asyncio.sleep(60)
        return Done()

    work = stage(never, max_wait=timedelta(minutes=10), incomplete="Work incomplete (timeout/stall)")
    kit = await start_kit(f := flow(work), hands=1)
    run = await start_run(kit, Start(f, "key", input={"targets": ["a", "b", "c"]}))
    await started_all.wait()
    began = one("SELECT started_at FROM stages")
    await move_clock(dsn, timedelta(minutes=11))
    row = await wait_for_run(kit, run.run.id, PATIENCE)
    assert (row["status"], row["selected"], row["failed"]) == ("failed", 3, 3)
    assert one("SELECT started_at, deadline_at - started_at, end_cause FROM stages") == (
        began,
        timedelta(minutes=10),
        "timeout",
    )
    reasons = {reason for (reason,) in query("SELECT reason FROM outcomes")}
    assert reasons == {"Work incomplete (timeout/stall)"}, "in hand or not"
    assert one("SELECT count(*) FROM items WHERE status = 'open'") == 0
    assert one("SELECT sum(in_flight) FROM claims") == 0


@pytest.mark.req("ENG-90", "ENG-22")
async def test_a_stall_opens_a_further_round_for_what_failed_and_may_heal(start_kit, query, one):
    async def heals_in_round_two(_: WorkContext, item: Item) -> Result:
        if item.key == "never":
            raise PermanentError("no", code="NO")
        if item.round < 2:
            raise TransientError("not yet", code="NOT_YET")
        return Done()

    work = stage(heals_in_round_two, rounds=2, retry=RetryPolicy(executions=2, base=0.001), **SHORT)
    kit = await start_kit(f := flow(work))
    row = await run_to_end(kit, f, ["later", "never"])
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 1, 1)
    assert query("SELECT key, round, executions FROM items ORDER BY key") == [("later", 2, 1), ("never", 0, 1)]
    run = row["id"]
    assert sorted(event for (event,) in query("SELECT event_id FROM attempts")) == [
        f"test-{run}-work-later",
        f"test-{run}-work-later",
        f"test-{run}-work-later-retry-1",
        f"test-{run}-work-later-retry-1",
        f"test-{run}-work-never",
    ]
    assert one("SELECT round FROM stages") == 2
    waited = one("SELECT ended_at - started_at FROM stages")
    assert waited >= 2 * 3 * work.poll, "each round waits for a stall: three polls without progress"


async def test_no_round_is_opened_for_permanent_failures(start_kit, one):
    async def refuses(_: WorkContext, item: Item) -> Result:
        raise PermanentError("no", code="NO")

    kit = await start_kit(f := flow(stage(refuses, rounds=3, **SHORT)))
    row = await run_to_end(kit, f, ["a"])
    assert (row["status"], one("SELECT round FROM stages")) == ("failed", 0)


@pytest.mark.req("ENG-06")
async def test_a_gate_needs_no_hint_the_table_is_the_truth(start_kit, dsn, one, monkeypatch):
    """Every hint is lost: the gate finds by itself, in its own time, that the work is done."""
    from ecluse.engine.lead import durable

    async def lost(*_: object) -> None:
        return None

    monkeypatch.setattr(durable, "wake", lost)
    kit = await start_kit(f := flow(stage()))
    row = await run_to_end(kit, f, keys(10))
    assert (row["status"], row["successful"]) == ("completed", 10)


async def test_early_and_doubled_hints_do_not_end_a_gate(start_kit, dsn, one):
    go_on = asyncio.Event()

    async def held(_: WorkContext, item: Item) -> Result:
        await go_on.wait()
        return Done()

    kit = await start_kit(f := flow(stage(held)))
    run = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await until(lambda: one("SELECT count(*) FROM stages") == 1)
    for _ in range(5):
        await asyncio.sleep(0.05)
        await move_clock(dsn, timedelta(0))
    assert (await wait_for_run(kit, run.run.id, timedelta(milliseconds=200)))["status"] == "running"
    go_on.set()
    assert (await wait_for_run(kit, run.run.id, PATIENCE))["status"] == "completed"


@pytest.mark.req("ENG-48")
async def test_a_restart_during_backoff_neither_loses_nor_repeats_an_attempt(start_kit, dsn, query, one):
    calls: list[int] = []

    async def fails_twice(_: WorkContext, item: Item) -> Result:
        calls.append(item.executions)
        if item.executions < 2:
            raise TransientError("busy", code="BUSY", retry_after=300)
        return Done()

    f = flow(stage(fails_twice, max_wait=timedelta(hours=1)))
    kit = await start_kit(f)
    run = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    for execution in (1, 2):
        while one("SELECT count(*) FROM attempts") < execution:
            await asyncio.sleep(0.02)
        due, executions, error = one("SELECT due_at - ecluse_now(), executions, error_code FROM items")
        assert executions == execution
        assert error == "BUSY"
        assert timedelta(minutes=4) < due <= timedelta(minutes=5)
        await kit.stop()
        await move_clock(dsn, timedelta(minutes=6))
        kit = await start_kit(f)
    row = await wait_for_run(kit, run.run.id, PATIENCE)
    assert (row["status"], calls) == ("completed", [0, 1, 2])
    assert one("SELECT executions, crashes FROM items") == (3, 0)


@pytest.mark.req("ENG-02", "ENG-04")
async def test_a_gate_s_wait_survives_a_restart_of_its_process(start_kit, dsn, query, one):
    """The wake-up is stored: a process that takes over waits for the rest of it, it does not start over."""
    go_on = asyncio.Event()

    async def held(_: WorkContext, item: Item) -> Result:
        await go_on.wait()
        return Done()

    f = flow(stage(held))
    kit = await start_kit(f)
    run = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    steps = "SELECT function_id, function_name, output FROM dbos.operation_outputs"
    while not any("sleep" in name for _, name, _ in query(steps)):
        await asyncio.sleep(0.02)
    before = query(steps)
    assert "poll-work-0" in [name for _, name, _ in before], "each look at the gate is a step of its own"
    stage_before = one("SELECT started_at, deadline_at FROM stages")
    await kit.stop(grace=0.1)
    kit = await start_kit(f)
    go_on.set()
    row = await wait_for_run(kit, run.run.id, PATIENCE)
    assert row["status"] == "completed"
    assert set(before) <= set(query(steps)), "finished steps and the stored wake-up are as they were"
    assert one("SELECT started_at, deadline_at FROM stages") == stage_before


async def test_an_item_that_outlives_its_time_limit_is_cut_off_and_tried_again(start_kit, query):
    cut_off: list[str] = []

    async def hangs_once(_: WorkContext, item: Item) -> Result:
        if item.executions == 0:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cut_off.append(item.key)
                raise
        return Done()

    kit = await start_kit(f := flow(stage(hangs_once, time_limit=timedelta(milliseconds=200))), hands=3)
    row = await run_to_end(kit, f, keys(6))
    assert (row["status"], row["successful"], sorted(cut_off)) == ("completed", 6, keys(6))
    assert query("SELECT DISTINCT error_code, error, ambiguous FROM attempts") == [
        ("TIMEOUT", "No answer within 0.2 s", True)
    ]


async def test_a_stop_lets_running_work_finish_and_gives_back_the_rest(start_kit, one):
    begun = []

    async def slow(_: WorkContext, item: Item) -> Result:
        begun.append(item.key)
        await asyncio.sleep(0.3)
        return Done()

    kit = await start_kit(f := flow(stage(slow)), hands=4)
    run = await start_run(kit, Start(f, "key", input={"targets": keys(20)}))
    while len(begun) < 4:
        await asyncio.sleep(0.02)
    await kit.stop(grace=5)
    assert one("SELECT coalesce(sum(in_flight), 0) FROM claims") == 0
    finished = one("SELECT count(*) FROM items WHERE status = 'succeeded'")
    assert finished >= 4
    assert one("SELECT count(*) FROM items WHERE claim_id IS NULL AND crashes = 0") == 20 - finished
    assert one("SELECT state FROM replicas") == "left"
    kit = await start_kit(f)
    assert (await wait_for_run(kit, run.run.id, PATIENCE))["successful"] == 20


async def test_what_waited_in_a_paused_lane_until_the_gate_gave_up_says_so(start_kit, dsn, query, one):
    kit = await start_kit(f := flow(stage(max_wait=timedelta(minutes=10))))
    query("UPDATE lanes SET paused_at = now(), paused_by = 'ann', paused_reason = 'invoice'")
    run = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await until(lambda: query("SELECT 1 FROM stages WHERE fanned_out_at IS NOT NULL"))
    await move_clock(dsn, timedelta(minutes=11))
    assert (await wait_for_run(kit, run.run.id, PATIENCE))["status"] == "failed"
    assert one("SELECT reason FROM outcomes").endswith(": lane lane was paused: invoice")
