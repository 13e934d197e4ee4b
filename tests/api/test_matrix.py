"""Every route, method and kind of caller, made from the server's own route table: what a caller gets follows from the
permission that the route declares, and a route that declares none must be one of the public ones."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
from datetime import timedelta

import psycopg
import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from ecluse.access.permissions import EXECUTE, OF_SERVER, PERMISSIONS, ROLES, permissions_of
from ecluse.access.secrets import Secrets
from ecluse.app import create_app
from ecluse.bootstrap import Database
from ecluse.notify.webhook_signature import new_secret
from ecluse.web.authentication import Page
from tests.support import job_rows
from tests.support.api_server import FLOW, SEALING, SECRET_KEY, add_connections, add_tenant, new_key

PUBLIC = {"/healthz", "/readyz", "/metrics", "/openapi.json"}
# What a caller gets here depends on the channel: tests/realtime/test_channel_rights.py has that table.
BY_CHANNEL = {"/api/events", "/pusher/auth"}
# Pusher's own: sockets, and requests signed with an app's secret instead of a key.
SIGNED = {
    "/app/{key}",
    "/apps/{app_id}/events",
    "/apps/{app_id}/batch_events",
    "/apps/{app_id}/channels",
    "/apps/{app_id}/channels/{channel}",
    "/apps/{app_id}/channels/{channel}/users",
}
# The token in the body is what counts.
BY_TOKEN = {"/api/agent/enrol"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
UNKNOWN = ("nobody", "garbage", "expired", "revoked")
CALLERS = (*UNKNOWN, "disabled tenant", "limited scope", *ROLES, "other tenant's admin", "agent")
CREDENTIAL = "ecl_agent_" + "y" * 43
SERVER = "cmatrix000000000000000000"
# What succeeds for those who may; a new route that changes something needs its own here.
BODIES = {
    "/api/runs": {"flow": "test"},
    "/api/runs/{run_id}/end": {"reason": "matrix"},
    "/api/leases/release": {"key": "fiche:7", "reason": "matrix"},
    "/api/audit-configs": {"name": "matrix", "steps": [{"name": "a", "criteria": "b"}]},
    "/api/audit-configs/{config_id}": {"description": "matrix"},
    "/api/transcriptions/batch": {"fiche_ids": ["100000001"]},
    "/api/automation/schedules": {"schedule_type": "MANUAL", "fiche_selection": {"mode": "manual"}},
    "/api/automation/schedules/{schedule_id}": {"max_retries": 1},
    "/api/schedules": {"flow": "test"},
    "/api/schedules/{schedule_id}": {"overlap": "allow"},
    "/api/schedules/preview": {"cron": "@daily"},
    "/api/notifications/endpoints": {"kind": "webhook", "url": "https://8.8.8.8/", "events": ["*"]},
    "/api/notifications/endpoints/{endpoint_id}": {"description": "matrix"},
    "/api/connections/{kind}": {"max_in_flight": 3},
    "/api/notifications/addresses": {"address": "matrix@example.com"},
    "/api/pricing/projects/{project_id}": {},
    "/api/pricing/rules": {"selection": {"price_from": 0}, "change": {"kind": "percent", "percent": "-10"}},
    "/api/pricing/rules/{rule_id}": {"allow_free": True},
    "/api/pricing/runs/{rule_run_id}/queue": {"plan_hash": "0" * 64},
    "/api/jobs/schedules": {
        "name": "matrix",
        "serverInstanceId": SERVER,
        "cronExpression": "@daily",
        "jobType": "noop",
    },
    "/api/jobs/schedules/{job_schedule_id}": {"description": "matrix"},
    "/api/agent/jobs/claim": {
        "max": 0,
        "waitSeconds": 0,
        "types": [],
        "version": "1",
        "claimKey": "00000000-0000-4000-8000-000000000000",
    },
    "/api/agent/job-runs/{job_run_id}/renew": {"fence": 1},
    "/api/agent/job-runs/{job_run_id}/logs": {"fence": 1, "offset": 0, "text": "matrix"},
    "/api/agent/job-runs/{job_run_id}/result": {"fence": 1, "status": "succeeded"},
    "/api/jobs/servers": {"hostId": SERVER},
    "/api/jobs/servers/{server_id}": {},
    "/api/lanes/{name}": {"max_in_flight": 3},
    "/api/lanes/{name}/pause": {"reason": "matrix"},
    "/api/lanes/{name}/resume": {"reason": "matrix"},
    "/api/budgets": {"amount": "1000000", "period": "day"},
    "/api/keys": {"name": "matrix", "role": "viewer"},
    "/api/tenants/{tenant}/disable": {"reason": "matrix"},
    "/api/erasure/fiches/{fiche_id}": {"reason": "matrix"},
    "/api/erasure/tenants/{tenant}": {"reason": "matrix"},
    "/api/erasure/companies/{siren}": {"reason": "matrix"},
    "/api/tenants/{tenant}/recipient": {"recipient": None},
    "/v1/requests": {"company_siren": "552049447"},
}
# A number that one tenant has may be another's, too: whoever asks for it gets a run of his own.
EVERYBODYS = {
    "/api/transcriptions/{fiche_id}": "/api/transcriptions/100000001",
    "/api/connections/{kind}": "/api/connections/crm",
    "/api/connections/{kind}/test": "/api/connections/crm/test",
    "/api/lanes/{name}": "/api/lanes/matrix",
    "/api/lanes/{name}/pause": "/api/lanes/matrix/pause",
    "/api/lanes/{name}/resume": "/api/lanes/matrix/resume",
    "/api/tenants/{tenant}/disable": "/api/tenants/spare/disable",
    "/api/tenants/{tenant}/enable": "/api/tenants/spare/enable",
    "/api/erasure/tenants/{tenant}": "/api/erasure/tenants/spare",
    "/api/erasure/companies/{siren}": "/api/erasure/companies/310000005",
    "/api/tenants/{tenant}/recipient": "/api/tenants/spare/recipient",
}
# A vendor is called first, and there is none here: the right is found to be there, and the connection not to work.
REFUSED_BY_VENDOR = ("/api/pricing/projects", "/api/connections", "/api/connections/{kind}/test")
# Of the whole installation: only for admins of the tenant `default`. Of lanes, which are shared, only the changes.
ADMINISTERED = ("/api/tenants", "/api/erasure/tenants", "/api/erasure/companies", "/api/retention", "/api/doctor")
# Where a path is another one's with a name in place of a number, its other methods are those of the other.
NAME_OF_NONE = {
    "/api/schedules/preview": "/api/schedules/{schedule_id}",
    "/api/lanes/{name}/pause": "/api/lanes/{name}",
    "/api/lanes/{name}/resume": "/api/lanes/{name}",
    "/v1/requests/{request_id}:refresh-company": "/v1/requests/{request_id}",
}
# What they are about is named in the body.
NAMED = (
    "/api/pricing/rules",
    "/api/pricing/runs",
    "/api/jobs/schedules",
    "/api/jobs/servers",
    "/api/leases/release",
    "/api/audits",
    "/api/automation/trigger",
)
HOLD = """
INSERT INTO leases (tenant_id, key, fence, owner, ttl, acquired_at, expires_at)
VALUES ('default', 'fiche:7', %s, 'somebody', '2 hours', ecluse_now(), ecluse_now() + interval '2 hours')
"""
SPARE = """
WITH lane AS (
    INSERT INTO lanes (name) VALUES ('matrix') ON CONFLICT (name) DO UPDATE SET name = 'matrix' RETURNING id),
