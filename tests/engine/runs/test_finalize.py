"""Ends that are not normal: by an operator, at a deadline, in doubt."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from ecluse.base.errors import InvalidInput, NotFound, PermanentError, TransientError
from ecluse.engine import (
    Done,
    Flow,
    Ignored,
    Item,
    Lane,
    NewItem,
    Result,
    RetryPolicy,
    Stage,
    Start,
    WorkContext,
    load_run,
)
from ecluse.engine.effects.probe import settle_forgotten
from ecluse.engine.kit import Kit
from ecluse.engine.lead.gate import end as end_gate
from ecluse.engine.lead.story import Story
from ecluse.engine.work.claim import Claimant, claim_items
from ecluse.engine.work.completion import end_by_operator
from tests.support.engine_flows import (
    END_LISTENERS,
    NO_SHARE,
    PATIENCE,
    TAKE_OVER,
    Shop,
    Targets,
    flow,
    given_targets,
    keys,
    open_board,
    run_to_end,
    stage,
    started,
    until,
)
from tests.support.runs import end_run, start_items, start_run, wait_for_run

REASON = "wrong price list"
CLASSES = ["keyed", "absolute"]
ONCE = RetryPolicy(executions=1)
# A workflow that was handed over before its first step.
ENQUEUE = """
SELECT dbos.enqueue_workflow(workflow_name => 'ecluse.run', queue_name => '_dbos_internal_queue',
    positional_args => ARRAY[to_json(%s)], workflow_id => %s, app_version => '1', application_name => 'ecluse')
"""


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


def said(logs: list[Any], event: str) -> int:
    return sum(line["event"] == event for line in logs)


class Calls:
    """Reads that take half a minute, and know whether they were let finish; quick ones by name."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.started: list[str] = []

    async def work(self, _: WorkContext, item: Item) -> Result:
        self.started.append(item.key)
        if item.key.startswith("quick"):
            return Done()
        if item.key.startswith("gone"):
            return Ignored("Not found (404)", code="NOT_FOUND")
        if item.key.startswith("bad"):
            raise PermanentError("no", code="REFUSED")
        self.running.add(item.key)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled.append(item.key)
            raise
        finally:
            self.running.discard(item.key)
        return Done()


async def ask_once(kit: Kit) -> None:
    """What the settling loop does every five seconds."""
    await settle_forgotten(kit.pool, kit.by_name, kit.worker._executor._contexts, kit.replica)


# ── By an operator ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.alone
async def test_an_operator_ends_a_run_at_once_with_hundreds_of_calls_in_hand(start_kit, query, one):
    calls = Calls()
    kit = await start_kit(f := flow(stage(calls.work)), hands=200)
    run = await started(kit, f, keys(250))
    await until(lambda: len(calls.running) == 200)
    # An old gate looks every five seconds: its workflow is over soon only if it is told to look.
    await asyncio.to_thread(query, "UPDATE stages SET started_at = started_at - interval '10 minutes'")
    await until(lambda: query("SELECT 1 FROM dbos.operation_outputs WHERE function_name = 'poll-work-1'"))
    began = time.monotonic()
    assert await end_run(kit, run, REASON, by="laptop") is True
    assert time.monotonic() - began < 1
    row = await wait_for_run(kit, run, timedelta(0))
    assert (row["status"], row["state"], row["end_cause"]) == ("failed", "cancelled", "operator")
    assert (row["reason"], row["error_message"]) == (REASON, REASON)
    assert (row["selected"], row["successful"], row["failed"], row["ignored"]) == (250, 0, 250, 0)
    assert (row["cancelled"], row["ended_by"], row["phase"]) == (250, "laptop", None)
    assert query("SELECT DISTINCT outcome, error_code, reason, effect_may_exist FROM outcomes") == [
        ("failed", "CANCELLED", f"Cancelled by laptop: {REASON}", False)
    ]
    assert one("SELECT sum(in_flight) FROM claims") == 0
    assert one("SELECT count(*) FROM items WHERE status = 'open' OR claim_id IS NULL") == 0
    assert query("SELECT end_cause FROM stages") == [("run ended",)]
    await until(lambda: not calls.running and kit.worker.slots.busy == 0, 1)
    assert len(calls.cancelled) == 200
    over = "SELECT 1 FROM dbos.workflow_status WHERE status = 'SUCCESS' AND workflow_uuid = 'default/key'"
    await until(lambda: query(over), 1.5)
    assert (await run_to_end(kit, f, ["quick"], "next"))["status"] == "completed", "the hands are free again"
    assert len(calls.started) == 200 + 1
    assert not kit.broken.is_set()


