"""Lanes made at run time, one per credential: what closes or slows one does not concern the others, and running
workers know a new one at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from ecluse.base.errors import TransientError
from ecluse.db.connect import Connection
from ecluse.engine import (
    Breaker,
    Done,
    Item,
    Lane,
    NewItem,
    Result,
    RetryPolicy,
    Run,
    Stage,
    Start,
    Work,
    WorkContext,
    pause_lane,
    put_lanes,
    resume_lane,
    retire_lanes,
    set_lane_caps,
)
from ecluse.engine.lanes.rows import put_declared, remove_unused
from ecluse.engine.work.claim import LANES_AT_ONCE, WaitingLanes
from ecluse.insight.waiting import why_run
from tests.support.engine_flows import flow, open_board, stage, until
from tests.support.rates import assert_within
from tests.support.runs import start_run

HOUR = timedelta(hours=1)
MANY = RetryPolicy(executions=50, base=0.01)


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        yield board


class Vendor:
    """Answers by credential, which is the first part of an item's key; remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.errors: dict[str, Exception] = {}
        self.hanging: set[str] = set()
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, _: WorkContext, item: Item) -> Result:
        credential = item.key.split("-")[0]
        self.calls.append((credential, time.monotonic()))
        if credential in self.hanging:
            await asyncio.sleep(3600)
        await self.open.wait()
        if credential in self.errors:
            raise self.errors[credential]
        return Done()

    @property
    def count(self) -> Counter[str]:
        return Counter(credential for credential, _ in self.calls)


class Credentials:
    """A flow whose items name the lanes of their credentials, beneath the lane `vendor`; `caps` are by credential."""

    def __init__(self, work: Work | None = None, **declared: Any) -> None:
        self.vendor = Vendor()
        self.caps: dict[str, dict[str, Any]] = {}
        one = stage(work or self.vendor, lane=Lane("vendor", **declared), retry=MANY, max_wait=HOUR)

        async def given(_: Connection, run: Run) -> list[NewItem]:
            return [NewItem(key, lane=self.lane(key.split("-")[0], run.tenant_id)) for key in run.input["targets"]]

        async def story(run) -> None:
            await run.select(given)
            await run.fan_out(one, given)
            await run.gate(one)

        self.flow = flow(one, story=story)

    def lane(self, credential: str, tenant: str = "default") -> Lane:
        return Lane(f"vendor/{credential}", tenant=tenant, **self.caps.get(credential, {}))


async def send(kit, credentials, *names: str, items: int = 20, tenant: str = "default") -> int:
    """Start a run with so many items per credential."""
    targets = [f"{name}-{n}" for name in names for n in range(items)]
    given = Start(credentials.flow, f"run-{time.monotonic()}", input={"targets": targets}, tenant_id=tenant)
    return (await start_run(kit, given)).run.id


async def do(kit, what, *arguments, **options):
    async with kit.pool.connection() as connection:
        return await what(connection, *arguments, **options)


@pytest.fixture
def done(one):
    def count(credential: str) -> int:
        return one("SELECT count(*) FROM items WHERE status = 'succeeded' AND key LIKE %s", f"{credential}-%")

    return count


# --- two lanes beneath one


@pytest.mark.req("ENG-50")
async def test_a_retry_after_holds_the_lane_of_its_credential_alone(start_kit, query, done):
    credentials = Credentials()
    credentials.vendor.errors["one"] = TransientError("429 slow down", code="THROTTLED", retry_after=600)
    kit = await start_kit(credentials.flow, hands=10)
    await send(kit, credentials, "one")
    await until(lambda: query("SELECT 1 FROM lanes WHERE held_until IS NOT NULL"))
    called = credentials.vendor.count["one"]
    await send(kit, credentials, "two", "one")
    await until(lambda: done("two") == 20)
    assert credentials.vendor.count["one"] == called <= 10
    held = query("SELECT name, base, tenant_id, held_until IS NOT NULL FROM lanes ORDER BY name")
    assert held == [
        ("vendor", "vendor", None, False),
        ("vendor/one", "vendor", "default", True),
        ("vendor/two", "vendor", "default", False),
    ]


async def test_a_breaker_opens_for_the_credential_that_fails(start_kit, query, done):
    credentials = Credentials(breaker=Breaker(failures=3, pause=timedelta(hours=1)))
    credentials.vendor.errors["one"] = TransientError("429", code="THROTTLED")
    kit = await start_kit(credentials.flow, hands=10)
    await send(kit, credentials, "one", "two")
    await until(lambda: done("two") == 20 and query("SELECT 1 FROM lanes WHERE trips > 0"))
    found = query("SELECT name, break_after, trips FROM lanes ORDER BY name")
    assert found == [("vendor", 3, 0), ("vendor/one", 3, 1), ("vendor/two", 3, 0)]
    assert done("one") == 0


