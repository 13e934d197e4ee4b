"""Event keys over HTTP: the keys of callers are apart from computed ones, and a key names one decision."""

from __future__ import annotations

import pytest

from tests.support.api_server import FLOW, new_key, serving
from tests.support.engine_flows import flow, stage

OTHER = flow(stage(), "other")
# Each with an input that its runs may have, and what starts them instead.
NOT_BY_HAND = {
    "automation": ({"override_fiche_selection": None, "due_at": None}, "POST /api/automation/trigger"),
    "enrichment": (
        {"company_siren": "552049447", "trigger": "x", "request_id": None, "asked": [], "recipient": None},
        "POST /v1/requests",
    ),
    "jobs": ({}, "/api/jobs/schedules"),
    "notifications": ({"kind": "webhook", "to": "y" * 3000}, "/test"),
    "pricing": ({"kind": "preview", "rule_id": "1"}, "POST /api/pricing/runs"),
}


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


def test_the_flows_that_are_not_started_by_hand_are_these(two_flows):
    assert {one.name for one in two_flows.app.state.kit.flows if one.not_by_hand} == set(NOT_BY_HAND)


@pytest.mark.parametrize("flow", NOT_BY_HAND)
def test_a_flow_with_a_start_of_its_own_is_not_started_by_hand_and_says_how(two_flows, flow):
    given, says = NOT_BY_HAND[flow]
    for more in ({}, {"key": "notify-1-x"}, {"input": given}):
        answer = two_flows.post("/api/runs", {"flow": flow, **more})
        assert (answer.status, answer.code) == (422, "INVALID_INPUT")
        assert says in answer.json["error"]["message"]
    assert two_flows.get(f"/api/runs?flow={flow}").json["runs"] == []


@pytest.mark.parametrize("squatted", ["payday-retry-1", "payday-retry-22", "a-retry-1-retry-2"])
def test_a_callers_key_is_never_that_of_a_repetition(two_flows, squatted):
    answer = two_flows.post("/api/runs", {"flow": "test", "key": squatted})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert "-retry-" in answer.json["error"]["message"]
    assert two_flows.post("/api/runs", {"flow": "test", "key": "payday-retry-1x"}).status in (200, 201)


@pytest.mark.parametrize("flow", ["notifications", "enrichment", "jobs"])
def test_what_only_the_server_or_another_route_starts_is_not_started_by_a_schedule_either(two_flows, flow):
    plan, _ = NOT_BY_HAND[flow]
    given = {"name": "nightly", "flow": flow, "cron": "0 2 * * *", "timezone": "UTC"}
    for wanted in ({}, plan, {**plan, "idempotency_key": "k"}):
        answer = two_flows.post("/api/schedules", {**given, "plan": wanted})
        assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert two_flows.get("/api/schedules").json["schedules"] == []
