"""Audits and their configs over HTTP: what is kept, shown and started, for whom, and what is refused."""

from __future__ import annotations

import asyncio
import json

import psycopg
import pytest

from ecluse.flows.audits.surface import AUDITS, CONFIGS, AuditInFull, ConfigInFull, StartedAudit
from tests.api.narrow import narrow
from tests.support.api_server import add_tenant, new_key
from tests.support.fiche_rows import call, details, save

STEPS = [{"name": "Consent", "criteria": "The customer agrees.", "weight": 2, "max_score": 5}]
RESULT = {
    "steps": [
        {
            "name": "Consent",
            "score": 4.5,
            "max": 5,
            "weight": 2,
            "comment": "Clear.",
            "evidence": [{"quote": "yes", "call_id": "c", "position": 3, "verified": True}],
        }
    ]
}
FINISH = """
UPDATE audits SET status = 'completed', is_latest = true, score = 90, result = %s, model = 'm', input_tokens = 10,
    output_tokens = 5, cost = 0.25, started_at = ecluse_now(), finished_at = ecluse_now() WHERE id = %s
"""


@pytest.fixture(scope="module")
def fiches(shared_dsn):
    """Of `default`: 10 (group A, user 7) and 11 (B, 8); of `acme` another 10."""
    add_tenant(shared_dsn, "acme")

    async def fill() -> None:
        async with await psycopg.AsyncConnection.connect(shared_dsn, autocommit=True) as c:
            await save(c, ("10", details(call("c"))), ("11", details(groupe="B", user="8")))
            await save(c, ("10", details()), tenant="acme")

    asyncio.run(fill())


def ask(dsn, sql, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def new_config(client, **given):
    answer = client.post("/api/audit-configs", {"name": "Compliance", "steps": STEPS, **given})
    assert answer.status == 201, answer.body
    return ConfigInFull.model_validate(answer.json)


def started(client, fiche, config, **options):
    answer = client.post(
        "/api/audits", {"fiche_id": fiche, "audit_config_id": config, **options.pop("more", {})}, **options
    )
    assert answer.status == 201, answer.body
    return StartedAudit.model_validate(answer.json)


@pytest.mark.req("G-34")
def test_a_config_is_added_shown_listed_and_changed_into_a_new_version(shared_api, shared_dsn):
    made = new_config(shared_api, description="d", system_prompt="s", model="m", run_automatically=True)
    assert (made.version, made.is_active, made.run_automatically, made.tenant_id) == (1, True, True, "default")
    path = f"/api/audit-configs/{made.id}"
    assert ConfigInFull.model_validate(shared_api.get(path).json) == made
    page = CONFIGS.page.model_validate(shared_api.get("/api/audit-configs?limit=200").json)
    [row] = [one for one in page.configs if one.id == made.id]
    assert row.model_dump() == made.model_dump(exclude={"steps", "system_prompt"}) | {"step_count": 1}
    changes = [
        ({"is_active": False, "run_automatically": False}, 1),
        ({"name": "Compliance"}, 1),
        ({"name": "Conformity"}, 2),
        ({"steps": [*STEPS, {"name": "b", "criteria": "c"}]}, 3),
        ({"model": None, "is_active": True}, 4),
        ({}, 4),
    ]
    for change, version in changes:
        answer = shared_api.ask("PATCH", path, change)
        assert (answer.status, answer.json["version"]) == (200, version), answer.body
    now = ConfigInFull.model_validate(shared_api.get(path).json)
    assert (now.name, len(now.steps), now.model, now.system_prompt, now.is_active) == ("Conformity", 2, None, "s", True)
    kept = ask(
        shared_dsn,
        "SELECT version, snapshot->>'name', jsonb_array_length(snapshot->'steps'), snapshot->>'model'"
        " FROM audit_config_versions WHERE audit_config_id = %s ORDER BY 1",
        made.id,
    )
    assert kept == [
        (1, "Compliance", 1, "m"),
        (2, "Conformity", 1, "m"),
        (3, "Conformity", 2, "m"),
        (4, "Conformity", 2, None),
    ]
    trail = ask(shared_dsn, "SELECT action FROM audit_trail WHERE subject = %s", f"audit_config:{made.id}")
    assert {action for (action,) in trail} == {"audit_config.create", "audit_config.update"}


def test_a_deleted_config_is_gone_and_what_was_made_with_it_stays(shared_api, fiches):
    made = new_config(shared_api)
    one = started(shared_api, "10", made.id)
    path = f"/api/audit-configs/{made.id}"
    assert shared_api.ask("DELETE", path).json == {"id": made.id, "deleted": True}
    for method, body in (("GET", None), ("PATCH", {"name": "x"}), ("DELETE", None)):
        answer = shared_api.ask(method, path, body)
        assert (answer.status, answer.code) == (404, "NOT_FOUND")
    assert made.id not in {c["id"] for c in shared_api.get("/api/audit-configs?limit=200").json["configs"]}
    refused = shared_api.post("/api/audits", {"fiche_id": "10", "audit_config_id": made.id})
    assert (refused.status, refused.code) == (404, "NOT_FOUND")
    shown = AuditInFull.model_validate(shared_api.get(f"/api/audits/{one.audit_id}").json)
    assert (shown.config_name, shown.config["steps"][0]["name"]) == ("Compliance", "Consent")


@pytest.mark.req("G-34")
@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": []},
        {"steps": [{"name": "a", "criteria": "b", "weight": 0}]},
        {"steps": [{"name": "a", "criteria": "b"}] * 2},
        {"steps": [{"name": "a", "criteria": " "}]},
        {"steps": [{"name": "a", "criteria": "b", "weight": -1}]},
        {"name": " "},
        {"name": "n" * 201},
        {"model": "two words"},
        {"more": 1},
        {"is_active": "yes"},
    ],
)
def test_a_config_that_cannot_be_asked_is_refused_when_added_and_when_changed(shared_api, wrong):
    added = shared_api.post("/api/audit-configs", {"name": "n", "steps": STEPS, **wrong})
    changed = shared_api.ask("PATCH", f"/api/audit-configs/{new_config(shared_api).id}", wrong)
    assert (added.status, added.code) == (changed.status, changed.code) == (422, "INVALID_INPUT")