@pytest.mark.alone
async def test_a_rate_and_a_cap_hold_for_their_own_lane(start_kit, done):
    credentials = Credentials()
    credentials.caps = {"one": {"per_second": 20}, "two": {"max_in_flight": 2}}
    credentials.vendor.hanging.add("two")
    kit = await start_kit(credentials.flow)
    await send(kit, credentials, "one", "two", "three", items=15)
    await until(lambda: done("one") == 15 and done("three") == 15)
    assert credentials.vendor.count["two"] == 2
    assert_within([at for name, at in credentials.vendor.calls if name == "one"], rate=20, burst=1, slack=0.05)


async def test_a_pause_of_one_lane_leaves_the_other_open(start_kit, one, done):
    credentials = Credentials()
    kit = await start_kit(credentials.flow)
    await do(kit, put_lanes, [credentials.lane("one")])
    await do(kit, pause_lane, "vendor/one", reason="night", by="op")
    await send(kit, credentials, "one", "two")
    await until(lambda: done("two") == 20)
    assert (done("one"), credentials.vendor.count["one"]) == (0, 0)
    assert one("SELECT count(*) FROM run_log WHERE message LIKE %s", "%paused%") == 0  # no run needed it at the time


async def test_a_pause_of_a_tenants_lane_holds_what_is_claimed_too_and_no_other_tenant(start_kit, board, one, done):
    credentials = Credentials()
    vendor = credentials.vendor
    kit = await start_kit(credentials.flow, hands=2)
    held = await send(kit, credentials, "acme", tenant="acme", items=20_000)
    claimed = "SELECT count(*) FROM items WHERE key LIKE 'acme-%%' AND status = 'open' AND claim_id IS NOT NULL"
    while one(claimed) <= 2:  # until items are claimed ahead of the slots
        vendor.open.set()
        await asyncio.sleep(0.1)
        vendor.open.clear()
        await asyncio.sleep(0.1)
    await do(board, pause_lane, "vendor/acme", reason="night", by="op")
    await until(lambda: one(claimed) == 2, seconds=2)
    called = vendor.count["acme"]
    vendor.open.set()
    await send(kit, credentials, "beta", tenant="beta")
    await until(lambda: done("beta") == 20)
    vendor.hanging.add("hung")
    other = await send(kit, credentials, "hung", tenant="beta", items=2000)
    await until(lambda: vendor.count["hung"] == 2)
    assert (vendor.count["acme"], one(claimed)) == (called, 0)
    assert one("SELECT max(executions) FROM items WHERE key LIKE 'acme-%%' AND status = 'open'") == 0
    ours, theirs = [await do(board, why_run, *whose) for whose in (("acme", held), ("beta", other))]
    assert [(group.cause, group.lane) for group in ours.groups] == [("paused", "vendor/acme")]
    assert "lane vendor/acme was paused by an operator: night" in ours.summary
    assert [group.cause for group in theirs.groups] == ["queued"]
    assert "acme" not in str(theirs)


# --- known to running workers


async def test_workers_of_all_replicas_call_through_a_new_lane_within_a_second(start_kit, done):
    credentials = Credentials(max_in_flight=5)
    kits = [await start_kit(credentials.flow, hands=5) for _ in range(2)]
    for name in ("one", "two", "three"):
        begun = time.monotonic()
        await send(kits[0], credentials, name)
        await until(lambda name=name: credentials.vendor.count[name])
        assert credentials.vendor.calls[-1][1] - begun < 1
    await until(lambda: done("three") == 20)


async def test_caps_that_change_at_run_time_hold_for_the_next_calls(start_kit, one, done):
    credentials = Credentials()
    credentials.caps["one"] = {"max_in_flight": 1}
    credentials.vendor.hanging.add("one")
    kit = await start_kit(credentials.flow)
    await send(kit, credentials, "one")
    await until(lambda: credentials.vendor.count["one"] == 1)
    await do(kit, put_lanes, [Lane("vendor/one", tenant="default", max_in_flight=4)])
    await until(lambda: credentials.vendor.count["one"] == 4)
    # An operator's cap stays in force; what the connection says is kept for when it is cleared.
    await do(kit, set_lane_caps, "vendor/one", {"max_in_flight": 6}, by="op")
    await do(kit, put_lanes, [Lane("vendor/one", tenant="default", max_in_flight=5)])
    await until(lambda: credentials.vendor.count["one"] == 6)
    assert one("SELECT declared_max_in_flight, max_in_flight FROM lanes WHERE name = 'vendor/one'") == (5, 6)