@pytest.mark.alone
async def test_what_was_claimed_ahead_and_not_started_is_dropped(start_kit):
    """Quick items are claimed by the hundred: when slow ones follow, many are claimed that no hand is free for."""
    calls = Calls()
    kit = await start_kit(f := flow(stage(calls.work)), hands=10)
    run = await started(kit, f, [f"quick-{n}" for n in range(400)] + keys(400))
    await until(lambda: len(calls.running) == 10)
    assert kit.worker.slots.ready, "nothing was claimed ahead: the test proves nothing"
    before = len(calls.started)
    await end_run(kit, run, REASON)
    await until(lambda: not kit.worker.runs_in_hand, 1)
    assert (len(calls.started), len(kit.worker.slots.ready)) == (before, 0)


FINISHED = {
    "bad": ("failed", "REFUSED", "no"),
    "gone": ("ignored", "NOT_FOUND", "Not found (404)"),
    "quick": ("successful", None, None),
}


@pytest.mark.parametrize("target", FINISHED)
async def test_a_target_that_is_finished_keeps_its_outcome_when_the_run_is_ended(start_kit, query, one, target):
    kit = await start_kit(f := flow(stage(Calls().work)))
    run = await started(kit, f, [target, "slow"])
    await until(lambda: one("SELECT count(*) FROM items WHERE status <> 'open'") == 1)
    await end_run(kit, run, REASON)
    outcomes = {name: rest for name, *rest in query("SELECT target, outcome, error_code, reason FROM outcomes")}
    assert outcomes["slow"] == ["failed", "CANCELLED", f"Cancelled by operator: {REASON}"]
    row = await wait_for_run(kit, run, timedelta(0))
    assert (row["status"], row["state"]) == ("partial" if target == "quick" else "failed", "cancelled")
    assert (row["failed"], row["cancelled"]) == (2 if target == "bad" else 1, 1)
    assert outcomes[target] == list(FINISHED[target])


async def test_a_second_end_changes_nothing_and_a_reason_must_be_given(start_kit, query):
    kit = await start_kit(f := flow(stage(Calls().work)))
    run = await started(kit, f, ["slow"])
    await until(lambda: query("SELECT 1 FROM claims"))
    with pytest.raises(InvalidInput, match="reason: required"):
        await end_run(kit, run, " \n")
    with pytest.raises(NotFound):
        await end_run(kit, run + 1, REASON)
    assert (await wait_for_run(kit, run, timedelta(0)))["ended_at"] is None
    assert await end_run(kit, run, f" {REASON}\x00 ") is True
    everything = "SELECT r::text, (SELECT count(*) FROM run_log), (SELECT max(fence) FROM claims) FROM runs r"
    before = query(everything)
    assert "wrong price list" in before[0][0]
    assert await end_run(kit, run, "another reason") is False
    assert query(everything) == before


async def test_a_run_that_has_not_begun_can_be_ended(start_kit, dsn, query):
    """Its workflow, when its turn comes, finds nothing to do; or there is none, and none is started any more."""
    calls = Calls()
    kit = await start_kit(f := flow(stage(calls.work)), roles={"api"})
    for key in ("enqueued", "unstarted"):
        run = (await start_run(kit, Start(f, key, input={"targets": ["a"]}))).run
        if key == "enqueued":
            query(ENQUEUE, run.id, f"default/{key}")
        assert await end_run(kit, run.id, REASON)
    await start_kit(f)
    assert query("SELECT DISTINCT status, end_cause, selected, started_at FROM runs") == [
        ("failed", "operator", 0, None)
    ]
    await until(lambda: query("SELECT 1 FROM dbos.workflow_status WHERE status = 'SUCCESS'"), 5)
    query("NOTIFY ecluse_runs")
    await asyncio.sleep(0.3)
    assert (query("SELECT count(*) FROM dbos.workflow_status"), calls.started) == ([(1,)], [])


