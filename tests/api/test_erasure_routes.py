"""Erasure, retention and the doctor over HTTP: what is asked for is done, by admins only, and recorded."""

from __future__ import annotations

import psycopg
import pytest

from ecluse.api.erasure import ErasedFiche, FicheErasure, TenantErasure
from ecluse.api.upkeep import Findings, Retention
from tests.support.api_server import FLOW, add_tenant, new_key, serving
from tests.support.waits import wait_for

FICHE = """
WITH f AS (
    INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at)
    VALUES (%(tenant)s, %(fiche)s, ecluse_now(), ecluse_now()) RETURNING id)
INSERT INTO recordings (fiche_cache_id, call_id, has_transcription, transcription_text, transcribed_at, created_at,
                        updated_at)
SELECT id, 'call', true, 'said', ecluse_now(), ecluse_now(), ecluse_now() FROM f
"""
ENDED = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, ended_at, end_cause, selected,
                  successful, failed, ignored)
SELECT %s, 'test', 'old-' || n, false, 'completed', 'succeeded', ecluse_now() - interval '200 days',
       ecluse_now() - interval '200 days', 'normal', 0, 0, 0, 0 FROM generate_series(1, 3) n
"""
SLASHED = "7/a"


def plant(dsn, statement, *given):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement, *given)


@pytest.fixture
def admin(api, dsn):
    add_tenant(dsn, "rival")
    for tenant, fiche in (("default", "7"), ("default", SLASHED), ("rival", "8")):
        plant(dsn, FICHE, {"tenant": tenant, "fiche": fiche})
    return api.with_key(new_key(dsn, "admin"))


def stored(query):
    changes = "(SELECT * FROM audit_trail WHERE times IS NULL)"
    tables = ("fiche_cache", "recordings", "tenants", "runs", changes, "maintenance")
    return [query(f"SELECT to_jsonb(t) FROM {table} t ORDER BY 1") for table in tables]  # noqa: S608


def test_a_fiche_is_erased_after_a_preview_and_recorded(admin, query):
    before = stored(query)
    preview = FicheErasure.model_validate(admin.get("/api/erasure/fiches/7").json)
    assert preview.rows == {"recordings and transcripts": 1, "fiche": 1}
    assert stored(query) == before, "a preview changes nothing"
    done = admin.post("/api/erasure/fiches/7", {"reason": "asked by the customer"})
    assert (done.status, ErasedFiche.model_validate(done.json).removed) == (200, preview.rows)
    assert query("SELECT fiche_id FROM fiche_cache ORDER BY id") == [(SLASHED,), ("8",)]
    (trail,) = query("SELECT action, subject, reason FROM audit_trail")
    said = "asked by the customer (recordings and transcripts: 1, fiche: 1)"
    assert trail == ("fiche.erase", "fiche:7", said)
    assert admin.get("/api/erasure/fiches/7").status == 404
    assert admin.post("/api/erasure/fiches/7%2Fa", {"reason": "x"}).status == 200
    assert query("SELECT fiche_id FROM fiche_cache") == [("8",)]


def test_a_fiche_of_an_open_run_is_not_erased(admin, query):
    query(
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)"
        " VALUES ('default', 'automation', 'k', true, 'running', 'running', ecluse_now())"
    )
    query("INSERT INTO outcomes (run_id, target) SELECT id, '7' FROM runs WHERE event_key = 'k'")
    before = stored(query)
    for answer in (admin.get("/api/erasure/fiches/7"), admin.post("/api/erasure/fiches/7", {"reason": "x"})):
        assert (answer.status, answer.code) == (409, "RUN_OPEN")
    assert stored(query) == before


def test_a_tenant_is_erased_by_a_scheduler_and_its_trail_stays(dsn, query, one):
    add_tenant(dsn, "rival")
    plant(dsn, FICHE, {"tenant": "rival", "fiche": "8"})
    plant(dsn, FICHE, {"tenant": "default", "fiche": "9"})
    plant(dsn, ENDED, ("rival",))
    theirs = new_key(dsn, "admin", "rival")
    with serving(dsn, FLOW, roles=frozenset({"api", "worker", "scheduler"})) as client:
        admin = client.with_key(new_key(dsn, "admin"))
        preview = TenantErasure.model_validate(admin.get("/api/erasure/tenants/rival").json)
        assert (preview.rows, preview.asked_at) == ({"runs": 3, "fiches": 1, "API keys": 1}, None)
        asked = admin.post("/api/erasure/tenants/rival", {"reason": "the contract has ended"})
        assert (asked.status, TenantErasure.model_validate(asked.json).asked_at is None) == (202, False)
        left = wait_for(lambda: (found := admin.get("/api/erasure/tenants/rival").json)["asked_at"] is None and found)
        assert left["rows"] == {}
        wait_for(lambda: client.with_key(theirs).get("/api/me").status == 401)
    assert query("SELECT fiche_id FROM fiche_cache") == [("9",)]
    assert one("SELECT disabled_at IS NOT NULL FROM tenants WHERE id = 'rival'")
    assert one("SELECT tenant_id, reason FROM audit_trail WHERE action = 'tenant.erase'") == (
        "default",
        "the contract has ended",
    )
    assert one("SELECT reason FROM audit_trail WHERE action = 'tenant.erased' AND tenant_id = 'rival'").startswith(
        "runs"
    )


def test_old_rows_are_foreseen_and_pruned_by_a_scheduler(dsn, query, one):
    plant(dsn, ENDED, ("default",))
    with serving(dsn, FLOW, roles=frozenset({"api", "worker", "scheduler"})) as client:
        admin = client.with_key(new_key(dsn, "admin"))
        wait_for(lambda: one("SELECT to_regclass('dbos.workflow_status')"))
        shown = Retention.model_validate(admin.get("/api/retention").json)
        assert {kind.kind: kind.rows for kind in shown.kinds if kind.rows} == {"runs": 3}
        assert shown.bytes > 0
        asked = admin.post("/api/retention/prune", {"reason": "full"})
        assert (asked.status, asked.json) == (202, {"asked": True, "schedulers": 1})
        wait_for(lambda: one("SELECT count(*) FROM runs") == 0)
        wait_for(lambda: one("SELECT count(*) FROM maintenance") == 0)
        findings = Findings.model_validate(admin.get("/api/doctor").json).findings
    assert {one.what for one in findings} >= {"environment", "database", "schema", "lanes", "growth", "connections"}
    assert not [one for one in findings if one.level == "fail"]
    actions = [row[0] for row in query("SELECT action FROM audit_trail ORDER BY id")]
    assert actions == ["retention.prune", "retention.pruned"]


def test_without_a_worker_ever_nothing_of_it_fails(admin):
    assert admin.get("/api/retention").status == 200
    assert admin.get("/api/doctor").status == 200


BAD = [
    ("GET", "/api/erasure/fiches/8", None, 404),
    ("POST", "/api/erasure/fiches/8", {"reason": "theirs"}, 404),
    ("POST", "/api/erasure/fiches/nothing", {"reason": "x"}, 404),
    ("POST", "/api/erasure/fiches/%00", {"reason": "x"}, 404),
    ("POST", "/api/erasure/fiches/7", {}, 422),
    ("POST", "/api/erasure/fiches/7", {"reason": "x", "force": True}, 422),
    ("GET", "/api/erasure/tenants/nothing", None, 404),
    ("POST", "/api/erasure/tenants/nothing", {"reason": "x"}, 404),
    ("POST", "/api/erasure/tenants/default", {"reason": "x"}, 409),
    ("POST", "/api/erasure/tenants/rival", {}, 422),
    ("GET", "/api/erasure/tenants/rival?dry=1", None, 422),
    ("POST", "/api/retention/prune", {"days": 1}, 422),
    ("GET", "/api/doctor?deep=1", None, 422),
]


def test_bad_input_is_refused_and_changes_nothing(admin, query):
    before = stored(query)
    for method, path, body, status in BAD:
        answer = admin.ask(method, path, body)
        wanted = (status, {404: "NOT_FOUND", 409: "CONFLICT", 422: "INVALID_INPUT"}[status])
        assert (answer.status, answer.code) == wanted, (method, path, body)
    assert stored(query) == before


def test_a_tenant_with_an_open_run_is_not_erased(admin, dsn, query):
    rival = admin.with_key(new_key(dsn, "operator", "rival"))
    assert rival.post("/api/runs", {"flow": "test"}).status == 201
    before = stored(query)
    answer = admin.post("/api/erasure/tenants/rival", {"reason": "x"})
    assert (answer.status, answer.code) == (409, "CONFLICT")
    assert stored(query) == before


def test_without_the_right_nothing_is_seen_or_changed(api, admin, dsn, query):
    rival, before = admin.with_key(new_key(dsn, "admin", "rival")), stored(query)
    asked = [
        ("GET", "/api/erasure/tenants/rival", None),
        ("POST", "/api/erasure/tenants/rival", {"reason": "x"}),
        ("GET", "/api/retention", None),
        ("POST", "/api/retention/prune", {}),
        ("GET", "/api/doctor", None),
        ("GET", "/api/erasure/fiches/7", None),
        ("POST", "/api/erasure/fiches/7", {"reason": "x"}),
    ]
    for method, path, body in asked:
        answers = [api.ask(method, path, body)] + ([rival.ask(method, path, body)] if "fiches" not in path else [])
        assert {(one.status, one.code) for one in answers} == {(403, "FORBIDDEN")}, path
    assert rival.get("/api/erasure/fiches/7").status == 404, "a fiche of another tenant is not there"
    assert stored(query) == before
