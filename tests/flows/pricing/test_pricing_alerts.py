"""Metrics and alerts of pricing: both sides of each border, one open alert per project and name, slowed lanes."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import pytest

from ecluse.db.query import fetch_all, fetch_column, fetch_row, fetch_rows, fetch_value
from ecluse.engine.cluster.alerts import LOCK, evaluate_measures
from ecluse.engine.model.alerts import decide
from ecluse.flows.pricing import metrics
from ecluse.flows.pricing.metrics import ALERTS, measured
from ecluse.flows.pricing.runs import retry_failed
from tests.support.pricing_executions import end, new_execution, new_lane, refuse
from tests.support.pricing_rows import BY, connected, ended, new_project, new_run
from tests.support.pricing_world import pricing

FLOW = pricing().flow
LOW, CRITICAL_RATE = "Low Success Rate", "Critical Success Rate"
BACKLOG, CRITICAL_DLQ, BURST, BREAKER = "DLQ Backlog", "DLQ Critical", "429 Burst", "Circuit breaker triggered"
EVENTS = "SELECT event_type, payload ->> 'alert' FROM events_outbox WHERE event_type LIKE 'pricing.%%' ORDER BY id"
MINUTE = timedelta(minutes=1)


def opened(values: dict[str, float | None], before: Collection[str] = ()) -> set[str]:
    return {one.name for one in decide(ALERTS.table, values, before)}


@pytest.mark.req("PRC-67", "PRC-68", "PRC-69", "PRC-70", "PRC-71", "PRC-72", "G-17")
@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"success rate": 97.0}, set()),
        ({"success rate": 96.9}, {LOW}),
        ({"success rate": 90.0}, {LOW}),
        ({"success rate": 89.9}, {CRITICAL_RATE}),
        ({"success rate": None}, set()),
        ({}, set()),
        ({"dead letters": 50}, set()),
        ({"dead letters": 51}, {BACKLOG}),
        ({"dead letters": 100}, {BACKLOG}),
        ({"dead letters": 101}, {CRITICAL_DLQ}),
        ({"refusals": 3}, set()),
        ({"refusals": 4}, {BURST}),
        ({"breaker": 0}, set()),
        ({"breaker": 1}, {BREAKER}),
    ],
)
def test_an_alert_is_raised_beyond_its_border_and_not_at_it(values, names):
    assert opened(values) == names


@pytest.mark.req("G-17", "PRC-72")
def test_of_a_pair_only_the_more_severe_one_is_open():
    assert opened({"dead letters": 101}, {BACKLOG}) == {CRITICAL_DLQ}
    assert opened({"dead letters": 100}, {CRITICAL_DLQ}) == {BACKLOG}
    assert opened({"dead letters": 50}, {BACKLOG}) == set()


@pytest.mark.req("G-17")
def test_an_open_alert_lasts_until_its_own_condition_clears_it():
    assert opened({"refusals": 1}, {BURST}) == {BURST}
    assert opened({"refusals": 0}, {BURST}) == set()
    assert opened({}, {LOW}) == {LOW}  # not known: failed targets are being retried
    assert opened({"success rate": None}, {LOW}) == set()
    assert opened({"breaker": 1}, {BREAKER}) == {BREAKER}


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
        counted = await fetch_column(connection, "SELECT DISTINCT name FROM rule_execution_counts")
        assert set(counted) == set(metrics.COUNTED)  # the view has the same buckets
        await metrics.keep(connection)
        await metrics.keep(connection)
        assert await fetch_value(connection, "SELECT run_id FROM rule_executions WHERE counted_at IS NULL") == other
        (kept,) = await metrics.read(connection)
        await connection.execute("DELETE FROM items WHERE run_id = %s", (run,))
        await connection.execute("DELETE FROM attempts")
        await connection.execute("DELETE FROM rule_executions WHERE run_id = %s", (run,))
        (after,) = await metrics.read(connection)
    assert before["counts"] == kept["counts"] == after["counts"]
    assert [after[name] for name in ("applies", "retries", "throttled")] == [9, 4, 2]
    assert (before["refusals"], before["success_rate"], before["last_run_rate"]) == (2, 75.0, 75.0)
    samples = metrics.samples([after])
    (histogram,) = [one for one in samples if one.buckets is not None]
    assert (histogram.value, histogram.sum) == (1, 4_000)
    assert list(histogram.buckets.values()) == [0] + [1] * 7
    values = {(one.metric.name, *one.metric.labels.values()): one.value for one in samples}
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
    assert (rated["success_rate"], rated["applying"]) == (50.0, False)
    assert (retried["success_rate"], retried["applying"]) == (None, True)
    assert later["success_rate"] is None


@pytest.mark.req("PRC-63", "G-17")
async def test_the_rate_that_alerts_judge_is_the_lower_one_and_not_known_during_a_retry(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        for failed in (0, 5):
            run = await new_run(connection, project, 10, "QUEUED")
            await ended(connection, run, failed)
        (rated,) = await measured(connection)
        assert rated.values["success rate"] == 50.0  # of the last run; 75 % of both
        await connection.execute("DELETE FROM rule_runs WHERE id <> %s", (run,))
        await retry_failed(connection, "default", run, None, BY)
        (retried,) = await measured(connection)
        assert "success rate" not in retried.values
        await connection.execute("DELETE FROM rule_runs")
        (none,) = await measured(connection)
        assert none.values["success rate"] is None


@pytest.mark.req("G-17", "PRC-70")
async def test_an_alert_is_raised_and_cleared_once_with_an_event_each(dsn):
    async with connected(dsn) as connection, connected(dsn) as other:
        project = await new_project(connection)
        run = await new_run(connection, project, 101, "QUEUED")
        await ended(connection, run, 101)
        for _ in range(2):
            await evaluate_measures(connection, FLOW)
        assert sorted(await fetch_rows(connection, EVENTS)) == [
            ("pricing.alert.critical.raised", CRITICAL_RATE),
            ("pricing.alert.critical.raised", CRITICAL_DLQ),
        ]
        (row,) = await fetch_all(connection, dict, "SELECT * FROM pricing_alerts WHERE alert = %s", (CRITICAL_DLQ,))
        assert row["summary"] == "Shop: 101 dead letters, more than 100"
        assert row["cleared_at"] is None
        async with other.transaction():  # while another replica decides
            assert await fetch_value(other, LOCK, (FLOW.name,))
            await connection.execute("DELETE FROM rule_runs")
            await evaluate_measures(connection, FLOW)
            assert len(await fetch_rows(connection, EVENTS)) == 2
        await evaluate_measures(connection, FLOW)
        assert await fetch_value(connection, "SELECT count(*) FROM pricing_alerts WHERE cleared_at IS NULL") == 0
        assert [kind for kind, _ in await fetch_rows(connection, EVENTS)][2:] == ["pricing.alert.critical.cleared"] * 2
        keys = "SELECT count(DISTINCT payload ->> 'dedup_key'), count(*) FROM events_outbox"
        assert await fetch_row(connection, keys + " WHERE event_type LIKE 'pricing.%%'") == (2, 4)


async def test_the_alerts_of_a_deleted_project_are_cleared(dsn):
    async with connected(dsn) as connection:
        project = await new_project(connection)
        await ended(connection, await new_run(connection, project, 10, "QUEUED"), 10)
        await evaluate_measures(connection, FLOW)
        await connection.execute("UPDATE pricing_projects SET deleted_at = ecluse_now()")
        await evaluate_measures(connection, FLOW)
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
        await evaluate_measures(connection, FLOW)
        assert await fetch_row(connection, pace) == (2, None)
        await refuse(connection, items[:1], timedelta(seconds=10))
        await evaluate_measures(connection, FLOW)
        assert await fetch_row(connection, pace) == (1, True)
        await connection.execute("UPDATE clock_offset SET \"offset\" = interval '4 minutes'")
        await refuse(connection, items)
        await evaluate_measures(connection, FLOW)
        assert await fetch_value(connection, "SELECT slowed_until - ecluse_now() > interval '4 minutes' FROM lanes")
        assert await fetch_rows(connection, EVENTS) == [("pricing.alert.warning.raised", BURST)]
        await connection.execute("UPDATE clock_offset SET \"offset\" = interval '10 minutes'")
        await evaluate_measures(connection, FLOW)
        assert (await fetch_rows(connection, EVENTS))[1:] == [("pricing.alert.warning.cleared", BURST)]


@pytest.mark.req("PRC-42")
async def test_an_open_breaker_alerts_operations(dsn):
    async with connected(dsn) as connection:
        await new_lane(connection, await new_project(connection))
        await connection.execute("UPDATE lanes SET trips = 1, failing_since = ecluse_now()")
        await evaluate_measures(connection, FLOW)
        ((told,),) = await fetch_rows(connection, "SELECT payload ->> 'summary' FROM events_outbox")
    assert told.startswith("Shop: Circuit breaker triggered")
