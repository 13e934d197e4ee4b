"""Who is alive, who only seems so, and what those in between may still do: fencing, hearts, leaving; and what is found
by looking when nobody leads or nobody does it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from ecluse.engine import Done, Flow, Item, NewItem, Result, Start, State, StatusMap, WorkContext, load_run
from ecluse.engine.cluster.forced_ends import end_stale
from ecluse.engine.cluster.heartbeat import RARELY
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from ecluse.engine.model.states import RunEnd
from ecluse.engine.runs.finalize import end_runs
from tests.support.engine_flows import (
    PATIENCE,
    QUIET,
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

pytestmark = pytest.mark.long

CLASSES = ["keyed", "absolute"]
NEVER_BEATS = {"beat": 60.0, "dead_after": 300.0}  # whoever beats and finds itself declared dead ends the process
SWEEP = "NOTIFY ecluse_closing"
DECLARE_DEAD = "UPDATE replicas SET state = 'dead', ended_at = now()"


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


async def hold(_: WorkContext, item: Item) -> Result:
    if item.key != "quick":
        await asyncio.sleep(60)
    return Done()


def said(logs: list[Any], event: str) -> int:
    return sum(line["event"] == event for line in logs)


# ── Fencing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def meddled(shop: Shop, kind: str, meddle: Callable[[], object]) -> Flow:
    """Between the claim and the intent, the first time."""

    def wanted(item: Item) -> Any:
        if pending:
            pending.pop()()
        return {"price": "2.00"}

    pending = [meddle]
    work = getattr(shop, kind)()
    return flow(replace(work, work=replace(work.work, wanted=wanted)))


@pytest.mark.req("ENG-27")
@pytest.mark.parametrize("kind", CLASSES)
async def test_whoever_lost_its_claim_before_the_intent_sends_nothing(start_kit, query, one, logs, kind):
    shop = Shop()
    kit = await start_kit(f := meddled(shop, kind, lambda: query(TAKE_OVER)))
    row = await run_to_end(kit, f, ["a"])
    assert (row["status"], len(shop.writes), said(logs, "execution: fenced out, nothing sent")) == ("completed", 1, 1)
    assert one("SELECT sends, state FROM effects") == (1, "applied")
    assert one("SELECT executions, crashes FROM items") == (1, 0), "the fenced execution did not count"
    assert query("SELECT taken, succeeded, released FROM claims ORDER BY id") == [(1, 0, 1), (1, 1, 0)]


async def test_whoever_was_declared_dead_before_the_intent_sends_nothing(start_kit, query, one, logs):
    """Nobody has taken the item over yet: the fence is as it was."""
    shop = Shop()
    kit = await start_kit(f := meddled(shop, "keyed", lambda: query(DECLARE_DEAD)), **NEVER_BEATS)
    await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await until(lambda: said(logs, "execution: fenced out, nothing sent"))
    await until(lambda: one("SELECT crashes FROM items") == 1)
    assert (shop.writes, query("SELECT 1 FROM effects")) == ([], [])


@pytest.mark.req("ENG-27")
@pytest.mark.parametrize("kind", CLASSES)
async def test_a_lost_claim_loses_the_result_but_not_what_is_known_about_the_write(start_kit, query, one, logs, kind):
    shop = Shop()

    async def take_over(_: Item, call: str) -> None:
        if call == "write":
            await asyncio.to_thread(query, TAKE_OVER)

    shop.watch = take_over
    kit = await start_kit(f := flow(getattr(shop, kind)(quiet=timedelta(seconds=2))))
    row = await run_to_end(kit, f, ["a"])
    assert (row["status"], len(shop.writes), shop.applied) == ("completed", 1, ["a"]), "not asked, not sent again"
    assert said(logs, "commit: results dropped, their claims were lost (fenced out)") == 1
    assert one("SELECT state, sends FROM effects") == ("applied", 1)
    assert one("SELECT executions, result FROM items") == (
        1,
        {"price": "2.00"} if kind == "absolute" else next(iter(shop.made.values())),
    )


async def test_whoever_was_declared_dead_says_nothing_any_more(start_kit, query, one, logs):
    shop = Shop()

    async def declare_dead(_: Item, call: str) -> None:
        if call == "write":
            await asyncio.to_thread(query, DECLARE_DEAD)

    shop.watch = declare_dead
    kit = await start_kit(f := flow(shop.absolute()), **NEVER_BEATS)
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await until(lambda: said(logs, "commit: results dropped, their claims were lost (fenced out)"))
    assert one("SELECT state, sends FROM effects") == ("sending", 1)
    assert one("SELECT status, executions FROM items") == ("open", 0)
    # Somebody else comes: to find out, not to send at once.
    shop.watch = None
    await until(lambda: one("SELECT crashes FROM items") == 1)
    await asyncio.to_thread(query, "UPDATE replicas SET state = 'live'")
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], shop.applied, len(shop.writes)) == ("completed", ["a"], 1)
    assert one("SELECT settled_at - first_send_at FROM effects") >= QUIET


# ── Hearts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", CLASSES)
async def test_whoever_has_not_beaten_for_a_while_does_not_send(start_kit, one, kind):
    """Somebody may be about to declare us dead. It is no failure, and no reason to ask the vendor all the time."""
    shop = Shop()
    kit = await start_kit(f := flow(getattr(shop, kind)()), **NEVER_BEATS)
    kit._heart._beaten_at -= NEVER_BEATS["dead_after"]
    run = await started(kit, f, ["a"])
    await until(lambda: one("SELECT count(*) FROM effects WHERE state = 'planned'"))
    await asyncio.sleep(0.3)
    assert (shop.writes, one("SELECT status, executions FROM items")) == ([], ("open", 0))
    assert max(len(shop.reads), one("SELECT sends FROM effects")) <= 2, "tried again later, not again and again"
    kit._heart._beaten_at = time.monotonic()
    row = await wait_for_run(kit, run, PATIENCE)
    assert (row["status"], shop.applied, len(shop.writes)) == ("completed", ["a"], 1)
    assert one("SELECT executions, crashes FROM items") == (1, 0), "waiting uses up no execution"


@pytest.fixture
async def left_behind(dsn, query):
    """A run that is only items, of which a replica "ghost" has some in hand."""
    async with open_board(dsn) as board:
        lane = await board.lane()
        run = await board.run(4)
        assert len(await board.claim(free=[lane], replica="ghost", room=3)) == 3
    query("UPDATE runs SET orchestrated = false, selected = 4")
    query("INSERT INTO outcomes (run_id, target) SELECT run_id, target FROM items")
    return run.id


GHOST = "SELECT state FROM replicas WHERE id = 'ghost'"


@pytest.mark.req("ENG-19")
@pytest.mark.parametrize(("state", "crashes"), [("live", 1), ("left", 0)], ids=["it died", "it left"])
async def test_what_a_dead_replica_held_is_done_by_a_live_one(start_kit, left_behind, query, one, state, crashes):
    query("UPDATE replicas SET state = %s", state)
    kit = await start_kit(flow(stage()), beat=0.2, dead_after=1.0)
    began = time.monotonic()
    row = await wait_for_run(kit, left_behind, PATIENCE)
    assert time.monotonic() - began < 5
    assert (row["status"], row["successful"]) == ("completed", 4)
    assert query("SELECT crashes, count(*) FROM items GROUP BY 1 ORDER BY 1 DESC") == (
        [(1, 3), (0, 1)] if crashes else [(0, 4)]
    )
    assert one(GHOST) == ("dead" if crashes else "left")
    assert query("SELECT taken, released, in_flight FROM claims WHERE replica_id = 'ghost'") == [(3, 3, 0)]


async def test_a_pause_of_the_database_kills_nobody(start_kit, left_behind, query, one):
    """Nobody could beat meanwhile: everybody has a full period from the moment at which the reaper is back."""
    await start_kit(flow(stage()), beat=0.2, dead_after=1.6)
    query("UPDATE replicas SET beat_at = clock_timestamp() WHERE id = 'ghost'")
    await asyncio.sleep(1.2)
    query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = 'ecluse' AND pid <> pg_backend_pid()"
    )
    await asyncio.sleep(0.9)
    assert one("SELECT clock_timestamp() - beat_at > interval '1.6 seconds' FROM replicas WHERE id = 'ghost'")
    assert one(GHOST) == "live", "the reaper has been back for less than the period"
    assert one("SELECT count(*) FROM items WHERE crashes > 0") == 0
    await until(lambda: one(GHOST) == "dead", 5)


async def test_whoever_beats_is_left_alone(start_kit, left_behind, query, one):
    await start_kit(flow(stage()), beat=0.2, dead_after=0.6)
    for _ in range(6):
        query("UPDATE replicas SET beat_at = clock_timestamp() WHERE id = 'ghost'")
        await asyncio.sleep(0.2)
    assert (one(GHOST), one("SELECT in_flight FROM claims WHERE replica_id = 'ghost'")) == ("live", 3)


async def test_a_row_that_ended_stays_for_an_hour(start_kit, query):
    kit = await start_kit(flow(stage()), beat=0.1)
    query(
        "INSERT INTO replicas (id, host, pid, state, beat_at, ended_at) SELECT name, 'there', 1, state, now() - ago,"
        " CASE WHEN state <> 'live' THEN now() - ago END FROM (VALUES ('old', 'dead', interval '61 minutes'),"
        " ('gone', 'left', interval '1 day'), ('young', 'dead', interval '59 minutes')) v(name, state, ago)"
    )
    kit._heart._ticks = RARELY - 1  # it is looked at every ten minutes
    await until(lambda: kit._heart._ticks > RARELY)
    assert query("SELECT id FROM replicas WHERE id <> %s", kit.replica) == [("young",)]


# ── Leaving ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", CLASSES)
async def test_a_write_cut_off_by_a_stop_is_asked_about_and_not_sent_blindly(start_kit, one, kind):
    shop = Shop(["applied, hangs"])
    f = flow(getattr(shop, kind)(quiet=timedelta(seconds=1)))
    kit = await start_kit(f)
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await until(lambda: shop.applied)
    await kit.stop(grace=0.1)
    assert one("SELECT state FROM effects") == "sending"
    assert one("SELECT claim_id, executions, crashes FROM items") == (None, 0, 0), "given back"
    kit = await start_kit(f)
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], shop.applied) == ("completed", ["a"])
    assert len(shop.writes) == (1 if kind == "absolute" else 2)
    assert one("SELECT settled_at - first_send_at FROM effects") >= timedelta(seconds=1)


async def test_nothing_is_sent_once_we_are_leaving(start_kit, one):
    """The intents are on record, then the stop comes; what is read in the meantime is not followed by a write."""
    shop = Shop()
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: Item, call: str) -> None:
        reading.set()
        await go_on.wait()

    shop.watch = slow
    f = flow(shop.absolute())
    kit = await start_kit(f)
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await reading.wait()
    stopping = asyncio.create_task(kit.stop(grace=5))
    await asyncio.sleep(0.2)
    go_on.set()
    await stopping
    assert shop.writes == []
    assert one("SELECT state FROM effects") == "planned"
    kit = await start_kit(f)
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["status"] == "completed"
    assert shop.applied == ["a"]


async def test_a_stop_hands_the_runs_over_at_once(start_kit, query):
    """Whoever comes next leads them on without having to find us dead first."""
    at_the_gate = asyncio.Event()

    async def hangs(_: WorkContext, item: Item) -> Result:
        if not at_the_gate.is_set():
            at_the_gate.set()
            await asyncio.sleep(60)
        return Done()

    work = stage(hangs)

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await run.fan_out(work, given_targets)
        await run.gate(work)

    f = Flow("test", (work,), story, Targets)
    kit = await start_kit(f, beat=2, dead_after=6)
    started = await start_run(kit, Start(f, "key", input={"targets": keys(3)}))
    await at_the_gate.wait()
    await kit.stop(grace=0.1)
    assert query("SELECT status FROM dbos.workflow_status") == [("ENQUEUED",)]
    kit = await start_kit(f)
    began = time.monotonic()
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], time.monotonic() - began < 3) == ("completed", True)
    assert query("SELECT DISTINCT crashes, executions FROM items") == [(0, 1)]


# ── Runs that nobody leads, work that nobody does ──────────────────────────────────────────────────────────────────


async def hanging(start_kit) -> tuple[Kit, int, timedelta]:
    """A story that hangs after its selection, led by this replica; and how long it may take."""

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await asyncio.Event().wait()

    kit = await start_kit(f := Flow("test", (stage(),), story, Targets))
    run = await started(kit, f, ["a"])
    return kit, run, f.stale_after


@pytest.mark.req("ENG-93")
async def test_a_run_that_takes_too_long_is_overdue_while_led_and_ended_after_twice_the_time(start_kit, query, one):
    kit, run, limit = await hanging(start_kit)
    await until(lambda: one("SELECT selected FROM runs") == 1)

    async def sweep_at(age: timedelta) -> dict[str, Any]:
        await asyncio.to_thread(query, "UPDATE runs SET started_at = ecluse_now() - %s::interval", age)
        await end_stale(kit.pool, kit.by_name)
        return await wait_for_run(kit, run, timedelta(seconds=0.3))

    assert (await sweep_at(limit - timedelta(seconds=5)))["ended_at"] is None
    overdue = "SELECT count(*) FROM run_log WHERE message LIKE 'overdue%' AND level = 'warning'"
    assert one(overdue) == 0
    for age in (limit + timedelta(seconds=5), limit + timedelta(minutes=1), 2 * limit - timedelta(seconds=5)):
        assert (await sweep_at(age))["ended_at"] is None, "it is being led"
        assert one(overdue) == 1, "said once"
    row = await sweep_at(2 * limit + timedelta(seconds=5))
    assert (row["status"], row["end_cause"], row["error_code"], row["failed"]) == ("failed", "stale", "STALE", 1)
    assert "longer than" in one("SELECT data ->> 'error_message' FROM run_log WHERE message = 'running -> failed'")
    assert one("SELECT reason FROM outcomes").startswith("Run ended: stale: running for ")


@pytest.mark.req("ENG-93")
async def test_a_run_that_nobody_leads_is_ended_as_soon_as_it_is_stale(start_kit, dsn, query, one):
    f = flow(stage())
    async with open_board(dsn) as board:
        await board.lane("elsewhere")
        young = await board.run(1, lane="elsewhere")
        stale = await board.run(1, lane="elsewhere")
    query("UPDATE runs SET started_at = started_at - %s::interval WHERE id = %s", f.stale_after, stale.id)
    query("UPDATE runs SET started_at = started_at - %s::interval WHERE id = %s", f.stale_after * 0.9, young.id)
    kit = await start_kit(f, sweep_every=0.2)
    row = await wait_for_run(kit, stale.id, PATIENCE)
    assert (row["status"], row["end_cause"]) == ("failed", "stale")
    assert one("SELECT count(*) FROM items WHERE status = 'open' AND run_id = %s", stale.id) == 0
    assert (await wait_for_run(kit, young.id, timedelta(0)))["ended_at"] is None
    again = await start_run(kit, Start(f, stale.event_key, again=True))
    assert not again.deduplicated, "its key is free"


@pytest.mark.req("ENG-27")
async def test_a_worker_that_comes_back_after_its_run_was_reconciled_changes_nothing(start_kit, query, one, logs):
    """It will not be cancelled, and has a result: that comes too late."""
    kit: Kit
    working, go_on = asyncio.Event(), asyncio.Event()

    async def stubborn(_: WorkContext, item: Item) -> Result:
        working.set()
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await go_on.wait()
        return Done("late")

    kit = await start_kit(f := flow(stage(stubborn)))
    run = await started(kit, f, ["a"])
    await working.wait()
    async with kit.pool.connection() as connection:
        await end_runs(connection, f, [await load_run(connection, run)], RunEnd("stale", "STALE", "too long"))
    everything = "SELECT r::text, o::text, i::text FROM runs r JOIN outcomes o ON true JOIN items i ON true"
    before = query(everything)
    go_on.set()
    await until(lambda: said(logs, "commit: results dropped, their claims were lost (fenced out)") == 1)
    assert query(everything) == before
    assert one("SELECT status, end_cause FROM runs") == ("failed", "stale")


@pytest.mark.req("ENG-92")
async def test_a_run_whose_last_look_was_lost_is_closed_by_the_sweep(start_kit, dsn, query):
    """Whoever committed its last item died before it could look: no signal will ever come."""
    async with open_board(dsn) as board:
        lane = await board.lane()
        run = await board.run(3)
        query("UPDATE runs SET orchestrated = false, selected = 3")
        query("INSERT INTO outcomes (run_id, target) SELECT run_id, target FROM items")
        await board.finish(await board.claim(free=[lane], replica="ghost"))
    kit = await start_kit(flow(stage()), sweep_every=0.2)
    row = await wait_for_run(kit, run.id, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 3)


async def test_a_run_of_a_stage_that_is_gone_does_not_stop_the_sweeps(start_kit, query):
    """The program that had it was another version; its time is up all the same."""
    one = stage(hold)
    kit = await start_kit(f := flow(one, story=None))
    for key in ("gone", "there"):
        await start_items(kit, Start(f, key), one, [NewItem("slow")])
    query("UPDATE stages SET stage = 'gone' WHERE run_id = (SELECT min(id) FROM runs)")
    query("UPDATE stages SET deadline_at = ecluse_now()")
    query(SWEEP)
    await until(lambda: query("SELECT event_key FROM runs WHERE ended_at IS NOT NULL") == [("there",)])
    assert not kit.broken.is_set()
    await kit.stop(grace=0.05)


async def test_a_run_that_cannot_be_ended_does_not_stop_the_sweeps(start_kit, query):
    """A mistake of one flow's words: other runs are still reconciled, and the engine goes on."""
    meaning = {"queued": State.QUEUED, "running": State.RUNNING, "completed": State.SUCCEEDED}
    moves = {"queued": frozenset({"running"}), "running": frozenset({"completed"})}
    clumsy = flow(stage(hold), "clumsy", statuses=StatusMap(meaning, moves, initial="queued"))
    kit = await start_kit(clumsy, f := flow(stage(hold)), sweep_every=0.2)
    for one_flow in (clumsy, f):
        await started(kit, one_flow, ["slow"], one_flow.name)
    await until(lambda: query("SELECT count(*) FROM runs WHERE selected = 1") == [(2,)])
    await asyncio.to_thread(query, "UPDATE runs SET started_at = started_at - interval '1 day'")
    await until(lambda: query("SELECT 1 FROM runs WHERE flow = 'test' AND end_cause = 'stale'"), 10)
    assert not kit.broken.is_set()
    await kit.stop(grace=0.05)


