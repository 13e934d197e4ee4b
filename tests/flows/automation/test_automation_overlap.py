"""Automation schedules over time: a run beside another, slots that wait for one, what is caught up on after a downtime.
Time is moved, never waited for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ecluse.engine.schedule.ticks import tick
from tests.support.automation_trouble import Deaf, maker, set_clock
from tests.support.runs import end_run
from tests.support.transcription_world import until

HOURLY = {"schedule_type": "CRON", "cron_expression": "0 * * * *"}
ONLY_FETCHED = {"run_transcription": False, "run_audits": False}
PATIENT = {"details_wait": timedelta(hours=9)}  # so that what is held back is not given up
NO_SCHEDULER = {"roles": frozenset({"api", "worker"})}
BEGIN = datetime(2030, 5, 6, 7, 30, tzinfo=UTC)
SLOTS = "SELECT due_at, state, reason, run_id FROM schedule_slots WHERE schedule_id = %s ORDER BY due_at"
OVERLAP = "overlap: the previous run was still open"


@pytest.fixture
def troubled(start_kit, sandbox, query):
    return maker(start_kit, sandbox, query)


def at(clock: str, day: int = 6) -> datetime:
    hour, minute = clock.split(":")
    return BEGIN.replace(day=day, hour=int(hour), minute=int(minute), second=1)


async def ticked(world, now: datetime) -> list[str]:
    """What becomes of the latest instants of all schedules that are due."""
    set_clock(world.query, now)
    return [line.status for line in await tick(world.kit.pool, world.kit.by_name, world.kit.due)]


def slots(world, schedule: int) -> list[tuple[str, str, str | None]]:
    return [(f"{due:%d %H:%M}", state, why) for due, state, why, _ in world.query(SLOTS, schedule)]


def run_of(world, schedule: int) -> int:
    """Of its latest slot that was fired."""
    return [run for *_, run in world.query(SLOTS, schedule) if run is not None][-1]


@pytest.mark.req("AUT-134", "AUT-135", "G-29", "G-85", "AUT-84", "AUT-85", "AUT-40", "AUT-77")
async def test_a_run_by_hand_beside_a_due_one_frees_nothing_and_uses_up_nothing(troubled, query):
    fiches = Deaf("fiche", "1000", "1016")
    world = await troubled(fiches=fiches, kit=NO_SCHEDULER, **PATIENT)
    set_clock(query, BEGIN)
    schedule = await world.schedule("1000", **HOURLY, **ONLY_FETCHED)

    def stands():
        row = world.stated(schedule)
        return row["last_run_status"], row["holding_run_id"], row["total_runs"]

    assert stands() == (None, None, 0)
    assert await ticked(world, at("08:00")) == ["fired"]
    due = run_of(world, schedule)
    assert stands() == ("running", due, 0), "from the moment it is fired, before a worker takes it"
    assert world.run(due)["event_id"] == f"automation-schedule-{schedule}-{int(at('08:00').timestamp()) // 60 * 60_000}"
    await fiches.asked.wait()
    # One by hand comes and goes.
    by_hand = await world.trigger(schedule, mode="manual", fiche_ids=["1008"])
    assert (await world.ended(by_hand))["status"] == "completed"
    assert stands() == ("running", due, 1), "it frees nothing but itself"
    # Another is still there when the one that holds the schedule ends.
    long = await world.trigger(schedule, mode="manual", fiche_ids=["1016"])
    assert await ticked(world, at("09:00")) == ["waiting"]
    assert await ticked(world, at("09:05")) == []
    assert stands() == ("running", due, 1)
    await end_run(world.kit, due, "enough")
    assert stands() == ("running", due, 2), "one of its runs is, though it holds nothing"
    assert await ticked(world, at("09:06")) == ["fired"]
    late = run_of(world, schedule)
    assert stands() == ("running", late, 2)
    fiches.let.set()
    for run_id in (late, long):
        assert (await world.ended(run_id))["status"] == "completed"
    assert stands() == ("success", late, 4)
    due_at = world.run(late)["config_snapshot"]["due_at"]
    assert datetime.fromisoformat(due_at) == at("09:00").replace(second=0), "as it was due, not as it was fired"
    assert slots(world, schedule) == [("06 08:00", "fired", None), ("06 09:00", "fired", None)]


@pytest.mark.req("G-85", "AUT-134", "G-29")
async def test_a_slot_waits_for_a_run_by_hand_that_holds_the_schedule_and_is_skipped_at_last(troubled, query):
    fiches = Deaf("fiche", "1000")
    world = await troubled(fiches=fiches, kit=NO_SCHEDULER, **PATIENT)
    set_clock(query, BEGIN)
    schedule = await world.schedule("1000", **HOURLY, **ONLY_FETCHED)
    run_id = await world.trigger(schedule)
    await fiches.asked.wait()
    assert await ticked(world, at("08:00")) == ["waiting"]
    assert slots(world, schedule) == [("06 08:00", "waiting", OVERLAP)]
    assert await ticked(world, at("08:19")) == []
    assert await ticked(world, at("08:21")) == ["skipped"]
    fiches.let.set()
    assert (await world.ended(run_id))["status"] == "completed"
    assert await ticked(world, at("08:22")) == [], "it was skipped, and stays so"
    assert await ticked(world, at("09:00")) == ["fired"]
    assert (await world.ended(run_of(world, schedule)))["status"] == "completed"
    assert slots(world, schedule) == [("06 08:00", "skipped", OVERLAP), ("06 09:00", "fired", None)]


@pytest.mark.req("AUT-138", "AUT-137", "G-85")
async def test_a_slot_that_waits_for_a_stale_run_is_fired_once_that_is_reconciled(troubled, query):
    face = await troubled(kit={"roles": frozenset({"api"})})
    set_clock(query, BEGIN)
    schedule = await face.schedule("1000", **HOURLY, **ONLY_FETCHED)
    assert await ticked(face, at("08:00")) == ["fired"]
    lost = run_of(face, schedule)
    # As if a worker had begun it, and been lost without a trace.
    query("DELETE FROM dbos.workflow_status")
    query("UPDATE runs SET status = 'running', state = 'running', started_at = ecluse_now() WHERE id = %s", lost)
    assert await ticked(face, at("09:00")) == ["waiting"]
    set_clock(query, at("09:12"))
    world = await troubled(kit={**NO_SCHEDULER, "sweep_every": 0.2})
    assert (await world.ended(lost))["end_cause"] == "stale"
    assert world.stated(schedule)["last_run_status"] == "failed"
    assert await ticked(world, at("09:13")) == ["fired"]
    run_id = run_of(world, schedule)
    assert (await world.ended(run_id))["status"] == "completed"
    stated = world.stated(schedule)
    assert (stated["last_run_status"], stated["total_runs"], stated["failed_runs"]) == ("success", 2, 1)


@pytest.mark.req("AUT-133", "G-27", "AUT-130", "AUT-44", "G-90", "AUT-162")
async def test_what_is_caught_up_on_after_a_downtime_is_about_the_days_it_was_due_for(troubled, query):
    world = await troubled(kit=NO_SCHEDULER)
    set_clock(query, BEGIN)
    daily = {"schedule_type": "DAILY", "time_of_day": "06:30", "timezone": "Europe/Paris", **ONLY_FETCHED}
    selection = {"mode": "date_range", "date_range": "yesterday", "max_fiches": 3}
    schedule = await world.schedule(fiche_selection=selection, **daily)
    skipping = await world.schedule(fiche_selection=selection, catch_up="skip", **daily)
    # Three days later, before that day's own instant.
    assert sorted(await ticked(world, at("03:00", day=10))) == ["fired", "missed"]
    missed = "no scheduler was running in time"
    assert slots(world, schedule) == [
        ("07 04:30", "missed", missed),
        ("08 04:30", "missed", missed),
        ("09 04:30", "fired", "caught up"),
    ]
    assert [state for _, state, _ in slots(world, skipping)] == ["missed"] * 3
    run_id = run_of(world, schedule)
    run = await world.ended(run_id)
    assert run["status"] in ("completed", "partial"), "whatever the CRM sold that day"
    assert datetime.fromisoformat(run["config_snapshot"]["due_at"]) == at("04:30", day=9).replace(second=0)
    assert world.calls("crm", "/sales") == ["08/05/2030"], "the day before it was due, not before today"
    assert query("SELECT DISTINCT sales_date::text FROM fiche_cache WHERE sales_date IS NOT NULL") == [("2030-05-08",)]
    (started,) = world.events(run_id, "automation.run.started")
    assert datetime.fromisoformat(started[1]["due_at"]) == at("04:30", day=9).replace(second=0)
    assert await ticked(world, at("04:31", day=10)) == ["fired", "fired"], "the next one comes in time, for both"
    await until(lambda: query("SELECT count(*) FROM runs WHERE flow = 'automation' AND ended_at IS NULL") == [(0,)])
    assert sorted(set(world.calls("crm", "/sales"))) == ["08/05/2030", "09/05/2030"]
