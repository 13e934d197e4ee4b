"""Schedules of a flow that fires its due instants itself: references, refusals, isolation, turns of tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from ecluse.base.errors import Conflict, InvalidInput
from ecluse.engine import DueInstant, FiredAs, Flow, NewSchedule, NotFired, Unfired
from ecluse.engine.schedule import schedules as rows
from ecluse.engine.schedule.ticks import BATCH
from tests.support.engine_flows import Targets
from tests.support.tick_world import BEGIN, FLOW, HOURLY, OTHER, World, hour

# As many more schedules, two per tenant.
MORE = """
INSERT INTO schedules (tenant_id, flow, name, cron, overlap, next_due_at, zone_rules, handled_until, created_at,
                       updated_at, unique_name)
SELECT 't' || n / 2, flow, name, cron, overlap, %s, zone_rules, handled_until, created_at, updated_at, unique_name
FROM schedules, generate_series(1, %s) n
"""
UNAVAILABLE = psycopg.errors.AdminShutdown


class Fires:
    """Fires by what a schedule is called, and keeps what it was called with."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.batches: list[Sequence[DueInstant]] = []
        self.unfired: list[Unfired] = []
        self.flow = Flow("ringing", (), None, Targets, fire=self.fire, on_unfired=self.on_unfired, unique_names=False)
        self.hourly = NewSchedule(self.flow, "good", "0 * * * *", overlap="allow")

    async def fire(self, connection: Any, due: Sequence[DueInstant]) -> Mapping[int, FiredAs | NotFired]:
        self.batches.append(due)
        results: dict[int, FiredAs | NotFired] = {}
        for one in due:
            match self.names[one.schedule_id]:
                case "raises":
                    await connection.execute("SELECT 1 / 0")
                case "outage":
                    raise UNAVAILABLE("the database shuts down")
                case "skips":
                    results[one.schedule_id] = NotFired("skipped", "not now")
                case "fails":
                    results[one.schedule_id] = NotFired("failed", "no server")
                case _:
                    results[one.schedule_id] = FiredAs(f"ring-{one.schedule_id}")
        return results

    async def on_unfired(self, _: Any, instants: Sequence[Unfired]) -> None:
        self.unfired += instants


class Ringing:
    def __init__(self, world: World) -> None:
        self.world, self.fires = world, Fires()
        world.flows["ringing"] = self.fires.flow

    async def create(self, name: str = "good", **changed: Any) -> int:
        made = await self.world.create(replace(self.fires.hourly, name=name, **changed))
        self.fires.names[made] = name
        return made


@pytest.fixture
def ringing(world: World) -> Ringing:
    return Ringing(world)


@pytest.mark.req("JOB-22", "JOB-23")
async def test_a_slot_names_what_the_flow_made_and_no_run_is_started(ringing, world, one):
    made = await ringing.create()
    (line,) = await world.tick(hour(8))
    assert (line.status, line.run_id, line.reference) == ("fired", None, f"ring-{made}")
    assert one("SELECT state, run_id, reference FROM schedule_slots") == ("fired", None, f"ring-{made}")
    assert one("SELECT count(*) FROM runs") == 0
    assert one("SELECT next_due_at, last_run_id, last_fired_at IS NOT NULL FROM schedules") == (hour(9), None, True)
    assert ringing.fires.batches == [[DueInstant(made, "default", hour(8), "allow")]]
    assert ringing.fires.unfired == []


@pytest.mark.req("JOB-25", "JOB-27", "JOB-32", "G-50")
@pytest.mark.parametrize(
    ("name", "state", "reason"), [("skips", "skipped", "not now"), ("fails", "failed", "no server")]
)
async def test_an_instant_that_the_flow_does_not_fire_is_used_up_and_the_next_is_armed(
    ringing, world, query, name, state, reason
):
    made = await ringing.create(name)
    assert [(one.status, one.reason) for one in await world.tick(hour(8))] == [(state, reason)]
    assert query("SELECT state, reason, reference FROM schedule_slots") == [(state, reason, None)]
    assert query("SELECT next_due_at, failures, last_fired_at FROM schedules") == [(hour(9), 0, None)]
    assert ringing.fires.unfired == [Unfired(made, "default", hour(8), state, reason)]


@pytest.mark.req("JOB-25", "JOB-27", "JOB-28", "G-50")
async def test_a_schedule_whose_fire_raises_is_alone_in_failing(ringing, world):
    names = ["good", "good", "raises", "good", "good"]
    made = [await ringing.create(name) for name in names]
    lines = await world.tick(hour(8))
    assert [one.status for one in lines] == ["failed" if name == "raises" else "fired" for name in names]
    assert "division by zero" in lines[2].reason
    assert [one.schedule_id for one in ringing.fires.unfired] == [made[2]]
    assert len(world.slots()) == 5
    assert await world.tick(hour(8.1)) == [], "its instant is used up"