# ── Two at once ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("ENG-26", "ENG-25")
async def test_of_many_finalizers_at_once_one_ends_the_run(start_kit, query):
    kit = await start_kit(f := flow(stage(hold)))
    for times in range(5):
        run_id = await started(kit, f, ["quick", "slow"], f"run-{times}")
        await until(lambda: query("SELECT 1 FROM items WHERE status = 'succeeded' AND run_id = %s", run_id))  # noqa: B023

        async def finalize(n: int) -> int:
            async with kit.pool.connection() as connection:
                run = await load_run(connection, run_id)  # noqa: B023
                how = ("normal", "operator", "stale")[n % 3]
                cause = RunEnd(how, reason=f"by {n}", by="me" if n % 3 == 1 else None)
                return await end_runs(connection, f, [run], cause)

        assert sum(await asyncio.gather(*(finalize(n) for n in range(50)))) == 1
    assert query("SELECT count(*) FROM run_log WHERE message LIKE 'running -> %%'") == [(5,)]
    assert query("SELECT count(*) FROM outcomes WHERE outcome IS NULL") == [(0,)]


@pytest.mark.req("ENG-28")
async def test_a_key_whose_run_has_ended_does_not_block_a_deliberate_repetition(start_kit, one):
    kit = await start_kit(f := flow(stage(hold)))
    first = await start_run(kit, Start(f, "key", input={"targets": ["slow"]}))
    for again in (False, True):
        answer = await start_run(kit, Start(f, "key", input={"targets": ["slow"]}, again=again))
        assert (answer.run.id, answer.deduplicated) == (first.run.id, True), "while it is active"
    await end_run(kit, first.run.id, "enough")
    answer = await start_run(kit, Start(f, "key", input={"targets": ["slow"]}))
    assert (answer.run.id, answer.deduplicated) == (first.run.id, True), "not asked to do it again"
    again = Start(f, "key", input={"targets": ["slow"]}, again=True)
    answers = await asyncio.gather(*(start_run(kit, again) for _ in range(10)))
    (second,) = {answer.run.id for answer in answers}
    assert sorted(answer.deduplicated for answer in answers) == [False] + [True] * 9
    assert one("SELECT event_key, status FROM runs WHERE id = %s", second)[0] == "key-retry-1"
    await end_run(kit, second, "enough")
    third = await start_run(kit, again)
    assert (third.run.event_key, third.deduplicated) == ("key-retry-2", False)
    assert one("SELECT count(*) FROM runs") == 3
