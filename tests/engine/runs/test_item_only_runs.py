"""Flows without a story: begun where they are inserted, one stage opening the next, many ended together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest

from ecluse.base.errors import PermanentError, TransientError
from ecluse.engine import (
    Done,
    EphemeralEvent,
    Event,
    Flow,
    Lane,
    NewItem,
    Postponed,
    Start,
    give_up,
    hold_for_runs,
    holders,
    load_runs,
    open_stage,
    select_targets,
    start_runs,
)
from tests.support.engine_flows import PATIENCE, QUICK, Targets, stage, succeed
from tests.support.runs import end_run, wait_for_run


class Chain:
    """Two stages: `first` finds the parts of a run's one subject, `second` works on each."""

    def __init__(self, second=succeed, **options):
        self.told: list[EphemeralEvent] = []
        self.runs_at_once: list[int] = []
        self.second = stage(second, name="second", **options)
        self.first = replace(
            stage(self._find, name="first"), save=self._save, opens=True, retry=replace(QUICK, executions=1)
        )
        self.flow = Flow("chain", (self.first, self.second), None, Targets, begin=self._begin, ended=self._ended)

    async def _begin(self, connection, runs):
        await open_stage(connection, self.first, [(run, [NewItem(run.event_key, target="")]) for run in runs])

    async def _find(self, _, item):
        if item.key.endswith("broken"):
            raise PermanentError("there is no such thing", code="NOT_FOUND")
        return Done({"parts": 3 if item.key != "empty" else 0})

    async def _save(self, connection, results):
        wanted = []
        by_id = {run.id: run for run in await load_runs(connection, {one.item.run_id for one in results})}
        for one in results:
            parts = [NewItem(f"{one.item.key}-{n}") for n in range(one.result["parts"])]
            wanted.append((by_id[one.item.run_id], parts))
        await open_stage(connection, self.second, wanted, select=True, chunk=2)

    async def _ended(self, connection, runs):
        self.runs_at_once.append(len(runs))
        cursor = await connection.execute(
            "SELECT id, status, error_code FROM runs WHERE id = ANY(%s)", ([run.id for run in runs],)
        )
        return [
            Event("default", f"chain-{run}:over", "chain.over", f"run:{run}", {"status": status, "code": code}, "c")
            for run, status, code in await cursor.fetchall()
        ]


async def start(kit, flow, *names, **options):
    async with kit.pool.connection() as connection:
        return await start_runs(connection, [Start(flow, name, **options) for name in names])


@pytest.fixture
def ask(dsn):
    def ask(sql, *parameters):
        with psycopg.connect(dsn, autocommit=True) as connection:
            return connection.execute(sql, parameters).fetchall()

    return ask


@pytest.mark.req("G-82", "ENG-11")
async def test_a_stage_opens_the_next_in_its_own_commit_and_the_run_ends_by_itself(start_kit, ask):
    chain = Chain()
    kit = await start_kit(chain.flow)
    started = await start(kit, chain.flow, "a", "empty", "broken")
    ends = {s.run.event_key: await wait_for_run(kit, s.run.id, PATIENCE) for s in started}
    assert (ends["a"]["status"], ends["a"]["selected"], ends["a"]["successful"]) == ("completed", 3, 3)
    assert (ends["empty"]["status"], ends["empty"]["selected"], ends["empty"]["reason"]) == (
        "completed",
        0,
        "no_targets",
    )
    broken = ends["broken"]
    assert (broken["status"], broken["end_cause"], broken["error_code"]) == ("failed", "catastrophic", "NOT_FOUND")
    assert broken["reason"] == "there is no such thing"
    events = ask("SELECT payload->>'status', payload->>'code' FROM events_outbox WHERE event_type = 'chain.over'")
    assert sorted(events, key=str) == sorted(
        [("completed", None), ("completed", None), ("failed", "NOT_FOUND")], key=str
    )
    assert ask("SELECT event_type FROM events_outbox WHERE event_key = 'broken:failed'") == [("chain/failed",)]