run AS (UPDATE runs SET selected = 1 WHERE id = %(id)s AND ended_at IS NULL),
item AS (
    INSERT INTO items (id, tenant_id, run_id, flow, stage, key, target, lane_id, due_at, status, finished_at)
    OVERRIDING SYSTEM VALUE
    SELECT %(id)s, 'default', %(id)s, 'test', 'work', 'a', '', id, ecluse_now(), 'succeeded', ecluse_now() FROM lane
    ON CONFLICT DO NOTHING),
target AS (INSERT INTO outcomes (run_id, target) VALUES (%(id)s, %(id)s) ON CONFLICT DO NOTHING),
budget AS (
    INSERT INTO budgets (id, tenant_id, scope, subject_id, period, amount, created_at, updated_at)
    OVERRIDING SYSTEM VALUE
    VALUES (%(id)s, 'default', 'schedule', %(id)s, 'day', 1000000, ecluse_now(), ecluse_now()) ON CONFLICT DO NOTHING)
INSERT INTO api_keys (id, tenant_id, name, hint, hash, role, created_at) OVERRIDING SYSTEM VALUE
VALUES (%(key)s, 'default', 'spare', 'ecl_', sha256(%(key)s::text::bytea), 'viewer', ecluse_now())
ON CONFLICT DO NOTHING
"""
# Under the number of the run, because the paths are filled in with it; attributed to the user of limited scope.
FICHE = """
WITH f AS (
    INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at)
    SELECT 'default', unnest(ARRAY['100000001', %(id)s]), ecluse_now(), ecluse_now()
    ON CONFLICT DO NOTHING RETURNING id),
