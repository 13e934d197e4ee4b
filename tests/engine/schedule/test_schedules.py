"""Schedules as people make and change them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.engine import (
    create_schedule,
    delete_schedule,
    enable_schedule,
    fire_by_hand,
    list_schedules,
    load_schedule,
    show_schedule,
    update_schedule,
)
from tests.support.engine_flows import Targets, flow, stage
from tests.support.tick_world import BEGIN, FLOW, HOURLY, OTHER, hour

CHORES = flow(stage(), "chores", story=None)


@pytest.mark.req("G-39", "G-51", "G-52", "G-69")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cron": "61 * * * *"}, "bad minute"),
        ({"cron": ""}, "0 fields"),
        ({"timezone": "Mars/Olympus"}, "no time zone 'Mars/Olympus'"),
        ({"window_start": "02:00"}, "give both start and end"),
        ({"window_start": "02:00", "window_end": "02:00"}, "must differ"),
        ({"input": {"targets": 7}}, "Input of flow test: targets"),
        ({"flow": CHORES}, "cannot be scheduled"),
        ({"name": " "}, "1 to 200 characters"),
        ({"name": "x" * 201}, "1 to 200 characters"),
        ({"name": "a\x00"}, "1 to 200 characters"),
        ({"tenant_id": "a/b"}, "tenant: must be"),
        ({"overlap": "never"}, "^overlap: must be wait, allow or skip$"),
        ({"catch_up": "all"}, "^catch_up: must be latest or skip$"),
        ({"cron": None, "timezone": "Nowhere"}, "no time zone"),
    ],
)
async def test_what_cannot_be_is_refused_when_it_is_made_and_when_it_is_changed(world, query, change, said):
    with pytest.raises(InvalidInput, match=said):
        await world.do(create_schedule, replace(HOURLY, **change))
    schedule = await world.create()
    before = query("SELECT s::text FROM schedules s")
    with pytest.raises(InvalidInput, match=said):
        await world.do(update_schedule, "default", schedule, replace(HOURLY, **change))
    assert query("SELECT s::text FROM schedules s") == before


async def test_a_name_is_taken_once_per_tenant_and_free_again_after_deletion(world):
    schedule = await world.create()
    with pytest.raises(Conflict, match="'hourly' already"):
        await world.create()
    await world.create(replace(HOURLY, tenant_id="acme"))
    other = await world.create(replace(HOURLY, name="other"))
    with pytest.raises(Conflict, match="'hourly' already"):
        await world.do(update_schedule, "default", other, HOURLY)
    await world.do(delete_schedule, "default", schedule)
    await world.create()
    for tenant, names in (("acme", ["hourly"]), ("default", ["hourly", "other"])):
        listed = await world.do(list_schedules, tenant, limit=10, offset=0)
        assert [(row["tenant_id"], row["name"]) for row in listed] == [(tenant, name) for name in names]


async def test_one_tenants_schedule_does_not_exist_for_another(world):
    schedule = await world.create()
    for ask in (load_schedule, show_schedule, enable_schedule, delete_schedule):
        with pytest.raises(NotFound, match=f"no schedule {schedule}"):
            await world.do(ask, "acme", schedule)
    with pytest.raises(NotFound):
        await world.do(fire_by_hand, "acme", schedule, FLOW)


@pytest.mark.req("AUT-131", "G-29", "JOB-24")
async def test_switched_off_it_is_not_due_and_switched_on_only_for_what_comes(world, one):
    schedule = await world.create()
    await world.do(enable_schedule, "default", schedule, enabled=False)
    assert one("SELECT next_due_at FROM schedules") is None
    assert await world.tick(hour(9.5)) == []
    await world.do(enable_schedule, "default", schedule)
    assert one("SELECT next_due_at FROM schedules") == hour(10)
    assert await world.tick(hour(9.9)) == []
    assert [line.status for line in await world.tick(hour(10))] == ["fired"]
    assert world.states() == [("06 10:00", "fired")], "nothing was due while it was off"


@pytest.mark.req("JOB-24", "G-50")
@pytest.mark.parametrize("how", ["change", "switch off", "delete"])
async def test_what_was_due_just_before_a_change_is_not_fired_and_says_why(world, one, how):
    schedule = await world.create()
    world.at(hour(8) + timedelta(seconds=1))
    if how == "change":
        await world.do(update_schedule, "default", schedule, replace(HOURLY, cron="30 8 * * *"))
    elif how == "switch off":
        await world.do(enable_schedule, "default", schedule, enabled=False)
    else:
        await world.do(delete_schedule, "default", schedule)
    ((due, state, reason),) = world.slots()
    assert (due, state) == ("06 08:00", "skipped")
    assert "before it was fired" in str(reason)
    assert await world.tick(hour(8.1)) == []
    assert one("SELECT count(*) FROM runs") == 0
    assert [line.status for line in await world.tick(hour(8.5))] == (["fired"] if how == "change" else [])


@pytest.mark.req("G-85")
async def test_a_slot_that_waits_when_the_schedule_is_switched_off_is_skipped(world):
    schedule = await world.create()
    await world.tick(hour(8))
    await world.tick(hour(9))
    await world.do(enable_schedule, "default", schedule, enabled=False)
    assert world.states() == [("06 08:00", "fired"), ("06 09:00", "skipped")]
    world.end_runs()
    assert await world.tick(hour(9.1)) == []


async def test_changed_under_a_clock_that_was_set_back_nothing_is_decided_again(world, one):
    schedule = await world.create()
    await world.tick(hour(9))
    world.end_runs()
    world.at(hour(7.9))
    await world.do(update_schedule, "default", schedule, replace(HOURLY, timezone="Europe/Paris"))
    assert await world.tick(hour(8.9)) == []
    assert one("SELECT next_due_at, handled_until FROM schedules") == (hour(10), hour(9))


async def test_another_input_or_name_changes_nothing_about_when_it_is_due(world, one):
    schedule = await world.create()
    world.at(hour(8) + timedelta(seconds=1))
    await world.do(update_schedule, "default", schedule, replace(HOURLY, name="new", input={"targets": ["b"]}))
    assert one("SELECT name, next_due_at FROM schedules") == ("new", hour(8))
    assert [line.status for line in await world.tick(hour(8.1))] == ["fired"]
    assert one("SELECT input->'targets' FROM runs") == ["b"]


async def test_one_that_is_broken_can_be_repaired(world, query):
    schedule = await world.create()
    query("UPDATE schedules SET cron = 'nonsense'")
    assert [line.status for line in await world.tick(hour(8))] == ["failed"]
    await world.do(update_schedule, "default", schedule, HOURLY)
    assert [line.status for line in await world.tick(hour(9))] == ["fired"]


async def test_without_a_cron_it_is_fired_by_hand_only(world, one):
    schedule = await world.create(replace(HOURLY, cron=None))
    assert one("SELECT next_due_at FROM schedules") is None
    assert await world.tick(hour(40)) == []
    started = await world.do(fire_by_hand, "default", schedule, FLOW)
    assert one("SELECT schedule_id, event_key FROM runs") == (schedule, started.run.event_key)
    with pytest.raises(InvalidInput, match="belongs to flow test, not to other"):
        await world.do(fire_by_hand, "default", schedule, OTHER)


async def test_defaults_of_the_input_are_filled_in_once(world, one):
    await world.create(replace(HOURLY, input={}))
    assert one("SELECT input FROM schedules") == Targets().model_dump()


async def test_a_schedule_shows_its_latest_slots(world):
    schedule = await world.create(now=BEGIN)
    await world.tick(hour(10) + timedelta(minutes=1))
    shown = await world.do(show_schedule, "default", schedule)
    assert [(slot["due_at"], slot["state"]) for slot in shown["slots"]] == [
        (hour(10), "fired"), (hour(9), "missed"), (hour(8), "missed"),
    ]  # fmt: skip
