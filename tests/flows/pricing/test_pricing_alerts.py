"""Metrics and alerts of pricing: both sides of each border, one open alert per project and name, slowed lanes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ecluse.db.query import fetch_all, fetch_row, fetch_rows, fetch_value
from ecluse.flows.pricing import alerts, metrics
from ecluse.flows.pricing.alerts import State, decide
from ecluse.flows.pricing.metrics import Figures
from ecluse.flows.pricing.runs import retry_failed
from tests.support.pricing_executions import end, lane_name, new_execution, new_lane, refuse
from tests.support.pricing_rows import BY, connected, ended, new_project, new_run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LOW, CRITICAL_RATE = "Low Success Rate", "Critical Success Rate"
BACKLOG, CRITICAL_DLQ, BURST, BREAKER = "DLQ Backlog", "DLQ Critical", "429 Burst", "Circuit breaker triggered"
EVENTS = "SELECT event_type, payload ->> 'alert' FROM events_outbox WHERE event_type LIKE 'pricing.%%' ORDER BY id"
MINUTE = timedelta(minutes=1)


def state(*, breaker_open: bool = False, **known) -> State:
    return State(Figures("default", 1, "Shop", NOW, **known), breaker_open)


def opened(before=(), **known) -> frozenset[str]:
    return decide(state(**known), NOW, before).open


@pytest.mark.req("PRC-67", "PRC-68", "PRC-69", "PRC-70", "PRC-71", "PRC-72", "G-17")
@pytest.mark.parametrize(
    ("known", "names"),
    [
        ({"applied": 97, "failed": 3}, set()),
        ({"applied": 969, "failed": 31}, {LOW}),
        ({"applied": 90, "failed": 10}, {LOW}),
        ({"applied": 899, "failed": 101}, {CRITICAL_RATE}),
        ({"applied": 1000, "failed": 1, "last_applied": 9, "last_failed": 1}, {LOW}),
        ({"applied": 1000, "failed": 3, "last_applied": 1, "last_failed": 2}, {CRITICAL_RATE}),
        ({}, set()),
        ({"dead": 50, "never_sent": 500}, set()),
        ({"dead": 51}, {BACKLOG}),
        ({"dead": 100}, {BACKLOG}),
        ({"dead": 101}, {CRITICAL_DLQ}),
        ({"refusals": 3, "refused_at": NOW}, set()),
        ({"refusals": 4, "refused_at": NOW}, {BURST}),
        ({"breaker_open": True}, {BREAKER}),
    ],
)
def test_an_alert_is_raised_beyond_its_border_and_not_at_it(known, names):
    decision = decide(state(**known), NOW, ())
    assert (decision.open, {one.name for one in decision.raised}, decision.cleared) == (names, names, [])


@pytest.mark.req("G-17", "PRC-72")
def test_of_a_pair_only_the_more_severe_one_is_open():
    worse = decide(state(dead=101), NOW, {BACKLOG})
    assert ([one.name for one in worse.raised], worse.cleared) == ([CRITICAL_DLQ], [BACKLOG])
    better = decide(state(dead=100), NOW, {CRITICAL_DLQ})
    assert ([one.name for one in better.raised], better.cleared) == ([BACKLOG], [CRITICAL_DLQ])
    over = decide(state(dead=50), NOW, {BACKLOG})
    assert (over.raised, over.cleared) == ([], [BACKLOG])


@pytest.mark.req("G-17")
def test_an_open_alert_lasts_until_its_own_condition_clears_it():
    assert opened({BURST}, refusals=1, refused_at=NOW - 4 * MINUTE) == {BURST}
    assert opened({BURST}, refusals=0, refused_at=NOW - 5 * MINUTE) == set()
    assert opened({LOW}, applying=True) == {LOW}
    assert opened({LOW}) == set()
    assert opened({BREAKER}, breaker_open=True) == {BREAKER}


@pytest.mark.req("PRC-61", "PRC-62", "PRC-63", "PRC-64", "PRC-65", "PRC-66")
async def test_metrics_count_what_the_executions_did_and_outlive_their_rows(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        lane = await new_lane(connection, project)
        first, second = [await new_run(connection, project, 4, "QUEUED") for _ in range(2)]
        run, items = await new_execution(connection, first, lane, [1, 1, 4, 2])
        await refuse(connection, items[:3])  # one call for three targets
        await refuse(connection, items[3:])
        await ended(connection, first, 1)
        await ended(connection, second, 4, code="NOT_ATTEMPTED")
        await end(connection, run, timedelta(seconds=4))
        other, _ = await new_execution(connection, second, lane, [1])
        (before,) = await metrics.read(connection)
        await metrics.keep(connection)
        await metrics.keep(connection)
        assert await fetch_value(connection, "SELECT run_id FROM rule_executions WHERE counted_at IS NULL") == other
        (kept,) = await metrics.read(connection)
        await connection.execute("DELETE FROM items WHERE run_id = %s", (run,))
        await connection.execute("DELETE FROM attempts")
        await connection.execute("DELETE FROM rule_executions WHERE run_id = %s", (run,))
        (after,) = await metrics.read(connection)
    assert before.counts == kept.counts == after.counts
    assert [after.count(name) for name in ("applies", "retries", "throttled")] == [9, 4, 2]
    assert (after.count("runs"), after.count("duration_ms")) == (1, 4_000)
    assert list(after.up_to.values()) == [0] + [1] * 7
    assert (before.refusals, before.success_rate, before.last_run_rate) == (2, 75.0, 75.0)
    assert (after.dead, after.never_sent) == (1, 4)
    values = {(one["name"], *one["labels"].values()): one["value"] for one in metrics.rows([after])}
    assert values == {
        ("rules.apply.count",): 9,
        ("rules.apply.duration_ms",): 1,
        ("rules.apply.success_rate", "24h"): 75.0,
        ("rules.apply.success_rate", "last_run"): 75.0,
        ("rules.dlq.size", "true"): 1,
        ("rules.dlq.size", "false"): 4,
        ("rules.target.retries",): 4,
        ("rules.429.count",): 2,
    }


@pytest.mark.req("PRC-63", "G-17")
async def test_the_success_rate_is_of_the_runs_of_the_last_day_and_follows_a_retry(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        run = await new_run(connection, project, 10, "QUEUED")
        await ended(connection, run, 5)
        (rated,) = await metrics.read(connection, "default", project)
        await retry_failed(connection, "default", run, None, BY)
        (retried,) = await metrics.read(connection)
        await connection.execute("UPDATE clock_offset SET \"offset\" = interval '25 hours'")
        (later,) = await metrics.read(connection)
        assert await metrics.read(connection, "another") == []
    assert (rated.success_rate, rated.applying) == (50.0, False)
    assert (retried.success_rate, retried.applying) == (None, True)
    assert later.success_rate is None


@pytest.mark.req("G-17", "PRC-70")
async def test_an_alert_is_raised_and_cleared_once_with_an_event_each(dsn):
    async with connected(dsn) as connection, connected(dsn) as other:
        project = await new_project(connection)
        run = await new_run(connection, project, 101, "QUEUED")
        await ended(connection, run, 101)
        for _ in range(2):
            await alerts.watch(connection, lane_name)
        assert sorted(await fetch_rows(connection, EVENTS)) == [
            ("pricing.alert.critical.raised", CRITICAL_RATE),
            ("pricing.alert.critical.raised", CRITICAL_DLQ),
        ]
        (row,) = await fetch_all(connection, dict, "SELECT * FROM pricing_alerts WHERE alert = %s", (CRITICAL_DLQ,))
        assert row["summary"] == "Shop: 101 dead letters, more than 100"
        assert row["cleared_at"] is None
        async with other.transaction():  # while another replica decides
            assert await fetch_value(other, alerts.LOCK)
            await connection.execute("DELETE FROM rule_runs")
            await alerts.watch(connection, lane_name)
            assert len(await fetch_rows(connection, EVENTS)) == 2
        await alerts.watch(connection, lane_name)
        assert await fetch_value(connection, "SELECT count(*) FROM pricing_alerts WHERE cleared_at IS NULL") == 0
        assert [kind for kind, _ in await fetch_rows(connection, EVENTS)][2:] == ["pricing.alert.critical.cleared"] * 2
        keys = "SELECT count(DISTINCT payload ->> 'dedup_key'), count(*) FROM events_outbox"
        assert await fetch_row(connection, keys + " WHERE event_type LIKE 'pricing.%%'") == (2, 4)


async def test_the_alerts_of_a_deleted_project_are_cleared(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        await ended(connection, await new_run(connection, project, 10, "QUEUED"), 10)
        await alerts.watch(connection, lane_name)
        await connection.execute("UPDATE pricing_projects SET deleted_at = ecluse_now()")
        await alerts.watch(connection, lane_name)
        assert await fetch_rows(connection, "SELECT alert, cleared_at IS NULL FROM pricing_alerts") == [
            (CRITICAL_RATE, False)
        ]


@pytest.mark.req("PRC-71", "PRC-72", "G-17")
async def test_a_burst_of_429s_halves_the_pace_of_the_lane_until_five_quiet_minutes(dsn):
    pace = "SELECT per_second, slowed_until - ecluse_now() <= interval '5 minutes' FROM lanes"
    async with connected(dsn) as connection:
        project = await new_project(connection)
        lane = await new_lane(connection, project)
        run = await new_run(connection, project, 4, "QUEUED")
        _, items = await new_execution(connection, run, lane, [1] * 4)
        for seconds in (40, 30, 20):
            await refuse(connection, items, timedelta(seconds=seconds))
        await alerts.watch(connection, lane_name)
        assert await fetch_row(connection, pace) == (2, None)
        await refuse(connection, items[:1], timedelta(seconds=10))
        await alerts.watch(connection, lane_name)
        assert await fetch_row(connection, pace) == (1, True)
        await connection.execute("UPDATE clock_offset SET \"offset\" = interval '4 minutes'")
        await refuse(connection, items)
        await alerts.watch(connection, lane_name)
        assert await fetch_value(connection, "SELECT slowed_until - ecluse_now() > interval '4 minutes' FROM lanes")
        assert await fetch_rows(connection, EVENTS) == [("pricing.alert.warning.raised", BURST)]
        await connection.execute("UPDATE clock_offset SET \"offset\" = interval '10 minutes'")
        await alerts.watch(connection, lane_name)
        assert (await fetch_rows(connection, EVENTS))[1:] == [("pricing.alert.warning.cleared", BURST)]


@pytest.mark.req("PRC-42")
async def test_an_open_breaker_alerts_operations(dsn):
    async with connected(dsn) as connection:
        await new_lane(connection, await new_project(connection))
        await connection.execute("UPDATE lanes SET trips = 1, failing_since = ecluse_now()")
        await alerts.watch(connection, lane_name)
        ((told,),) = await fetch_rows(connection, "SELECT payload ->> 'summary' FROM events_outbox")
    assert told.startswith("Shop: Circuit breaker triggered")
