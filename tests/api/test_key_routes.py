"""Keys and tenants over HTTP: a key is shown once, and none has more rights than the one that made it."""

from __future__ import annotations

import pytest

from ecluse.api.keys import KEYS, TENANTS, CreatedKey, KeyRow, TenantRow
from tests.support.api_server import add_tenant, new_key, serving
from tests.support.waits import wait_for

EVERYTHING = "SELECT to_jsonb(t) - 'last_used_at' FROM {} t ORDER BY id"


@pytest.fixture
def admin(api, dsn):
    return api.with_key(new_key(dsn, "admin"))


@pytest.fixture
def rival(api, dsn):
    """The admin of another tenant."""
    add_tenant(dsn, "rival")
    return api.with_key(new_key(dsn, "admin", "rival"))


def kept(query):
    changes = query("SELECT * FROM audit_trail WHERE times IS NULL")
    return query(EVERYTHING.format("api_keys")), query(EVERYTHING.format("tenants")), changes


def test_a_key_is_shown_once_works_and_is_revoked(admin, query, one):
    answer = admin.post("/api/keys", {"name": "export", "role": "viewer", "expires_in": "30d"})
    assert answer.status == 201, answer.body
    made = CreatedKey.model_validate(answer.json)
    assert (made.role, made.scope, made.state, made.tenant_id) == ("viewer", "ALL", "valid", "default")
    assert (made.expires_at - made.created_at).days == 30
    theirs = admin.with_key(made.key)
    assert theirs.get("/api/me").json["key_id"] == made.id
    listed = admin.get("/api/keys").json
    assert made.key not in str(listed)
    assert made.id in [row.id for row in KEYS.page.model_validate(listed).keys]
    assert made.key not in str(query("TABLE audit_trail"))
    assert admin.ask("DELETE", f"/api/keys/{made.id}").json == {"id": made.id, "revoked": True}
    assert admin.ask("DELETE", f"/api/keys/{made.id}").status == 200
    wait_for(lambda: theirs.get("/api/me").status == 401)
    actions = query("SELECT action, subject FROM audit_trail WHERE times IS NULL ORDER BY id")
    assert actions == [("key.create", f"key:{made.id}"), ("key.revoke", f"key:{made.id}")], "a second time is nothing"
    assert [row["id"] for row in admin.get("/api/keys?state=revoked").json["keys"]] == [made.id]


@pytest.mark.parametrize(("given", "days"), [({}, 365), ({"expires_in": None}, 365), ({"expires_in": "never"}, None)])
def test_a_key_expires_after_a_year_unless_another_lifetime_is_given(admin, given, days):
    made = CreatedKey.model_validate(admin.post("/api/keys", {"name": "export", "role": "viewer", **given}).json)
    assert (made.expires_at and (made.expires_at - made.created_at).days) == days


@pytest.mark.parametrize(("days", "left"), [(30, 30), (0, None)])
def test_keys_of_a_server_with_another_lifetime_expire_after_it_and_never_if_it_is_0(dsn, days, left):
    with serving(dsn, ECLUSE_KEY_LIFETIME_DAYS=days) as client:
        admin = client.with_key(new_key(dsn, "admin"))
        made = CreatedKey.model_validate(admin.post("/api/keys", {"name": "export", "role": "viewer"}).json)
        assert admin.with_key(made.key).get("/api/me").status == 200
    assert (made.expires_at and (made.expires_at - made.created_at).days) == left


def test_a_repeated_request_makes_one_key_and_does_not_show_it_again(admin, one):
    given = {"name": "export", "role": "viewer"}
    first, second = (admin.post("/api/keys", given, headers={"Idempotency-Key": "once"}) for _ in range(2))
    assert (first.status, second.status, "key" in second.json) == (201, 201, False)
    assert first.json["id"] == second.json["id"]
    KeyRow.model_validate(second.json)
    assert one("SELECT count(*) FROM api_keys WHERE name = 'export'") == 1
    assert first.json["key"] not in str(one("SELECT answer FROM idempotency_keys"))


def test_keys_are_made_and_revoked_within_the_tenant(admin, rival, query):
    made = rival.post("/api/keys", {"name": "theirs", "role": "admin"}).json
    assert made["tenant_id"] == "rival"
    before = kept(query)
    for address in (f"/api/keys/{made['id']}", "/api/keys/999", "/api/keys/x"):
        answer = admin.ask("DELETE", address)
        assert (answer.status, answer.code) == (404, "NOT_FOUND")
    assert made["id"] not in [row["id"] for row in admin.get("/api/keys").json["keys"]]
    assert kept(query) == before
    acting = admin.ask("DELETE", f"/api/keys/{made['id']}", headers={"Ecluse-Tenant": "rival"})
    assert acting.status == 200, "an admin of default acts for another tenant"


def test_the_own_key_is_not_revoked(admin, query):
    before = kept(query)
    answer = admin.ask("DELETE", f"/api/keys/{admin.get('/api/me').json['key_id']}")
    assert (answer.status, answer.code) == (409, "CONFLICT")
    assert kept(query) == before