async def test_a_lane_of_another_base_is_left_to_the_replicas_that_have_it(start_kit, board, query):
    await board.run([NewItem("a", lane=Lane("elsewhere/one"))], one=stage(lane=Lane("elsewhere")), name="other")
    credentials = Credentials()
    kit = await start_kit(credentials.flow)
    run = await send(kit, credentials, "one")
    await until(lambda: query("SELECT 1 FROM runs WHERE id = %s AND ended_at IS NOT NULL", run))
    assert query("SELECT key FROM items WHERE claim_id IS NULL") == [("a",)]


async def test_further_calls_keep_the_rate_of_their_own_lane(start_kit, done):
    """`permit` waits for the lane of the item's credential, not for that of the stage."""

    async def twice(context: WorkContext, item: Item) -> Result:
        await context.permit(item)
        return Done()

    credentials = Credentials(twice, per_second=0.01)
    credentials.caps["one"] = {"per_second": 100}
    kit = await start_kit(credentials.flow)
    await send(kit, credentials, "one", items=5)
    await until(lambda: done("one") == 5, seconds=5)


# --- on all replicas


async def replicas_of(start_kit, hands: int = 4) -> list[Credentials]:
    """Two replicas that run before any lane is made, each with a vendor of its own."""
    both = [Credentials(), Credentials()]
    for one in both:
        await start_kit(one.flow, hands=hands)
    return both


async def dispatch(board, credentials, name: str, items: int = 20) -> None:
    """Dispatch items of a credential as another process does: the replicas only hear of it."""
    new = [NewItem(f"{name}-{n}", lane=credentials.lane(name)) for n in range(items)]
    await board.run(new, one=credentials.flow.stages[0])


def calls_of(both: list[Credentials], name: str) -> list[int]:
    return [one.vendor.count[name] for one in both]


async def test_every_running_replica_calls_through_a_lane_that_another_process_has_made(start_kit, board):
    both = await replicas_of(start_kit)
    for one in both:
        one.vendor.hanging |= {"one", "two"}
    await dispatch(board, both[0], "one", items=2)
    await until(lambda: sum(calls_of(both, "one")) == 2, seconds=2)
    await dispatch(board, both[0], "two")
    await until(lambda: [sum(one.vendor.count.values()) for one in both] == [4, 4], seconds=2)


async def test_a_lane_whose_notification_was_lost_is_read_before_its_items_are_claimed(start_kit, board, query, done):
    """The share of a tenant is per base, which the replica must know of every item that it holds."""
    credentials = Credentials()
    kit = await start_kit(credentials.flow, tenant_share=0.75)
    for name in ("one", "two"):
        query("INSERT INTO lanes (name, tenant_id, declared_burst) VALUES (%s, 'default', 1)", f"vendor/{name}")
        await dispatch(board, credentials, name)
        await until(lambda name=name: done(name) == 20, seconds=4)
    assert not kit.broken.is_set()


async def only_the_other_goes_on(both, board, done):
    """See that calls are made through the lane "two" and none through "one". Return the calls through "one"."""
    await asyncio.sleep(0.5)
    seen = calls_of(both, "one")
    await dispatch(board, both[0], "two")
    await until(lambda: done("two") == 20)
    await asyncio.sleep(0.5)
    assert calls_of(both, "one") == seen
    return seen


async def test_a_pause_of_a_made_lane_holds_all_replicas_and_a_resume_opens_it_on_all(start_kit, board, done):
    both = await replicas_of(start_kit)
    both[0].caps["one"] = {"per_second": 50}
    await dispatch(board, both[0], "one", items=600)
    await until(lambda: min(calls_of(both, "one")) > 2)
    await do(board, pause_lane, "vendor/one", reason="night", by="op")
    seen = await only_the_other_goes_on(both, board, done)
    await do(board, resume_lane, "vendor/one", reason="day", by="op")
    await until(lambda: all(now > before for now, before in zip(calls_of(both, "one"), seen, strict=True)), seconds=3)


