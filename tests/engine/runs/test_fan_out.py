"""Fan-out: many items in small statements, each once, the bad ones alone; and work is found when nobody is told."""

from __future__ import annotations

import asyncio
import hashlib
import time
from datetime import timedelta

import pytest

from ecluse.base.errors import TransientError
from ecluse.engine import Done, Item, NewItem, Result, RetryPolicy, Start, WorkContext
from ecluse.engine.lead.story import Story
from ecluse.engine.model.flow import Flow
from ecluse.engine.runs.lifecycle import RunEnded
from ecluse.engine.runs.stages import fan_out
from tests.support.engine_flows import PATIENCE, Targets, flow, keys, open_board, run_to_end, stage
from tests.support.runs import start_items, start_run, wait_for_run

RECORD = """
CREATE TABLE statements (at timestamptz NOT NULL DEFAULT clock_timestamp(), rows integer);
CREATE FUNCTION record() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO statements (rows) SELECT count(*) FROM new_items;
    RETURN NULL;
END $$;
CREATE TRIGGER record AFTER INSERT ON items REFERENCING NEW TABLE AS new_items
    FOR EACH STATEMENT EXECUTE FUNCTION record();
"""


@pytest.fixture
async def board(dsn):
    async with open_board(dsn) as board:
        await board.lane()
        yield board


async def dispatch(board, run, items, chunk=200, one=None):
    async with board.pool.connection() as connection:
        return await fan_out(connection, run, one or stage(), items, chunk=chunk)


def story_of(one, items):
    """A flow whose one stage is fed with `items`, whatever they are."""

    async def source(_connection, _run):
        return items

    async def story(run: Story) -> None:
        await run.select(source)
        await run.fan_out(one, source)
        await run.gate(one)

    return Flow("test", (one,), story, Targets)


def deep(levels: int) -> list[object]:
    nested: list[object] = []
    for _ in range(levels):
        nested = [nested]
    return nested


# --- statements