@pytest.mark.req("G-82")
async def test_runs_that_are_over_at_once_end_together(start_kit):
    chain = Chain()
    kit = await start_kit(chain.flow)
    started = await start(kit, chain.flow, *(f"r{n:03d}" for n in range(100)))
    for one in started:
        assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "completed"
    assert sum(chain.runs_at_once) == 100
    assert len(chain.runs_at_once) < 50


@pytest.mark.req("G-19")
async def test_many_starts_answer_in_order_and_repeat_only_what_has_ended(start_kit):
    held = asyncio.Event()

    async def wait(context, item):
        if item.key.startswith("slow"):
            await held.wait()
        return Done()

    chain = Chain(wait)
    kit = await start_kit(chain.flow)
    first = await start(kit, chain.flow, "quick", "slow", again=True)
    await wait_for_run(kit, first[0].run.id, PATIENCE)
    second = await start(kit, chain.flow, "slow", "quick", "new", again=True)
    assert [(s.run.event_key, s.deduplicated) for s in second] == [
        ("slow", True),
        ("quick-retry-1", False),
        ("new", False),
    ]
    assert second[0].run.id == first[1].run.id
    held.set()
    for one in (*first, *second):
        await wait_for_run(kit, one.run.id, PATIENCE)
    third = await start(kit, chain.flow, "quick", again=True)
    assert third[0].run.event_key == "quick-retry-2"
    await wait_for_run(kit, third[0].run.id, PATIENCE)


async def test_what_is_postponed_begins_anew_and_counts_no_execution(start_kit, ask):
    tries = []

    async def not_yet(context, item):
        tries.append(item.executions)
        if len(tries) < 4:
            return Postponed(context.now() + timedelta(milliseconds=20), "somebody else has it")
        return Done()

    chain = Chain(not_yet, retry=replace(QUICK, executions=1))
    kit = await start_kit(chain.flow)
    (one,) = await start(kit, chain.flow, "empty-but-one")
    assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "completed"
    assert len(tries) >= 4
    assert set(tries) == {0}
    assert ask("SELECT count(*) FROM attempts") == [(0,)]


@pytest.mark.req("ENG-70")
async def test_news_of_items_that_are_over_come_before_the_end_of_their_run_and_harm_nobody(start_kit):
    seen, ended = [], []

    async def news(connection, over):
        if any(one.item.key == "bad-0" for one in over):
            raise RuntimeError("nobody listens")
        seen.extend((one.item.key, one.status, one.error_code) for one in over)
        return [EphemeralEvent(one.item.tenant_id, "part.over", {"key": one.item.key}) for one in over]

    async def second(context, item):
        context.emit([EphemeralEvent(item.tenant_id, "part.begun", {"key": item.key})])
        if item.key == "a-1":
            raise PermanentError("no", code="REFUSED")
        if item.key == "a-2" and item.executions == 0:
            raise TransientError("later")
        return Done({"key": item.key})

    chain = Chain(second, news=news)
    kit = await start_kit(chain.flow, live=ended.extend)
    (one,) = await start(kit, chain.flow, "a")
    assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "partial"
    assert sorted(seen) == [("a-0", "succeeded", None), ("a-1", "failed", "REFUSED"), ("a-2", "succeeded", None)]
    names = [live.event for live in ended]
    assert names.count("part.begun") == 4  # one of them twice
    assert names.count("part.over") == 3
    (bad,) = await start(kit, chain.flow, "bad")
    assert (await wait_for_run(kit, bad.run.id, PATIENCE))["status"] == "completed"