r AS (
    INSERT INTO recordings (fiche_cache_id, call_id, has_transcription, transcription_text, transcribed_at, created_at,
                            updated_at)
    SELECT id, %(id)s, true, 'said', ecluse_now(), ecluse_now(), ecluse_now() FROM f)
INSERT INTO fiche_cache_information (fiche_cache_id, attribution_user_id, updated_at)
SELECT id, '7', ecluse_now() FROM f
"""
# Under that number, too, with a version and an audit of that fiche.
AUDIT = """
WITH config AS (
    INSERT INTO audit_configs (id, tenant_id, name, steps, created_at, updated_at) OVERRIDING SYSTEM VALUE
    VALUES (%(id)s, 'default', 'matrix', '[]', ecluse_now(), ecluse_now())
    ON CONFLICT (id) DO UPDATE SET deleted_at = NULL),
version AS (
    INSERT INTO audit_config_versions (audit_config_id, version, snapshot, created_at)
    VALUES (%(id)s, 1, '{"name": "matrix", "steps": []}', ecluse_now()) ON CONFLICT DO NOTHING)
INSERT INTO audits (id, tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version, trigger_source,
                    created_at) OVERRIDING SYSTEM VALUE
SELECT %(id)s, 'default', %(id)s, id, fiche_id, %(id)s, 1, 'api', ecluse_now() FROM fiche_cache
WHERE tenant_id = 'default' AND fiche_id = %(id)s::text ON CONFLICT DO NOTHING
"""
# A schedule under that number, and an automation run that has ended and may be redriven; its number is another.
SCHEDULE = """
WITH made AS (
    INSERT INTO schedules (id, tenant_id, flow, name, zone_rules, handled_until, created_at, updated_at)
    OVERRIDING SYSTEM VALUE
    VALUES (%(id)s, 'default', 'automation', 'matrix ' || %(id)s, '', ecluse_now(), ecluse_now(), ecluse_now())
    ON CONFLICT (id) DO UPDATE SET deleted_at = NULL, enabled = true RETURNING id)
INSERT INTO automation_settings (id, schedule_type, fiche_selection_mode, webhook_url)
SELECT id, 'MANUAL', 'manual', 'https://8.8.8.8/' FROM made ON CONFLICT DO NOTHING
"""
AUTOMATION_RUN = """
WITH made AS (
    INSERT INTO runs (id, tenant_id, flow, event_key, orchestrated, schedule_id, status, state, input, created_at)
    OVERRIDING SYSTEM VALUE
    SELECT %(run)s, 'default', 'automation', 'matrix-' || %(id)s, true, %(id)s, 'running', 'running', '{}', ecluse_now()
    ON CONFLICT DO NOTHING RETURNING id)
INSERT INTO outcomes (run_id, target, outcome, error_code, reason) SELECT id, '7', 'failed', 'MATRIX', '' FROM made
"""
END_AUTOMATION_RUN = """
UPDATE runs SET status = 'failed', state = 'failed', selected = 1, successful = 0, failed = 1, ignored = 0,
    end_cause = 'normal', ended_at = ecluse_now() WHERE id = %(run)s AND ended_at IS NULL
