"""Items that workers died with: taken over at full pace until something points at one of them; then run in small
groups, at last alone, and after deaths alone not run again."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from ecluse.engine import Done, Item, Lane, NewItem, Result, Start, WorkContext
from ecluse.engine.cluster.heartbeat import TOMBSTONES
from ecluse.engine.cluster.take_over import take_over
from ecluse.engine.work.suspects import Suspicion
from tests.support.engine_flows import PATIENCE, Shop, flow, open_board, stage, until
from tests.support.runs import start_items, start_run, wait_for_run

HANDS = 20
NONE, TENTH, HUNDREDTH, ALONE, POISON, DEADLY = Suspicion
Facts = dict[str, int]


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


GIVEN = """
UPDATE items i SET crashes = coalesce(t.crashes, 0), solo_deaths = coalesce(t.solo_deaths, 0),
    suspicion = coalesce(t.suspicion, 0)
FROM jsonb_to_recordset(%s::jsonb) AS t(key text, crashes smallint, solo_deaths smallint, suspicion smallint)
WHERE i.key = t.key AND i.run_id = %s
"""


@pytest.fixture
async def waiting(dsn, query):
    """A run that is only items, all of them waiting; the facts of each."""

    async def make(items: dict[str, Facts], lane: str = "lane", name: str = "test") -> int:
        if not query("SELECT 1 FROM lanes WHERE name = %s", lane):
            await board.lane(lane)
        run = await board.run(list(items), lane=lane, name=name)
        query("UPDATE runs SET orchestrated = false, selected = %s WHERE id = %s", len(items), run.id)
        query("INSERT INTO outcomes (run_id, target) SELECT run_id, target FROM items WHERE run_id = %s", run.id)
        query(GIVEN, json.dumps([{"key": key, **facts} for key, facts in items.items()]), run.id)
        return run.id

    async with open_board(dsn) as board:
        yield make


class Floor:
    """Work that knows who else is at work: the most at once per kind of items, and who was with whom."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds
        self.at_work: list[Item] = []
        self.most: Counter[str] = Counter()
        self.group_sizes: dict[str, set[str]] = {}
        self.order: list[str] = []

    async def work(self, _: WorkContext, item: Item) -> Result:
        self.at_work.append(item)
        self.order.append(item.key)
        for kind, count in Counter(one.key[0] for one in self.at_work).items():
            self.most[kind] = max(self.most[kind], count)
        for one in self.at_work:
            self.group_sizes.setdefault(one.key, set()).update(other.key for other in self.at_work if other is not one)
        await asyncio.sleep(self.seconds)
        self.at_work.remove(item)
        return Done()


class Slow(Floor):
    """One long call, and many short ones."""

    async def work(self, context: WorkContext, item: Item) -> Result:
        if item.key.startswith("long"):
            await asyncio.sleep(2.5)
            return Done()
        return await super().work(context, item)


def some(kind: str, count: int, **facts: int) -> dict[str, Facts]:
    return {f"{kind}-{n:03d}": facts for n in range(count)}


# ── Evidence ───────────────────────────────────────────────────────────────────────────────────────────────────────

DIES = """
WITH r AS (
    INSERT INTO replicas (id, host, pid, work, state, ended_at)
    VALUES (%(name)s, 'there', 1, %(work)s, %(state)s, clock_timestamp())),
c AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at, apart)
    SELECT %(name)s, run_id, stage, lane_id, count(*), now(), %(apart)s::text FROM items WHERE key = ANY(%(held)s)
    GROUP BY run_id, stage, lane_id RETURNING id)
UPDATE items SET claim_id = c.id FROM c WHERE key = ANY(%(held)s)
"""
A, B, IDLE = ["a"], ["b"], []
Death = tuple[Sequence[str], dict[str, Any]]


