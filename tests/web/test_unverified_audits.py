"""An audit with a step of which no quote is verified says so: in the list, in full, on its pages and in the CSV."""

from __future__ import annotations

import csv
import io
import json

import psycopg
import pytest

from ecluse.flows.audits.surface import AuditInFull
from tests.support.api_server import FLOW, new_key, serving

AUDITED = """
WITH fiche AS (INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at)
               VALUES ('default', '7', now(), now()) RETURNING id),
config AS (INSERT INTO audit_configs (tenant_id, name, steps, created_at, updated_at)
           VALUES ('default', 'Compliance', '[]', now(), now()) RETURNING id),
version AS (INSERT INTO audit_config_versions (audit_config_id, version, snapshot, created_at)
            SELECT id, 1, '{"name": "Compliance"}', now() FROM config)
INSERT INTO audits (tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version, automation_run_id,
    trigger_source, status, score, result, created_at, finished_at)
SELECT 'default', %(run)s, fiche.id, '7', config.id, 1, %(run)s, 'automation', 'completed', 90, %(result)s, now(), now()
FROM fiche, config RETURNING id
"""


def step(name: str, *, verified: bool) -> dict:
    found = {"call_id": "c-1", "position": 5} if verified else {"call_id": None, "position": None}
    evidence = [{"quote": "I agree", **found, "verified": verified}]
    judged = {"name": name, "score": 4.5, "max": 5, "weight": 2, "comment": "Clear.", "evidence": evidence}
    return {**judged, "unverified": not verified}


@pytest.fixture
def audited(dsn):
    with serving(dsn, FLOW) as client:
        yield client.with_key(new_key(dsn))


def test_an_unverified_step_is_marked_everywhere(audited, dsn):
    run_id = audited.post("/api/runs", {"flow": "test"}).json["run_id"]
    result = {"steps": [step("Consent", verified=True), step("Price", verified=False)]}
    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE runs SET selected = 2 WHERE id = %s", (run_id,))
        connection.execute("INSERT INTO outcomes (run_id, target) VALUES (%s, '7'), (%s, '8')", (run_id, run_id))
        (audit_id,) = connection.execute(AUDITED, {"run": run_id, "result": json.dumps(result)}).fetchone()

    (listed,) = audited.get("/api/audits").json["audits"]
    assert listed["unverified_steps"] == 1
    shown = audited.get(f"/api/audits/{audit_id}").json
    assert [one["unverified"] for one in shown["result"]["steps"]] == [False, True]
    declared = AuditInFull.model_validate(shown).result
    assert declared is not None
    assert [one.unverified for one in declared.steps] == [False, True]
    rows = csv.DictReader(io.StringIO(audited.get(f"/api/runs/{run_id}/outcomes.csv").body.decode()))
    assert [(row["target"], row["unverified_steps"]) for row in rows] == [("7", "1"), ("8", "")]
    cookie = {"Cookie": f"ecluse_key={audited.key}"}
    assert b"1 step whose quotes are in no transcript" in audited.get("/ui/audits", headers=cookie).body
    page = audited.get(f"/ui/audits/{audit_id}", headers=cookie).body.decode()
    assert page.count("quotes are in no transcript") == 1
    assert "quotes are in no transcript" in page.partition("Price")[2]
