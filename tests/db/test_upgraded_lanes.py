"""Lanes and tenants of a database of the version before connections: after the upgrade, the lanes of vendors belong to
the tenant `default`, as an operator has left them, and the other tenants are told to add connections."""

from __future__ import annotations

import psycopg

from ecluse.migrations import runner
from tests.support.api_server import new_key, serving
from tests.support.servers import upgrade_to

OLD = "0022"  # lanes were those that flows declare, with the keys of the environment, for all tenants
FILL = """
INSERT INTO tenants (id, name, created_at) VALUES ('acme', 'Acme', now());
INSERT INTO lanes (name, max_in_flight, declared_max_in_flight, set_max_in_flight, paused_at, paused_by, paused_reason)
VALUES ('crm', 3, 20, 3, now(), 'an operator', 'maintenance'), ('webhooks', NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)
SELECT t, 'transcription', 'old', false, 'running', 'running', now() FROM unnest(ARRAY['default', 'acme']) t;
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, order_at, status)
SELECT r.tenant_id, r.id, 'transcription', 'list', 'k', 'k', l.id, now(), now(), 'open' FROM runs r, lanes l
WHERE l.name = 'crm';
"""


def test_lanes_stay_as_they_were_and_those_of_vendors_are_of_the_tenant_default(empty_dsn):
    upgrade_to(empty_dsn, OLD)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(FILL)
    runner.upgrade(empty_dsn)
    knobs = {"CRM_BASE_URL": "https://crm.example", "CRM_API_KEY": "of-the-server"}
    with serving(empty_dsn, roles=frozenset({"api", "worker"}), **knobs) as client:
        mine, acme = (client.with_key(new_key(empty_dsn, tenant=one)) for one in ("default", "acme"))
        lanes = {one["name"]: one for one in mine.get("/api/lanes").json["lanes"]}
        assert (lanes["crm"]["owner"], lanes["webhooks"]["owner"]) == ("default", None)
        assert (lanes["crm"]["max_in_flight"], lanes["crm"]["overrides"]) == (3, {"max_in_flight": 3})
        assert (lanes["crm"]["state"], lanes["crm"]["paused_reason"], lanes["crm"]["waiting"]) == (
            "paused", "maintenance", 1,
        )  # fmt: skip
        assert acme.get("/api/lanes/crm").code == "NOT_FOUND"
        refused = acme.post("/api/transcriptions/9010")
        assert (refused.status, refused.code) == (409, "NO_CONNECTION")
        assert "ecluse connections create" in refused.json["error"]["message"]
        assert mine.get("/api/connections").json["environment"] == ["crm"]
        assert mine.post("/api/lanes/crm/resume", {"reason": "over"}).json["resumed"]
