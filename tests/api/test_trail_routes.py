"""The audit trail and the outbox over HTTP: admins read what was changed, and everybody what is to be told."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

import ecluse
from ecluse.access.refusal_log import MOST, Refusals
from ecluse.api.trail import EVENTS, TRAIL
from ecluse.db.connect import pool
from tests.support.api_server import add_tenant, new_key
from tests.support.waits import wait_for

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
        ("run.start", f"run:{run_id}", None),
    ]
    assert [(row.actor_name, row.address) for row in page.entries[:2]] == [(None, None), ("a test", "127.0.0.1")]
    for filters, actions in {
        f"actor={page.entries[1].actor}": ["run.end", "run.start"],
        "action=retention.prune": ["retention.prune"],
        f"subject=run:{run_id}": ["run.end", "run.start"],
        "address=127.0.0.1": ["run.end", "run.start"],
        "until=2020-01-02": ["retention.prune"],
        "since=2020-01-02": ["run.end", "run.start"],
        "action=nothing": [],
    }.items():
        assert [row["action"] for row in admin.get(f"/api/audit-trail?{filters}").json["entries"]] == actions, filters
    rival = admin.with_key(new_key(dsn, "admin", "rival"))
    assert [row["action"] for row in rival.get("/api/audit-trail").json["entries"]] == ["x.y"]
    acting = admin.get("/api/audit-trail", headers={"Ecluse-Tenant": "rival"}).json["entries"]
    assert [row["action"] for row in acting] == ["x.y"]


def test_who_started_what_is_recorded_once(admin, api, query):
    """A repetition starts nothing, and a schedule that is due has no author."""
    run = {"flow": "test", "key": "monday"}
    run_ids = [api.post("/api/runs", run).json["run_id"] for _ in range(2)]
    fiche = [api.post("/api/transcriptions/7").json["run_id"] for _ in range(2)]
    batch = api.post("/api/transcriptions/batch", {"fiche_ids": ["8", "9"]}, headers={"X-Request-Id": "lot-1"})
    assert [row["actor"] for row in admin.get("/api/audit-trail?action=run.start").json["entries"]] == ["key:1"]
    found = admin.get("/api/audit-trail").json["entries"]
    assert [(row["action"], row["subject"], row["request_id"] == "lot-1") for row in reversed(found)] == [
        ("run.start", f"run:{run_ids[0]}", False),
        ("transcription.start", f"run:{fiche[0]}", False),
        ("transcription.start", "fiches:2", True),
    ]
    started = [row["run_id"] for row in batch.json["fiches"]]
    assert [str(row[0]) for row in query("SELECT id FROM runs WHERE correlation_id = 'lot-1' ORDER BY id")] == started


def test_every_operation_is_recorded_but_these():
    unrecorded = re.compile(r"action=None.*?async def (\w+)", re.DOTALL)
    found = [name for path in Path(ecluse.__path__[0]).rglob("*.py") for name in unrecorded.findall(path.read_text())]
    recorded_by_themselves = {"erase_fiche", "erase_company", "end_run", "rotate_credential"}
    work_of_agents = {"renew_lease", "append_log", "report_result"}
    assert set(found) == recorded_by_themselves | work_of_agents | {"preview_timetable"}


def refusals(admin, query):
    """The rows of refusals once all are written."""

    def counted():
        rows = admin.get("/api/audit-trail?limit=200").json["entries"]
        return [row for row in rows if row["times"]]

    return wait_for(counted)


def test_refusals_are_one_row_per_minute_and_actor(admin, api, query):
    stranger, agent = api.with_key("ecl_" + "x" * 43), api.with_key("ecl_agent_" + "x" * 43)
    token = {"token": "ecl_enrol_x", "hostname": "h", "version": "1", "platform": "p"}
    waiting = {"max": 0, "waitSeconds": 0, "types": [], "version": "1", "claimKey": "0" * 32}
    viewer = api.with_key(admin.post("/api/keys", {"name": "v", "role": "viewer"}).json["key"])
    for _ in range(20):
        assert stranger.get("/api/me").status == 401
        assert stranger.post("/api/agent/enrol", token).code == "ENROLMENT_REFUSED"
        assert agent.post("/api/agent/jobs/claim", waiting).code == "CREDENTIAL_REVOKED"
        assert viewer.post("/api/runs", {"flow": "test"}).status == 403
    assert api.with_key(None).get("/api/me").status == 401, "no key: not counted"
    wait_for(lambda: sum(row["times"] for row in refusals(admin, query)) == 80)
    rows = {(row["action"], row["actor"]): row for row in refusals(admin, query)}
    me = viewer.get("/api/me").json["key_id"]
    assert {one: row["subject"] for one, row in rows.items()} == {
        ("credentials.invalid", "address:127.0.0.1"): "key",
        ("request.refused", f"key:{me}"): "POST /api/runs",
    }
    refused = rows["request.refused", f"key:{me}"]
    assert "runs.write" in refused["reason"]
    assert refused["address"] == "127.0.0.1"
    assert len(query("SELECT 1 FROM audit_trail WHERE times IS NOT NULL")) <= 4, "at most two minutes, of two kinds"
    assert "xxxx" not in str(query("TABLE audit_trail"))


async def test_many_strangers_cannot_fill_the_disk(dsn, query):
    async with pool(dsn, size=1) as own:
        counted = Refusals(own, write_seconds=0.0)
        for n in range(3 * MOST):
            counted.invalid_credentials(f"2001:db8:0:{n:x}::1")
            counted.invalid_credentials(f"2001:db8:0:{n:x}::2")
        counted.forbidden("default", "key:1", "POST /api/runs", "no", "127.0.0.1")
        await counted.settle()
    rows = query("SELECT actor, times FROM audit_trail WHERE action = 'credentials.invalid'")
    assert len(rows) == MOST + 1
    assert dict(rows)["others"] == 4 * MOST
    assert dict(rows)["address:2001:db8:0:7::/64"] == 2
    assert query("SELECT times FROM audit_trail WHERE action = 'request.refused'") == [(1,)]


def test_the_trail_is_exported_whole_as_csv_and_as_lines_of_json(admin, api, query):
    query(
        "INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason)"
        " SELECT 'default', now(), 'cli:ann', 'x.y', 'n:' || n, '=1+1' FROM generate_series(1, 2500) n"
    )
    query(
        "INSERT INTO audit_trail (tenant_id, at, actor, action, subject) VALUES ('rival', now(), 'key:9', 'x.y', 'z')"
    )
    answer = admin.get("/api/audit-trail/export?action=x.y")
    assert answer.headers["Content-Type"].startswith("text/csv")
    rows = list(csv.DictReader(answer.body.decode().splitlines()))
    assert [row["subject"] for row in rows] == [f"n:{n}" for n in range(2500, 0, -1)]
    assert {row["reason"] for row in rows} == {"'=1+1"}
    answer = admin.get("/api/audit-trail/export?format=ndjson&actor=cli:ann")
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert [json.loads(line)["subject"] for line in answer.body.splitlines()] == [row["subject"] for row in rows]
    assert admin.get("/api/audit-trail/export?format=ndjson&action=nothing").body == b""
    for wrong in ("format=xlsx", "since=soon", "who=ann"):
        assert admin.get(f"/api/audit-trail/export?{wrong}").status == 422
    assert api.get("/api/audit-trail/export").status == 403
    exports = admin.get("/api/audit-trail?action=trail.export").json["entries"]
    assert [(row["subject"], row["reason"]) for row in reversed(exports)] == [
        ("trail", "action=x.y"),
        ("trail", "format=ndjson&actor=cli:ann"),
        ("trail", "format=ndjson&action=nothing"),
    ]


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