async def test_a_lost_signal_delays_the_end_by_a_second_at_most(start_kit, query):
    """The one connection that listens is killed just before: nobody hears that the run has ended."""
    calls = Calls()
    kit = await start_kit(f := flow(stage(calls.work)), hands=20)
    run = await started(kit, f, keys(30))
    await until(lambda: len(calls.running) == 20)
    killed = query(END_LISTENERS)
    assert killed == [(True,)]
    await end_run(kit, run, REASON)
    await until(lambda: not calls.running, 1.5)
    assert (len(calls.started), kit.worker.runs_in_hand) == (20, set())


@pytest.mark.parametrize("kind", CLASSES)
async def test_a_write_in_flight_is_let_finish_and_its_answer_is_kept(start_kit, one, logs, kind):
    shop, sending, go_on = Shop(), asyncio.Event(), asyncio.Event()

    async def slow(_: Item, call: str) -> None:
        if call == "write":
            sending.set()
            await go_on.wait()

    shop.watch = slow
    kit = await start_kit(f := flow(getattr(shop, kind)()))
    run = await started(kit, f, ["a"])
    await sending.wait()
    await end_run(kit, run, REASON)
    await asyncio.sleep(0.7)  # the second look, too, lets it be
    assert one("SELECT state FROM effects") == "sending"
    assert one("SELECT error_code, effect_may_exist FROM outcomes") == ("CANCELLED", True)
    go_on.set()
    await until(lambda: one("SELECT state FROM effects") == "applied")
    await until(lambda: said(logs, "commit: results dropped, their claims were lost (fenced out)") == 1)
    assert shop.applied == ["a"]
    assert one("SELECT status, error_code FROM items") == ("failed", "RUN_ENDED")
    assert one("SELECT outcome, effect_may_exist FROM outcomes") == ("failed", True), "outcomes are final"


@pytest.mark.parametrize("kind", CLASSES)
async def test_no_write_is_sent_for_a_run_that_has_ended(start_kit, dsn, one, logs, kind):
    """It was about to be: the item is in hand, its intent not yet on record, and no signal has been heard."""
    shop = Shop()
    work = getattr(shop, kind)()

    async def end_it() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await end_by_operator(connection, f, await load_run(connection, 1), REASON, by="laptop")

    def wanted(_: Item) -> Any:
        elsewhere = threading.Thread(target=asyncio.run, args=(end_it(),))
        elsewhere.start()
        elsewhere.join()
        return {"price": "2.00"}

    kit = await start_kit(f := flow(replace(work, work=replace(work.work, wanted=wanted))))
    run = await started(kit, f, ["a"])
    assert (await wait_for_run(kit, run, PATIENCE))["end_cause"] == "operator"
    await until(lambda: not kit.worker.runs_in_hand)
    assert (shop.writes, one("SELECT count(*) FROM effects")) == ([], 0)
    assert one("SELECT effect_may_exist FROM outcomes") is False


@pytest.mark.parametrize("kind", CLASSES)
async def test_what_is_in_doubt_at_the_end_is_settled_if_it_can_be_read(start_kit, query, one, kind):
    shop = Shop(["applied, 500"])
    kit = await start_kit(f := flow(getattr(shop, kind)(quiet=timedelta(seconds=1))))
    run = await started(kit, f, ["a"])
    await until(lambda: query("SELECT 1 FROM effects WHERE state = 'unknown'"))
    await end_run(kit, run, REASON)
    assert one("SELECT error_code, effect_may_exist FROM outcomes") == ("CANCELLED", True)
    await ask_once(kit)
    assert one("SELECT state FROM effects") == "unknown", "the quiet period is not over"
    await asyncio.sleep(1)
    await ask_once(kit)
    assert one("SELECT state FROM effects") == ("applied" if kind == "absolute" else "unknown")
    assert len(shop.writes) == 1, "nothing is sent for a run that is over"


async def test_the_sweep_settles_what_was_in_doubt_by_itself(start_kit, query):
    shop = Shop(["500"])
    kit = await start_kit(f := flow(shop.absolute()), sweep_every=0.5)
    run = await started(kit, f, ["a"])
    await until(lambda: query("SELECT 1 FROM effects WHERE state = 'unknown'"))
    await end_run(kit, run, REASON)
    await until(lambda: query("SELECT 1 FROM effects WHERE state = 'not_applied' AND settled_at IS NOT NULL"), 5)
    assert query("SELECT message FROM run_log WHERE event_id IS NOT NULL AND level = 'warning'") == [
        (f"a write of test-{run}-work-a was in doubt: not_applied",)
    ]


