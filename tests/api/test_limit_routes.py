"""Limits per key and tenant over HTTP: 429 with the name of the limit and when to come back, and no word to others."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.api_server import FLOW, add_connections, add_tenant, new_key, serving

KNOBS = {
    "ECLUSE_LIMIT_KEY_REQUESTS": 100,
    "ECLUSE_LIMIT_SCHEDULES": 3,
    "ECLUSE_LIMIT_AUDIT_CONFIGS": 2,
    "ECLUSE_LIMIT_ENDPOINTS": 2,
}
NAMES = itertools.count()
SCHEDULES = "/api/automation/schedules"


@pytest.fixture(scope="module")
def limited(shared_dsn):
    add_tenant(shared_dsn, "rival")
    with serving(shared_dsn, FLOW, **KNOBS) as client:
        yield client


@pytest.fixture
def tenant(limited, shared_dsn):
    """A tenant of the test's own, whose keys have used nothing yet."""
    name = f"tenant-{next(NAMES)}"
    add_connections(shared_dsn, name)
    return lambda role="operator": limited.with_key(new_key(shared_dsn, role, name))


def refusal(answer):
    error = answer.json["error"]
    return answer.status, answer.code, [one["where"] for one in error["details"]], int(answer.headers["Retry-After"])


def plan():
    return {"name": f"schedule {next(NAMES)}", "fiche_selection": {"fiche_ids": ["1"]}}


def test_a_key_that_asks_too_much_is_told_when_to_come_back_and_others_are_not(tenant):
    busy, other = tenant(), tenant()
    answers = [busy.get("/api/runs?limit=200") for _ in range(12)]
    assert [one.status for one in answers[:8]] == [200] * 8  # 11 units each
    status, code, names, wait = refusal(answers[-1])
    assert (status, code, names) == (429, "RATE_LIMITED", ["key_requests"])
    assert 1 <= wait <= 60
    assert other.get("/api/me").status == 200


def test_limits_are_shown_with_what_is_used(tenant):
    client = tenant("viewer")
    client.get("/api/runs?limit=200")
    found = {one["name"]: one for one in client.get("/api/limits").json["limits"]}
    mine, ours = found["key_requests"], found["tenant_requests"]
    assert (mine["per"], mine["knob"], mine["limit"]) == ("key", "ECLUSE_LIMIT_KEY_REQUESTS", 100)
    assert 11 <= mine["used"] <= 13
    assert 1 <= mine["resets_in_seconds"] <= 8
    assert (ours["per"], ours["limit"]) == ("tenant", 12_000)
    assert (found["schedules"]["limit"], found["schedules"]["used"]) == (3, 0)
    assert found["schedules"]["resets_in_seconds"] is None


@pytest.mark.parametrize(
    ("path", "body", "name", "most"),
    [
        (SCHEDULES, plan, "schedules", 3),
        (
            "/api/schedules",
            lambda: {"flow": "automation", "name": plan()["name"], "plan": {"fiche_selection": {"fiche_ids": ["1"]}}},
            "schedules",
            3,
        ),
        (
            "/api/audit-configs",
            lambda: {"name": "a", "steps": [{"name": "Consent", "criteria": "It is given."}]},
            "audit_configs",
            2,
        ),
        (
            "/api/notifications/endpoints",
            lambda: {"kind": "webhook", "url": "https://hooks.example.com/x", "events": ["*"]},
            "endpoints",
            2,
        ),
    ],
)
def test_requests_at_once_do_not_pass_the_limit_of_a_count(tenant, path, body, name, most):
    client = tenant()
    with ThreadPoolExecutor(3) as together:
        answers = list(together.map(lambda _: client.post(path, body()), range(most + 3)))
    assert sorted(one.status for one in answers) == [201] * most + [429] * 3
    (refused, *_) = [one for one in answers if one.status == 429]
    assert refusal(refused)[:3] == (429, "LIMIT_REACHED", [name])
    assert f"ECLUSE_LIMIT_{name.upper()}" in refused.json["error"]["message"]


def test_what_is_deleted_makes_room(tenant):
    client = tenant()
    made = [client.post(SCHEDULES, plan()).json["id"] for _ in range(3)]
    assert client.post(SCHEDULES, plan()).status == 429
    assert client.ask("DELETE", f"{SCHEDULES}/{made[0]}").status == 200
    assert client.post(SCHEDULES, plan()).status == 201
