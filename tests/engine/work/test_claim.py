"""Taking work: who gets what, in which order, how much at once and how fast, over as many replicas as there are."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import psycopg
import pytest

from ecluse.engine import Done, Item, Lane, NewItem, Result, Start, WorkContext
from ecluse.engine.lanes.pause import pause
from ecluse.engine.lead.story import Story
from ecluse.engine.model.flow import Flow
from tests.support.engine_flows import (
    PATIENCE,
    Targets,
    flow,
    given_targets,
    keys,
    open_board,
    run_to_end,
    stage,
    until,
)
from tests.support.rates import assert_within
from tests.support.runs import start_run, wait_for_run

JITTER = 0.03  # of a shared, busy machine between a permit and the call; a limiter that bunches is off by more


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


def names(taken):
    return [one.item.key for one in taken]


def per_tenant(taken):
    return Counter(one.item.tenant_id for one in taken)


async def test_within_a_tenant_the_order_is_the_place_in_line_then_id(board):
    lane = await board.lane()
    await board.run(["late-1", "late-2"])
    await board.run(["early-1", "early-2"], delay=-10)
    await board.run(["middle"], delay=-5)
    order = [name for _ in range(5) for name in names(await board.claim(lane, room=1))]
    assert order == ["early-1", "early-2", "middle", "late-1", "late-2"]


async def test_nothing_is_claimed_before_it_is_due(board, query):
    lane = await board.lane()
    await board.run(["later"], delay=60)
    await board.run(["now"])
    assert names(await board.claim(lane)) == ["now"]
    query("UPDATE clock_offset SET \"offset\" = '59 seconds'")
    assert await board.claim(lane) == []
    query("UPDATE clock_offset SET \"offset\" = '61 seconds'")
    assert names(await board.claim(lane)) == ["later"]


async def test_a_tenant_with_three_items_is_served_before_a_tenant_with_a_thousand_is_done(board):
    lane = await board.lane()
    await board.run(1000, tenant="a", delay=-10)
    await board.run(3, tenant="b")
    assert per_tenant(await board.claim(free=[lane], room=20))["b"] == 3


@pytest.mark.parametrize("caps", [{}, {"max_in_flight": 1}, {"per_second": 1000}], ids=["hands", "in flight", "rate"])
async def test_tenants_take_turns_also_where_one_item_is_claimed_at_a_time(board, caps):
    lane = await board.lane(**caps)
    await board.run(40, tenant="a", delay=-10)
    await board.run(3, tenant="b")
    got = Counter()
    for _ in range(20):
        got += per_tenant(taken := await board.claim(lane, room=1))
        await board.finish(taken)
        await asyncio.sleep(0.002)
    assert got == {"a": 17, "b": 3}


async def test_more_tenants_than_hands_are_all_served_in_a_few_claims(board):
    lane = await board.lane()
    for n in range(25):
        await board.run(20, tenant=f"old-{n}", delay=-10)
    await board.run(1, tenant="new")
    got = Counter()
    for _ in range(12):
        got += per_tenant(await board.claim(lane, room=10))
    assert got["new"] == 1


async def test_lanes_share_the_free_hands(board):
    lanes = [await board.lane(name) for name in ("a", "b", "c")]
    await board.run(1000, lane="a", delay=-10)
    await board.run(1000, lane="b")
    await board.run(2, lane="c")
    taken = await board.claim(free=lanes, room=30)
    by_lane = Counter(one.item.run_id for one in taken)
    assert list(by_lane.values()) == [10, 10, 2]


async def test_a_capped_lane_does_not_starve_behind_a_lane_without_caps(board):
    free, capped = await board.lane("free"), await board.lane("capped", max_in_flight=5)
    await board.run(1000, lane="free", delay=-10)
    slow = await board.run(3, lane="capped")
    taken = [one for _ in range(3) for one in await board.claim(capped, free=[free], room=20)]
    assert sum(one.item.run_id == slow.id for one in taken) == 3


async def test_a_held_lane_gives_nothing_and_delays_no_other(board, query):
    held, other = await board.lane("held"), await board.lane("other", max_in_flight=100)
    await board.run(10, lane="held", delay=-10)
    fast = await board.run(30, lane="other")
    query("UPDATE lanes SET held_until = ecluse_now() + interval '1 hour', held_reason = 'test' WHERE name = 'held'")
    taken = await board.claim(other, free=[held], room=20)
    assert [one.item.run_id for one in taken] == [fast.id] * 20
    query("UPDATE lanes SET held_until = ecluse_now() WHERE name = 'held'")
    assert len(await board.claim(free=[held])) == 10


@pytest.mark.alone
async def test_a_run_locked_by_somebody_is_left_alone_and_nobody_waits(board, dsn):
    lane = await board.lane()
    locked = await board.run(["locked-1", "locked-2"], delay=-10)
    await board.run(["open-1", "open-2"])
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        await other.execute("SELECT 1 FROM runs WHERE id = %s FOR NO KEY UPDATE", (locked.id,))
        begun = time.monotonic()
        assert names(await board.claim(free=[lane])) == ["open-1", "open-2"]
        assert time.monotonic() - begun < 1
    assert names(await board.claim(free=[lane])) == ["locked-1", "locked-2"]


async def test_one_claim_row_per_run_and_stage_counts_its_items(board, query):
    lane = await board.lane()
    runs = [await board.run(n) for n in (2, 3, 4)]
    await board.run(5, one=stage(name="second"), name="other")
    taken = await board.claim(free=[lane], room=100)
    assert len(taken) == 14
    rows = query(
        "SELECT c.run_id, c.stage, c.taken, c.in_flight, c.replica_id, count(i.id)::int FROM claims c"
        " JOIN items i ON i.claim_id = c.id GROUP BY c.id ORDER BY c.run_id"
    )
    want = [(run.id, "work", n, n, "one", n) for run, n in zip(runs, (2, 3, 4), strict=True)]
    assert rows == [*want, (runs[-1].id + 1, "second", 5, 5, "one", 5)]
    assert {one.item.id: one.claim_id for one in taken} == dict(query("SELECT id, claim_id FROM items"))
    await board.finish(taken[:3])
    assert query("SELECT sum(taken), sum(succeeded), sum(in_flight) FROM claims") == [(14, 3, 11)]
    assert await board.claim(free=[lane]) == []


@pytest.mark.parametrize("capped", [False, True])
async def test_concurrent_claims_never_hand_out_an_item_twice_and_together_hand_out_all(board, one, capped):
    lane = await board.lane(max_in_flight=100_000 if capped else None)
    for n in range(4):
        await board.run(250, tenant=f"tenant-{n % 2}")
    got = []

    async def claimer(name):
        empty = 0
        while empty < 5:
            taken = await board.claim(*[lane] * capped, free=[lane] * (not capped), room=17, replica=name)
            got.extend(one.item.id for one in taken)
            empty = 0 if taken else empty + 1
            await asyncio.sleep(0 if taken else 0.01)

    await asyncio.gather(*(claimer(f"replica-{n}") for n in range(8)))
    assert Counter(Counter(got).values()) == {1: 1000}
    assert one("SELECT sum(taken) = 1000 AND count(DISTINCT replica_id) > 1 FROM claims")
    assert one("SELECT count(*) FROM items WHERE claim_id IS NULL") == 0


async def test_a_lane_that_has_a_cap_meanwhile_is_not_claimed_from_as_one_without(board):
    lane = await board.lane(max_in_flight=1)
    await board.run(2)
    assert await board.claim(free=[lane]) == []
    assert len(await board.claim(lane)) == 1


# --- caps over several replicas


async def stress(board, lane, count, watch, *, claimers=8, hold=0.002):
    """Replicas that claim, work for a moment and finish, until all is done. `watch` sees every start and end."""
    left = count

    async def replica(name):
        nonlocal left
        while left:
            taken = await board.claim(lane, room=7, replica=name)
            for one in taken:
                watch(one, +1)
            await asyncio.sleep(hold)
            for one in taken:
                watch(one, -1)
            await board.finish(taken)
            left -= len(taken)

    async with asyncio.timeout(20):
        await asyncio.gather(*(replica(f"replica-{n}") for n in range(claimers)))


@pytest.mark.req("ENG-14")
@pytest.mark.parametrize("cap", [1, 5])
async def test_a_lanes_cap_in_flight_holds_over_all_replicas(board, query, cap):
    lane = await board.lane(max_in_flight=cap)
    await board.run(40, tenant="a")
    await board.run(40, tenant="b")
    running, most = 0, 0

    def watch(_, change):
        nonlocal running, most
        running += change
        most = max(most, running)

    await stress(board, lane, 80, watch)
    assert most == cap
    assert query("SELECT DISTINCT status FROM items") == [("succeeded",)]


@pytest.mark.req("ENG-14")
async def test_a_cap_per_key_holds_over_all_replicas_while_other_keys_go_on(board):
    lane = await board.lane(max_per_key=1)
    items = [NewItem(f"{fiche}-{n}", group=fiche) for fiche in ("a", "b", "c") for n in range(15)]
    await board.run(items)
    await board.run([NewItem(f"a-{n}", group="a") for n in range(5)], tenant="other")
    await board.run([NewItem(f"none-{n}") for n in range(15)])
    running, together, most = Counter(), set(), Counter()

    def watch(one, change):
        fiche = one.item.key.split("-")[0]
        running[fiche] += change
        most[fiche] = max(most[fiche], running[fiche])
        together.add(frozenset(key for key, n in running.items() if n))

    await stress(board, lane, 65, watch, hold=0.02)
    assert most["a"] == most["b"] == most["c"] == 1
    assert most["none"] > 1
    assert max(len(fiches - {"none"}) for fiches in together) > 1


@pytest.mark.alone
@pytest.mark.req("ENG-14")
async def test_a_busy_key_does_not_keep_the_others_waiting(board):
    lane = await board.lane(max_per_key=1)
    await board.run([NewItem(f"a-{n}", group="a") for n in range(3000)], delay=-10)
    await board.run([NewItem(f"k-{n}", group=f"k-{n}") for n in range(10)])
    begun = time.monotonic()
    taken = [one for _ in range(2) for one in await board.claim(lane, room=20)]
    assert Counter(name.split("-")[0] for name in names(taken)) == {"a": 1, "k": 10}
    assert await board.claim(lane) == []
    assert time.monotonic() - begun < 1  # a look at each of its waiting items, not at each pair


# --- rates


def instants(taken, now):
    """When each may be called, in seconds: its permit, or at once if that is past."""
    return [max((one.start_at - now).total_seconds(), 0.0) for one in taken]


@pytest.mark.alone
@pytest.mark.req("ENG-15")
@pytest.mark.parametrize(("rate", "burst"), [(40, 1), (100, 1), (20, 5)])
async def test_a_rate_holds_over_all_replicas_in_every_window(board, rate, burst):
    lane = await board.lane(per_second=rate, burst=burst)
    await board.run(500)
    begun = datetime.now(UTC)
    permits: list[float] = []

    async def replica(name):
        while datetime.now(UTC) < begun + timedelta(seconds=0.6):
            now = datetime.now(UTC)
            taken = await board.claim(lane, room=10, replica=name)
            permits.extend((now - begun).total_seconds() + at for at in instants(taken, now))
            await asyncio.sleep(0.01)

    await asyncio.gather(*(replica(f"replica-{n}") for n in range(4)))
    # `now` was read a little before the permits were given: what was due at once counts from then on.
    assert_within(permits, rate=rate, burst=burst, slack=JITTER)
    assert len(permits) >= rate * 0.6 * 0.8 + burst - 1
    if burst == 1:
        permits.sort()
        assert all(later - sooner > 0.9 / rate for sooner, later in pairwise(permits))


@pytest.mark.req("ENG-15")
async def test_an_idle_lane_saves_up_its_burst_and_no_more(board):
    lane = await board.lane(per_second=1, burst=4)
    await board.run(100)
    first = await board.claim(lane, room=50)
    assert len(first) == 4
    assert await board.claim(lane, room=50) == []
    gaps = [(b.start_at - a.start_at).total_seconds() for a, b in pairwise(sorted(first, key=lambda t: t.start_at))]
    assert gaps == pytest.approx([1 / 0.98] * len(gaps), abs=1e-5)


@pytest.mark.req("ENG-15")
async def test_keys_with_a_rate_of_their_own_do_not_slow_each_other(board):
    """A keyed limit is a lane per key."""
    slow, fast = await board.lane("key-a", per_second=1), await board.lane("key-b", per_second=1000)
    await board.run(100, lane="key-a", delay=-10)
    other = await board.run(100, lane="key-b")
    taken = [one for _ in range(2) for one in await board.claim(slow, fast, room=60)]
    counts = Counter(one.item.run_id for one in taken)
    assert counts.pop(other.id) >= 60
    assert list(counts.values()) == [1]


async def test_deep_groups_at_the_head_do_not_make_a_claim_small(board):
    lane = await board.lane(max_per_key=1)
    await board.run([NewItem(f"{group}-{n}", group=group) for group in "abcdefg" for n in range(4)])
    assert [one.item.key for one in await board.claim(lane, room=1)] == ["a-0"]
    assert {one.item.key for one in await board.claim(lane, room=3)} == {"b-0", "c-0", "d-0"}


async def test_a_rate_holds_beside_a_cap_per_key(board):
    """What the cap per key leaves out must neither take a permit's place nor make one be given twice."""
    lane = await board.lane(per_second=100, max_per_key=1)
    await board.run([NewItem(f"a-{n}", group="a") for n in range(4)] + ["b"])
    await board.run(["c", "d", "e", "f", "g"])
    taken = [one for _ in range(3) for one in await board.claim(lane, room=5)]
    starts = sorted(one.start_at for one in taken)
    assert len(starts) >= 7
    assert min((b - a).total_seconds() for a, b in pairwise(starts)) > 0.009


