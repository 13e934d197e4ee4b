"""The scheduler on a real database: what is fired, when, and exactly once. Time is moved, never waited for."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import psycopg
import pytest
from pydantic import model_validator

from ecluse.base.crash import POINTS_OF_A_TICK
from ecluse.engine import Start, start_run
from ecluse.engine.kit import Kit
from ecluse.engine.schedule import schedules as rows
from ecluse.engine.schedule.slot_decisions import event_key
from ecluse.engine.schedule.ticks import BATCH, TickResult, renew, tick
from tests.support.engine_flows import PATIENCE, Targets, until
from tests.support.runs import wait_for_run
from tests.support.tick_world import BEGIN, FLOW, HOURLY, OTHER, RULES, hour

keyed = partial(event_key, FLOW.slot_key)


@pytest.mark.req("AUT-131", "G-50", "ENG-20")
async def test_a_due_instant_is_a_run_and_a_slot_in_one_commit(world, one):
    schedule = await world.create()
    assert await world.tick(hour(7.9)) == [], "created after 07:00: not due before 08:00"
    (line,) = await world.tick(hour(8) + timedelta(seconds=2))
    assert (line.schedule_id, line.status, line.reason) == (schedule, "fired", None)
    key = f"schedule:{schedule}:{int(hour(8).timestamp()) * 1000}"
    assert one("SELECT id, event_key, schedule_id, tenant_id, input->>'targets', state FROM runs") == (
        line.run_id, key, schedule, "default", '["a"]', "queued",
    )  # fmt: skip
    assert one("SELECT due_at, state, run_id FROM schedule_slots") == (hour(8), "fired", line.run_id)
    assert one("SELECT next_due_at, handled_until, last_run_id, holding_run_id FROM schedules") == (
        hour(9), hour(8), line.run_id, line.run_id,
    )  # fmt: skip
    assert await world.tick(hour(8.1)) == []


@pytest.mark.req("AUT-132", "AUT-130")
async def test_of_several_instants_in_the_window_the_latest_is_run(world):
    await world.create(replace(HOURLY, cron="*/5 * * * *"))
    (line,) = await world.tick(hour(7) + timedelta(minutes=46))
    assert line.status == "fired"
    assert world.states() == [("06 07:35", "skipped"), ("06 07:40", "skipped"), ("06 07:45", "fired")]


@pytest.mark.req("AUT-133", "G-27")
async def test_what_was_missed_is_recorded_and_the_latest_is_run_once(world, one):
    """TM-04: forty days without anybody."""
    await world.create()
    now = BEGIN + timedelta(days=40, minutes=55)
    assert [line.status for line in await world.tick(now)] == ["fired"]
    assert one("SELECT count(*) FROM runs") == 1
    states = [state for _, state in world.states()]
    assert states == ["missed"] * 99 + ["fired"]
    assert one("SELECT missed_uncounted FROM schedules") == 40 * 24 + 1 - 100
    assert await world.tick(now + timedelta(minutes=1)) == []


@pytest.mark.req("G-85", "AUT-134")
async def test_while_its_run_goes_on_a_slot_waits_and_fires_when_it_ends(world, one):
    await world.create()
    await world.tick(hour(8))
    (line,) = await world.tick(hour(9) + timedelta(seconds=1))
    assert line.status == "waiting"
    assert await world.tick(hour(9) + timedelta(minutes=5)) == []
    assert one("SELECT count(*) FROM runs") == 1
    world.end_runs()
    (line,) = await world.tick(hour(9) + timedelta(minutes=6))
    assert line.status == "fired"
    assert world.states() == [("06 08:00", "fired"), ("06 09:00", "fired")]
    assert one("SELECT event_key FROM runs WHERE ended_at IS NULL") == keyed(line.schedule_id, hour(9))


@pytest.mark.req("G-85")
async def test_a_slot_that_has_waited_too_long_is_skipped(world):
    await world.create()
    await world.tick(hour(8))
    await world.tick(hour(9) + timedelta(seconds=1))
    (line,) = await world.tick(hour(9) + timedelta(minutes=21))
    assert (line.status, line.reason) == ("skipped", "overlap: the previous run was still open")
    world.end_runs()
    assert await world.tick(hour(9) + timedelta(minutes=22)) == []
    assert [line.status for line in await world.tick(hour(10))] == ["fired"]


@pytest.mark.req("G-85")
async def test_a_later_instant_takes_the_place_of_one_that_waits(world):
    await world.create(replace(HOURLY, cron="*/10 * * * *"))
    await world.tick(hour(8))
    await world.tick(hour(8) + timedelta(minutes=10))
    await world.tick(hour(8) + timedelta(minutes=20))
    assert world.states()[-3:] == [("06 08:00", "fired"), ("06 08:10", "skipped"), ("06 08:20", "waiting")]
    world.end_runs()
    await world.tick(hour(8) + timedelta(minutes=21))
    assert world.states()[-1] == ("06 08:20", "fired")


async def test_a_schedule_that_allows_overlap_fires_beside_its_former_run(world, one):
    await world.create(replace(HOURLY, overlap="allow"))
    (first,) = await world.tick(hour(8))
    (second,) = await world.tick(hour(9))
    assert (first.status, second.status) == ("fired", "fired")
    assert one("SELECT holding_run_id, last_run_id FROM schedules") == (first.run_id, second.run_id)


@pytest.mark.req("G-29")
async def test_a_run_by_hand_is_allowed_at_any_time_and_frees_nothing_but_itself(world, query, one):
    schedule = await world.create()
    (due,) = await world.tick(hour(8))
    by_hand = await world.do(rows.fire_by_hand, "default", schedule, FLOW)
    assert by_hand.run.event_key.startswith(f"schedule:{schedule}:manual-")
    assert one("SELECT holding_run_id FROM schedules") == due.run_id
    query(
        "UPDATE runs SET status = 'failed', state = 'failed', selected = 0, successful = 0, failed = 0, ignored = 0,"
        " end_cause = 'operator', ended_at = ecluse_now() WHERE id = %s",
        by_hand.run.id,
    )
    assert [line.status for line in await world.tick(hour(9))] == ["waiting"], "the due run still holds it"
    world.end_runs()
    assert [line.status for line in await world.tick(hour(9.1))] == ["fired"], "nor was the instant used up"


@pytest.mark.req("JOB-38", "G-51", "G-27")
async def test_with_a_window_nothing_is_fired_outside_it(world):
    nightly = replace(HOURLY, cron="0 1 * * *", window_start="02:00", window_end="06:00")
    await world.create(nightly)
    assert await world.tick(hour(24 + 1.5)) == []
    assert [line.status for line in await world.tick(hour(24 + 2))] == ["fired"], "moved to the start of the window"
    world.end_runs()
    (line,) = await world.tick(hour(48 + 6) + timedelta(minutes=1))
    assert (line.status, line.reason) == ("skipped", "outside the execution window"), "a second too late"
    assert world.states() == [("07 02:00", "fired"), ("08 02:00", "skipped")]
    assert [line.status for line in await world.tick(hour(72 + 5) + timedelta(minutes=59))] == ["fired"], "caught up"


@pytest.mark.req("AUT-140", "ENG-13")
async def test_one_that_cannot_be_fired_is_reported_and_tried_again_and_the_others_go_on(world, query, one):
    ids = [await world.create(replace(HOURLY, name=f"n{n}")) for n in range(9)]
    bad_input, bad_row = ids[2], ids[6]
    query("UPDATE schedules SET input = '{\"targets\": 1}' WHERE id = %s", bad_input)
    query(f"ALTER TABLE runs ADD CONSTRAINT no CHECK (schedule_id <> {bad_row})")
    lines = {line.schedule_id: line for line in await world.tick(hour(8))}
    assert {id_ for id_, line in lines.items() if line.status == "failed"} == {bad_input, bad_row}
    assert sum(line.status == "fired" for line in lines.values()) == 7
    assert "targets" in lines[bad_input].reason
    assert one("SELECT failures, error, handled_until = created_at FROM schedules WHERE id = %s", bad_row) == (
        1, lines[bad_row].reason, True,
    )  # fmt: skip
    assert await world.tick(hour(8) + timedelta(seconds=2)) == [], "not at once again"
    query("ALTER TABLE runs DROP CONSTRAINT no")
    (again,) = [line for line in await world.tick(hour(8) + timedelta(seconds=30)) if line.schedule_id == bad_row]
    assert again.status == "fired"
    assert one("SELECT event_key FROM runs WHERE schedule_id = %s", bad_row) == keyed(bad_row, hour(8))
    assert one("SELECT failures, error FROM schedules WHERE id = %s", bad_row) == (0, None)
    assert one("SELECT failures FROM schedules WHERE id = %s", bad_input) == 2


async def test_schedules_of_flows_that_are_not_loaded_are_left_to_others(world, one):
    await world.create()
    await world.create(replace(HOURLY, flow=OTHER, name="other"))
    world.flows = {"test": FLOW}
    assert [line.status for line in await world.tick(hour(8))] == ["fired"]
    assert one("SELECT flow FROM runs") == "test"
    world.flows = {"other": OTHER}
    assert [line.status for line in await world.tick(hour(8.1))] == ["fired"]


async def test_schedules_of_a_disabled_tenant_are_skipped_and_say_so(world, query):
    await world.create(replace(HOURLY, tenant_id="acme"))
    query("INSERT INTO tenants (id, name, created_at, disabled_at) VALUES ('acme', 'Acme', now(), now())")
    (line,) = await world.tick(hour(8))
    assert (line.status, line.reason) == ("skipped", "the tenant is disabled")
    query("UPDATE tenants SET disabled_at = NULL WHERE id = 'acme'")
    assert [line.status for line in await world.tick(hour(9))] == ["fired"]


@pytest.mark.req("AUT-128", "G-50")
async def test_while_another_replica_is_at_it_nothing_is_done(world, dsn, one):
    await world.create()
    with psycopg.connect(dsn) as another:
        another.execute("SELECT pg_advisory_xact_lock(%s)", (0x7EC1_05E5,))
        assert await world.tick(hour(8)) == []
        another.rollback()
    assert one("SELECT count(*) FROM runs") == 0
    assert len(await world.tick(hour(8))) == 1


@pytest.mark.req("AUT-128", "ENG-20")
async def test_many_replicas_fire_every_instant_exactly_once(world, one):
    count = 2 * BATCH + 50
    await world.create()
    world.query(
        "INSERT INTO schedules (tenant_id, flow, name, cron, input, next_due_at, zone_rules, handled_until, created_at,"
        " updated_at) SELECT 't' || n %% 3, flow, 'copy ' || n, cron, input, next_due_at, zone_rules, handled_until,"
        " created_at, updated_at FROM schedules, generate_series(2, %s) n",
        count,
    )
    world.at(hour(8))
    lines: list[TickResult] = []
    while len(lines) < count:
        ticks = await asyncio.gather(*(tick(world.pool, world.flows, RULES) for _ in range(3)))
        lines += [line for each in ticks for line in each]
    assert [line.status for line in lines] == ["fired"] * count
    assert one("SELECT count(*), count(DISTINCT schedule_id), count(DISTINCT event_key) FROM runs") == (count,) * 3
    assert (
        one("SELECT count(*) FROM schedule_slots s JOIN runs r ON r.id = s.run_id AND r.tenant_id = s.tenant_id")
        == count
    )


@pytest.mark.req("G-50", "JOB-23")
@pytest.mark.parametrize("point", POINTS_OF_A_TICK)
async def test_killed_in_a_tick_the_next_one_does_what_is_left_and_nothing_twice(world, one, point):
    await world.create()
    world.at(hour(8))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.engine.schedule.tick_child",
        world.dsn,
        env={**os.environ, "ECLUSE_CRASH_AT": point},
    )
    assert await child.wait() == -9
    assert one("SELECT count(*) FROM runs") == (point == "after tick")
    await until(lambda: one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0)
    assert len(await world.tick(hour(8) + timedelta(seconds=5))) == (point == "in tick")
    assert one("SELECT count(*), max(event_key) FROM runs") == (1, keyed(1, hour(8)))


async def test_a_clock_that_goes_back_fires_nothing_again(world, one):
    """TM-05"""
    await world.create()
    await world.tick(hour(8))
    world.end_runs()
    for now in (hour(7.9), hour(8) - timedelta(days=1), hour(8), hour(8.5)):
        assert await world.tick(now) == []
    assert one("SELECT count(*) FROM runs") == 1


async def test_a_run_of_that_key_that_exists_already_is_the_slots_run(world, one):
    schedule = await world.create()
    known = await world.do(start_run, Start(FLOW, keyed(schedule, hour(8)), schedule_id=schedule))
    (line,) = await world.tick(hour(8))
    assert (line.status, line.run_id) == ("fired", known.run.id)
    assert one("SELECT count(*) FROM runs") == 1


@pytest.mark.req("G-50")
@pytest.mark.parametrize("whose", ["of another flow", "by hand", "of another schedule"])
async def test_an_instant_whose_key_another_run_has_is_skipped_with_that_reason_and_never_fired(world, one, whose):
    taken, other = await world.create(), await world.create(replace(HOURLY, name="beside"))
    flow, schedule = (OTHER if whose == "of another flow" else FLOW), (other if "schedule" in whose else None)
    by_hand = await world.do(start_run, Start(flow, keyed(taken, hour(8)), schedule_id=schedule))
    lines = {line.schedule_id: line for line in await world.tick(hour(8))}
    assert (lines[taken].status, lines[taken].run_id, lines[other].status) == ("skipped", None, "fired")
    assert f"run {by_hand.run.id} of flow {flow.name}" in lines[taken].reason
    assert one("SELECT last_run_id, next_due_at FROM schedules WHERE id = %s", taken) == (None, hour(9))
    assert [line.status for line in await world.tick(hour(9)) if line.schedule_id == taken] == ["fired"]


async def test_new_rules_of_time_zones_change_what_is_still_due_and_nothing_else(world, one, query):
    """TM-03"""
    await world.create(replace(HOURLY, cron="0 12 * * *", timezone="Europe/Paris"))
    query("UPDATE schedules SET next_due_at = %s, zone_rules = 'older'", hour(11))
    await renew(world.pool)
    assert await world.tick(hour(7.6)) == []
    assert one("SELECT next_due_at, zone_rules <> 'older' FROM schedules") == (hour(10), True)
    assert one("SELECT count(*) FROM schedule_slots") == 0


@pytest.mark.req("JOB-29")
async def test_a_stored_expression_that_cannot_be_read_is_visible_and_stops_nobody(world, query, one):
    broken = await world.create()
    await world.create(replace(HOURLY, name="sound"))
    query("UPDATE schedules SET cron = 'nonsense' WHERE id = %s", broken)
    assert sorted(line.status for line in await world.tick(hour(8))) == ["failed", "fired"]
    assert "nonsense" in one("SELECT error FROM schedules WHERE id = %s", broken)


async def test_a_bug_in_a_flows_model_stops_nobody_else(world, one):
    class Broken(Targets):
        @model_validator(mode="after")
        def never(self) -> Broken:
            raise KeyError("a bug")

    await world.create()
    await world.create(replace(HOURLY, flow=OTHER, name="other"))
    world.flows["other"] = replace(OTHER, input=Broken)
    assert sorted(line.status for line in await world.tick(hour(8))) == ["failed", "fired"]
    assert "a bug" in one("SELECT error FROM schedules WHERE name = 'other'")


async def test_what_is_switched_off_while_a_tick_looks_is_not_fired(world, dsn, query, one):
    """Its row is locked by whoever changes it: the tick leaves it alone, and finds it off the next time."""
    await world.create()
    world.at(hour(8))
    with psycopg.connect(dsn) as operator:
        operator.execute("UPDATE schedules SET enabled = false, next_due_at = NULL")
        assert await tick(world.pool, world.flows, RULES) == []
        operator.commit()
    assert await tick(world.pool, world.flows, RULES) == []
    assert one("SELECT count(*) FROM runs") == 0


async def test_a_server_fires_by_itself_and_its_runs_are_led(start_kit, world, one):
    world.at(datetime.now(UTC).replace(second=58, microsecond=0))
    await world.do(rows.create_schedule, replace(HOURLY, cron="* * * * *"))
    kit: Kit = await start_kit(FLOW)
    await until(lambda: one("SELECT count(*) FROM runs"), 20)
    assert (await wait_for_run(kit, 1, PATIENCE))["status"] == "completed"


async def test_a_process_without_that_role_fires_nothing(start_kit, world, one):
    world.at(datetime.now(UTC).replace(second=58, microsecond=0))
    await world.do(rows.create_schedule, replace(HOURLY, cron="* * * * *", input=Targets(targets=[]).model_dump()))
    kit = await start_kit(FLOW, roles=frozenset({"worker"}))
    assert "scheduler" not in {task.get_name() for task in kit._background}


@pytest.mark.req("AUT-129")
async def test_only_what_is_active_and_has_an_expression_is_considered(world):
    await world.create(replace(HOURLY, name="by hand", cron=None))
    disabled = await world.create(replace(HOURLY, name="disabled"))
    await world.do(rows.enable_schedule, "default", disabled, enabled=False)
    deleted = await world.create(replace(HOURLY, name="deleted"))
    await world.do(rows.delete_schedule, "default", deleted)
    active = await world.create()
    assert [line.schedule_id for line in await world.tick(hour(8.1))] == [active]