# ── At a deadline ──────────────────────────────────────────────────────────────────────────────────────────────────


class TwoStages:
    """The first gate gives up after a second; the run goes on until the second stage is let go."""

    def __init__(self, first: Stage) -> None:
        self.go_on = asyncio.Event()
        second = stage(self._hold, name="second", lane=Lane("second"))

        async def story(run: Story) -> None:
            async def one_more(_: object, __: object) -> list[NewItem]:
                return [NewItem("last", target="in time")]

            await run.select(given_targets)
            await run.fan_out(first, given_targets)
            await run.gate(first)
            await run.fan_out(second, one_more)
            await run.gate(second)

        self.flow = Flow("test", (first, second), story, Targets)

    async def _hold(self, _: WorkContext, __: Item) -> Result:
        await self.go_on.wait()
        return Done()


TIMED_OUT = "SELECT 1 FROM stages WHERE end_cause = 'timeout'"


async def test_what_is_in_hand_at_a_deadline_may_finish_but_is_not_tried_again(start_kit, query):
    after = asyncio.Event()
    calls: list[str] = []

    async def work(_: WorkContext, item: Item) -> Result:
        calls.append(item.key)
        await after.wait()
        if item.key == "fails":
            raise TransientError("busy", code="BUSY")
        return Done()

    first = stage(work, lane=Lane("first", max_in_flight=2), max_wait=timedelta(seconds=1), incomplete="Too slow")
    two = TwoStages(first)
    kit = await start_kit(two.flow)
    run = await started(kit, two.flow, ["in time", "fails", "never begun"])
    await until(lambda: query(TIMED_OUT))
    after.set()
    await until(lambda: not query("SELECT 1 FROM items WHERE stage = 'work' AND status = 'open'"))
    await asyncio.sleep(0.3)  # a retry would be due by now
    assert sorted(calls) == ["fails", "in time"]
    assert query("SELECT key, status, permanent, error_code, error FROM items WHERE stage = 'work' ORDER BY id") == [
        ("in time", "succeeded", False, None, None),
        ("fails", "failed", True, "BUSY", "busy"),
        ("never begun", "failed", True, "INCOMPLETE", "Too slow"),
    ]
    two.go_on.set()
    row = await wait_for_run(kit, run, PATIENCE)
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 1, 2)


async def test_an_item_claimed_just_when_its_gate_gives_up_is_not_tried_again_either(dsn, query):
    """The claim is committed between the look at what is in hand and the closing of what is not."""
    async with open_board(dsn) as board, board.pool.connection() as worker, board.pool.connection() as gate:
        lane = await board.lane()
        run = await board.run(["a"])
        query("INSERT INTO replicas (id, host, pid) VALUES ('one', 'here', 1)")
        async with worker.transaction():
            assert (
                len(
                    await claim_items(
                        worker, Claimant("one", ["test/work"], [1]), [lane], 1, capped=False, left=NO_SHARE
                    )
                )
                == 1
            )
            giving_up = asyncio.create_task(end_gate(gate, run, stage(), "timeout"))
            await asyncio.wait([giving_up], timeout=0.3)
        await giving_up
    assert query("SELECT permanent, error_code FROM items") == [(True, "INCOMPLETE")]


async def test_a_write_that_must_wait_when_its_gate_gives_up_is_in_doubt_and_says_so(start_kit, query, one):
    """A successor has it in hand, reads, and learns that it is too early to ask: there will be no later."""
    shop = Shop(["applied, hangs"])
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: Item, call: str) -> None:
        if call == "read" and shop.writes:
            reading.set()
            await go_on.wait()

    shop.watch = slow
    two = TwoStages(shop.absolute(quiet=timedelta(seconds=30), max_wait=timedelta(seconds=1), incomplete="Too slow"))
    kit = await start_kit(two.flow)
    run = await started(kit, two.flow, ["in time"])
    await until(lambda: shop.writes)
    await asyncio.to_thread(query, TAKE_OVER)
    await reading.wait()
    await until(lambda: query(TIMED_OUT))
    go_on.set()
    await until(lambda: one("SELECT status FROM items WHERE stage = 'work'") == "failed")
    assert one("SELECT error_code, error FROM items WHERE stage = 'work'") == ("INCOMPLETE", "Too slow")
    two.go_on.set()
    await wait_for_run(kit, run, PATIENCE)
    assert one("SELECT error_code, effect_may_exist FROM outcomes") == ("INCOMPLETE", True)
    assert len(shop.writes) == 1
    await kit.stop(grace=0.05)


