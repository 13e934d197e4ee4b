"""Every secret that the API takes or makes is nowhere in the database in plain text, and is sealed anew by a rotation.
A new field with a secret fails the first test until the second one stores it."""

from __future__ import annotations

import base64
from typing import Any

import psycopg
import pytest

from ecluse.access import sealing
from ecluse.access.secrets import Secrets
from tests.support.api_server import Client, new_key, serving
from tests.support.session import Session
from tests.support.vendor_clients import PLACES

OLD, NEW = (bytes([n]) * 32 for n in (1, 2))
CANARY = "canary7f3a"
# Fields of the OpenAPI document that are passwords: those of `given`, and of the changes of the same records.
FIELDS = {
    "NewConnection.api_key",
    "ChangedConnection.api_key",
    "NewPagerDuty.routing_key",
    "ChangedEndpoint.routing_key",
    "NewProject.access_token",
    "ChangedProject.access_token",
    "Plan.external_api_key",
    "Changes.external_api_key",
}
ROWS = "SELECT to_jsonb(t)::text FROM {} t"
TABLES = """
SELECT format('%I.%I', table_schema, table_name) FROM information_schema.tables
WHERE table_type = 'BASE TABLE' AND table_schema NOT IN ('pg_catalog', 'information_schema')
"""


@pytest.fixture
def client(dsn: str) -> Any:
    knobs = {"ECLUSE_SECRET_KEY": base64.b64encode(OLD).decode(), "ECLUSE_ALLOWED_NETWORKS": "127.0.0.0/8"}
    with serving(dsn, **knobs, CRM_BASE_URL="https://crm.example", CRM_API_KEY="of-the-server") as client:
        yield client.with_key(new_key(dsn, "admin"))


def test_no_password_of_the_document_is_forgotten_here(client: Client) -> None:
    found = {
        f"{name}.{field}"
        for name, schema in client.get("/openapi.json").json["components"]["schemas"].items()
        for field, shape in schema.get("properties", {}).items()
        if "'format': 'password'" in str(shape)
    }
    assert found == FIELDS


def given(sandbox: Any) -> list[tuple[str, dict[str, Any]]]:
    """Bodies with secrets, and the routes that take them."""
    url = f"https://hooks.example.com/services/T0/{CANARY}"
    endpoint = {"events": ["*"]}
    work = {
        "fiche_selection": {"mode": "manual", "fiche_ids": ["1"]},
        "run_transcription": False,
        "run_audits": False,
        "webhook_url": url,
        "external_api_key": CANARY,
    }
    schedule = {"name": "s", "flow": "automation", "cron": "0 2 * * *", "timezone": "UTC", "plan": work}
    shop = {"connector": "shopify", "base_url": f"{sandbox.url}/shopify/unlimited/", "currency": "EUR"}
    bodies = [
        ("/api/connections", {"kind": kind, "base_url": sandbox.url + place, "api_key": f"{CANARY}-{kind}"})
        for kind, place in PLACES.items()
    ]
    bodies[-1][1]["model"] = "gpt-4.1"
    return [
        *bodies,
        ("/api/notifications/endpoints", {"kind": "webhook", "url": url, **endpoint}),
        ("/api/notifications/endpoints", {"kind": "slack", "url": f"{url}2", **endpoint}),
        ("/api/notifications/endpoints", {"kind": "pagerduty", "routing_key": (CANARY * 4)[:32], **endpoint}),
        ("/api/pricing/projects", {"name": "Shop", "access_token": f"shpat_{CANARY}", **shop}),
        ("/api/schedules", schedule),
        ("/api/keys", {"name": "another", "role": "viewer"}),
    ]


async def test_no_secret_is_stored_in_plain_text_and_a_rotation_seals_all_of_them(client, sandbox, dsn) -> None:
    made, wanted = [CANARY], 0
    for n, (path, body) in enumerate(given(sandbox)):
        answer = client.post(path, body, headers={"Idempotency-Key": f"k{n}"})
        assert answer.status == 201, (path, answer.body)
        made += [value for value in texts(answer.json) if value.startswith(("whsec_", "ecl_")) and len(value) > 20]
        wanted += 1
    host = client.post("/api/jobs/hosts", {"name": "h"}, headers={"Idempotency-Key": "host"}).json["id"]
    server = client.post("/api/jobs/servers", {"name": "s", "hostId": host}).json["id"]
    payload = {"command": f"curl -H 'Authorization: Bearer {CANARY}'", "env": {"API_TOKEN": CANARY}}
    job = {"name": "j", "cronExpression": "0 0 1 1 *", "serverInstanceId": server, "jobType": "shell"}
    schedule = client.post("/api/jobs/schedules", {**job, "payload": payload}, headers={"Idempotency-Key": "job"}).json
    client.post(f"/api/jobs/schedules/{schedule['id']}/run", {}, headers={"Idempotency-Key": "run"})
    made.append(client.post(f"/api/jobs/hosts/{host}/token", {}, headers={"Idempotency-Key": "token"}).json["token"])
    agent = client.post("/api/agent/enrol", {"token": made[-1], "hostname": "h", "version": "1", "platform": "p"}).json
    made.append(agent["credential"])
    session = Session(dsn)
    rows = [(table, str(row)) for (table,) in session.ask(TABLES) for row in session.ask(ROWS.format(table))]
    assert len(made) >= 6
    assert [row for row in rows for secret in made if secret in row[1]] == []
    sealed = session.ask("SELECT count(*) FROM secrets")[0][0]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        assert await sealing.rotate(connection, Secrets(NEW, OLD)) == sealed
        opened = [
            await Secrets(NEW).get(connection, tenant, name)
            for tenant, name in session.ask("SELECT tenant_id, name FROM secrets")
        ]
    session.close()
    assert sum(CANARY in value for value in opened) == wanted + 1, "all but the key, the webhook's two, and the jobs"


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    return [text for one in value for text in texts(one)] if isinstance(value, list) else [str(value)]