@pytest.mark.req("ENG-12")
@pytest.mark.parametrize(("count", "chunk"), [(1000, 200), (7, 3), (200, 200), (1, 200), (0, 200)])
async def test_no_statement_inserts_more_rows_than_a_chunk(board, query, count, chunk):
    query(RECORD)
    run = await board.run()
    query("TRUNCATE statements")
    assert await dispatch(board, run, [NewItem(key) for key in keys(count)], chunk) == count
    rows = [n for (n,) in query("SELECT rows FROM statements WHERE rows > 0")]
    assert sum(rows) == count
    assert len(rows) == -(-count // chunk)
    assert max(rows, default=0) <= chunk


@pytest.mark.req("ENG-12")
async def test_the_first_items_are_worked_on_while_the_last_are_still_being_inserted(start_kit, query):
    query(RECORD)
    first: list[float] = []

    async def work(_: WorkContext, item: Item) -> Result:
        first.append(time.time())
        return Done()

    kit = await start_kit(f := flow(stage(work)))
    row = await run_to_end(kit, f, keys(10_000))
    assert row["successful"] == 10_000
    last, most = query("SELECT extract(epoch FROM max(at))::float8, max(rows) FROM statements")[0]
    assert first[0] < last
    assert most <= 200


async def test_fifty_thousand_items_are_dispatched_in_a_few_seconds(board, one):
    run = await board.run()
    begun = time.monotonic()
    items = [NewItem(key, payload={"fiche": key}) for key in keys(50_000)]
    assert await dispatch(board, run, items) == 50_000
    assert time.monotonic() - begun < 10
    assert one("SELECT count(*), count(DISTINCT key) FROM items") == (50_000, 50_000)


# --- each once


async def test_a_key_given_twice_is_one_item_and_a_second_fan_out_adds_nothing(board, query):
    run = await board.run()
    twice = [NewItem("a", payload=1), NewItem("b"), NewItem("a", payload=2)]
    assert await dispatch(board, run, twice) == 2
    assert await dispatch(board, run, twice, chunk=1) == 2
    assert await dispatch(board, run, [*twice, NewItem("c")]) == 3
    assert query("SELECT key, payload FROM items ORDER BY key") == [("a", 1), ("b", None), ("c", None)]
    assert query("SELECT expected, fanned_out_at IS NOT NULL FROM stages") == [(3, True)]


async def test_two_fan_outs_of_the_same_items_at_once_insert_each_once(board, one):
    """A replay on another replica, while the first is still at it."""
    run = await board.run()
    items = [NewItem(key) for key in keys(2000)]
    counts = await asyncio.gather(*(dispatch(board, run, items) for _ in range(3)))
    assert max(counts) == 2000
    assert one("SELECT count(*) FROM items") == 2000
    assert one("SELECT expected FROM stages") == 2000


async def test_the_other_stages_of_a_run_may_have_the_same_keys(board, query):
    run = await board.run(["a"])
    assert await dispatch(board, run, [NewItem("a", target="fiche-1")], one=stage(name="second")) == 1
    assert query("SELECT stage, key, target FROM items ORDER BY 1") == [("second", "a", "fiche-1"), ("work", "a", "a")]


async def test_nothing_is_dispatched_into_a_run_that_has_ended(board, one, query):
    run = await board.run()
    query(
        "UPDATE runs SET status = 'failed', state = 'failed', end_cause = 'operator', ended_at = now(),"
        " selected = 0, successful = 0, failed = 0, ignored = 0"
    )
    for key in ("a", "x" * 1000):
        with pytest.raises(RunEnded):
            await dispatch(board, run, [NewItem(key)], one=stage(name="later"))
    assert one("SELECT count(*) FROM items") == 0
    assert query("SELECT stage FROM stages") == [("work",)], "nor is the stage opened"


# --- what cannot be dispatched

UNSTORABLE = {
    "NUL": "a\x00b",
    "lone surrogate": "a\ud800b",
    "no JSON": object(),
    "NUL in a name": {"\x00": 1},
    "not a number": float("nan"),
    "nested too deeply": deep(400),
    "not UTF-8": b"\xff",
}


@pytest.mark.req("ENG-13")
async def test_items_that_cannot_be_stored_fail_alone_and_the_run_ends_partial(start_kit, query):
    items = [NewItem(key, payload={"n": 1}) for key in keys(30)]
    for place, (name, payload) in enumerate(UNSTORABLE.items()):
        items.insert(place * 4, NewItem(name, payload=payload))
    kit = await start_kit(f := story_of(stage(), items))
    row = await run_to_end(kit, f, [])
    bad = len(UNSTORABLE)
    assert (row["status"], row["selected"], row["successful"], row["failed"]) == ("partial", 30 + bad, 30, bad)
    assert query("SELECT key, error_code, permanent, executions FROM items WHERE status <> 'succeeded' ORDER BY 1") == [
        (name, "DISPATCH_FAILED", True, 0) for name in sorted(UNSTORABLE)
    ]
    outcomes = query("SELECT target, error_code, reason FROM outcomes WHERE outcome = 'failed'")
    assert {(target, code) for target, code, _ in outcomes} == {(name, "DISPATCH_FAILED") for name in UNSTORABLE}
    assert all(reason.startswith("The item could not be dispatched: ") for _, _, reason in outcomes)


@pytest.mark.req("ENG-13")
async def test_several_bad_items_in_several_chunks_harm_nobody_else_also_the_second_time(board, query):
    run = await board.run()
    items = [NewItem(key, payload="\x00" if n % 17 == 0 else n) for n, key in enumerate(keys(100))]
    for _ in range(2):
        assert await dispatch(board, run, items, chunk=10) == 100
    assert query("SELECT status, count(*) FROM items GROUP BY 1 ORDER BY 1") == [("failed", 6), ("open", 94)]
    assert query("SELECT sum(taken), sum(failed), sum(in_flight), count(*) FROM claims") == [(6, 6, 0, 6)]


@pytest.mark.req("ENG-13")
@pytest.mark.parametrize("payload", ["a\x00b", object()], ids=["refused by the database", "refused before"])
async def test_a_bad_item_fails_alone_in_a_run_of_items_only(start_kit, payload):
    work = stage()
    kit = await start_kit(f := flow(work, story=None))
    items = [NewItem("a"), NewItem("bad", payload=payload), NewItem("c")]
    started = await start_items(kit, Start(f, "items-only"), work, items)
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 2, 1)


@pytest.mark.req("ENG-13")
async def test_a_run_of_items_only_ends_though_none_of_them_could_be_dispatched(start_kit, query):
    """No worker ever has anything of it in hand: the sweep closes it."""
    work = stage()
    kit = await start_kit(f := flow(work, story=None))
    started = await start_items(kit, Start(f, "items-only"), work, [NewItem("bad", payload=object())])
    query("SELECT pg_notify('ecluse_closing', '')")  # which need not wait for its turn
    row = await wait_for_run(kit, started.run.id, timedelta(seconds=8))
    assert (row["status"], row["failed"]) == ("failed", 1)


LONG = "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(200))