@pytest.fixture
def dies(dsn) -> Callable[..., None]:
    """A worker that dies, or leaves, with these items in hand, and another that takes them over."""
    names = (f"worker-{n}" for n in itertools.count())

    def die(held: Sequence[str], apart: str | None = None, state: str = "dead", work: str = "test/work") -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            facts = {"name": next(names), "held": list(held), "apart": apart, "state": state, "work": [work]}
            connection.execute(DIES, facts)
            assert take_over(connection) == len(held)

    return die


def once(held: Sequence[str], **how: Any) -> list[Death]:
    return [(held, how)]


IN_GROUP, SOLO = once(A, apart="group"), once(A, apart="alone")
TOGETHER = 3 * once([*A, *B])
# Who died with what in hand: crashes of item a, of them in a group and alone, and what it is suspected of.
SEEN: dict[str, tuple[list[Death], tuple[int, int, int, Suspicion]]] = {
    "twice": (2 * once(A), (2, 0, 0, NONE)),
    "at each of three deaths": (3 * once(A), (3, 0, 0, TENTH)),
    "at each since its first": (5 * once(B) + 3 * once(A), (3, 0, 0, TENTH)),
    "at three of five": (once(A) + once(B) + once(A) + once(IDLE) + once(A), (3, 0, 0, NONE)),
    "at eight of sixteen": (8 * (once(A) + once(B)), (8, 0, 0, TENTH)),
    "at a stop": (4 * once(A, state="left"), (0, 0, 0, NONE)),
    "beside deaths of workers that cannot do it": (
        once(A) + 5 * once(IDLE, work="test/second") + 2 * once(A),
        (3, 0, 0, TENTH),
    ),
    "beside deaths while another ran alone": (2 * once(A) + 6 * once(B, apart="alone") + once(A), (3, 0, 0, TENTH)),
    "once in a group": (TOGETHER + IN_GROUP, (4, 1, 0, HUNDREDTH)),
    "twice in a group": (TOGETHER + 2 * IN_GROUP, (5, 2, 0, ALONE)),
    "once alone": (TOGETHER + SOLO, (4, 0, 1, ALONE)),
    "three times alone": (TOGETHER + 3 * SOLO, (6, 0, 3, POISON)),
    "three times alone, another one died without it": (TOGETHER + 3 * SOLO + once(B), (6, 0, 3, POISON)),
    "another one died without it, three times alone": (TOGETHER + once(B) + 3 * SOLO, (6, 0, 3, ALONE)),
    "another one died without it, four times alone": (TOGETHER + once(B) + 4 * SOLO, (7, 0, 4, POISON)),
    "many died without it, six times alone": (
        8 * (once(A) + once(B)) + 2 * IN_GROUP + 6 * SOLO,
        (16, 2, 6, POISON),
    ),
    "and when it was asked about": (TOGETHER + 4 * SOLO, (7, 0, 4, DEADLY)),
    "while another was convicted": (TOGETHER + 3 * (SOLO + once(B, apart="alone")), (6, 0, 3, POISON)),
}


@pytest.mark.parametrize(("deaths", "expected"), SEEN.values(), ids=SEEN)
async def test_deaths_are_counted_for_and_against_an_item(waiting, dies, query, deaths, expected):
    await waiting({"a": {}, "b": {}})
    for held, how in deaths:
        dies(held, **how)
    row = query("SELECT crashes, group_deaths, solo_deaths, suspicion FROM items WHERE key = 'a'")
    assert row == [expected]


async def test_an_item_that_was_in_hand_only_at_the_last_deaths_is_not_blamed_for_them(waiting, dies, query):
    await waiting({"a": {}, "b": {}, "c": {}})
    for held in (["a"], ["a", "b"], ["a", "b"], ["a", "c"]):
        dies(held)
    assert query("SELECT key, suspicion FROM items ORDER BY 1") == [("a", TENTH), ("b", NONE), ("c", NONE)]