def test_tenants_are_made_disabled_and_enabled(admin, query, dsn):
    made = admin.post("/api/tenants", {"id": "acme", "name": "ACME"})
    assert (made.status, TenantRow.model_validate(made.json).name) == (201, "ACME")
    key = admin.post("/api/keys", {"name": "first", "role": "admin"}, headers={"Ecluse-Tenant": "acme"}).json["key"]
    theirs = admin.with_key(key)
    assert theirs.get("/api/me").json["tenant_id"] == "acme"
    page = TENANTS.page.model_validate(admin.get("/api/tenants").json)
    assert (page.tenants[0].id, page.tenants[0].keys, page.tenants[0].disabled_at) == ("acme", 1, None)
    disabled = admin.post("/api/tenants/acme/disable", {"reason": "unpaid"})
    assert disabled.json["disabled_at"]
    wait_for(lambda: theirs.get("/api/me").status == 403)
    admin.post("/api/tenants/acme/disable", {"reason": "again"})
    assert admin.post("/api/tenants/acme/enable", {}).json["disabled_at"] is None
    wait_for(lambda: theirs.get("/api/me").status == 200)
    trail = query("SELECT action, subject, reason FROM audit_trail WHERE action LIKE 'tenant.%%' ORDER BY id")
    assert trail == [
        ("tenant.create", "tenant:acme", None),
        ("tenant.disable", "tenant:acme", "unpaid"),
        ("tenant.enable", "tenant:acme", None),
    ]


def test_keys_that_are_expired_or_revoked_count_neither_for_the_tenant_nor_for_its_limit(admin, rival, query):
    theirs = [rival.post("/api/keys", {"name": f"key {n}", "role": "viewer"}).json["id"] for n in range(3)]
    query("UPDATE api_keys SET expires_at = ecluse_now() WHERE id = %s", int(theirs[0]))
    rival.ask("DELETE", f"/api/keys/{theirs[1]}")
    counted = {one["id"]: one["keys"] for one in admin.get("/api/tenants").json["tenants"]}["rival"]
    used = {one["name"]: one["used"] for one in rival.get("/api/limits").json["limits"]}["api_keys"]
    assert counted == used == 2  # the admin's, and the third


READ = ("/api/me", "/api/runs", "/api/runs/{}", "/api/spend", "/api/budgets", "/api/audit-trail", "/api/keys")


def test_a_disabled_tenant_is_read_by_an_admin_of_default_and_by_none_of_its_own_keys(api, admin, rival, dsn):
    run = rival.post("/api/runs", {"flow": "test"}).json["run_id"]
    assert admin.post("/api/tenants/rival/disable", {"reason": "unpaid"}).status == 200
    wait_for(lambda: rival.get("/api/me").status == 403)
    acting = {"headers": {"Ecluse-Tenant": "rival"}}
    for path in (one.format(run) for one in READ):
        assert admin.get(path, **acting).status == 200, path
        assert (rival.get(path).status, rival.get(path).code) == (403, "TENANT_DISABLED"), path
        assert api.get(path, **acting).code == "FORBIDDEN", "an operator of default acts for no other tenant"
    assert [one["id"] for one in admin.get("/api/runs", **acting).json["runs"]] == [run]


def test_a_disabled_tenant_is_not_changed_by_an_admin_of_default_either(admin, rival, query):
    run = rival.post("/api/runs", {"flow": "test"}).json["run_id"]
    assert admin.post("/api/tenants/rival/disable", {"reason": "unpaid"}).status == 200
    before = kept(query), query("TABLE runs"), query("TABLE budgets")
    key = admin.get("/api/keys", headers={"Ecluse-Tenant": "rival"}).json["keys"][0]["id"]
    for method, path, body in [
        ("POST", "/api/runs", {"flow": "test"}),
        ("POST", f"/api/runs/{run}/end", {"reason": "x"}),
        ("POST", "/api/budgets", {"amount_eur": "1", "period": "day"}),
        ("POST", "/api/keys", KEY),
        ("DELETE", f"/api/keys/{key}", None),
    ]:
        answer = admin.ask(method, path, body, headers={"Ecluse-Tenant": "rival"})
        assert (answer.status, answer.code) == (403, "TENANT_DISABLED"), path
        assert "`ecluse tenants enable rival`" in answer.json["error"]["message"]
    assert (kept(query), query("TABLE runs"), query("TABLE budgets")) == before


@pytest.mark.parametrize("stop", [False, True])
def test_a_tenant_is_disabled_with_or_without_its_open_runs(admin, rival, query, stop):
    rival.post("/api/runs", {"flow": "test", "input": {"targets": ["a", "b"]}})
    rival.post("/api/runs", {"flow": "test"})
    ours = admin.post("/api/runs", {"flow": "test"}).json["run_id"]
    preview = admin.get("/api/tenants/rival/disable")
    assert (preview.status, preview.json["open_runs"], preview.json["disabled_at"]) == (200, 2, None)
    answer = admin.post("/api/tenants/rival/disable", {"reason": "unpaid", "stop": stop})
    assert answer.status == 200, answer
    assert (answer.json["ended_runs"], answer.json["open_runs"]) == ((2, 0) if stop else (0, 2))
    ends = query("SELECT state, end_cause, reason FROM runs WHERE tenant_id = 'rival' AND ended_at IS NOT NULL")
    assert ends == (2 * [("cancelled", "operator", "unpaid")] if stop else [])
    assert query("SELECT ended_at FROM runs WHERE id = %s", ours) == [(None,)]
    again = admin.post("/api/tenants/rival/disable", {"reason": "again", "stop": stop})
    assert (again.status, again.json["ended_runs"]) == (200, 0)
    assert query("SELECT reason FROM audit_trail WHERE action = 'tenant.disable'") == [("unpaid",)]