@pytest.mark.req("ENG-13")
@pytest.mark.parametrize("key", ["x\x00y", "x\ud800y", LONG], ids=["NUL", "lone surrogate", "too long for an index"])
@pytest.mark.parametrize("target", [None, "fiche"], ids=["and target", "under a good target"])
async def test_a_bad_key_fails_alone_and_the_run_ends_partial(start_kit, query, key, target):
    kit = await start_kit(f := story_of(stage(), [NewItem("a"), NewItem(key, target), NewItem("c")]))
    started = await start_run(kit, Start(f, "key"))
    row = await wait_for_run(kit, started.run.id, timedelta(seconds=4))
    assert (row["status"], row["selected"], row["successful"], row["failed"]) == ("partial", 3, 2, 1)
    assert query("SELECT error_code FROM items WHERE status = 'failed'") == [("DISPATCH_FAILED",)]
    ((failed, code),) = query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'")
    assert code == "DISPATCH_FAILED"
    assert target in (None, failed)


# --- event ids


@pytest.mark.req("ENG-22", "ENG-23")
async def test_logs_name_the_event_of_each_dispatch_and_of_each_failed_execution(start_kit, query):
    seen: list[tuple[str, int]] = []

    async def heals(_: WorkContext, item: Item) -> Result:
        seen.append((item.event_id, item.executions))
        if item.key == "b" and item.round == 0:
            raise TransientError("down", code="DOWN")
        return Done()

    healing = stage(heals, rounds=1, poll=timedelta(milliseconds=100), retry=RetryPolicy(executions=2, base=0.01))
    kit = await start_kit(f := flow(healing, "letters"))
    row = await run_to_end(kit, f, ["a", "b"])
    assert (row["status"], row["successful"]) == ("completed", 2)
    base = f"letters-{row['id']}-work"
    assert sorted(seen) == [(f"{base}-a", 0), (f"{base}-b", 0), (f"{base}-b", 1), (f"{base}-b-retry-1", 0)]
    dispatches = query("SELECT message, data->'event_ids' FROM run_log WHERE message LIKE 'FAN-OUT%%' ORDER BY id")
    assert dispatches == [
        ("FAN-OUT: letters/work x2", [f"{base}-a", f"{base}-b"]),
        ("FAN-OUT: letters/work x1 (round 1)", [f"{base}-b-retry-1"]),
    ]
    assert query("SELECT event_id, round, execution, error_code FROM attempts ORDER BY id") == [
        (f"{base}-b", 0, 1, "DOWN"),
        (f"{base}-b", 0, 2, "DOWN"),
    ]
    assert query("SELECT event_id, message FROM run_log WHERE level = 'error'") == [(f"{base}-b", "down")]


@pytest.mark.req("ENG-23")
async def test_the_log_names_the_event_that_could_not_be_dispatched(start_kit, query):
    kit = await start_kit(f := story_of(stage(), [*(NewItem(key) for key in keys(5)), NewItem("bad", payload="\x00")]))
    row = await run_to_end(kit, f, [])
    assert query("SELECT event_id FROM run_log WHERE level = 'error'") == [(f"test-{row['id']}-work-bad",)]


# --- when nobody is told

LISTENERS = "FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%%'"


async def test_work_is_found_by_polling_while_the_listener_is_dead_and_the_listener_comes_back(start_kit, query):
    begun: dict[str, float] = {}

    async def work(_: WorkContext, item: Item) -> Result:
        begun[item.key] = time.monotonic()
        return Done()

    one = stage(work)
    kit = await start_kit(f := flow(one, story=None))
    deaf = True

    async def keep_it_dead():
        while deaf:
            await asyncio.to_thread(query, f"SELECT pg_terminate_backend(pid) {LISTENERS}")
            await asyncio.sleep(0.02)

    async def start(key):
        at = time.monotonic()
        started = await start_items(kit, Start(f, key), one, [NewItem(key)])
        await wait_for_run(kit, started.run.id, PATIENCE)
        return begun[key] - at

    for _ in range(100):
        if query(f"SELECT 1 {LISTENERS}"):
            break
        await asyncio.sleep(0.02)
    killer = asyncio.create_task(keep_it_dead())
    await asyncio.sleep(0.1)
    assert query(f"SELECT 1 {LISTENERS}") == []
    late = [await start(f"unheard-{n}") for n in range(2)]
    assert max(late) < 1.6  # the poll, and some patience with a busy machine
    deaf = False
    await killer
    for _ in range(200):
        if query(f"SELECT 1 {LISTENERS}"):
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert sorted([await start(f"heard-{n}") for n in range(3)])[1] < 0.3