"""
PRICING = """
WITH project AS (
    INSERT INTO pricing_projects (id, tenant_id, name, connector, base_url, currency, created_by, created_at,
                                  updated_by, updated_at) OVERRIDING SYSTEM VALUE
    VALUES (%(id)s, 'default', 'matrix ' || %(id)s, 'shopify', 'https://shop.example', 'EUR', 'a test', ecluse_now(),
            'a test', ecluse_now())
    ON CONFLICT (id) DO UPDATE SET deleted_at = NULL)
INSERT INTO pricing_rules (id, tenant_id, project_id, name, selection, change, allow_free, created_by, created_at,
                           updated_by, updated_at) OVERRIDING SYSTEM VALUE
VALUES (%(id)s, 'default', %(id)s, 'matrix', '{"price_from": 0}', '{"kind": "amount", "amount": 1}', false, 'a test',
        ecluse_now(), 'a test', ecluse_now())
ON CONFLICT (id) DO UPDATE SET deleted_at = NULL
"""
RULE_RUN = """
INSERT INTO rule_runs (id, tenant_id, project_id, rule, currency, status, actor, correlation_id, source, created_at)
OVERRIDING SYSTEM VALUE
VALUES (%(id)s, 'default', %(id)s, '{}', 'EUR', 'PREVIEW', 'a test', '', 'a test', ecluse_now()) ON CONFLICT DO NOTHING
"""
# A run without a plan: the right is found to be there, and its state not to allow it.
BY_STATE = "/api/pricing/runs/{rule_run_id}/"
JOBS = """
WITH host AS (
    INSERT INTO job_hosts (id, tenant_id, name, created_by, created_at, updated_at)
    VALUES (%(server)s, 'default', 'matrix', 'a test', ecluse_now(), ecluse_now()) ON CONFLICT DO NOTHING),
server AS (
    INSERT INTO job_servers (id, tenant_id, host_id, name, created_by, created_at, updated_at)
    VALUES (%(server)s, 'default', %(server)s, 'matrix', 'a test', ecluse_now(), ecluse_now()) ON CONFLICT DO NOTHING),
timed AS (
    INSERT INTO schedules (id, tenant_id, flow, name, unique_name, overlap, cron, zone_rules, handled_until, created_at,
                           updated_at)
    OVERRIDING SYSTEM VALUE
    VALUES (%(run)s + 400000, 'default', 'jobs', 'matrix', false, 'allow', '@daily', '1', ecluse_now(), ecluse_now(),
            ecluse_now())
    ON CONFLICT (id) DO UPDATE SET deleted_at = NULL)
INSERT INTO job_schedules (id, tenant_id, schedule_id, server_instance_id, job_type, payload, max_retries, backoff_ms,
                           backoff_type, created_by_id)
VALUES (%(run)s::text, 'default', %(run)s + 400000, %(server)s, 'noop', '{}', 0, 1000, 'fixed', 'a test')
ON CONFLICT DO NOTHING
"""
# A company whose data are fresh, so that no request waits for a job.
REQUEST = """
WITH company AS (
    INSERT INTO companies (siren, enrichment_status, core_identity_present, created_at, updated_at, status_at)
    VALUES ('552049447', 'SUCCESS', true, ecluse_now(), ecluse_now(), ecluse_now()) ON CONFLICT DO NOTHING)
INSERT INTO requests (id, tenant_id, company_siren, correlation_id, created_by, created_at, updated_at)
OVERRIDING SYSTEM VALUE
VALUES (%(id)s, 'default', '552049447', 'matrix', 'a test', ecluse_now(), ecluse_now()) ON CONFLICT DO NOTHING
"""
APART = 500_000
ENDED = (
    "/api/automation/runs/",
    "/api/runs/{run_id}/redrive",
    "/api/jobs/{job_id}/retry",
)  # about the run that has ended
# One number for all of them: whatever a path asks for is there.
TOLD = """
WITH made AS (
    INSERT INTO notification_endpoints (id, tenant_id, kind, url, events, created_at, updated_at)
    OVERRIDING SYSTEM VALUE VALUES (%(id)s, 'default', 'webhook', 'https://8.8.8.8/', '{*}', ecluse_now(), ecluse_now())
    ON CONFLICT DO NOTHING),