async def test_deaths_are_remembered_for_as_long_as_they_are_evidence(waiting, dies, query, dsn):
    await waiting({"a": {}})
    for held in (IDLE, A, IDLE, A):
        dies(held)
    query("UPDATE replicas SET ended_at = ended_at - interval '3 hours'")
    query("UPDATE items SET first_crash_at = first_crash_at - interval '3 hours'")
    query(TOMBSTONES)
    assert query("SELECT count(*) FROM replicas") == [(3,)], "what was before its first crash is no evidence"
    query("UPDATE items SET status = 'succeeded', finished_at = now(), claim_id = 1")
    query(TOMBSTONES)
    assert query("SELECT count(*) FROM replicas") == [(0,)]


# ── What suspects are run with ─────────────────────────────────────────────────────────────────────────────────────


async def test_what_workers_died_with_is_taken_over_at_full_pace(start_kit, waiting):
    floor = Floor()
    run = await waiting(some("crashed", 60, crashes=7))
    kit = await start_kit(flow(stage(floor.work)), hands=HANDS)
    row = await wait_for_run(kit, run, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 60)
    assert floor.most["c"] == HANDS


async def test_suspects_are_few_at_a_time_while_the_others_go_on(start_kit, waiting, query):
    floor = Floor()
    run = await waiting(some("other", 600) | some("tenth", 50, suspicion=TENTH) | some("hundredth", 6, suspicion=2))
    kit = await start_kit(flow(stage(floor.work)), hands=10 * HANDS)
    row = await wait_for_run(kit, run, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 656)
    assert 10 < floor.most["t"] <= HANDS, "a tenth of the hands"
    assert floor.most["h"] == HANDS // 10, "a hundredth"
    assert floor.most["o"] > 5 * HANDS
    last_of_the_others = max(place for place, key in enumerate(floor.order) if key.startswith("o"))
    assert any(key.startswith("t") for key in floor.order[:last_of_the_others]), "side by side"
    marks = query("SELECT DISTINCT i.suspicion, c.apart FROM items i JOIN claims c ON c.id = i.claim_id ORDER BY 1")
    assert marks == [(NONE, None), (TENTH, "group"), (HUNDREDTH, "group")]


RUN_ALONE = {
    "after two groups": (HANDS, some("suspect", 5, suspicion=ALONE)),
    "few hands have no groups": (HANDS - 1, some("suspect", 5, suspicion=TENTH)),
    "few suspects need no groups": (10 * HANDS, some("suspect", 3, suspicion=TENTH)),
}


@pytest.mark.parametrize(("hands", "suspects"), RUN_ALONE.values(), ids=RUN_ALONE)
async def test_a_suspect_runs_alone(start_kit, waiting, query, hands, suspects):
    floor = Floor()
    run = await waiting(some("other", 60, crashes=2) | suspects)
    kit = await start_kit(flow(stage(floor.work)), hands=hands)
    row = await wait_for_run(kit, run, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 60 + len(suspects)), "the others waited, and went on"
    assert {key: floor.group_sizes[key] for key in suspects} == {key: set() for key in suspects}
    assert floor.most["o"] > HANDS // 2
    claims = query("SELECT c.taken, c.apart FROM claims c JOIN items i ON i.claim_id = c.id WHERE i.suspicion > 0")
    assert claims == [(1, "alone")] * len(suspects)


OTHER_WORKER = """
WITH r AS (INSERT INTO replicas (id, host, pid, work, beat_at)
           VALUES ('other', 'there', 1, '{{test/work}}', clock_timestamp() - interval '{silent} seconds'))
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at, apart)
SELECT 'other', 0, 'work', id, {held}, now(), {apart} FROM lanes
"""
WAITS_FOR_IT = {
    "no other worker": ("SELECT 1", True),
    "another has less in hand": (OTHER_WORKER.format(held=0, silent=0, apart="NULL"), False),
    "another has more in hand": (OTHER_WORKER.format(held=9, silent=0, apart="NULL"), True),
    "another has less in hand, but is silent": (OTHER_WORKER.format(held=0, silent=4, apart="NULL"), True),
    "another is running one alone": (OTHER_WORKER.format(held=1, silent=0, apart="'alone'"), True),
}


