"""Event keys over HTTP: the keys of callers are apart from computed ones, and a key names one decision."""

from __future__ import annotations

import pytest

from tests.support.api_server import FLOW, new_key, serving
from tests.support.engine_flows import flow, stage

OTHER = flow(stage(), "other")


@pytest.fixture(scope="module")
def two_flows(shared_dsn):
    with serving(shared_dsn, FLOW, OTHER) as client:
        yield client.with_key(new_key(shared_dsn))


def test_a_callers_key_is_never_the_computed_key_of_another_run(two_flows):
    for wanted in ("schedule:48:1794874920000", "automation-schedule-48-1794874920000", "notify-3-run:7:ended"):
        started = two_flows.post("/api/runs", {"flow": "test", "key": wanted})
        assert (started.status, started.json["event_key"]) == (201, f"request:{wanted}")
    for headers in ({}, {"Idempotency-Key": "schedule:48:1"}):
        named = two_flows.post("/api/runs", {"flow": "test"}, headers=headers).json["event_key"]
        assert named.startswith("request:test-")


def test_a_key_of_an_open_run_of_another_flow_is_a_conflict_that_names_the_run(two_flows):
    first = two_flows.post("/api/runs", {"flow": "test", "key": "payroll"}).json["run_id"]
    answer = two_flows.post("/api/runs", {"flow": "other", "key": "payroll"})
    assert (answer.status, answer.code) == (409, "KEY_TAKEN")
    assert f"run {first} of flow test" in answer.json["error"]["message"]
    assert [run["flow"] for run in two_flows.get("/api/runs?flow=other").json["runs"]] == []


def test_deliveries_are_not_started_by_hand(two_flows):
    given = {"kind": "webhook", "to": "y" * 3000}
    answer = two_flows.post("/api/runs", {"flow": "notifications", "key": "notify-1-x", "input": given})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert "/test" in answer.json["error"]["message"]
    assert two_flows.get("/api/runs?flow=notifications").json["runs"] == []


@pytest.mark.parametrize("squatted", ["payday-retry-1", "payday-retry-22", "a-retry-1-retry-2"])
def test_a_callers_key_is_never_that_of_a_repetition(two_flows, squatted):
    answer = two_flows.post("/api/runs", {"flow": "test", "key": squatted})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert "-retry-" in answer.json["error"]["message"]
    assert two_flows.post("/api/runs", {"flow": "test", "key": "payday-retry-1x"}).status in (200, 201)


@pytest.mark.parametrize(
    ("flow", "plan"),
    [
        ("notifications", {}),
        (
            "enrichment",
            {"company_siren": "552049447", "trigger": "x", "request_id": None, "asked": [], "recipient": None},
        ),
        ("jobs", {}),
    ],
)
def test_what_is_not_started_by_hand_is_not_started_by_a_schedule_either(two_flows, flow, plan):
    given = {"name": "nightly", "flow": flow, "cron": "0 2 * * *", "timezone": "UTC"}
    for wanted in (plan, {**plan, "idempotency_key": "k"}):
        answer = two_flows.post("/api/schedules", {**given, "plan": wanted})
        assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert two_flows.post("/api/runs", {"flow": flow}).status == 422
    assert two_flows.get("/api/schedules").json["schedules"] == []