address AS (
    INSERT INTO mail_addresses (tenant_id, address, asked_at, confirmed_at)
    SELECT id, 'matrix@example.com', ecluse_now(), ecluse_now() FROM tenants ON CONFLICT DO NOTHING)
INSERT INTO deliveries (run_id, tenant_id, endpoint_id, kind, recipient, event_key, event_type, message, created_at)
VALUES (%(id)s, 'default', %(id)s, 'webhook', 'https://8.8.8.8/', gen_random_uuid(), 'ping', '{}', ecluse_now())
ON CONFLICT (run_id) DO UPDATE SET event_key = excluded.event_key
"""


async def seal(dsn, name):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await Secrets(base64.b64decode(SECRET_KEY)).put(connection, "default", name, new_secret())


@pytest.fixture(scope="module")
def callers(shared_dsn):
    for tenant in ("rival", "closed", "spare"):
        add_tenant(shared_dsn, tenant)
    made = {role: new_key(shared_dsn, role) for role in ROLES} | {
        "nobody": None,
        "garbage": "ecl_" + "x" * 43,
        "expired": new_key(shared_dsn, "admin", expires_in=timedelta(microseconds=1)),
        "revoked": new_key(shared_dsn, "admin"),
        "disabled tenant": new_key(shared_dsn, "admin", "closed"),
        "limited scope": new_key(shared_dsn, "admin"),
        "other tenant's admin": new_key(shared_dsn, "admin", "rival"),
    }
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        hint = "UPDATE api_keys SET {} WHERE hint = %s"
        connection.execute(hint.format("revoked_at = ecluse_now()"), (made["revoked"][:8],))
        connection.execute(hint.format("scope = 'SELF', crm_user_id = '7'"), (made["limited scope"][:8],))
        connection.execute("UPDATE tenants SET disabled_at = ecluse_now() WHERE id = 'closed'")
        connection.execute(job_rows.AGENT, {"server": SERVER, "credential": CREDENTIAL.encode()})
    return made | {"agent": CREDENTIAL}


@pytest.fixture
def something(shared_api, shared_dsn):
    """An open run, a fiche with an audit, a held lease, an endpoint and a delivery, whatever was ended and deleted."""
    fences = itertools.count(1)
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        for table in (
            "items",
            "audits",
            "audit_configs",
            "notification_endpoints",
            "schedules",
            "budgets",
            "pricing_projects",
            "pricing_rules",
            "rule_runs",
            "requests",
        ):  # ours are runs' numbers
            connection.execute(f"ALTER SEQUENCE {table}_id_seq RESTART 1000000")

        def make() -> str:
            if connection.execute("SELECT 1 WHERE NOT EXISTS (SELECT FROM leases WHERE ended_at IS NULL)").fetchone():
                connection.execute(HOLD, (next(fences),))
            run = shared_api.post("/api/runs", {"flow": "test", "key": "matrix"}).json["run_id"]
            connection.execute(TOLD, {"id": int(run)})
            if not connection.execute("SELECT 1 FROM secrets WHERE name = %s", (f"webhook:{run}",)).fetchone():
                asyncio.run(seal(shared_dsn, f"webhook:{run}"))
            connection.execute(SPARE, {"id": int(run), "key": int(run) + APART})
            for tenant in ("default", "rival"):
                add_connections(shared_dsn, tenant)
            connection.execute(FICHE, {"id": run})
            connection.execute(AUDIT, {"id": int(run)})
            for statement in (PRICING, RULE_RUN, REQUEST):
                connection.execute(statement, {"id": int(run)})
            connection.execute(JOBS, {"run": int(run), "server": SERVER})
            connection.execute(job_rows.JOB, {"id": run, "failed": str(int(run) + APART), "server": SERVER})
            for statement in (SCHEDULE, AUTOMATION_RUN, END_AUTOMATION_RUN):
                connection.execute(statement, {"id": int(run), "run": int(run) + APART})
            return run

        yield make


def table(app):
    """Method, path, route; the methods that a path does not have come with None. Without the pages, which take the key
    from a cookie: tests/web/test_page_rights.py has their table."""
    paths: dict[str, dict[str, object]] = {}
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, Page):
            continue
        for method in route.methods or ["GET"]:  # a socket begins as one
            paths.setdefault(re.sub(r":\w+\}", "}", route.path), {})[method] = route.original_route
    return [(method, path, routes.get(method)) for path, routes in paths.items() for method in METHODS]


def named(path, number, cells):
    """What is about something names it; what is made has a name that nobody has."""
    return {
        "/api/pricing/runs": {"rule_id": number},
        "/api/pricing/rules": {"project_id": number, "name": f"matrix cell {cells}"},
        "/api/audits": {"fiche_id": number, "audit_config_id": number},
        "/api/automation/trigger": {"schedule_id": number},
        "/api/automation/schedules": {"name": f"matrix cell {cells}"},
        "/api/schedules": {"name": f"matrix cell {cells}"},
        "/api/tenants": {"id": f"matrix-{cells}"},
        "/api/jobs/hosts": {"name": f"matrix cell {cells}"},
        "/api/jobs/servers": {"name": f"matrix cell {cells}"},
    }.get(path, {})


def expected(who, path, route):
    declared = route.openapi_extra
    if who in UNKNOWN:
        return {401}
    if who == "disabled tenant" or (who == "limited scope" and not declared["x-narrowed"]):
        return {403}
    role = who if who in ROLES or who == "agent" else "admin"
    if declared["x-permission"] not in permissions_of(role):
        return {403}
    if who != "admin" and (
        path.startswith(ADMINISTERED) or (path.startswith("/api/lanes/") and not route.methods & {"GET"})
    ):
        return {403}
    if path in REFUSED_BY_VENDOR and "POST" in route.methods:
        return {422}
    named = "{" in path or (path in NAMED and "POST" in route.methods)
    theirs = who == "other tenant's admin" and named and path not in EVERYBODYS
    if path.startswith(BY_STATE) and "POST" in route.methods and not theirs:
        return {409}
    return {404} if theirs else {200, 201, 202}


@pytest.mark.timeout(300)
@pytest.mark.req("ENG-102", "G-33")
def test_every_route_answers_every_caller_as_its_permission_says(shared_api, callers, something):
    wrong, cells, number = [], 0, something()
    for method, path, route in table(shared_api.app):
        if path in PUBLIC | SIGNED | BY_CHANNEL | BY_TOKEN or (path in NAME_OF_NONE and route is None):
            continue
        for who in CALLERS:
            apart = path.startswith((*ENDED, "/api/keys/"))
            about = str(int(number) + APART) if apart else number
            address, body = EVERYBODYS.get(path, re.sub(r"\{\w+\}", about, path)), None
            if method in ("POST", "PATCH"):
                body = {**BODIES.get(path, {}), **named(path, number, cells)}
            answer = shared_api.with_key(callers[who]).ask(method, address, body)
            if method != "GET" and answer.status < 300:
                number = something()
            wanted = {405} if route is None else expected(who, path, route)
            cells += 1
            if answer.status not in wanted:
                wrong.append((method, path, who, answer.status, wanted))
            shared = path in EVERYBODYS
            if who == "other tenant's admin" and route is not None and "{" in path and method == "GET" and not shared:
                assert (answer.status, answer.code) == (404, "NOT_FOUND")
            if answer.status == 401:
                assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert wrong == []
    assert cells >= len(METHODS) * len(CALLERS) * 7


def test_a_route_without_a_permission_is_public_by_name_or_not_at_all(shared_api):
    undeclared = {
        path
        for _, path, route in table(shared_api.app)
        if route and not (isinstance(route, APIRoute) and (route.openapi_extra or {}).get("x-permission"))
    }
    assert undeclared <= PUBLIC | SIGNED | BY_TOKEN


def test_a_signed_route_takes_no_key_instead_of_a_signature(shared_api, callers):
    for method, path, route in table(shared_api.app):
        if path in SIGNED - {"/app/{key}"} and route is not None:
            body = {"name": "x", "channel": "x", "data": "x"} if method == "POST" else None
            address = re.sub(r"\{\w+\}", "1001", path)
            answer = shared_api.with_key(callers["admin"]).ask(method, address, body)
            assert (answer.status, answer.code) == (401, "UNAUTHENTICATED"), path


@pytest.mark.parametrize("path", sorted(PUBLIC))
def test_the_public_routes_need_no_key(shared_api, path):
    assert shared_api.with_key(None).get(path).status == 200


@pytest.mark.req("ENG-102")
def test_roles_grow_and_nobody_but_an_admin_decides_who_comes_in():
    assert ROLES["viewer"] < ROLES["operator"] < ROLES["admin"] == PERMISSIONS
    assert all(permission.endswith(".read") for permission in ROLES["viewer"])
    both = {f"{area}.{verb}" for area in ("keys", "tenants", "erasure", "retention") for verb in ("read", "write")}
    assert ROLES["admin"] - ROLES["operator"] == both | {"trail.read", "doctor.read", "budgets.write"}
    for area in ("automation", "transcriptions", "runs", "schedules"):
        assert {f"{area}.read", f"{area}.write"} <= ROLES["operator"]


@pytest.mark.parametrize(
    "path",
    ["/api/runs/", "//api/runs", "/API/runs", "/api/runs/../runs", "/api/%72uns/x/y", "/api/runs;x=1"],
)
def test_another_spelling_of_a_path_leads_nowhere(shared_api, path):
    for client in (shared_api, shared_api.with_key(None)):
        answer = client.get(path, headers={"X-Original-URL": "/api/runs", "X-HTTP-Method-Override": "POST"})
        assert (answer.status, answer.code) == (404, "NOT_FOUND")


@pytest.mark.parametrize("header", ["ecl_x", "Bearer", "Bearer ", "Basic ecl_x", "Bearer \xff\xfe", "bearer  x y"])
def test_an_authorization_that_is_none_of_ours_is_refused(shared_api, header):
    answer = shared_api.with_key(None).get("/api/me", headers={"Authorization": header})
    assert (answer.status, answer.code) == (401, "UNAUTHENTICATED")


def test_a_process_without_the_api_role_has_only_the_public_routes(shared_dsn):
    app = create_app(SEALING, Database(shared_dsn, None), [FLOW], frozenset({"worker"}))
    assert {path for _, path, _ in table(app)} <= PUBLIC


def test_the_document_names_every_route_its_permission_and_the_shape_of_its_errors(shared_api):
    document = shared_api.with_key(None).get("/openapi.json").json
    for method, path, route in table(shared_api.app):
        if isinstance(route, APIRoute) and path not in PUBLIC | SIGNED | BY_TOKEN:
            described = document["paths"][path][method.lower()]
            assert described["x-permission"] in PERMISSIONS | {EXECUTE}
            assert described["description"]
            shape = described["responses"]["401"]["content"]["application/json"]["schema"]
            assert shape == {"$ref": "#/components/schemas/ErrorAnswer"}


def test_me_says_what_the_key_in_hand_may_do(shared_api, callers):
    me = shared_api.with_key(callers["viewer"]).get("/api/me").json
    assert (me["tenant_id"], me["role"], me["scope"]) == ("default", "viewer", "ALL")
    assert me["permissions"] == sorted(ROLES["viewer"])
    theirs = shared_api.with_key(callers["other tenant's admin"]).get("/api/me").json["permissions"]
    assert set(ROLES["admin"]) - set(theirs) == OF_SERVER, "of the whole server"
    limited = shared_api.with_key(callers["limited scope"])
    assert (limited.get("/api/me").json["scope"], limited.get("/api/me").json["crm_user_id"]) == ("SELF", "7")
    refused = limited.get("/api/runs")
    assert (refused.status, refused.code) == (403, "SCOPE")