async def test_a_retry_after_that_one_replica_hears_holds_a_made_lane_on_all(start_kit, board, query, done):
    both = await replicas_of(start_kit)
    both[0].caps["one"] = {"per_second": 50}
    await dispatch(board, both[0], "one", items=600)
    await until(lambda: min(calls_of(both, "one")) > 2)
    both[0].vendor.errors["one"] = TransientError("429 slow down", code="THROTTLED", retry_after=600)
    await until(lambda: query("SELECT 1 FROM lanes WHERE name = 'vendor/one' AND held_until > ecluse_now()"))
    await only_the_other_goes_on(both, board, done)


async def test_a_changed_cap_of_a_made_lane_holds_over_all_replicas(start_kit, board):
    both = await replicas_of(start_kit, hands=10)
    for one in both:
        one.vendor.hanging.add("one")
    await do(board, put_lanes, [both[0].lane("one")])
    await do(board, set_lane_caps, "vendor/one", {"max_in_flight": 3}, by="op")
    await dispatch(board, both[0], "one")
    for cap in (3, 7, 12):
        await do(board, set_lane_caps, "vendor/one", {"max_in_flight": cap}, by="op")
        await until(lambda cap=cap: sum(calls_of(both, "one")) == cap, seconds=2)
    await asyncio.sleep(0.3)
    assert sum(calls_of(both, "one")) == 12


# --- rows


async def test_an_item_keeps_to_lanes_beneath_its_stages_and_of_its_tenant(board):
    for lane, why in (
        (Lane("other/one"), "not beneath lane"),
        (Lane("lane"), "not beneath lane"),
        (Lane("lane/one", tenant="acme"), "another tenant"),
    ):
        with pytest.raises(ValueError, match=why):
            await board.run([NewItem("a", lane=lane)])
    with pytest.raises(ValueError, match="no slash"):
        Stage("work", Lane("a/b"), stage().work)


@pytest.mark.parametrize("tenant", [None, "beta"])
async def test_an_item_is_not_dispatched_into_the_stored_lane_of_another_tenant(board, query, tenant):
    """Whatever owner its flow gives for the lane: the stored one counts."""
    await board.run([NewItem("a", lane=Lane("lane/key", tenant="acme", max_in_flight=2))], tenant="acme")
    before = query("SELECT to_jsonb(l) FROM lanes l ORDER BY id")
    with pytest.raises(ValueError, match="lane/key belongs to another tenant"):
        await board.run([NewItem("b", lane=Lane("lane/key", tenant=tenant, max_in_flight=9))], tenant="beta")
    assert query("SELECT to_jsonb(l) FROM lanes l ORDER BY id") == before
    assert query("SELECT tenant_id, key FROM items") == [("acme", "a")]


@pytest.mark.parametrize("capped", [True, False])
async def test_a_claim_from_a_lane_takes_the_items_of_this_lane_alone(board, query, capped):
    """Not those of the same tenant in another lane, nor those of another tenant in its own."""
    for tenant, name in (("acme", "one"), ("acme", "two"), ("beta", "three")):
        await board.run(
            [NewItem(f"{name}-{n}", lane=Lane(f"lane/{name}", tenant=tenant)) for n in range(3)], tenant=tenant
        )
    ids = dict(query("SELECT name, id FROM lanes"))
    for name in ("one", "three", "two"):
        lane = ids[f"lane/{name}"]
        taken = await (board.claim(lane) if capped else board.claim(free=[lane]))
        assert sorted(one.item.key for one in taken) == [f"{name}-{n}" for n in range(3)]


async def test_a_replay_of_a_dispatch_finds_lanes_and_items_as_they_are(board, query):
    new = [NewItem(f"a-{n}", lane=Lane(f"lane/{n % 3}", max_in_flight=2)) for n in range(9)]
    async with board.pool.connection() as connection:
        await put_declared(connection, [stage(lane=Lane("lane", breaker=Breaker(failures=7)))])
    await board.run(new)
    before = query("SELECT id, name, max_in_flight, break_after FROM lanes ORDER BY id")
    await board.run(new)
    assert query("SELECT id, name, max_in_flight, break_after FROM lanes ORDER BY id") == before
    assert [row[1:] for row in before] == [("lane", None, 7), *((f"lane/{n}", 2, 7) for n in range(3))]
    assert query("SELECT l.name, count(*) FROM items i JOIN lanes l ON l.id = i.lane_id GROUP BY 1 ORDER BY 1") == [
        (f"lane/{n}", 6) for n in range(3)
    ]


