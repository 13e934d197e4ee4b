"""The audit trail and the outbox over HTTP: admins read what was changed, and everybody what is to be told."""

from __future__ import annotations

import pytest

from ecluse.api.trail import EVENTS, TRAIL
from tests.support.api_server import add_tenant, new_key

EVENT = """
INSERT INTO events_outbox (tenant_id, event_key, event_type, aggregate, correlation_id, producer, occurred_at, tries,
                           try_at, error, published_seq, published_at)
VALUES ('default', 'a', 'run.completed', 'run:1', 'c', 'p', now(), 0, '-infinity', NULL, 1, now()),
       ('default', 'b', 'run.failed', 'run:2', 'c', 'p', now(), 3, 'tomorrow', 'no answer', NULL, NULL),
       ('default', 'c', 'run.failed', 'run:3', 'c', 'p', now(), 0, '-infinity', NULL, NULL, NULL),
       ('rival', 'd', 'run.failed', 'run:3', 'c', 'p', now(), 0, '-infinity', NULL, NULL, NULL)
"""


@pytest.fixture
def admin(api, dsn):
    add_tenant(dsn, "rival")
    return api.with_key(new_key(dsn, "admin"))


def test_who_did_what_and_why_is_found(admin, api, dsn, query):
    run_id = api.post("/api/runs", {"flow": "test"}).json["run_id"]
    api.post(f"/api/runs/{run_id}/end", {"reason": "enough"})
    query(
        "INSERT INTO audit_trail (tenant_id, at, actor, action, subject) VALUES"
        " ('system', '2020-01-01Z', 'cli:ann', 'retention.prune', 'runs 3'), ('rival', now(), 'key:1', 'x.y', 'z')"
    )
    page = TRAIL.page.model_validate(admin.get("/api/audit-trail").json)
    assert [(row.action, row.subject, row.reason) for row in page.entries] == [
        ("retention.prune", "runs 3", None),
        ("run.end", f"run:{run_id}", "enough"),
    ]
    assert page.entries[1].actor_name == "a test"
    for filters, actions in {
        f"actor={page.entries[1].actor}": ["run.end"],
        "action=retention.prune": ["retention.prune"],
        f"subject=run:{run_id}": ["run.end"],
        "until=2020-01-02": ["retention.prune"],
        "since=2020-01-02": ["run.end"],
        "action=nothing": [],
    }.items():
        assert [row["action"] for row in admin.get(f"/api/audit-trail?{filters}").json["entries"]] == actions, filters
    rival = admin.with_key(new_key(dsn, "admin", "rival"))
    assert [row["action"] for row in rival.get("/api/audit-trail").json["entries"]] == ["x.y"]
    acting = admin.get("/api/audit-trail", headers={"Ecluse-Tenant": "rival"}).json["entries"]
    assert [row["action"] for row in acting] == ["x.y"]


def test_events_are_listed_with_their_state(admin, dsn, query):
    query(EVENT)
    page = EVENTS.page.model_validate(admin.get("/api/events/outbox").json)
    assert [(row.event_key, row.state, row.tries, row.error) for row in page.events] == [
        ("c", "waiting", 0, None),
        ("b", "failing", 3, "no answer"),
        ("a", "published", 0, None),
    ]
    for filters, keys in {
        "state=failing": ["b"],
        "event_type=run.failed": ["c", "b"],
        "aggregate=run:1": ["a"],
        "state=published": ["a"],
    }.items():
        assert [row["event_key"] for row in admin.get(f"/api/events/outbox?{filters}").json["events"]] == keys
    viewer = admin.with_key(new_key(dsn, "viewer", "rival"))
    assert [row["event_key"] for row in viewer.get("/api/events/outbox").json["events"]] == ["d"]


def test_bad_input_and_missing_rights_are_refused(admin, api, dsn):
    for path in (
        "/api/audit-trail?who=ann",
        "/api/audit-trail?since=soon",
        "/api/audit-trail?cursor=x",
        "/api/events/outbox?state=lost",
        "/api/events/outbox?type=x",
        "/api/events/outbox?limit=201",
    ):
        assert (admin.get(path).status, admin.get(path).code) == (422, "INVALID_INPUT"), path
    for key in (api.key, new_key(dsn, "viewer")):
        answer = api.with_key(key).get("/api/audit-trail")
        assert (answer.status, answer.code) == (403, "FORBIDDEN")
    assert admin.ask("POST", "/api/events/outbox", {}).status == 405
