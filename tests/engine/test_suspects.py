"""Items that workers died with: narrowed down while the others go on, run alone, and in the end not run again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from ecluse.engine import Done, Item, Lane, NewItem, Result, Start, WorkContext
from tests.engine.flows import PATIENCE, Shop, flow, open_board, stage, until

HANDS = 20


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


@pytest.fixture
async def waiting(dsn, query):
    """A run that is only items, all of them waiting; `crashes` of each."""

    async def make(crashes: dict[str, int], lane: str = "lane", name: str = "test") -> int:
        if not query("SELECT 1 FROM lanes WHERE name = %s", lane):
            await board.lane(lane)
        run = await board.run(list(crashes), lane=lane, name=name)
        query("UPDATE runs SET orchestrated = false, selected = %s WHERE id = %s", len(crashes), run.id)
        query("INSERT INTO outcomes (run_id, target) SELECT run_id, target FROM items WHERE run_id = %s", run.id)
        for key, died in crashes.items():
            query("UPDATE items SET crashes = %s WHERE key = %s AND run_id = %s", died, key, run.id)
        return run.id

    async with open_board(dsn) as board:
        yield make


class Floor:
    """Work that knows who else is at work: the most at once per number of crashes, and who was with whom."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds
        self.at_work: list[Item] = []
        self.most: Counter[int] = Counter()
        self.company: dict[str, set[str]] = {}
        self.order: list[str] = []

    async def work(self, _: WorkContext, item: Item) -> Result:
        self.at_work.append(item)
        self.order.append(item.key)
        for crashes, count in Counter(one.crashes for one in self.at_work).items():
            self.most[crashes] = max(self.most[crashes], count)
        for one in self.at_work:
            self.company.setdefault(one.key, set()).update(other.key for other in self.at_work if other is not one)
        await asyncio.sleep(self.seconds)
        self.at_work.remove(item)
        return Done()


def some(crashes: int, count: int) -> dict[str, int]:
    return {f"c{crashes}-{n:03d}": crashes for n in range(count)}


async def test_suspects_are_few_at_a_time_while_the_others_go_on(start_kit, waiting):
    floor = Floor()
    run = await waiting(some(0, 60) | some(1, 12) | some(2, 6))
    kit = await start_kit(flow(stage(floor.work)), hands=HANDS)
    row = await kit.wait_for_run(run, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 78)
    assert (floor.most[1], floor.most[2]) == (HANDS // 10, 1), "a tenth of the hands, a hundredth, at least one"
    assert floor.most[0] > HANDS // 2
    last_of_the_others = max(place for place, key in enumerate(floor.order) if key.startswith("c0"))
    assert any(key.startswith("c1") for key in floor.order[:last_of_the_others]), "side by side"


@pytest.mark.parametrize("crashes", [3, 4])
async def test_from_the_third_death_on_an_item_runs_alone(start_kit, waiting, query, crashes):
    floor = Floor()
    run = await waiting(some(0, 60) | some(1, 2) | some(crashes, 3))
    kit = await start_kit(flow(stage(floor.work)), hands=HANDS)
    row = await kit.wait_for_run(run, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 65), "the others waited, and went on"
    assert {key: company for key, company in floor.company.items() if key in some(crashes, 3)} == {
        key: set() for key in some(crashes, 3)
    }
    assert floor.most[0] > HANDS // 2
    claims = query("SELECT c.taken FROM claims c JOIN items i ON i.claim_id = c.id WHERE i.crashes = %s", crashes)
    assert claims == [(1,)] * 3


async def test_after_five_deaths_an_item_is_not_run_again(start_kit, waiting, query):
    floor = Floor()
    run = await waiting(some(0, 5) | {"poison": 5, "worse": 9})
    kit = await start_kit(flow(stage(floor.work)), hands=HANDS)
    row = await kit.wait_for_run(run, PATIENCE)
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 5, 2)
    assert sorted(floor.order) == sorted(some(0, 5))
    assert query("SELECT target, error_code, reason FROM outcomes WHERE outcome = 'failed' ORDER BY 1") == [
        ("poison", "WORKER_CRASHED", "5 workers died with this item in hand"),
        ("worse", "WORKER_CRASHED", "9 workers died with this item in hand"),
    ]
    assert query("SELECT DISTINCT permanent, executions FROM items WHERE status = 'failed'") == [(True, 1)]