@pytest.mark.req("G-91", "G-81", "G-34")
def test_an_audit_is_started_by_hand_and_shown_with_its_result(shared_api, shared_dsn, fiches):
    config = new_config(shared_api)
    one = started(shared_api, "10", config.id, more={"use_rlm": True})
    shown = AuditInFull.model_validate(shared_api.get(f"/api/audits/{one.audit_id}").json)
    assert (shown.status, shown.result, shown.score, shown.is_latest, shown.use_rlm) == (
        "pending", None, None, False, True,
    )  # fmt: skip
    assert (shown.run_id, shown.fiche_id, shown.audit_config_id) == (one.run_id, "10", config.id)
    assert (shown.trigger_source, shown.automation_run_id, shown.maybe_paid) == ("api", None, 0)
    run = shared_api.get(f"/api/runs/{one.run_id}").json
    assert (run["flow"], run["selected"], run["event_key"]) == ("audit", 1, one.event_key)
    ask(shared_dsn, FINISH, json.dumps(RESULT), one.audit_id)
    done = AuditInFull.model_validate(shared_api.get(f"/api/audits/{one.audit_id}").json)
    assert (done.status, done.score, done.cost, done.input_tokens) == ("completed", "90.00", "0.250000", 10)
    assert done.result is not None
    assert done.result.steps[0].evidence[0].verified


@pytest.mark.req("G-34", "ENG-103")
def test_audits_are_listed_newest_first_and_filtered(shared_api, shared_dsn, fiches):
    config, other = new_config(shared_api), new_config(shared_api, name="Other")
    first, second, third = (
        started(shared_api, fiche, c.id).audit_id for fiche, c in (("10", config), ("11", config), ("10", other))
    )
    ask(shared_dsn, FINISH, json.dumps(RESULT), first)
    ask(shared_dsn, "UPDATE audits SET automation_run_id = 4711 WHERE id = %s", second)

    def listed(query):
        page = AUDITS.page.model_validate(shared_api.get(f"/api/audits?{query}").json)
        return [one.id for one in page.audits]

    assert listed("limit=3") == [third, second, first]
    assert listed("limit=1&offset=1") == [second]
    assert listed(f"audit_config_id={config.id}") == [second, first]
    assert listed(f"audit_config_id={config.id}&fiche_id=10") == [first]
    assert listed(f"audit_config_id={config.id}&status=pending") == [second]
    assert listed(f"audit_config_id={config.id}&latest=true") == [first]
    assert listed("automation_run_id=4711") == [second]
    for query in ("status=late", "audit_config_id=x", "fiche_id=", "latest=perhaps", "limit=0", "audit_config_id=0"):
        assert shared_api.get(f"/api/audits?{query}").status == 422