@pytest.mark.req("ENG-15")
@pytest.mark.alone
async def test_the_calls_themselves_keep_the_rate_and_waiting_for_it_is_no_attempt(start_kit, query):
    calls: list[float] = []

    async def call(_: WorkContext, item: Item) -> Result:
        calls.append(time.monotonic())
        assert item.executions == 0
        return Done()

    kit = await start_kit(f := flow(stage(call, lane=Lane("paced", per_second=50, burst=5))))
    started = await start_run(kit, Start(f, "key", input={"targets": keys(60)}))
    while len(calls) < 10:
        await asyncio.sleep(0.02)
    waiting = query("SELECT DISTINCT executions, round, crashes FROM items WHERE status = 'open'")
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["successful"] == 60
    assert waiting == [(0, 0, 0)]
    assert query("SELECT DISTINCT executions FROM items") == [(1,)]
    assert query("SELECT count(*) FROM attempts") == [(0,)]
    assert_within(calls, rate=50, burst=5, slack=JITTER)
    assert max(calls) - min(calls) < 55 / 50 * 1.5


@pytest.mark.alone
async def test_a_rate_holds_at_the_call_when_hands_were_busy_with_another_lane(start_kit):
    """Permits reserved while every hand was held by a slow vendor must not all be used at once afterwards."""
    calls: list[float] = []
    release = asyncio.Event()

    async def blocked(_: WorkContext, item: Item) -> Result:
        if item.key.startswith("block"):
            await release.wait()
        return Done()

    async def call(_: WorkContext, item: Item) -> Result:
        calls.append(time.monotonic())
        return Done()

    slow = stage(blocked, name="slow", lane=Lane("free"))
    paced = stage(call, name="paced", lane=Lane("paced", per_second=25))

    async def paced_targets(connection, run):
        return [item for item in await given_targets(connection, run) if item.key.startswith("t")][:12]

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await run.fan_out(slow, given_targets)
        await run.fan_out(paced, paced_targets)
        await run.gate(slow)
        await run.gate(paced)

    kit = await start_kit(f := Flow("test", (slow, paced), story, Targets), hands=8)
    started = await start_run(kit, Start(f, "key", input={"targets": [*keys(1500), *(f"block{n}" for n in range(8))]}))
    await asyncio.sleep(1.2)
    release.set()
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["status"] == "completed"
    assert len(calls) == 12
    assert_within(calls, rate=25, burst=1, slack=0.2)  # a stall of the machine; permits used at once would be 12


