"""Lanes that close: for the patience a vendor asked for, by a breaker, by an operator; on all replicas, at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import psycopg
import pytest

from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound, TransientError
from ecluse.db.query import fetch_value
from ecluse.engine import Breaker, Done, Item, Lane, Result, RetryPolicy, Start, WorkContext, pause_lane, resume_lane
from ecluse.engine.lanes.registry import Lanes
from ecluse.engine.model.breaker import TRIGGERED
from ecluse.engine.work.worker_slots import WorkerSlots
from tests.support.engine_flows import PATIENCE, flow, keys, open_board, run_to_end, stage, until
from tests.support.rates import assert_within
from tests.support.runs import start_run, wait_for_run

HOUR = timedelta(hours=1)
MANY = RetryPolicy(executions=50, base=0.01)


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


class Vendor:
    """Answers as its script says, call by call, and well after that; remembers every call."""

    def __init__(self, *script: Exception | None) -> None:
        self.script = list(script)
        self.calls: list[tuple[str, float]] = []
        self.gate: asyncio.Event | None = None

    async def __call__(self, _: WorkContext, item: Item) -> Result:
        self.calls.append((item.key, time.monotonic()))
        answer = self.script.pop(0) if self.script else None
        if self.gate is not None:
            await self.gate.wait()
        if answer is not None:
            raise answer
        return Done()


def throttled(retry_after: float | None = None) -> TransientError:
    return TransientError("429 slow down", code="THROTTLED", retry_after=retry_after, ambiguous=False)


async def say(kit, what, *arguments, **options):
    async with kit.pool.connection() as connection:
        return await what(connection, *arguments, **options)


# --- weights, priorities


@pytest.mark.req("ENG-50")
async def test_a_heavy_call_takes_its_permits_together(board):
    lane = await board.lane(per_second=1000)
    await board.run(["light-1"], delay=-3)
    await board.run(["heavy-1", "heavy-2"], delay=-2, one=stage(name="heavy"))
    await board.run(["light-2"], delay=-1)
    taken = sorted(await board.claim(lane, room=10), key=lambda one: one.start_at)
    assert [one.item.key for one in taken] == ["light-1", "heavy-1", "heavy-2", "light-2"]
    gaps = [(b.start_at - a.start_at).total_seconds() * 980 for a, b in pairwise(taken)]
    assert gaps == pytest.approx([1, 3, 3], abs=0.01)


async def test_a_heavy_call_is_not_passed_over_for_a_lighter_one_behind_it(board):
    lane = await board.lane(per_second=10)
    await board.run(["heavy-1", "heavy-2"], one=stage(name="heavy"))
    await board.run(100)
    assert [one.item.key for one in await board.claim(lane, room=10)] == ["heavy-1"]


@pytest.mark.alone
@pytest.mark.req("ENG-50")
async def test_further_calls_of_an_item_keep_the_lanes_rate_with_the_first_ones(start_kit):
    calls: list[float] = []

    async def twice(context: WorkContext, item: Item) -> Result:
        calls.append(time.monotonic())
        await context.permit(item)
        calls.append(time.monotonic())
        return Done()

    f = flow(stage(twice, lane=Lane("paced", per_second=50)))
    kits = [await start_kit(f) for _ in range(2)]
    assert (await run_to_end(kits[0], f, keys(30)))["successful"] == 30
    assert len(calls) == 60
    assert_within(calls, rate=50, burst=1, slack=0.05)


async def test_a_head_start_is_an_hour_and_whoever_has_waited_longer_still_goes_first(board, query):
    lane = await board.lane()
    await board.run([f"low-{n}" for n in range(1000)], priority="low")
    await board.run(["normal"])
    await board.run(["high"], priority="high")
    query("UPDATE items SET order_at = order_at - interval '3 hours' WHERE key = 'low-7'")
    order = [one.item.key for _ in range(4) for one in await board.claim(lane, room=1)]
    assert order == ["low-7", "high", "normal", "low-0"]
    assert query("SELECT DISTINCT due_at <= ecluse_now() FROM items") == [(True,)]


async def test_a_retry_keeps_its_place_in_line(start_kit, one):
    kit = await start_kit(f := flow(stage(Vendor(TransientError("500"), None))))
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    place = await until(lambda: one("SELECT max(order_at) FROM items"))
    await wait_for_run(kit, started.run.id, PATIENCE)
    assert one("SELECT order_at, executions FROM items") == (place, 2)


# --- patience a vendor asks for


@pytest.mark.alone
@pytest.mark.req("ENG-42", "ENG-50")
async def test_a_retry_after_holds_the_whole_lane_on_all_replicas_and_counts_once(start_kit, query, one):
    asked: list[float] = []
    calls: list[float] = []

    async def work(_: WorkContext, item: Item) -> Result:
        calls.append(time.monotonic())
        if item.key == "t00003" and not item.executions:
            await asyncio.sleep(0.1)
            asked.append(time.monotonic())
            raise throttled(1.5)
        await asyncio.sleep(0.02)
        return Done()

    f = flow(stage(work, lane=Lane("vendor", per_second=50)))
    kits = [await start_kit(f, hands=5) for _ in range(2)]
    row = await run_to_end(kits[0], f, keys(60))
    assert (row["status"], row["successful"]) == ("completed", 60)
    (begun,) = asked
    # What another replica had begun, or began before it heard of it, is under way.
    assert [round(at - begun, 2) for at in calls if begun + 0.4 < at < begun + 1.45] == []
    assert sum(at > begun + 1.45 for at in calls) > 10
    assert query("SELECT key, executions FROM items WHERE executions <> 1") == [("t00003", 2)]
    assert query("SELECT error_code, count(*) FROM attempts GROUP BY 1") == [("THROTTLED", 1)]
    assert one("SELECT held_reason FROM lanes") == "Retry-After: 429 slow down"


async def test_what_was_in_hand_and_not_started_is_given_back_with_its_place_and_nothing_counted(start_kit, query):
    vendor = Vendor(throttled(600))
    kit = await start_kit(f := flow(stage(vendor)), hands=1)
    await start_run(kit, Start(f, "key", input={"targets": keys(50)}))
    await until(lambda: query("SELECT count(*) FROM items WHERE claim_id IS NULL") == [(50,)] and vendor.calls)
    rows = query("SELECT executions, crashes, count(*) FROM items GROUP BY 1, 2 ORDER BY 1")
    assert rows == [(0, 0, 49), (1, 0, 1)]
    assert query("SELECT sum(in_flight) FROM claims") == [(0,)]
    assert query("SELECT count(DISTINCT order_at), bool_and(order_at <= ecluse_now()) FROM items") == [(1, True)]
    assert len(vendor.calls) == 1


@pytest.mark.alone
async def test_when_the_patience_is_over_work_goes_on_without_waiting_for_a_poll(start_kit):
    vendor = Vendor(throttled(2.5))
    kit = await start_kit(f := flow(stage(vendor, lane=Lane("vendor", max_in_flight=1))), hands=1)
    assert (await run_to_end(kit, f, keys(2)))["successful"] == 2
    waited = vendor.calls[1][1] - vendor.calls[0][1]
    assert 2.4 < waited < 3.4


async def test_a_lane_that_is_held_does_not_delay_another(start_kit, query):
    first, second = Vendor(throttled(600)), Vendor()
    kit = await start_kit(
        one := flow(stage(first, lane=Lane("held")), "one"),
        two := flow(stage(second, lane=Lane("open")), "two"),
        hands=4,
    )
    await start_run(kit, Start(one, "one", input={"targets": keys(200)}))
    await until(lambda: query("SELECT 1 FROM lanes WHERE held_until > ecluse_now()"))
    assert (await run_to_end(kit, two, keys(200), "two"))["successful"] == 200


async def test_a_replica_that_starts_later_knows_of_the_hold(start_kit, query):
    vendor = Vendor(throttled(600))
    kit = await start_kit(f := flow(stage(vendor)), hands=1)
    await start_run(kit, Start(f, "key", input={"targets": keys(5)}))
    await until(lambda: query("SELECT 1 FROM lanes WHERE held_until > ecluse_now()"))
    await start_kit(f)
    await asyncio.sleep(1.2)  # longer than a poll
    assert len(vendor.calls) == 1


# --- the breaker


def broken(query) -> bool:
    return bool(query("SELECT 1 FROM lanes WHERE starts_with(held_reason, %s)", TRIGGERED))


async def test_a_sixth_failure_in_a_row_pauses_the_lane_then_one_call_goes_first(start_kit, query, one):
    breaker = Breaker(pause=timedelta(seconds=1))
    vendor = Vendor(*[throttled()] * 7)
    f = flow(stage(vendor, lane=Lane("vendor", max_in_flight=1, breaker=breaker), retry=MANY))
    kit = await start_kit(f, hands=20)
    started = await start_run(kit, Start(f, "key", input={"targets": keys(20)}))
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["successful"] == 20
    # six, a pause, a failed probe, a pause, one that goes well, and the rest
    gaps = [b - a for (_, a), (_, b) in pairwise(vendor.calls)]
    assert min(gaps[5:7]) > 0.9
    assert one("SELECT failures FROM lanes") == 0
    said = query("SELECT level, message FROM run_log WHERE data ->> 'lane' = 'vendor' ORDER BY id")
    assert said[0] == ("error", f"{TRIGGERED}: more than 5 times in a row 429 slow down; closed for 1 s")
    assert [(level, message[:-1]) for level, message in said[1:]] == [
        ("info", "Lane vendor: the vendor answers again after 0:00:0")
    ]
    assert query("SELECT count(*) FROM attempts WHERE outage IS NULL") == [(7,)], "a 429 uses up an attempt"


@pytest.mark.parametrize("codes", [("THROTTLED",), ("VENDOR_ERROR_503",)], ids=["throttled", "down"])
async def test_a_run_is_not_told_what_the_vendor_answered_to_another_tenant(start_kit, query, codes):
    async def refuse(_: WorkContext, item: Item) -> Result:
        raise TransientError(f"no: fiche of {item.tenant_id}", code=codes[0], ambiguous=False)

    breaker = Breaker(failures=3, pause=HOUR, codes=frozenset(codes))
    f = flow(stage(refuse, lane=Lane("vendor", max_in_flight=1, breaker=breaker), retry=MANY))
    kit = await start_kit(f)
    for tenant in ("acme", "beta"):
        await start_run(kit, Start(f, tenant, tenant_id=tenant, input={"targets": keys(30)}))
    said = (
        "SELECT r.tenant_id, l.level, l.message FROM run_log l JOIN runs r ON r.id = l.run_id"
        " WHERE l.data ->> 'lane' = 'vendor' ORDER BY 1"
    )
    (_, level, first), (_, _, second) = await until(lambda: query(said) if len(query(said)) == 2 else None)
    assert level == "error"
    assert first.startswith(TRIGGERED)
    assert second.startswith(TRIGGERED)
    assert ("fiche of acme" in first, "fiche of beta" in second) in ((True, False), (False, True))
    assert "fiche of beta" not in first
    assert "fiche of acme" not in second


async def test_any_other_answer_ends_the_row(start_kit, query):
    fails = Vendor(*[throttled()] * 5, None, *[throttled()] * 5, TransientError("500"), *[throttled()] * 500)
    f = flow(stage(fails, lane=Lane("vendor", max_in_flight=1, breaker=Breaker(pause=HOUR)), retry=MANY))
    kit = await start_kit(f)
    await start_run(kit, Start(f, "key", input={"targets": keys(40)}))
    await until(lambda: broken(query), 20)
    await asyncio.sleep(0.3)
    assert len(fails.calls) == 5 + 1 + 5 + 1 + 6


async def test_failures_count_over_all_replicas(start_kit, query):
    """Each hands its item to the other one: what it found out must be known there."""
    fails = Vendor(*[throttled()] * 500)
    f = flow(stage(fails, lane=Lane("vendor", max_in_flight=1, breaker=Breaker(failures=20, pause=HOUR)), retry=MANY))
    kits = [await start_kit(f, hands=1) for _ in range(3)]
    await start_run(kits[0], Start(f, "key", input={"targets": keys(40)}))
    await until(lambda: broken(query), 20)
    await asyncio.sleep(0.3)
    assert len(fails.calls) == 21


async def heard(board, breaker):
    """Lanes of a process that has one item of theirs in hand."""
    lanes = Lanes(board.pool, [flow(stage(lane=Lane("vendor", per_second=10 / 60, breaker=breaker)))], Clock())
    await lanes.put()
    await board.run(["a"], lane="vendor")
    async with board.pool.connection() as connection:
        lane = await fetch_value(connection, "SELECT id FROM lanes")
    (taken,) = await board.claim(lane)
    return lanes, taken


async def test_a_lane_whose_vendor_asks_for_more_patience_than_its_breaker_is_not_broken_again(board, query):
    """By what was under way together with the call that broke it."""
    lanes, taken = await heard(board, Breaker(pause=timedelta(seconds=1)))
    for _ in range(2):
        for _ in range(6):
            lanes.record_result(taken, throttled(600))
        await lanes.write_results(board.pool)
    found = query("SELECT failures, trips, held_until > ecluse_now() + interval '5 minutes' FROM lanes")
    assert found == [(5, 1, True)]


async def test_the_next_permit_is_expected_when_the_database_will_give_it(board, one):
    lanes, taken = await heard(board, None)
    assert lanes.spacing(taken.item) == pytest.approx(float(one("SELECT extract(epoch FROM spacing) FROM lanes")))


class Deaf:
    """A pool whose connections are lost after all was done on them."""

    def __init__(self, pool):
        self.pool = pool

    @asynccontextmanager
    async def connection(self):
        async with self.pool.connection() as connection:
            yield connection
        raise psycopg.OperationalError("server closed the connection unexpectedly")


async def test_a_count_whose_answer_was_lost_is_not_made_again(board, one):
    lanes, taken = await heard(board, Breaker())
    lanes.record_result(taken, throttled(600))
    with pytest.raises(psycopg.OperationalError):
        await lanes.write_results(Deaf(board.pool))
    assert one("SELECT failures FROM lanes") == 1
    await lanes.write_results(board.pool)
    assert one("SELECT failures, held_until IS NOT NULL FROM lanes") == (1, True)


async def test_what_is_dropped_is_asked_about_once():
    """A lane may open in between: nobody is forgotten, and nobody both kept and given back."""
    slots, answers = WorkerSlots(1, None, None, None, None), iter([True, False, True, False])
    slots.ready.extend("ab")
    assert (slots.drop(lambda _: next(answers)), list(slots.ready)) == (["a"], ["b"])


async def test_a_healthy_lane_with_a_breaker_is_not_written_to(start_kit, one):
    f = flow(stage(lane=Lane("vendor", breaker=Breaker())))
    kit = await start_kit(f)
    before = one("SELECT xmin::text FROM lanes")
    assert (await run_to_end(kit, f, keys(300)))["successful"] == 300
    assert one("SELECT xmin::text FROM lanes") == before


# --- pause and resume


@pytest.mark.alone
async def test_a_paused_lane_starts_nothing_on_any_replica_and_goes_on_at_once(start_kit, query):
    vendor = Vendor()
    f = flow(stage(vendor, lane=Lane("vendor", per_second=100)))
    kits = [await start_kit(f) for _ in range(2)]
    started = await start_run(kits[0], Start(f, "key", input={"targets": keys(150)}))
    await until(lambda: len(vendor.calls) > 10)
    await say(kits[1], pause_lane, "vendor", reason="invoice", by="cli:ann")
    await asyncio.sleep(1)
    seen = len(vendor.calls)
    assert seen < 150
    await asyncio.sleep(0.5)
    assert len(vendor.calls) == seen
    assert query("SELECT paused_by, paused_reason FROM lanes") == [("cli:ann", "invoice")]
    begun = time.monotonic()
    assert await say(kits[0], resume_lane, "vendor", reason="paid", by="cli:ann") == []
    await until(lambda: len(vendor.calls) > seen)
    assert time.monotonic() - begun < 0.9  # not with the next poll
    row = await wait_for_run(kits[0], started.run.id, PATIENCE)
    assert (row["successful"], Counter(key for key, _ in vendor.calls).most_common(1)[0][1]) == (150, 1)
    assert query("SELECT DISTINCT executions FROM items") == [(1,)]
    assert await say(kits[0], resume_lane, "vendor", reason="again", by="cli:ann") is None


async def test_work_that_awaits_a_permit_of_a_closed_lane_is_given_back_and_begins_anew(start_kit, query):
    begun, gate = Counter(), asyncio.Event()

    async def twice(context: WorkContext, item: Item) -> Result:
        begun[item.executions] += 1
        if begun[0] == 1:
            await gate.wait()
        await context.permit(item)
        return Done()

    kit = await start_kit(f := flow(stage(twice, lane=Lane("vendor", per_second=100))))
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await until(lambda: begun)
    await say(kit, pause_lane, "vendor", reason="stop", by="test")
    await until(lambda: kit.worker._lanes.is_closed(1))
    gate.set()
    await until(lambda: query("SELECT executions FROM items WHERE claim_id IS NULL") == [(0,)])
    await say(kit, resume_lane, "vendor", reason="go", by="test")
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["successful"] == 1
    assert begun == {0: 2}


async def test_an_unknown_lane_is_named_beside_the_known_ones(start_kit):
    kit = await start_kit(flow(stage(lane=Lane("vendor"))))
    with pytest.raises(NotFound, match=r"no lane 'vndor' \(known: vendor\)"):
        await say(kit, pause_lane, "vndor", reason="x", by="test")


async def test_a_replica_starts_while_another_sleeps_in_the_middle_of_a_claim(board, dsn, query):
    """It may sleep for longer than anybody waits for a lock."""
    lane = Lane("vendor", max_in_flight=7, per_second=2.0)
    await Lanes(board.pool, [flow(stage(lane=lane))], Clock()).put()
    async with await psycopg.AsyncConnection.connect(dsn) as sleeper:
        await sleeper.execute("SELECT 1 FROM lanes FOR NO KEY UPDATE")
        await Lanes(board.pool, [flow(stage(lane=lane))], Clock()).put()
    await Lanes(board.pool, [flow(stage(lane=replace(lane, max_in_flight=8)))], Clock()).put()
    assert query("SELECT max_in_flight, per_second FROM lanes WHERE name = 'vendor'") == [(8, 2.0)]