@pytest.mark.req("G-82", "G-80")
async def test_what_was_paid_for_is_kept_although_its_run_was_ended(start_kit, ask):
    asked, answer, saved = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pay(context, item):
        await context.pay(item)
        asked.set()
        await answer.wait()
        return Done({"worth": 7})

    async def keep(connection, results):
        saved.set()

    chain = Chain(pay, save=keep, paid=True)
    kit = await start_kit(chain.flow)
    (one,) = await start(kit, chain.flow, "a")
    await asyncio.wait_for(asked.wait(), 30)
    await end_run(kit, one.run.id, "enough")
    answer.set()
    await asyncio.wait_for(saved.wait(), 30)
    assert (await wait_for_run(kit, one.run.id, PATIENCE))["failed"] == 3
    assert ask("SELECT DISTINCT outcome, error_code FROM outcomes WHERE run_id = %s", one.run.id) == [
        ("failed", "CANCELLED")
    ]


@pytest.mark.req("G-80")
async def test_a_repetition_that_may_have_been_paid_for_is_noted(start_kit, ask):
    async def unsure(context, item):
        if item.executions == 0:
            raise TransientError("no answer", code="TIMEOUT")
        return Done()

    chain = Chain(unsure, paid=True)
    kit = await start_kit(chain.flow)
    (one,) = await start(kit, chain.flow, "a")
    assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "completed"
    assert ask("SELECT DISTINCT error_code, ambiguous, maybe_paid, count(*) FROM attempts GROUP BY 1, 2, 3") == [
        ("TIMEOUT", True, True, 3)
    ]


@pytest.mark.req("ENG-30", "G-81", "G-82")
async def test_runs_hold_many_leases_until_they_end_and_whoever_comes_second_is_told_by_whom(start_kit, ask):
    chain = Chain()
    kit = await start_kit(chain.flow)
    idle = Flow("idle", (stage(name="idle", lane=Lane("nobody")),), None, Targets)
    one, two = await start(kit, idle, "one", "two")
    wanted = [f"thing:{n}" for n in range(3_000)]
    async with kit.pool.connection() as connection, connection.transaction():
        held = await hold_for_runs(connection, [(one.run.id, "default", key) for key in wanted])
        assert held == {("default", key): one.run.id for key in wanted}
    async with kit.pool.connection() as connection:
        async with connection.transaction():
            keys = [("default", "thing:7"), ("default", "other"), ("elsewhere", "thing:7")]
            assert await hold_for_runs(connection, [(two.run.id, *key) for key in keys]) == {
                keys[0]: one.run.id,
                keys[1]: two.run.id,
                keys[2]: two.run.id,
            }
            both = [(one.run.id, "default", "contended"), (two.run.id, "default", "contended")]
            assert await hold_for_runs(connection, both) == {("default", "contended"): one.run.id}
        assert await holders(connection, "default", ["thing:8", "other", "free"]) == {
            "thing:8": one.run.id,
            "other": two.run.id,
        }
    kit.by_name["idle"] = idle
    await end_run(kit, one.run.id, "enough")
    async with kit.pool.connection() as connection, connection.transaction():
        held = await hold_for_runs(connection, [(two.run.id, "default", "thing:7")])
        assert held == {("default", "thing:7"): two.run.id}
    assert ask("SELECT fence, end_cause FROM leases WHERE tenant_id = 'default' AND key = 'thing:7' ORDER BY 1") == [
        (1, "run ended"),
        (2, None),
    ]


async def test_nothing_is_opened_in_a_run_that_has_ended(start_kit, ask):
    chain = Chain()
    kit = await start_kit(chain.flow)
    (one,) = await start(kit, chain.flow, "empty")
    await wait_for_run(kit, one.run.id, PATIENCE)
    async with kit.pool.connection() as connection, connection.transaction():
        await open_stage(connection, replace(chain.second, name="late"), [(one.run, [NewItem("x")])], select=True)
    assert ask("SELECT count(*) FROM items WHERE stage = 'late'") == [(0,)]