@pytest.mark.req("G-33", "G-91")
def test_a_caller_of_a_narrow_scope_sees_and_starts_audits_of_its_fiches_only(shared_api, shared_dsn, fiches):
    config = new_config(shared_api)
    mine, theirs = (started(shared_api, fiche, config.id).audit_id for fiche in ("10", "11"))
    for scope in ({"scope": "GROUP", "groupes": ["A"]}, {"scope": "SELF", "user": "7"}):
        client = narrow(shared_api, shared_dsn, role="operator", **scope)
        listed = client.get(f"/api/audits?audit_config_id={config.id}").json["audits"]
        assert {one["fiche_id"] for one in listed} == {"10"}
        assert mine in {one["id"] for one in listed}
        assert client.get(f"/api/audits/{mine}").status == 200
        hidden, missing = client.get(f"/api/audits/{theirs}"), client.get("/api/audits/999999999")
        assert (hidden.status, hidden.code) == (missing.status, missing.code) == (404, "NOT_FOUND")
        for fiche in ("11", "999"):
            refused = client.post("/api/audits", {"fiche_id": fiche, "audit_config_id": config.id})
            assert (refused.status, refused.code) == (403, "SCOPE")
        started(client, "10", config.id)
        assert client.get(f"/api/audit-configs/{config.id}").status == 200
        assert client.ask("PATCH", f"/api/audit-configs/{config.id}", {"name": "x"}).code == "SCOPE"


@pytest.mark.req("G-33")
def test_what_belongs_to_another_tenant_does_not_exist(shared_api, shared_dsn, fiches):
    config = new_config(shared_api)
    one = started(shared_api, "10", config.id)
    rival = shared_api.with_key(new_key(shared_dsn, "admin", "acme"))
    for path in (f"/api/audits/{one.audit_id}", f"/api/audit-configs/{config.id}"):
        assert rival.get(path).code == "NOT_FOUND"
    assert rival.get("/api/audits").json["audits"] == rival.get("/api/audit-configs").json["configs"] == []
    refused = rival.post("/api/audits", {"fiche_id": "10", "audit_config_id": config.id})
    assert (refused.status, refused.code) == (404, "NOT_FOUND")


@pytest.mark.req("G-34", "G-91")
def test_what_cannot_be_audited_is_refused_and_leaves_nothing_behind(shared_api, shared_dsn, fiches):
    config, off = new_config(shared_api), new_config(shared_api, is_active=False)
    before = ask(shared_dsn, "SELECT count(*) FROM runs")
    for body, status, code in [
        ({"fiche_id": "999", "audit_config_id": config.id}, 404, "NOT_FOUND"),
        ({"fiche_id": "10", "audit_config_id": "999999"}, 404, "NOT_FOUND"),
        ({"fiche_id": "10", "audit_config_id": off.id}, 409, "CONFIG_INACTIVE"),
        ({"fiche_id": "10", "audit_config_id": int(config.id)}, 422, "INVALID_INPUT"),
        ({"fiche_id": " ", "audit_config_id": config.id}, 422, "INVALID_INPUT"),
        ({"fiche_id": "10"}, 422, "INVALID_INPUT"),
    ]:
        answer = shared_api.post("/api/audits", body)
        assert (answer.status, answer.code) == (status, code)
    generic = shared_api.post("/api/runs", {"flow": "audit", "input": {"fiche_id": "10", "audit_config_id": off.id}})
    assert (generic.status, generic.code) == (409, "CONFIG_INACTIVE")
    assert ask(shared_dsn, "SELECT count(*) FROM runs") == before


def test_a_repetition_with_the_same_idempotency_key_starts_nothing(shared_api, shared_dsn, fiches):
    config = new_config(shared_api)
    once = {"headers": {"Idempotency-Key": "audit-once"}}
    first = started(shared_api, "10", config.id, **once)
    again = shared_api.post("/api/audits", {"fiche_id": "10", "audit_config_id": config.id}, **once)
    assert (again.json["audit_id"], again.headers["Idempotent-Replay"]) == (first.audit_id, "true")
    ask(shared_dsn, "DELETE FROM idempotency_keys")
    forgotten = shared_api.post("/api/audits", {"fiche_id": "10", "audit_config_id": config.id}, **once)
    assert (forgotten.status, forgotten.json) == (200, first.model_dump())
    made = {"headers": {"Idempotency-Key": "config-once"}}
    twice = [shared_api.post("/api/audit-configs", {"name": "n", "steps": STEPS}, **made).json for _ in range(2)]
    assert twice[0] == twice[1]