async def test_lanes_that_many_transactions_make_at_once_are_made_once(board, query):
    wanted = [Lane(f"lane/{n}", max_in_flight=n + 1) for n in range(20)]

    async def make(lanes: list[Lane]) -> dict[str, int]:
        async with board.pool.connection() as connection, connection.transaction():
            return await put_lanes(connection, lanes)

    found = await asyncio.gather(*(make(wanted if n % 2 else wanted[::-1]) for n in range(8)))
    assert all(ids == found[0] for ids in found)
    assert query("SELECT count(*), count(DISTINCT name) FROM lanes") == [(20, 20)]


async def test_what_lanes_have_of_their_base_follows_it(board, query):
    async with board.pool.connection() as connection:
        await put_lanes(connection, [Lane("lane/one", burst=4)])  # before any worker has declared the base
        await put_declared(connection, [stage(lane=Lane("lane", breaker=Breaker(failures=7)), weight=3)])
    assert query("SELECT break_after, heaviest, burst FROM lanes WHERE name = 'lane/one'") == [(7, 3, 2)]


async def test_a_retired_lane_is_removed_when_no_item_points_at_it(board, query):
    lanes = [Lane(f"lane/{name}") for name in ("waits", "done", "unused", "wanted")]
    await board.run([NewItem("a", lane=lanes[0]), NewItem("b", lane=lanes[1])])
    async with board.pool.connection() as connection:
        ids = await put_lanes(connection, lanes)
        await retire_lanes(connection, ["lane", *ids])
        await put_lanes(connection, [lanes[3]])
    await board.finish(await board.claim(ids["lane/done"]))
    assert await remove_unused(board.pool) == []  # it may be about to be used
    assert await remove_unused(board.pool, timedelta(0)) == ["lane/unused"]
    assert query("SELECT name FROM lanes ORDER BY 1") == [("lane",), ("lane/done",), ("lane/waits",), ("lane/wanted",)]


# --- many lanes


async def test_a_claim_looks_at_a_bounded_number_of_lanes_and_each_has_its_turn(board, query):
    await board.run([NewItem(str(n), lane=Lane(f"lane/{n:03d}")) for n in range(37)])
    query("UPDATE lanes SET paused_at = ecluse_now(), paused_reason = 'x' WHERE name = 'lane/007'")
    ((open_lanes,),) = query("SELECT array_agg(id ORDER BY id) FROM lanes WHERE name <> base AND paused_at IS NULL")
    waiting, elsewhere = WaitingLanes(["lane"]), WaitingLanes(["else"])
    async with board.pool.connection() as connection:
        first = [await anext(waiting.windows(connection)) for _ in range(4)]
        assert [LANES_AT_ONCE - len(window.uncapped) for window in first] == [1, 0, 1, 0]
        assert not any(window.is_all or window.capped for window in first)
        everything = [window async for window in waiting.windows(connection)]
        assert sorted(lane for window in everything for lane in window.uncapped) == open_lanes
        assert [window.uncapped async for window in elsewhere.windows(connection)] == [[]] * 3


async def test_an_item_is_found_behind_a_thousand_lanes_in_which_nothing_is_due(start_kit, board, query):
    credentials = Credentials()
    far = [NewItem(f"far-{n}", lane=Lane(f"vendor/far-{n}")) for n in range(1000)]
    await board.run(far, one=credentials.flow.stages[0], delay=3600)
    kit = await start_kit(credentials.flow)
    await send(kit, credentials, "near", items=1)
    begun = time.monotonic()
    await until(lambda: credentials.vendor.count["near"], seconds=5)
    assert time.monotonic() - begun < 2


async def test_the_lanes_that_a_search_has_found_serve_several_claims(start_kit, board, one, monkeypatch):
    searches: list[int] = []
    scan = WaitingLanes._scan

    async def counted(self, connection, after, most):
        searches.append(after)
        return await scan(self, connection, after, most)

    monkeypatch.setattr(WaitingLanes, "_scan", counted)
    credentials = Credentials()
    busy = [NewItem(str(n), lane=Lane("vendor/busy")) for n in range(20_000)]
    await board.run(busy, one=credentials.flow.stages[0])
    async with board.pool.connection() as connection:
        await put_lanes(connection, [Lane(f"vendor/idle-{n}") for n in range(2 * LANES_AT_ONCE)])
    await start_kit(credentials.flow)
    await until(lambda: one("SELECT count(*) FROM items WHERE status = 'succeeded'") == 20_000, seconds=20)
    assert len(searches) < one("SELECT count(*) FROM claims")
