"""Fires of job schedules on a real database: Job, JobRun, telemetry and re-arm in one commit, exactly once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from ecluse.base.crash import POINTS_OF_A_TICK
from ecluse.base.errors import Conflict
from ecluse.engine.model import counters
from ecluse.engine.schedule.ticks import tick
from ecluse.flows.jobs import fire, schedules
from ecluse.flows.jobs.flow import FLOW
from tests.support.engine_flows import until
from tests.support.job_rows import HOST, SERVER, add_schedule, add_server
from tests.support.tick_world import BEGIN, RULES, World, hour, tick_world

TELEMETRY = "SELECT last_run_status, last_run_at, last_run_job_id, run_count, failure_count FROM job_schedules"


@pytest.fixture
async def world(dsn, query) -> AsyncIterator[World]:
    async with tick_world(dsn, query) as opened:
        opened.flows["jobs"] = FLOW
        opened.at(BEGIN)
        await opened.do(add_server)
        yield opened


def milliseconds(h: float) -> int:
    return int(hour(h).timestamp()) * 1000


@pytest.mark.req("JOB-16", "JOB-17", "JOB-18", "JOB-19", "JOB-20", "JOB-22", "JOB-39", "JOB-43", "JOB-44", "JOB-45",
                 "JOB-47")  # fmt: skip
async def test_a_fire_is_a_job_its_first_run_telemetry_and_re_arm(world, one):
    made = await world.do(add_schedule)
    (line,) = await world.tick(hour(8))
    assert one(
        "SELECT id, key, tenant_id, job_schedule_id, host_id, type, payload, status, max_attempts, backoff_ms,"
        " backoff_type, due_at FROM jobs"
    ) == (
        line.reference, f"schedule:{made.id}:{milliseconds(8)}", "default", made.id, HOST, "noop", {"what": "all"},
        "pending", 3, 500, "exponential", hour(8),
    )  # fmt: skip
    assert one("SELECT job_id, host_id, attempt, status, fence FROM job_runs") == (
        line.reference,
        HOST,
        1,
        "pending",
        0,
    )
    status, at, job, fired, failed = one(TELEMETRY)
    assert (status, job, fired, failed) == ("success", line.reference, 1, 0)
    assert hour(8) <= at < hour(8.1)
    assert one("SELECT next_run_at, last_job_status FROM job_schedule_list") == (hour(9), "pending")
    assert one("SELECT count(*) FROM runs") == 0


async def test_fires_and_their_lag_are_counted(world):
    await world.do(add_schedule)
    fired, lag = counters.fires["jobs", "fired"], counters.fire_lag_seconds[("jobs",)]
    await world.tick(hour(8) + timedelta(seconds=5))
    assert counters.fires["jobs", "fired"] == fired + 1
    assert 5 <= counters.fire_lag_seconds[("jobs",)] - lag < 60


async def test_the_event_of_a_job_names_its_queue_and_not_its_payload(world, one):
    made = await world.do(add_schedule)
    (line,) = await world.tick(hour(8))
    kind, key, payload = one("SELECT event_type, event_key, payload FROM events_outbox")
    assert (kind, key) == ("job.created", f"schedule:{made.id}:{milliseconds(8)}:created")
    assert (payload["job_id"], payload["queue"], payload["schedule_id"]) == (line.reference, "jobs:default", made.id)
    assert "payload" not in payload


async def test_the_agents_of_the_host_are_notified_at_the_commit(world, dsn):
    await world.do(add_schedule)
    await world.do(add_schedule)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as listening:
        await listening.execute(f"LISTEN {fire.CHANNEL}")
        await world.tick(hour(8))
        heard = [one.payload async for one in listening.notifies(timeout=5, stop_after=1)]
    assert heard == [HOST]


@pytest.mark.req("JOB-23", "G-50")
async def test_three_ticks_at_once_make_one_job_per_schedule(world, one):
    for _ in range(30):
        await world.do(add_schedule)
    world.at(hour(8))
    lines = await asyncio.gather(*(tick(world.pool, world.flows, RULES) for _ in range(3)))
    assert sum(map(len, lines)) == 30
    assert one("SELECT count(*), count(DISTINCT key), count(DISTINCT job_schedule_id) FROM jobs") == (30, 30, 30)
    assert one("SELECT count(*), count(DISTINCT job_id) FROM job_runs") == (30, 30)
    assert one("SELECT min(run_count), max(run_count) FROM job_schedules") == (1, 1)


@pytest.mark.req("JOB-22", "JOB-23", "G-50")
@pytest.mark.parametrize("point", POINTS_OF_A_TICK)
async def test_killed_in_a_tick_a_fire_is_whole_or_not_there_and_never_twice(world, one, point):
    await world.do(add_schedule)
    world.at(hour(8))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.flows.jobs.job_tick_child", world.dsn),
        env={**os.environ, "ECLUSE_CRASH_AT": point},
    )
    assert await child.wait() == -9
    counts = (
        "SELECT (SELECT count(*) FROM jobs), (SELECT count(*) FROM job_runs), (SELECT run_count FROM job_schedules)"
    )
    assert one(counts) == ((1, 1, 1) if point == "after tick" else (0, 0, 0))
    await until(lambda: one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0)
    await world.tick(hour(8) + timedelta(seconds=5))
    assert one(counts) == (1, 1, 1)


async def test_a_key_that_is_taken_names_the_job_that_was_made_before(world, one, query):
    """As after a loss of slots: nothing is made or counted twice."""
    made = await world.do(add_schedule)
    (first,) = await world.tick(hour(8))
    query("DELETE FROM schedule_slots")
    query("UPDATE schedules SET handled_until = %s, next_due_at = %s", hour(7.5), hour(8))
    (again,) = await world.tick(hour(8.1))
    assert again.reference == first.reference
    assert one("SELECT count(*) FROM jobs WHERE job_schedule_id = %s", made.id) == 1
    assert one(TELEMETRY)[3] == 1


@pytest.mark.req("JOB-25", "JOB-27", "JOB-28", "JOB-43", "JOB-45", "JOB-46", "G-49", "G-50")
async def test_a_server_that_was_deleted_fails_the_fire_once_and_the_next_one_is_armed(world, one, query):
    await world.do(add_schedule)
    (first,) = await world.tick(hour(8))
    before = one(TELEMETRY)
    query("UPDATE job_servers SET deleted_at = ecluse_now()")
    (line,) = await world.tick(hour(9))
    assert (line.status, line.reason) == ("failed", f"server instance {SERVER} (server) was deleted")
    assert one(TELEMETRY) == ("scheduler_failed", before[1], first.reference, 1, 1)
    assert one("SELECT next_run_at FROM job_schedule_list") == hour(10)
    query("UPDATE job_servers SET deleted_at = NULL")
    assert [line.status for line in await world.tick(hour(10))] == ["fired"]
    assert one(TELEMETRY)[0] == "success"


@pytest.mark.req("JOB-25", "JOB-26", "JOB-28")
async def test_data_that_the_database_refuses_fails_its_own_schedule_only(world, query):
    bad = await world.do(add_schedule)
    good = [await world.do(add_schedule) for _ in range(3)]
    query("ALTER TABLE jobs ADD CONSTRAINT planted CHECK (payload <> '{\"bad\": 1}')")
    query("UPDATE job_schedules SET payload = '{\"bad\": 1}' WHERE id = %s", bad.id)
    assert [line.status for line in await world.tick(hour(8))] == ["failed", "fired", "fired", "fired"]
    found = dict(query("SELECT id, (last_run_status, run_count, failure_count)::text FROM job_schedules"))
    assert found == {bad.id: "(scheduler_failed,0,1)"} | {one.id: "(success,1,0)" for one in good}


@pytest.mark.req("JOB-32", "G-49")
async def test_overlap_skip_skips_while_a_job_is_active(world, one, query):
    await world.do(add_schedule, overlap="skip")
    await world.tick(hour(8))
    (line,) = await world.tick(hour(9))
    assert (line.status, line.reason) == ("skipped", fire.STILL_ACTIVE)
    assert one(TELEMETRY)[0] == "skipped"
    query("UPDATE jobs SET status = 'succeeded', ended_at = ecluse_now()")
    assert [line.status for line in await world.tick(hour(10))] == ["fired"]


@pytest.mark.req("JOB-32", "JOB-33", "JOB-38", "JOB-43", "G-49", "G-51")
@pytest.mark.parametrize(
    ("given", "now"),
    [
        ({"execution_window_start": "07:00", "execution_window_end": "08:00"}, 8.25),
        ({"catch_up": "skip"}, 8.5),
    ],
    ids=["too late for the window", "catch-up refused"],
)
async def test_a_fire_that_is_too_late_is_skipped_and_the_next_one_is_armed(world, one, given, now):
    await world.do(add_schedule, **given)
    await world.tick(hour(now))
    assert one(TELEMETRY) == ("skipped", None, None, 0, 0)
    assert one("SELECT count(*) FROM jobs") == 0
    assert one("SELECT next_run_at > ecluse_now() FROM job_schedule_list")


@pytest.mark.req("JOB-33")
async def test_what_came_due_while_nothing_ran_is_run_once(world, one):
    await world.do(add_schedule)
    await world.tick(hour(11.5))
    assert world.states() == [
        ("06 08:00", "missed"),
        ("06 09:00", "missed"),
        ("06 10:00", "missed"),
        ("06 11:00", "fired"),
    ]
    assert one("SELECT count(*), max(due_at) FROM jobs") == (1, hour(11))


@pytest.mark.req("JOB-24", "JOB-32", "G-49")
@pytest.mark.parametrize("change", ["edited", "paused", "deleted"])
async def test_an_edit_between_arming_and_firing_makes_the_older_fire_do_nothing(world, one, change):
    made = await world.do(add_schedule)
    world.at(hour(8))
    if change == "edited":
        await world.do(schedules.change, made, {"cron_expression": "30 * * * *"}, lambda: None)
    elif change == "paused":
        await world.do(schedules.switch, made, enabled=False)
    else:
        await world.do(schedules.delete, made)
    assert await world.tick(hour(8.1)) == []
    assert one("SELECT count(*) FROM jobs") == 0
    assert one(TELEMETRY)[0] == "skipped"
    assert world.states() == [("06 08:00", "skipped")]


@pytest.mark.req("JOB-42", "JOB-43", "JOB-45")
async def test_run_now_makes_a_job_and_uses_up_no_instant(world, one, query):
    made = await world.do(add_schedule, enabled=False, overlap="skip")
    first = await world.do(fire.run_now, made.schedule_id, "an operator")
    second = await world.do(fire.run_now, made.schedule_id, "an operator")
    assert first["id"] != second["id"]
    assert one("SELECT count(*), count(due_at), min(created_by) FROM jobs") == (2, 0, "an operator")
    assert one(TELEMETRY)[2:] == (second["id"], 2, 0)
    assert world.slots() == []
    query("UPDATE job_hosts SET deleted_at = ecluse_now()")
    with pytest.raises(Conflict, match="Give the schedule another server"):
        await world.do(fire.run_now, made.schedule_id, "an operator")
    assert one("SELECT count(*) FROM jobs") == 2


@pytest.mark.req("JOB-29")
async def test_a_stored_cron_that_is_invalid_has_no_next_run_and_a_reason(world, one, query):
    await world.do(add_schedule)
    query("UPDATE schedules SET cron = 'sometimes'")
    await world.tick(hour(8))
    following, why = one("SELECT next_run_at, error FROM job_schedule_list")
    assert following is None
    assert "sometimes" in why


async def test_slots_of_jobs_and_jobs_are_pruned_by_age(world, query):
    from ecluse.bootstrap import retention_rules
    from ecluse.retention import sweep
    from ecluse.settings import Settings

    await world.do(add_schedule)
    await world.tick(hour(8))
    await world.tick(hour(9))
    query("UPDATE jobs SET status = 'succeeded', ended_at = created_at WHERE due_at = %s", hour(8))
    world.at(hour(9) + timedelta(days=90, minutes=-30))
    kinds = [rule for rule in retention_rules(Settings(), []) if rule.kind.name in ("slots", "jobs")]

    async def prune(connection: Any) -> None:
        await sweep.prune(connection, {}, kinds)

    await world.do(prune)
    assert world.states() == [("06 09:00", "fired")]
    assert query("SELECT count(*), min(due_at) FROM jobs") == [(1, hour(9))]
    assert query("SELECT count(*) FROM job_runs") == [(1,)]