KEY = {"name": "x", "role": "viewer"}
BAD = [
    ("POST", "/api/keys", {"name": "x"}, 422),
    ("POST", "/api/keys", {**KEY, "role": "god"}, 422),
    ("POST", "/api/keys", {**KEY, "name": " "}, 422),
    ("POST", "/api/keys", {**KEY, "expires_in": "soon"}, 422),
    ("POST", "/api/keys", {**KEY, "tenant": "rival"}, 422),
    ("POST", "/api/keys", {**KEY, "scope": "GROUP"}, 422),
    ("POST", "/api/keys", {**KEY, "scope": "SELF"}, 422),
    ("POST", "/api/keys", {**KEY, "groupes": ["a"]}, 422),
    ("GET", "/api/keys?name=x", None, 422),
    ("GET", "/api/keys?state=lost", None, 422),
    ("POST", "/api/tenants", {"id": "a b"}, 422),
    ("POST", "/api/tenants", {"id": "rival"}, 409),
    ("POST", "/api/tenants", {"id": "new", "colour": "red"}, 422),
    ("POST", "/api/tenants/nothing/disable", {"reason": "x"}, 404),
    ("POST", "/api/tenants/%00/enable", {}, 404),
    ("POST", "/api/tenants/rival/disable", {}, 422),
    ("POST", "/api/tenants/rival/disable", {"reason": "x", "stop": "yes"}, 422),
    ("GET", "/api/tenants/nothing/disable", None, 404),
    ("POST", "/api/tenants/default/disable", {"reason": "x"}, 409),
    ("GET", "/api/tenants?id=x", None, 422),
]
CODES = {404: "NOT_FOUND", 409: "CONFLICT", 422: "INVALID_INPUT"}


def test_bad_input_is_refused_and_changes_nothing(admin, rival, query):
    before = kept(query)
    for method, path, body, status in BAD:
        answer = admin.ask(method, path, body)
        assert (answer.status, answer.code) == (status, CODES[status]), (method, path, body)
    assert kept(query) == before


def test_without_the_right_nothing_is_seen_or_changed(api, admin, rival, dsn, query):
    viewer, before = api.with_key(new_key(dsn, "viewer")), None
    asked = [
        ("GET", "/api/keys", None),
        ("POST", "/api/keys", KEY),
        ("DELETE", "/api/keys/1", None),
        ("GET", "/api/tenants", None),
        ("POST", "/api/tenants", {"id": "new"}),
        ("POST", "/api/tenants/rival/disable", {"reason": "x"}),
        ("POST", "/api/tenants/rival/enable", {}),
    ]
    before = kept(query)
    for client in (api, viewer):
        for method, path, body in asked:
            assert (client.ask(method, path, body).status, client.ask(method, path, body).code) == (403, "FORBIDDEN")
    for method, path, body in asked[3:]:
        answer = rival.ask(method, path, body)
        assert (answer.status, answer.code) == (403, "FORBIDDEN"), "tenants are for the admins of default"
    assert kept(query) == before


def test_a_tenant_that_is_disabled_with_stop_has_no_transcription_and_no_enrichment_left_to_do(admin, rival, query):
    query(
        "INSERT INTO connections (tenant_id, kind, base_url, created_by, created_at, updated_by, updated_at)"
        " SELECT 'rival', k, 'https://vendor.example', 't', now(), 't', now() FROM unnest(ARRAY['crm', 'speech']) k"
    )
    assert rival.post("/api/transcriptions/7").status in (200, 201, 202)
    assert rival.post("/api/transcriptions/batch", {"fiche_ids": ["8", "9"]}).status in (200, 201, 202)
    assert rival.post("/v1/requests", {"company_siren": "552049447"}).status == 201
    answer = admin.post("/api/tenants/rival/disable", {"reason": "unpaid", "stop": True})
    assert (answer.status, answer.json["ended_runs"], answer.json["open_runs"]) == (200, 4, 0)
    ends = query("SELECT flow, state, count(*) FROM runs WHERE tenant_id = 'rival' GROUP BY 1, 2 ORDER BY 1")
    assert ends == [("enrichment", "cancelled", 1), ("transcription", "cancelled", 3)]
    assert query("SELECT count(*) FROM items WHERE tenant_id = 'rival' AND status = 'open'") == [(0,)]
    assert query("SELECT count(*) FROM enrichment_jobs WHERE ended_at IS NULL") == [(0,)]