@pytest.mark.parametrize(("others", "waits"), WAITS_FOR_IT.values(), ids=WAITS_FOR_IT)
async def test_of_several_workers_those_with_the_least_in_hand_make_room(start_kit, waiting, query, others, waits):
    floor = Slow(0.01)
    await waiting({"suspect": {"suspicion": ALONE}})
    query("UPDATE items SET due_at = now() + interval '1 hour'")
    run = await waiting({"long": {}, "longer": {}})
    work = stage(floor.work)
    kit = await start_kit(f := flow(work, story=None), hands=HANDS)
    await until(lambda: kit.worker.slots.busy == 2)
    query(others)
    query("UPDATE items SET due_at = now() WHERE key = 'suspect'")
    await until(lambda: kit.worker._suspects.limits)
    short = await start_items(kit, Start(f, "short"), work, [NewItem(key) for key in some("short", 20)])
    await wait_for_run(kit, short.run.id, PATIENCE)
    ended = query("SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", run)
    assert ended == [(waits,)], "the others go on while one worker waits for its hands to be empty"
    await until(lambda: query("SELECT status FROM items WHERE key = 'suspect'") == [("succeeded",)])
    assert floor.group_sizes["suspect"] == set()


# ── Poison ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("paid", [False, pytest.param(True, marks=pytest.mark.req("G-80"))], ids=["", "paid"])
async def test_what_killed_its_workers_alone_is_not_run_again(start_kit, waiting, query, paid):
    floor = Floor()
    convicted = {"crashes": 6, "solo_deaths": 3, "suspicion": POISON}
    run = await waiting(some("other", 5) | some("crashed", 5, crashes=15, solo_deaths=2) | {"poison": convicted})
    kit = await start_kit(flow(stage(floor.work, paid=paid)), hands=HANDS)
    row = await wait_for_run(kit, run, PATIENCE)
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 10, 1)
    assert "poison" not in floor.order
    died = "6 workers died while they held this item, 3 of them while it ran alone"
    assert query("SELECT target, error_code, reason FROM outcomes WHERE outcome = 'failed'") == [
        ("poison", "WORKER_CRASHED", died)
    ]
    assert query("SELECT DISTINCT permanent, executions FROM items WHERE status = 'failed'") == [(True, 1)]


AFTER_DEATHS = {
    # by class, what became of the last write, and suspicion: the effect's state, the error, whether in doubt, and sends
    ("absolute", "applied, hangs", POISON): ("applied", None, False, 1),
    ("absolute", "hangs", POISON): ("not_applied", "WORKER_CRASHED", False, 1),
    ("absolute", "arrives late, hangs", POISON): ("applied", None, False, 1),
    ("keyed", "applied, hangs", POISON): ("unknown", "OUTCOME_UNKNOWN", True, 1),
    ("keyed", "hangs", POISON): ("unknown", "OUTCOME_UNKNOWN", True, 1),
    # the very look has killed one, too
    ("absolute", "applied, hangs", DEADLY): ("sending", "WORKER_CRASHED", True, 1),
    # nothing points at it, however many died with it in hand: asked about, or sent again under its key
    ("absolute", "applied, hangs", NONE): ("applied", None, False, 1),
    ("absolute", "hangs", NONE): ("applied", None, False, 2),
    ("keyed", "applied, hangs", NONE): ("applied", None, False, 2),
    ("keyed", "hangs", NONE): ("applied", None, False, 2),
    ("keyed", "hangs", ALONE): ("applied", None, False, 2),
}