# --- hands


async def test_a_worker_has_no_more_in_flight_than_it_has_hands(start_kit):
    running, most = 0, 0

    async def slow(_: WorkContext, item: Item) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return Done()

    kit = await start_kit(f := flow(stage(slow)), hands=5)
    row = await run_to_end(kit, f, keys(60))
    assert (row["status"], row["successful"]) == ("completed", 60)
    assert most == 5


async def test_work_of_a_flow_this_program_does_not_know_is_left_to_those_who_do(start_kit, dsn, query):
    """Lanes are shared between flows, and replicas of two versions run side by side during an upgrade."""
    kit = await start_kit(f := flow(stage()), hands=2)
    async with open_board(dsn) as board:
        await board.run(["x", "y", "z"], name="unknown", delay=-10)
    row = await run_to_end(kit, f, keys(5))
    assert (row["status"], row["successful"]) == ("completed", 5)
    assert query(
        "SELECT DISTINCT i.claim_id, i.status FROM items i JOIN runs r ON r.id = i.run_id AND r.flow = 'unknown'"
    ) == [(None, "open")]


LOSE_ONE = """
CREATE SEQUENCE lost;
CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.stage = 'second' AND nextval('lost') = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER lose BEFORE INSERT ON claims FOR EACH ROW EXECUTE FUNCTION lose();
"""


async def test_what_was_claimed_is_not_lost_with_the_connection(start_kit, query):
    """The connection goes between the claim of the free lanes and that of the capped ones."""
    query(LOSE_ONE)
    first, second = stage(name="first"), stage(name="second", lane=Lane("capped", max_in_flight=10))

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await run.fan_out(first, given_targets)
        await run.fan_out(second, given_targets)
        await run.gate(first)
        await run.gate(second)

    kit = await start_kit(f := Flow("test", (first, second), story, Targets))
    async with kit.pool.connection() as connection:
        for lane in ("lane", "capped"):
            await pause(connection, lane, reason="wait for both", by="test")
    started = await start_run(kit, Start(f, "key", input={"targets": keys(10)}))
    await until(lambda: query("SELECT count(*) FROM items") == [(20,)])
    query("UPDATE lanes SET paused_at = NULL, paused_by = NULL, paused_reason = NULL")
    query("NOTIFY ecluse_lanes")
    row = await wait_for_run(kit, started.run.id, timedelta(seconds=6))
    assert query("SELECT last_value > 1 FROM lost") == [(True,)]
    assert (row["status"], row["successful"]) == ("completed", 10)