AFTER_FIVE_DEATHS = {
    # by class, what became of the last write, and deaths: the effect's state, the error, whether in doubt
    ("absolute", "applied, hangs", 5): ("applied", None, False),
    ("absolute", "hangs", 5): ("not_applied", "WORKER_CRASHED", False),
    ("absolute", "arrives late, hangs", 5): ("applied", None, False),
    ("keyed", "applied, hangs", 5): ("unknown", "OUTCOME_UNKNOWN", True),
    ("keyed", "hangs", 5): ("unknown", "OUTCOME_UNKNOWN", True),
    # the very look has killed one, too
    ("absolute", "applied, hangs", 6): ("sending", "WORKER_CRASHED", True),
}


async def test_a_write_that_killed_five_is_asked_about_once_and_not_sent_again(start_kit, query):
    keys = {f"{kind}, {goes}, {deaths}": (kind, goes, deaths) for kind, goes, deaths in AFTER_FIVE_DEATHS}
    shop = Shop({key: [goes] for key, (_, goes, _) in keys.items()})
    shop.late = 1.0  # when others are at it already
    flows = {kind: flow(getattr(shop, kind)(quiet=timedelta(seconds=1.3)), kind) for kind in ("keyed", "absolute")}
    kit = await start_kit(*flows.values())
    runs = [
        await kit.start_run(Start(f, kind, input={"targets": [key for key in keys if keys[key][0] == kind]}))
        for kind, f in flows.items()
    ]
    await until(lambda: len(shop.writes) == len(keys))
    await kit.stop(grace=0.01)
    query("UPDATE items SET crashes = right(key, 1)::int")
    kit = await start_kit(*flows.values())
    for run in runs:
        await kit.wait_for_run(run.run.id, PATIENCE)
    found = query(
        "SELECT target, e.state, o.error_code, o.effect_may_exist FROM outcomes o JOIN effects e USING (run_id, target)"
    )
    assert {keys[key]: tuple(rest) for key, *rest in found} == AFTER_FIVE_DEATHS
    assert len(shop.writes) == len(keys), "none was sent again"
    reads = Counter(key for key, _ in shop.reads)
    assert reads["absolute, applied, hangs, 6"] == 1, "before its write, and not again"


# ── Suspects that cannot be had ────────────────────────────────────────────────────────────────────────────────────


class Slow(Floor):
    """One long call, and many short ones."""

    async def work(self, context: WorkContext, item: Item) -> Result:
        if item.key == "long":
            await asyncio.sleep(2.5)
            return Done()
        return await super().work(context, item)


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
    await waiting({"suspect": 3}, lane=lane.name, name=name)
    query(because)
    run = await waiting({"long": 0})
    work, held = stage(floor.work), stage(floor.work, name="second", lane=lane)
    kit = await start_kit(f := flow(work, stages=(work, held), story=None), hands=HANDS)
    await until(lambda: kit.worker.hands.busy)
    began = time.monotonic()
    short = await kit.start_items(Start(f, "short"), work, [NewItem(key) for key in some(0, 50)])
    await kit.wait_for_run(short.run.id, PATIENCE)
    took = time.monotonic() - began
    assert query("SELECT ended_at FROM runs WHERE id = %s", run) == [(None,)], "the long one is still at work"
    assert took < 1.5, "the short ones had nothing to wait for"
    assert query("SELECT claim_id FROM items WHERE key = 'suspect'") == [(None,)]
    await kit.stop(grace=0.05)