# ── In doubt ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def in_doubt_at_the_deadline(start_kit, shop: Shop, targets=("a",)) -> Any:
    """A write is applied, its answer is lost, and the vendor cannot be read until the gate has given up."""

    async def goes_down(item: Item, call: str) -> None:
        if call == "write":
            shop.down.add(item.key)

    shop.watch = goes_down
    work = shop.absolute(retry=ONCE, max_wait=timedelta(seconds=1.2))
    kit = await start_kit(f := flow(work))
    return kit, await run_to_end(kit, f, targets)


async def test_what_cannot_be_read_back_is_asked_about_until_the_deadline_and_then_in_doubt(start_kit, query, one):
    shop = Shop(["applied, 500"])
    kit, row = await in_doubt_at_the_deadline(start_kit, shop)
    assert (row["status"], row["failed"], shop.applied) == ("failed", 1, ["a"])
    assert one("SELECT error_code, effect_may_exist FROM outcomes") == ("INCOMPLETE", True)
    assert one("SELECT state, sends FROM effects") == ("unknown", 1)
    assert len(shop.reads) >= 3, "asked again and again"
    await ask_once(kit)
    assert one("SELECT state FROM effects") == "unknown", "the vendor is still down"
    shop.down.clear()
    await asyncio.to_thread(query, "UPDATE effects SET probe_at = '-infinity'")
    await ask_once(kit)
    assert one("SELECT state FROM effects") == "applied"
    assert one("SELECT count(*) FROM run_log WHERE message LIKE '%in doubt: applied' AND level = 'warning'") == 1
    assert one("SELECT outcome, effect_may_exist FROM outcomes") == ("failed", True), "outcomes are final"
    assert len(shop.writes) == 1


async def test_a_run_without_a_gate_does_not_ask_for_ever(start_kit, one):
    """Nobody leads it: what its stage may take at most is for the sweep to enforce."""
    shop = Shop(["applied, 500"])

    async def goes_down(item: Item, call: str) -> None:
        if call == "write":
            shop.down.add(item.key)

    shop.watch = goes_down
    work = shop.absolute(retry=ONCE, max_wait=timedelta(seconds=1))
    kit = await start_kit(f := flow(work, story=None), sweep_every=0.5)
    run = await start_items(kit, Start(f, "key"), work, [NewItem("a")])
    row = await wait_for_run(kit, run.run.id, timedelta(seconds=4))
    assert (row["status"], row["failed"]) == ("failed", 1)
    assert one("SELECT error_code, effect_may_exist FROM outcomes") == ("INCOMPLETE", True)


async def test_looking_does_not_use_up_executions(start_kit, one):
    shop = Shop(["applied, 500"])
    await in_doubt_at_the_deadline(start_kit, shop)
    assert one("SELECT executions FROM items") <= 1 + 1, "the budget, and one more to find out"


@pytest.mark.parametrize("how", ["hangs", "raises a bug"])
async def test_a_read_back_that_hangs_or_breaks_is_no_reason_to_give_up(start_kit, one, how):
    """Until the deadline, like one that is answered 503: the write can still be asked about."""
    shop = Shop(["applied, 500"])

    async def breaks(_: Item, call: str) -> None:
        if call == "read" and shop.writes and len(shop.reads) == 2:
            if how == "hangs":
                await asyncio.sleep(60)
            raise KeyError("colour")

    shop.watch = breaks
    kit = await start_kit(f := flow(shop.absolute(retry=ONCE, time_limit=timedelta(seconds=0.5))))
    row = await run_to_end(kit, f, ["a"])
    assert (row["status"], one("SELECT state FROM effects")) == ("completed", "applied")


async def test_one_vendor_that_hangs_does_not_keep_other_writes_in_doubt(start_kit, one):
    shop = Shop(["applied, 500"])
    kit, _ = await in_doubt_at_the_deadline(start_kit, shop, targets=keys(3))
    shop.down.clear()

    async def hangs(item: Item, call: str) -> None:
        if item.key == "t00000":
            await asyncio.sleep(60)

    shop.watch = hangs
    asking = asyncio.create_task(ask_once(kit))
    await until(lambda: one("SELECT count(*) FROM effects WHERE state = 'applied'") == 2, 3)
    asking.cancel()
