"""Automation schedules and the clock: what is fired, what is not and why, and schedules whose run is stuck. Time is
moved, never waited for."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.flows.automation import queries, schedules
from tests.support.automation_rows import FLOW, end_run, new_schedule
from tests.support.engine_flows import until
from tests.support.tick_world import BEGIN, RULES, hour, tick_world

HOURLY = {"schedule_type": "CRON", "cron_expression": "0 * * * *", "time_of_day": None, "timezone": "UTC"}
BY_HAND = {"fiche_selection": {"mode": "manual"}}
LONGEST = timedelta(minutes=70)


@pytest.fixture
async def automated(dsn, query):
    async with tick_world(dsn, query) as world:
        world.flows = {"automation": FLOW}
        yield world


async def make(world, name="hourly", **given):
    world.at(BEGIN)
    return (await world.do(new_schedule, name=name, **{**HOURLY, **BY_HAND, **given}))["id"]


@pytest.mark.req("AUT-77", "AUT-130", "AUT-131", "AUT-154")
@pytest.mark.parametrize(
    ("given", "due"),
    [
        ({}, hour(8)),
        ({"schedule_type": "DAILY", "cron_expression": None, "time_of_day": "10:15", "timezone": "Europe/Paris"},
         hour(8.25)),
        ({"schedule_type": "WEEKLY", "cron_expression": None, "time_of_day": "08:30", "day_of_week": 1}, hour(8.5)),
        ({"schedule_type": "MONTHLY", "cron_expression": None, "time_of_day": "23:30", "day_of_month": 31,
          "timezone": "America/New_York"}, hour(24 * 26 + 3.5)),
    ],
)  # fmt: skip
async def test_a_due_time_is_one_run_named_after_it(automated, one, given, due):
    """BEGIN is Monday, 6 May 2030, 07:30 in UTC."""
    schedule = await make(automated, **given)
    assert await automated.tick(due - timedelta(seconds=1)) == []
    (line,) = await automated.tick(due + timedelta(seconds=1))
    assert line.status == "fired"
    key = f"automation-schedule-{schedule}-{int(due.timestamp()) * 1000}"
    assert one("SELECT event_key, schedule_id, (input ->> 'due_at')::timestamptz FROM runs") == (key, schedule, due)
    assert await automated.tick(due + timedelta(minutes=1)) == []
    assert one("SELECT count(*) FROM automation_runs") == 1


@pytest.mark.req("AUT-129")
async def test_only_what_is_active_and_not_by_hand_is_considered(automated):
    await make(automated, "by hand", schedule_type="MANUAL", cron_expression=None)
    await make(automated, "off", is_active=False)
    deleted = await make(automated, "deleted")
    await automated.do(schedules.delete, "default", deleted)
    active = await make(automated)
    assert [line.schedule_id for line in await automated.tick(hour(8))] == [active]


@pytest.mark.req("AUT-132", "AUT-133", "G-27", "AUT-195")
@pytest.mark.parametrize("catch_up", ["latest", "skip"])
async def test_a_downtime_is_recorded_and_caught_up_on_once_if_that_is_wanted(automated, one, catch_up):
    schedule = await make(automated, catch_up=catch_up)
    (line,) = await automated.tick(hour(11) - timedelta(minutes=1))
    shown = await automated.do(queries.show_schedule_in_full, "default", schedule, LONGEST)
    last = (
        ("fired", "caught up")
        if catch_up == "latest"
        else ("missed", "no scheduler was running in time, and catch_up is skip")
    )
    assert [(slot["due_at"], slot["state"], slot["reason"]) for slot in shown["slots"]] == [
        (hour(10), *last), (hour(9), "missed", "no scheduler was running in time"),
        (hour(8), "missed", "no scheduler was running in time"),
    ]  # fmt: skip
    assert (line.status, one("SELECT count(*) FROM runs")) == (last[0], int(catch_up == "latest"))
    assert [run["id"] for run in shown["runs"]] == ([line.run_id] if catch_up == "latest" else [])


@pytest.mark.req("AUT-134", "G-85")
async def test_while_its_run_goes_on_nothing_is_fired_beside_it(automated, one):
    schedule = await make(automated)
    (first,) = await automated.tick(hour(8))
    assert [line.status for line in await automated.tick(hour(9))] == ["waiting"]
    assert one("SELECT count(*) FROM runs") == 1
    await automated.do(end_run, first.run_id, f1="successful")
    (second,) = await automated.tick(hour(9) + timedelta(minutes=5))
    assert (second.status, second.schedule_id) == ("fired", schedule)


LOSE = """
WITH r AS (UPDATE runs SET status = 'running', state = 'running', started_at = created_at WHERE id = %s
           RETURNING tenant_id || '/' || event_key AS name)
DELETE FROM dbos.workflow_status w USING r WHERE w.workflow_uuid = r.name
"""


@pytest.mark.req("AUT-85", "AUT-136", "AUT-137", "AUT-138", "AUT-205")
async def test_a_schedule_whose_run_is_stuck_is_freed_and_fires_again(automated, start_kit, query, one):
    """No replica leads its run any more; it was due again at 09:00, and at 09:11 the seventy minutes are over."""
    schedule = await make(automated)
    (stuck,) = await automated.tick(hour(8))
    query(LOSE, stuck.run_id)
    assert [line.status for line in await automated.tick(hour(9))] == ["waiting"]
    automated.at(hour(9) + timedelta(minutes=11))
    await start_kit(FLOW, due=RULES, sweep_every=0.2)
    await until(lambda: one("SELECT count(*) FROM automation_runs WHERE completed_at IS NOT NULL") == 2, 30)
    assert one("SELECT status, end_cause, error_code FROM automation_runs WHERE id = %s", stuck.run_id) == (
        "failed", "stale", "STALE",
    )  # fmt: skip
    lines = query("SELECT message FROM automation_logs WHERE run_id = %s AND level = 'error'", stuck.run_id)
    assert lines, "an error in the log of the run"
    assert one("SELECT event_id, status FROM automation_runs WHERE id <> %s", stuck.run_id) == (
        f"automation-schedule-{schedule}-{int(hour(9).timestamp()) * 1000}", "completed",
    )  # fmt: skip
    assert one("SELECT last_run_status, failed_runs, successful_runs FROM automation_schedules") == ("success", 1, 1)


@pytest.mark.req("AUT-139")
async def test_one_that_cannot_be_freed_keeps_no_other(automated, start_kit, query, one):
    stubborn, stuck = await make(automated, "stubborn"), await make(automated, "stuck")
    lines = {line.schedule_id: line.run_id for line in await automated.tick(hour(8))}
    for run in lines.values():
        query(LOSE, run)
    query(f"ALTER TABLE runs ADD CONSTRAINT no CHECK (id <> {lines[stubborn]} OR ended_at IS NULL)")
    assert [line.status for line in await automated.tick(hour(9))] == ["waiting"] * 2
    automated.at(hour(9) + timedelta(minutes=11))
    await start_kit(FLOW, due=RULES, sweep_every=0.2)
    fired = "SELECT count(*) FROM schedule_slots WHERE schedule_id = %s AND state = 'fired'"
    await until(lambda: one(fired, stuck) == 2, 30)
    assert one("SELECT end_cause FROM runs WHERE id = %s", lines[stuck]) == "stale"
    assert one("SELECT ended_at FROM runs WHERE id = %s", lines[stubborn]) is None
    assert one(fired, stubborn) == 1