@pytest.mark.req("G-50")
async def test_a_database_that_is_away_uses_up_nothing(ringing, world, one):
    made = await ringing.create("outage")
    with pytest.raises(UNAVAILABLE):
        await world.tick(hour(8))
    assert (world.slots(), ringing.fires.unfired) == ([], [])
    ringing.fires.names[made] = "good"
    assert [line.status for line in await world.tick(hour(8.2))] == ["fired"]
    assert one("SELECT due_at FROM schedule_slots") == hour(8)


@pytest.mark.req("JOB-29")
async def test_a_timetable_that_is_invalid_in_the_database_keeps_its_instant_and_says_why(ringing, world, query):
    await ringing.create()
    query("UPDATE schedules SET cron = 'never'")
    assert [line.status for line in await world.tick(hour(8))] == ["failed"]
    assert world.slots() == []
    (error,) = query("SELECT error FROM schedules")[0]
    assert "never" in error


@pytest.mark.req("JOB-24", "JOB-32")
@pytest.mark.parametrize("change", ["update", "disable", "delete"])
async def test_an_instant_that_a_change_drops_is_passed_on_as_skipped(ringing, world, change):
    made = await ringing.create()
    world.at(hour(8))
    which = ("default", made)
    if change == "update":
        await world.do(rows.update_schedule, *which, replace(ringing.fires.hourly, cron="30 * * * *"))
    elif change == "disable":
        await world.do(rows.enable_schedule, *which, enabled=False, flow=ringing.fires.flow)
    else:
        await world.do(rows.delete_schedule, *which, flow=ringing.fires.flow)
    assert [(one.due_at, one.state) for one in ringing.fires.unfired] == [(hour(8), "skipped")]
    assert await world.tick(hour(8.1)) == []
    assert ringing.fires.batches == []


@pytest.mark.req("JOB-33", "JOB-38")
async def test_what_the_engine_skips_or_has_missed_is_passed_on(ringing, world):
    windowed = await ringing.create("windowed", window_start="07:00", window_end="08:05")
    caught = await ringing.create("caught", catch_up="skip")
    await world.tick(hour(8.5))
    assert sorted((one.schedule_id, one.state) for one in ringing.fires.unfired) == [
        (windowed, "skipped"), (caught, "missed"),
    ]  # fmt: skip


@pytest.mark.req("JOB-21", "G-50")
async def test_tenants_take_turns_and_a_large_one_delays_no_other(ringing, world, query):
    made = await ringing.create()
    query("UPDATE schedules SET tenant_id = 'small', name = 'small'")
    query(MORE, hour(7.75), BATCH * 2 + 10)
    query("UPDATE schedules SET tenant_id = 'large' WHERE id <> %s", made)
    for (number,) in query("SELECT id FROM schedules"):
        ringing.fires.names[number] = "good"
    lines = await world.tick(hour(8))
    assert Counter(line.status for line in lines) == {"fired": BATCH * 2 + 11}, "all of them in one tick"
    first = ringing.fires.batches[0]
    assert made in [one.schedule_id for one in first]
    assert len(first) <= BATCH


async def test_more_tenants_than_a_batch_has_places_are_all_served(ringing, world, query):
    await ringing.create()
    query(MORE, hour(8), BATCH * 3)
    for (number,) in query("SELECT id FROM schedules"):
        ringing.fires.names[number] = "good"
    assert len(await world.tick(hour(8))) == BATCH * 3 + 1
    assert max(len(batch) for batch in ringing.fires.batches) <= BATCH


@pytest.mark.req("JOB-04")
async def test_names_are_unique_per_flow_or_not_at_all(ringing, world):
    await ringing.create("same")
    await ringing.create("same")
    await world.create(replace(HOURLY, name="same"))
    await world.create(replace(HOURLY, flow=OTHER, name="same"))
    with pytest.raises(Conflict, match="choose another name"):
        await world.create(replace(HOURLY, name="same"))


async def test_overlap_skip_skips_while_the_former_run_is_open(world, one):
    await world.create(replace(HOURLY, overlap="skip"))
    await world.tick(hour(8))
    (line,) = await world.tick(hour(9))
    assert (line.status, line.reason) == ("skipped", "overlap: the previous run was still open")
    world.end_runs()
    assert [line.status for line in await world.tick(hour(10))] == ["fired"]
    assert one("SELECT count(*) FROM runs") == 2


@pytest.mark.parametrize("overlap", ["wait", "never"])
async def test_an_overlap_that_the_flow_does_not_know_is_refused(ringing, world, overlap):
    with pytest.raises(InvalidInput, match="overlap"):
        await ringing.create(overlap=overlap)
    assert world.query("SELECT count(*) FROM schedules") == [(0,)]


async def test_a_flow_without_story_and_fire_has_no_schedules(world):
    with pytest.raises(InvalidInput, match="only items"):
        await world.create(replace(HOURLY, flow=replace(FLOW, story=None)), BEGIN)