@pytest.mark.req("ENG-13")
async def test_an_item_that_cannot_be_stored_fails_alone_in_a_stage_that_a_commit_opens(start_kit, ask):
    chain = Chain()

    async def save(connection, results):
        (run,) = await load_runs(connection, {one.item.run_id for one in results})
        parts = [NewItem("good"), NewItem("bad", payload="\x00"), NewItem("x" * 1000), NewItem("good")]
        await open_stage(connection, chain.second, [(run, parts)], select=True)

    chain.first = replace(chain.first, save=save)
    chain.flow = replace(chain.flow, stages=(chain.first, chain.second))
    kit = await start_kit(chain.flow)
    (one,) = await start(kit, chain.flow, "a")
    ended = await wait_for_run(kit, one.run.id, PATIENCE)
    assert (ended["status"], ended["selected"], ended["successful"], ended["failed"]) == ("partial", 3, 1, 2)
    assert ask("SELECT status, error_code FROM items WHERE stage = 'first'") == [("succeeded", None)]
    failed = ask("SELECT error_code, permanent FROM items WHERE stage = 'second' AND status = 'failed'")
    assert failed == [("DISPATCH_FAILED", True)] * 2


async def test_what_waits_can_be_given_up_and_the_run_ends(start_kit, ask):
    chain = Chain(lane=Lane("shut", max_in_flight=1))
    kit = await start_kit(chain.flow)
    async with kit.pool.connection() as connection:
        await connection.execute(
            "UPDATE lanes SET held_until = ecluse_now() + interval '1 hour', held_reason = 'test' WHERE name = 'shut'"
        )
    (one,) = await start(kit, chain.flow, "a")
    while not ask("SELECT 1 FROM items WHERE stage = 'second'"):
        await asyncio.sleep(0.02)
    async with kit.pool.connection() as connection:
        assert await give_up(connection, [one.run.id], "second", "STALLED", "nobody came") == 3
    ended = await wait_for_run(kit, one.run.id, PATIENCE)
    assert (ended["status"], ended["failed"]) == ("failed", 3)
    assert ask("SELECT DISTINCT error_code, reason FROM outcomes") == [("STALLED", "nobody came")]


async def test_what_is_large_goes_to_its_own_table_and_work_may_look_before_it_calls(start_kit, ask):
    saved = []

    async def look(context, item):
        async with context.database() as connection:
            row = await (
                await connection.execute("SELECT event_key FROM runs WHERE id = %s", (item.run_id,))
            ).fetchone()
        return Done({"small": row[0]}, kept={"large": "x" * 10})

    async def keep(connection, results):
        saved.extend((one.result, one.kept) for one in results)

    chain = Chain(look, save=keep)
    kit = await start_kit(chain.flow)
    (one,) = await start(kit, chain.flow, "a")
    assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "completed"
    assert saved == [({"small": "a"}, {"large": "x" * 10})] * 3
    assert ask("SELECT DISTINCT result FROM items WHERE stage = 'second'") == [({"small": "a"},)]


@pytest.mark.req("G-82", "G-89")
async def test_a_target_that_went_through_a_last_stage_is_done_although_its_run_is_ended(start_kit, ask):
    """Stages may be alternatives: whoever has been through his one is done."""
    waiting = asyncio.Event()

    async def never(context, item):
        await waiting.wait()
        return Done()

    chain = Chain(never, last=True)
    other = stage(name="other", lane=Lane("other"), last=True)
    flow = replace(chain.flow, stages=(chain.first, other, chain.second))
    chain.flow = flow

    async def both(connection, results):
        (run,) = await load_runs(connection, [results[0].item.run_id])
        await select_targets(connection, {run.id: [NewItem("quick"), NewItem("slow")]})
        await open_stage(connection, other, [(run, [NewItem("quick")])])
        await open_stage(connection, chain.second, [(run, [NewItem("slow")])])

    first = replace(chain.first, save=both)
    flow = replace(flow, stages=(first, other, chain.second))
    kit = await start_kit(flow)
    (one,) = await start(kit, flow, "a")
    while not ask("SELECT 1 FROM items WHERE key = 'quick' AND status = 'succeeded'"):
        await asyncio.sleep(0.02)
    await end_run(kit, one.run.id, "enough")
    waiting.set()
    assert ask("SELECT target, outcome FROM outcomes ORDER BY 1") == [("quick", "successful"), ("slow", "failed")]


