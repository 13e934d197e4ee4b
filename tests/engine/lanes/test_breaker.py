"""A vendor that is down: nothing is sent to it but a probe, and no attempt is used up; bad items fail as ever. Pauses
are a fraction of those in the box."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import psycopg
import pytest

from ecluse.base.errors import NotSentError, TransientError
from ecluse.engine import VENDOR_DOWN, Done, Item, Lane, Result, RetryPolicy, Start, WorkContext
from ecluse.engine.model.breaker import TRIGGERED
from ecluse.insight.waiting import why
from tests.support.engine_flows import PATIENCE, Shop, flow, keys, stage, started, until
from tests.support.runs import start_run, wait_for_run

pytestmark = pytest.mark.long

QUICK = replace(
    VENDOR_DOWN,
    pause=timedelta(milliseconds=50),
    longest=timedelta(milliseconds=400),
    doubt=timedelta(seconds=20),
)
LANE = Lane("vendor", max_in_flight=200, breaker=QUICK)
THREE = RetryPolicy(executions=3, base=0.01)
LONG = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DOWN = {
    "503": lambda: TransientError("503 Service Unavailable", code="VENDOR_ERROR_503"),
    "refused": lambda: NotSentError("not sent: Connection refused"),
    "cut": lambda: TransientError("the connection was lost", code="VENDOR_DISCONNECTED"),
    "no answer": lambda: TransientError("no answer within 1 s", code="TIMEOUT"),
}


class Vendor:
    """Up or down, for everybody or for some. Calls take a while, so that many are under way together."""

    def __init__(self, *, bad: frozenset[str] = frozenset(), seconds: float = 0.01) -> None:
        self.down: str | None = None
        self.bad, self.seconds = bad, seconds
        self.calls: list[tuple[str, float, bool]] = []  # key, when, whether it was answered

    async def __call__(self, _: WorkContext, item: Item) -> Result:
        begun = time.monotonic()
        await asyncio.sleep(self.seconds)
        how = self.down or ("503" if item.key in self.bad else None)
        self.calls.append((item.key, begun, how is None))
        if how is not None:
            raise DOWN[how]()
        return Done()

    @property
    def refused(self) -> Counter[str]:
        return Counter(key for key, _, answered in self.calls if not answered)


def work(vendor, **options):
    return stage(vendor, **{"lane": LANE, "retry": THREE, "max_wait": LONG, **options})


async def ended(kit, run_id):
    return await wait_for_run(kit, run_id, PATIENCE)


def down(one) -> bool:
    return one("SELECT trips > 0 FROM lanes WHERE name = 'vendor'")


@pytest.mark.parametrize("how", DOWN)
async def test_200_calls_that_fail_together_cost_a_few_items_one_execution_and_nothing_fails(
    start_kit, query, one, how
):
    vendor = Vendor(seconds=0.3)
    vendor.down = how
    kit = await start_kit(f := flow(work(vendor)), hands=200)
    run_id = await started(kit, f, keys(300))
    await until(lambda: down(one) and one("SELECT trips FROM lanes") > 3)
    vendor.down = None
    row = await ended(kit, run_id)
    assert (row["status"], row["successful"], row["failed"]) == ("completed", 300, 0)
    used = Counter(n for (n,) in query("SELECT executions FROM items"))
    assert used[1] >= 295
    assert set(used) <= {1, 2}
    counted = "SELECT count(*), count(*) FILTER (WHERE outage) FROM attempts"
    refused = vendor.refused.total()
    assert refused > 100
    assert one(counted) == (refused, refused - used[2]), "all of them are on record"
    assert one("SELECT failures, trips, failing_since, failing, last_failure FROM lanes") == (0, 0, None, [], None)


async def test_while_it_is_down_one_call_at_a_time_probes_it_after_pauses_that_grow(start_kit, one):
    vendor = Vendor()
    vendor.down = "503"
    kit = await start_kit(f := flow(work(vendor)), hands=50)
    run_id = await started(kit, f, keys(60))
    await until(lambda: down(one))
    first = len(vendor.calls)
    await until(lambda: len(vendor.calls) >= first + 6)
    probes = vendor.calls[first - 1 :]
    gaps = [b - a for (_, a, _), (_, b, _) in pairwise(probes)]
    assert min(gaps[3:]) > 0.35, gaps
    assert max(gaps) < 2
    assert len({key for key, *_ in probes}) == len(probes), "each probe is another item: the first may be at fault"
    vendor.down = None
    assert (await ended(kit, run_id))["successful"] == 60
    answered = [begun for _, begun, was in vendor.calls if was]
    assert sum(begun < answered[0] + 0.01 for begun in answered) == 1, "the others wait for the probe's answer"


async def test_an_item_that_is_refused_while_the_others_succeed_fails_after_its_own_budget(start_kit, query):
    vendor = Vendor(bad=frozenset({"t00003"}))
    kit = await start_kit(f := flow(work(vendor, lane=replace(LANE, max_in_flight=2))), hands=10)
    row = await ended(kit, await started(kit, f, keys(100)))
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 99, 1)
    assert vendor.refused == {"t00003": 3}
    assert query("SELECT executions, error_code FROM items WHERE status = 'failed'") == [(3, "VENDOR_ERROR_503")]
    assert query("SELECT DISTINCT outage FROM attempts") == [(None,)]


@pytest.mark.parametrize("items", [1, 3])
async def test_so_few_items_outlive_an_outage_too(start_kit, query, one, items):
    vendor = Vendor()
    vendor.down = "503"
    kit = await start_kit(f := flow(work(vendor)), hands=10)
    run_id = await started(kit, f, keys(items))
    await until(lambda: down(one))
    await asyncio.sleep(0.6)
    vendor.down = None
    row = await ended(kit, run_id)
    assert (row["successful"], row["failed"]) == (items, 0)
    assert query("SELECT max(executions) FROM items") == [(3,)], "the last one of its budget was kept for the answer"


async def test_a_lone_item_that_is_always_refused_fails_when_that_has_lasted(start_kit, query):
    vendor = Vendor(bad=frozenset({"t00000"}))
    lane = replace(LANE, breaker=replace(QUICK, doubt=timedelta(seconds=2)))
    kit = await start_kit(f := flow(work(vendor, lane=lane)), hands=10)
    run_id = await started(kit, f, keys(1))
    begun = time.monotonic()
    row = await ended(kit, run_id)
    assert (row["failed"], row["outcomes"]) == (1, {"VENDOR_ERROR_503": 1})
    assert 1.9 < time.monotonic() - begun < 15
    assert query("SELECT executions FROM items") == [(3,)]


async def test_bad_items_at_the_head_of_the_line_do_not_keep_the_lane_closed(start_kit, one):
    """Eight that are always refused open the breaker; probes go on to the others. In the end nothing else is left
    to show that the vendor is up: they fail with their stage."""
    bad = frozenset(keys(8))
    some = work(Vendor(bad=bad), lane=replace(LANE, max_in_flight=8), max_wait=timedelta(seconds=5))
    kit = await start_kit(f := flow(some), hands=8)
    row = await ended(kit, await started(kit, f, keys(100)))
    assert (row["successful"], row["failed"]) == (92, 8)


async def test_an_end_without_a_call_says_nothing_of_the_vendor(start_kit, one):
    """A paid stage says when it calls: a result that was there already is no sign of the vendor."""
    calls = Counter()

    async def pays(context: WorkContext, item: Item) -> Result:
        if item.key == "known":
            return Done()
        await context.pay(item)
        calls[item.key] += 1
        raise DOWN["503"]()

    slow = replace(QUICK, pause=HOUR, longest=HOUR)
    once = RetryPolicy(executions=3, base=60)
    f = flow(work(pays, paid=True, lane=Lane("vendor", max_in_flight=1, breaker=slow), retry=once))
    kit = await start_kit(f, hands=1)
    await started(kit, f, ["a", "b", "c", "known", "d", "e", "f", "g"])
    await until(lambda: down(one))
    assert (calls.total(), one("SELECT status FROM items WHERE key = 'known'")) == (6, "succeeded")
    assert one("SELECT failures, cardinality(failing) FROM lanes") == (5, 6)


async def test_a_write_in_doubt_keeps_to_its_budget_and_one_that_was_not_sent_is_spared(start_kit, query):
    lane = Lane("vendor", max_in_flight=50, breaker=replace(QUICK, failures=1))
    unsent = [f"unsent-{n}" for n in range(5)]
    script = {"doubtful": ["500"] * 3, **{key: ["not sent"] * 2 for key in unsent}}
    shop = Shop(script)
    f = flow(shop.keyed(lane=lane, retry=replace(THREE, executions=2), max_wait=LONG))
    kit = await start_kit(f, hands=10)
    row = await ended(kit, await started(kit, f, ["doubtful", *unsent]))
    assert (row["successful"], row["failed"]) == (5, 1)
    assert shop.arrived("doubtful") == 2
    rows = query("SELECT i.key, a.outage, count(*) FROM attempts a JOIN items i ON i.id = a.item_id GROUP BY 1, 2")
    assert ("doubtful", None, 2) in rows
    assert not any(key == "doubtful" and outage for key, outage, _ in rows)
    assert sum(n for key, outage, n in rows if outage) >= 5


async def test_replicas_share_what_they_know_and_a_new_one_is_told(start_kit, query, one):
    vendor = Vendor(seconds=0.2)
    vendor.down = "refused"
    slow = Lane("vendor", max_in_flight=100, breaker=replace(QUICK, pause=HOUR, longest=HOUR))
    f = flow(work(vendor, lane=slow))
    kits = [await start_kit(f, hands=40) for _ in range(2)]
    run_id = await started(kits[0], f, keys(200))
    await until(lambda: one("SELECT count(*) FROM items WHERE claim_id IS NULL") == 200 and down(one))
    assert one("SELECT sum(executions) FROM items") <= 10, "five of each replica"
    seen = len(vendor.calls)
    await start_kit(f, hands=40)
    await asyncio.sleep(1.2)
    assert len(vendor.calls) == seen
    vendor.down = None
    query("UPDATE items SET due_at = ecluse_now()")
    query("UPDATE lanes SET held_until = ecluse_now()")
    query("SELECT pg_notify('ecluse_lanes', '')")
    assert (await ended(kits[0], run_id))["successful"] == 200


async def test_since_when_and_why_is_told_where_somebody_looks(start_kit, query, one):
    vendor = Vendor()
    kit = await start_kit(f := flow(work(vendor, lane=replace(LANE, breaker=replace(QUICK, longest=HOUR)))), hands=50)
    vendor.down = "503"
    run_id = await started(kit, f, keys(60))
    await until(lambda: down(one) and one("SELECT trips FROM lanes") > 3)
    since = one("SELECT failing_since FROM lanes")
    assert one("SELECT last_failure FROM lanes") == "503 Service Unavailable"
    async with kit.pool.connection() as connection:
        (waits,) = {(found.cause, found.detail) for found in await why(connection, "default", run_id, limit=1)}
    assert waits[0] == "breaker"
    assert waits[1].startswith(f"lane vendor: vendor down since {since:%Y-%m-%d %H:%M:%S}Z, ")
    vendor.down = None
    assert (await ended(kit, run_id))["successful"] == 60
    said = query("SELECT run_id, level, message FROM run_log WHERE data ->> 'lane' = 'vendor' ORDER BY id")
    opened, closed = said
    assert opened[:2] == (run_id, "error")
    assert opened[2].startswith(f"{TRIGGERED}: lane vendor: vendor down since {since:%Y-%m-%d %H:%M:%S}Z, next probe")
    assert closed[:2] == (run_id, "info")
    assert closed[2].startswith("Lane vendor: the vendor answers again after 0:00:")


async def test_a_run_and_those_that_wait_for_it_are_told(start_kit, query, one):
    vendor = Vendor()
    vendor.down = "503"
    idle = stage(name="idle", lane=Lane("elsewhere"))
    kit = await start_kit(f := flow(work(vendor)), parent := flow(idle, "parent"), hands=50)
    query("INSERT INTO lanes (name, paused_at, paused_reason) VALUES ('nowhere', now(), 'x')")
    query("UPDATE lanes SET paused_at = now(), paused_reason = 'x' WHERE name = 'elsewhere'")
    waiter = await started(kit, parent, ["p"], "parent")
    await until(lambda: one("SELECT count(*) FROM items") == 1)
    async with kit.pool.connection() as connection, connection.transaction():
        await connection.execute("UPDATE lanes SET paused_at = now(), paused_reason = 'x' WHERE name = 'vendor'")
    child = await started(kit, f, keys(20), "child")
    alone = await started(kit, f, keys(20), "alone")
    query("INSERT INTO run_waiters VALUES (%s, %s, 'p')", child, waiter)
    await until(lambda: one("SELECT count(*) FROM items") == 41)
    query("UPDATE lanes SET paused_at = NULL, paused_reason = NULL WHERE name = 'vendor'")
    query("SELECT pg_notify('ecluse_lanes', '')")
    await until(lambda: query("SELECT 1 FROM run_log WHERE data ->> 'lane' = 'vendor'"))
    told = query("SELECT run_id FROM run_log WHERE data ->> 'lane' = 'vendor' ORDER BY 1")
    assert told == [(waiter,), (child,), (alone,)]


async def test_no_commit_waits_until_the_runs_are_told(start_kit, dsn, query, one):
    """There may be a million items to look through."""
    vendor = Vendor()
    vendor.down = "503"
    kit = await start_kit(f := flow(work(vendor)), hands=10)
    query("UPDATE lanes SET paused_at = now(), paused_reason = 'x'")
    run_id = await started(kit, f, keys(20))
    await until(lambda: one("SELECT count(*) FROM stages WHERE fanned_out_at IS NOT NULL"))
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection, connection.transaction():
        await connection.execute("LOCK TABLE run_waiters")  # the runs that wait cannot be found
        query("UPDATE lanes SET paused_at = NULL, paused_reason = NULL")
        query("SELECT pg_notify('ecluse_lanes', '')")
        await until(lambda: query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        await until(lambda: one("SELECT count(*) FROM attempts") > 5, 1)
        assert query("SELECT 1 FROM run_log WHERE data ->> 'lane' = 'vendor'") == []
    told = "SELECT run_id FROM run_log WHERE data ->> 'lane' = 'vendor' AND level = 'error'"
    await until(lambda: query(told) == [(run_id,)])


async def test_a_stage_whose_time_is_up_fails_what_waits_and_names_the_outage(start_kit, query):
    vendor = Vendor()
    vendor.down = "503"
    kit = await start_kit(f := flow(work(vendor, max_wait=timedelta(seconds=2))), hands=50)
    row = await ended(kit, (await start_run(kit, Start(f, "key", input={"targets": keys(60)}))).run.id)
    assert (row["failed"], row["outcomes"]) == (60, {"INCOMPLETE": 60})
    reasons = [reason for (reason,) in query("SELECT reason FROM outcomes")]
    assert sum(reason.endswith("503 Service Unavailable") for reason in reasons) >= 40
