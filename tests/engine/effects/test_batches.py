"""Writes over several items in one call: one read, one send, an effect and an outcome per item."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.db.connect import Connection
from ecluse.engine import BatchWrite, Breaker, Flow, Item, Lane, NewItem, Order, RetryPolicy, Run, Stage, WorkContext
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from tests.support.engine_flows import TAKE_OVER, Targets, run_to_end, stage

QUIET = timedelta(milliseconds=300)
RETRY = RetryPolicy(executions=3, base=0.01, jitter=1.0)
FIRST = tuple(f"a{n}" for n in range(4))
Orders = Sequence[tuple[Item, Order]]


@pytest.fixture(autouse=True)
def logs():
    with capture_logs() as lines:
        yield lines


async def grouped(_: Connection, run: Run) -> Sequence[NewItem]:
    """The group of an item is the first letter of its key."""
    return [NewItem(key, payload=run.input["payload"], group=key[0]) for key in run.input["targets"]]


class Shelf:
    """A vendor that reads and sets many prices in one call. The n-th write goes as the n-th word of its script says:
    which of its items are applied, and whether the answer arrives."""

    def __init__(self, *script: str, refused: Sequence[str] = (), **prices: str) -> None:
        self.script = list(script)
        self.refused = refused
        self.prices = prices
        self.reads: list[tuple[str, ...]] = []
        self.writes: list[tuple[str, ...]] = []
        self.applied: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.seen: list[Any] = []
        self.dsn: str | None = None

    def write(self, most: int = 10, **options: Any) -> BatchWrite:
        return BatchWrite(wanted=_wanted, read=self._read, send=self._send, quiet=QUIET, most=most, **options)

    async def _read(self, _: WorkContext, items: Sequence[Item]) -> Mapping[str, Any]:
        self.reads.append(tuple(item.key for item in items))
        return {item.key: {"price": self.prices.get(item.key, "1.00")} for item in items}

    async def _send(self, _: WorkContext, orders: Orders) -> Mapping[str, Any] | None:
        goes = self.script.pop(0) if self.script else "well"
        self.writes.append(tuple(item.key for item, _ in orders))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0.03)
            return await self._handle(goes, orders)
        finally:
            self.at_once -= 1

    async def _handle(self, goes: str, orders: Orders) -> Mapping[str, Any] | None:
        if self.dsn is not None:
            async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
                cursor = await connection.execute("SELECT key, state, sends FROM effects ORDER BY key")
                self.seen.append(await cursor.fetchall())
        if "throttled" in goes:
            raise TransientError("429", code="THROTTLED", ambiguous=False)
        taken = orders[: len(orders) // 2] if "half" in goes else () if "none" in goes else orders
        for item, order in taken:
            if item.key not in self.refused:
                self.prices[item.key] = order.wanted["price"]
                self.applied[item.key] += 1
        if "500" in goes:
            raise TransientError("500", code="VENDOR_ERROR_500")
        if "hangs" in goes:
            await asyncio.sleep(60)
        if "accepted" in goes:
            return None
        refusal: VendorError = PermanentError("price is too long", code="USER_ERROR")
        answers = {item.key: refusal if item.key in self.refused else order.wanted for item, order in orders}
        return dict(list(answers.items())[1:]) if "names no first" in goes else answers


def _wanted(item: Item) -> Any:
    return {"price": "2.00"}


def flow_of(write: BatchWrite, lane: Lane | None = None, **options: Any) -> Flow:
    lane = lane or Lane("shelf", max_per_key=1)
    given = {"retry": RETRY, "time_limit": timedelta(seconds=1), "poll": timedelta(milliseconds=100)}
    one: Stage = replace(stage(lane=lane, **{**given, **options}), work=write)

    async def story(run: Story) -> None:
        await run.select(grouped)
        await run.fan_out(one, grouped)
        await run.gate(one)

    return Flow("test", (one,), story, Targets)


@pytest.fixture
def outcomes(query):
    def ask() -> dict[str, Any]:
        return dict(query("SELECT target, error_code FROM outcomes"))

    return ask


async def test_items_of_a_group_that_wait_together_are_read_and_sent_together(start_kit, query, dsn):
    """Each intent is on record before the call, and each item has its own effect."""
    shelf = Shelf()
    shelf.dsn = dsn
    kit: Kit = await start_kit(f := flow_of(shelf.write(3)))
    run = await run_to_end(kit, f, [*FIRST, "b0"])
    assert (run["status"], run["successful"]) == ("completed", 5)
    assert sorted(shelf.writes) == sorted(shelf.reads) == [("a0", "a1", "a2"), ("a3",), ("b0",)]
    for keys, seen in zip(shelf.writes, shelf.seen, strict=True):
        assert {(key, "sending", 1) for key in keys} <= set(seen)
    assert query("SELECT key, state, sends FROM effects ORDER BY key") == [(k, "applied", 1) for k in [*FIRST, "b0"]]
    assert query("SELECT DISTINCT executions FROM items") == [(1,)]


@pytest.mark.parametrize(
    ("goes", "again"),
    [("half, 500", ("a2", "a3")), ("none, 500", FIRST), ("all, 500", None), ("half, hangs", ("a2", "a3"))],
)
async def test_after_an_answer_that_is_lost_all_are_read_back_together_and_what_is_missing_is_sent(
    start_kit, query, goes, again
):
    shelf = Shelf(goes)
    kit = await start_kit(f := flow_of(shelf.write()))
    assert (await run_to_end(kit, f, FIRST))["status"] == "completed"
    assert shelf.reads == [FIRST, FIRST], "read back in one call, whatever the jitter of a retry"
    assert shelf.writes == [FIRST] + ([again] if again else [])
    assert shelf.applied == dict.fromkeys(FIRST, 1)
    assert query("SELECT DISTINCT state FROM effects") == [("applied",)]
    assert query("SELECT DISTINCT executions FROM items") == [(2,)]


async def test_what_the_vendor_refuses_alone_fails_alone(start_kit, query, outcomes):
    shelf = Shelf(refused=["a1"])
    kit = await start_kit(f := flow_of(shelf.write()))
    assert (await run_to_end(kit, f, FIRST))["status"] == "partial"
    assert outcomes() == {"a0": None, "a1": "USER_ERROR", "a2": None, "a3": None}
    assert shelf.writes == [FIRST], "a definite refusal is not repeated"
    assert dict(query("SELECT key, state FROM effects"))["a1"] == "rejected"


async def test_an_item_that_the_answer_does_not_name_is_in_doubt(start_kit, query):
    shelf = Shelf("names no first")
    kit = await start_kit(f := flow_of(shelf.write()))
    assert (await run_to_end(kit, f, FIRST))["status"] == "completed"
    assert shelf.reads == [FIRST, ("a0",)]
    assert shelf.writes == [FIRST], "it was read back, and was there"


async def test_an_answer_without_items_accepts_all(start_kit, query):
    shelf = Shelf("accepted")
    kit = await start_kit(f := flow_of(shelf.write()))
    assert (await run_to_end(kit, f, FIRST))["status"] == "completed"
    assert shelf.reads == shelf.writes == [FIRST]


async def test_what_is_neither_as_expected_nor_as_wanted_fails_and_is_not_sent(start_kit, query, outcomes):
    shelf = Shelf(a1="9.99", a2="2.00")
    write = shelf.write(expected=lambda _: {"price": "1.00"}, conflict="PRICE_CONFLICT")
    kit = await start_kit(f := flow_of(write))
    await run_to_end(kit, f, FIRST)
    assert outcomes() == {"a0": None, "a1": "PRICE_CONFLICT", "a2": None, "a3": None}
    assert shelf.writes == [("a0", "a3")], "what is as wanted is done without a send"
    assert query("SELECT key, state, sends FROM effects ORDER BY key") == [
        ("a0", "applied", 1),
        ("a2", "applied", 0),
        ("a3", "applied", 1),
    ]
    assert shelf.prices["a1"] == "9.99"
    assert query("SELECT DISTINCT effect_may_exist FROM outcomes") == [(False,)]


async def test_a_conflict_of_one_item_after_a_lost_answer_leaves_the_others_alone(start_kit, query, outcomes):
    shelf = Shelf("none, 500")
    write = shelf.write(conflict="PRICE_CONFLICT")
    read = write.read

    async def changed(context: WorkContext, items: Sequence[Item]) -> Mapping[str, Any]:
        if shelf.reads:
            shelf.prices["a1"] = "9.99"
        return await read(context, items)

    kit = await start_kit(f := flow_of(BatchWrite(**{**vars(write), "read": changed})))
    await run_to_end(kit, f, FIRST)
    assert outcomes() == {"a0": None, "a1": "PRICE_CONFLICT", "a2": None, "a3": None}
    assert shelf.writes == [FIRST, ("a0", "a2", "a3")]


async def test_a_batch_is_one_call_for_caps_and_breaker(start_kit, one):
    """Four groups of four: two calls at once; six refusals in a row, not two, open the breaker."""
    lane = Lane("shelf", max_in_flight=2, max_per_key=1, breaker=Breaker())
    shelf = Shelf(*["throttled"] * 3)
    kit = await start_kit(f := flow_of(shelf.write(), lane))
    targets = [f"{group}{n}" for group in "abcd" for n in range(4)]
    assert (await run_to_end(kit, f, targets))["status"] == "completed"
    assert len(shelf.writes) == 7
    assert shelf.most_at_once == 2
    assert one("SELECT held_until FROM lanes WHERE name = 'shelf'") is None


async def test_a_batch_that_is_taken_over_in_flight_is_not_doubled(start_kit, dsn, query):
    """Its worker counts as dead while the call is at the vendor: the next one waits, reads, and sends what is
    missing."""
    shelf = Shelf("half, hangs")
    kit = await start_kit(f := flow_of(shelf.write(), time_limit=timedelta(seconds=30)))
    running = asyncio.create_task(run_to_end(kit, f, FIRST))
    while not shelf.writes:
        await asyncio.sleep(0.01)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TAKE_OVER)
    assert (await running)["status"] == "completed"
    assert shelf.writes == [FIRST, ("a2", "a3")]
    assert shelf.applied == dict.fromkeys(FIRST, 1)
    assert query("SELECT sum(in_flight) FROM claims") == [(0,)]


async def test_a_time_limit_leaves_no_answered_item_in_doubt(start_kit, query):
    """Two of four are found as wanted; the call for the others hangs."""
    shelf = Shelf("hangs", a0="2.00", a1="2.00")
    kit = await start_kit(f := flow_of(shelf.write()))
    assert (await run_to_end(kit, f, FIRST))["status"] == "completed"
    assert dict(query("SELECT key, executions FROM items")) == {"a0": 1, "a1": 1, "a2": 2, "a3": 2}


def test_a_batch_needs_a_lane_in_which_the_calls_of_a_group_follow_each_other() -> None:
    with pytest.raises(ValueError, match="max_per_key=1"):
        flow_of(Shelf().write(), Lane("shelf"))


async def test_a_replica_says_how_many_items_and_permits_a_call_of_its_stages_takes(start_kit, query):
    await start_kit(flow_of(Shelf().write(most=250), weight=3))
    assert query("SELECT work, batches, permits FROM replicas") == [(["test/work"], [250], [6])]