@pytest.mark.req("G-21")
async def test_a_run_whose_time_is_up_before_it_selected_has_failed(start_kit, ask):
    chain = Chain()
    lane = Lane("shut", max_in_flight=1)
    first = replace(chain.first, lane=lane, max_wait=timedelta(milliseconds=10))
    chain.first, chain.flow = first, replace(chain.flow, stages=(first, chain.second))
    kit = await start_kit(chain.flow, sweep_every=0.2)
    async with kit.pool.connection() as connection:
        await connection.execute(
            "UPDATE lanes SET held_until = ecluse_now() + interval '1 hour', held_reason = 'test' WHERE name = 'shut'"
        )
    (one,) = await start(kit, chain.flow, "a")
    ended = await wait_for_run(kit, one.run.id, PATIENCE)
    assert (ended["status"], ended["selected"], ended["end_cause"]) == ("failed", 0, "catastrophic")


async def test_a_run_with_nothing_to_do_ends_where_it_begins(start_kit, ask):
    chain = Chain()

    async def nothing(connection, runs):
        await open_stage(connection, chain.second, [(run, []) for run in runs], select=True)

    flow = replace(chain.flow, begin=nothing)
    kit = await start_kit(flow)
    (one,) = await start(kit, flow, "a")
    assert ask("SELECT status, reason FROM runs WHERE id = %s", one.run.id) == [("completed", "no_targets")]


@pytest.mark.req("G-80")
async def test_a_paid_call_that_a_stop_cuts_off_is_noted_once(start_kit, ask):
    asked = asyncio.Event()

    async def pay(context, item):
        await context.pay(item)
        asked.set()
        await asyncio.sleep(3600)

    chain = Chain(pay, paid=True)
    kit = await start_kit(chain.flow)
    await start(kit, chain.flow, "a")
    await asyncio.wait_for(asked.wait(), 30)
    while len(kit.worker.slots.executing) < 3:
        await asyncio.sleep(0.02)
    await kit.stop(grace=0.1)
    noted = ask("SELECT error_code, maybe_paid, count(*) FROM attempts GROUP BY 1, 2")
    assert noted == [("INTERRUPTED", True, 3)]
    assert ask("SELECT DISTINCT executions, status FROM items WHERE stage = 'second'") == [(0, "open")]


@pytest.mark.req("G-80")
async def test_one_crash_is_one_note_however_often_it_is_tried_afterwards(start_kit, ask):
    async def pay(context, item):
        await context.pay(item)
        if item.executions < 2:
            raise TransientError("later", ambiguous=False)
        return Done()

    chain = Chain(pay, paid=True, lane=Lane("shut", max_in_flight=3))
    kit = await start_kit(chain.flow)
    async with kit.pool.connection() as connection:
        await connection.execute(
            "UPDATE lanes SET held_until = ecluse_now() + interval '1 hour', held_reason = 'test' WHERE name = 'shut'"
        )
    (one,) = await start(kit, chain.flow, "a")
    while not ask("SELECT 1 FROM items WHERE stage = 'second'"):
        await asyncio.sleep(0.02)
    async with kit.pool.connection() as connection:
        await connection.execute("UPDATE items SET crashes = 1 WHERE stage = 'second'")
        await connection.execute("UPDATE lanes SET held_until = NULL, held_reason = NULL WHERE name = 'shut'")
        await connection.execute("SELECT pg_notify('ecluse_lanes', '')")
    assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "completed"
    assert ask("SELECT count(*) FROM attempts WHERE error_code = 'WORKER_CRASHED' AND maybe_paid") == [(3,)]