async def test_a_write_in_doubt_is_given_up_only_if_it_killed_its_workers_alone(start_kit, query):
    keys = {f"{kind}, {goes}, {suspicion}": (kind, goes, suspicion) for kind, goes, suspicion in AFTER_DEATHS}
    shop = Shop({key: [goes] for key, (_, goes, _) in keys.items()})
    shop.late = 1.0  # when others are at it already
    flows = {kind: flow(getattr(shop, kind)(quiet=timedelta(seconds=1.3)), kind) for kind in ("keyed", "absolute")}
    kit = await start_kit(*flows.values())
    runs = [
        await start_run(kit, Start(f, kind, input={"targets": [key for key in keys if keys[key][0] == kind]}))
        for kind, f in flows.items()
    ]
    await until(lambda: len(shop.writes) == len(keys))
    await kit.stop(grace=0.01)
    query("UPDATE items SET crashes = 9, suspicion = right(key, 1)::int, solo_deaths = right(key, 1)::int")
    kit = await start_kit(*flows.values())
    for run in runs:
        await wait_for_run(kit, run.run.id, PATIENCE)
    found = query(
        "SELECT target, e.state, o.error_code, o.effect_may_exist, e.sends"
        " FROM outcomes o JOIN effects e USING (run_id, target)"
    )
    assert {keys[key]: tuple(rest) for key, *rest in found} == AFTER_DEATHS
    assert sorted(shop.applied) == sorted(
        key for key in keys if keys[key][1] != "hangs" or AFTER_DEATHS[keys[key]][0] == "applied"
    ), "each once"
    reads = Counter(key for key, _ in shop.reads)
    assert reads[f"absolute, applied, hangs, {DEADLY}"] == 1, "before its write, and not again"


# ── Suspects that cannot be had ────────────────────────────────────────────────────────────────────────────────────


OTHERS = """
WITH r AS (INSERT INTO replicas (id, host, pid) VALUES ('other', 'there', 1))
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at)
SELECT 'other', 0, 'work', id, 1, now() FROM lanes
"""
CAP = Lane("capped", max_in_flight=1)
RATE = Lane("rated", per_second=0.001)
CANNOT_BE_HAD = {
    "its lane is held": (
        Lane("held"),
        "test",
        "UPDATE lanes SET held_until = now() + interval '1 hour', held_reason = ''",
    ),
    "others fill its lane": (CAP, "test", OTHERS),
    "its lane's next permit is far off": (RATE, "test", "UPDATE lanes SET next_free_at = now() + interval '1 hour'"),
    "its flow is not loaded here": (Lane("lane"), "elsewhere", "SELECT 1"),
    # its last worker died after the gate had timed out: nobody claims it any more
    "its gate has given up on it": (Lane("lane"), "test", "UPDATE items SET permanent = true"),
    "it waits for its next attempt": (Lane("lane"), "test", "UPDATE items SET due_at = now() + interval '1 hour'"),
}


@pytest.mark.parametrize(("lane", "name", "because"), CANNOT_BE_HAD.values(), ids=CANNOT_BE_HAD)
async def test_a_suspect_that_cannot_be_had_does_not_keep_the_others(start_kit, waiting, query, lane, name, because):
    floor = Slow(0.01)
    await waiting({"suspect": {"suspicion": ALONE}}, lane=lane.name, name=name)
    query(because)
    run = await waiting({"long": {}})
    work, held = stage(floor.work), stage(floor.work, name="second", lane=lane)
    kit = await start_kit(f := flow(work, stages=(work, held), story=None), hands=HANDS)
    await until(lambda: kit.worker.slots.busy)
    began = time.monotonic()
    short = await start_items(kit, Start(f, "short"), work, [NewItem(key) for key in some("short", 50)])
    await wait_for_run(kit, short.run.id, PATIENCE)
    took = time.monotonic() - began
    assert query("SELECT ended_at FROM runs WHERE id = %s", run) == [(None,)], "the long one is still at work"
    assert took < 1.5, "the short ones had nothing to wait for"
    assert query("SELECT claim_id FROM items WHERE key = 'suspect'") == [(None,)]
    await kit.stop(grace=0.05)
