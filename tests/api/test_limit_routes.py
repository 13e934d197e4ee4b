"""Limits per key and tenant over HTTP: 429 with the name of the limit and when to come back, and no word to others."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.support.api_server import FLOW, add_connections, add_tenant, new_key, serving
from tests.support.waits import wait_for

KNOBS = {
    "ECLUSE_LIMIT_KEY_REQUESTS": 100,
    "ECLUSE_LIMIT_SCHEDULES": 3,
    "ECLUSE_LIMIT_AUDIT_CONFIGS": 2,
    "ECLUSE_LIMIT_ENDPOINTS": 2,
    "ECLUSE_LIMIT_PRICING_PROJECTS": 1,
    "ECLUSE_LIMIT_PRICING_RULES": 1,
    "ECLUSE_LIMIT_RULE_RUNS": 1,
    "ECLUSE_ALLOWED_NETWORKS": "127.0.0.0/8",
    "ECLUSE_LIMIT_JOB_HOSTS": 2,
    "ECLUSE_LIMIT_JOB_SERVERS": 2,
    "ECLUSE_LIMIT_API_KEYS": 4,
    "ECLUSE_LIMIT_MAIL_ADDRESSES": 3,
    "SMTP_HOST": "localhost",
    "MAIL_FROM": "ecluse@example.com",
    "ECLUSE_PUBLIC_URL": "https://ecluse.example.com",
    "ECLUSE_LIMIT_KEY_STREAMS": 2,
    "ECLUSE_LIMIT_TENANT_STREAMS": 3,
    "ECLUSE_LIMIT_KEY_POLLS": 2,
    "ECLUSE_MAILS_PER_DAY": 7,
}
TRAIL = """
INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason)
SELECT 'default', ecluse_now(), 'key:1', 'run.start', 'run:1', repeat('because ', 10) FROM generate_series(1, 12000)
"""
RUNS = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, started_at)
SELECT 'default', 'test', 'run-' || n, false, 'running', 'running', ecluse_now(), ecluse_now()
FROM generate_series(1, 60) n
"""
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
        ("/api/jobs/hosts", lambda: {"name": f"host {next(NAMES)}"}, "job_hosts", 2),
        ("/api/keys", lambda: {"name": "k", "role": "viewer"}, "api_keys", 3),  # and the caller's own
    ],
)
def test_requests_at_once_do_not_pass_the_limit_of_a_count(tenant, path, body, name, most):
    client = tenant("admin")
    with ThreadPoolExecutor(3) as together:
        answers = list(together.map(lambda _: client.post(path, body()), range(most + 3)))
    assert sorted(one.status for one in answers) == [201] * most + [429] * 3
    (refused, *_) = [one for one in answers if one.status == 429]
    assert refusal(refused)[:3] == (429, "LIMIT_REACHED", [name])
    assert f"ECLUSE_LIMIT_{name.upper()}" in refused.json["error"]["message"]


def test_every_route_that_names_mail_addresses_meets_their_limit_and_known_ones_need_no_room(tenant):
    client, addresses = tenant("admin"), "/api/notifications/addresses"
    for name in ("a", "b"):
        assert client.post(addresses, {"address": f"{name}@example.com"}).status == 200
    mail = {"kind": "mail", "events": ["*"], "addresses": ["A@example.com"]}
    endpoint = client.post("/api/notifications/endpoints", mail)
    assert (endpoint.status, used(client)["mail_addresses"]) == (201, 2)
    schedule = client.post(SCHEDULES, {**plan(), "notify_emails": ["b@example.com", "c@example.com"]})
    assert (schedule.status, used(client)["mail_addresses"]) == (201, 3)
    new, generic = ["a@example.com", "d@example.com"], {"flow": "automation", "name": plan()["name"]}
    for method, path, body in [
        ("POST", addresses, {"address": "d@example.com"}),
        ("POST", "/api/notifications/endpoints", {**mail, "addresses": new}),
        ("PATCH", f"/api/notifications/endpoints/{endpoint.json['id']}", {"addresses": new}),
        ("POST", SCHEDULES, {**plan(), "notify_emails": new}),
        ("PATCH", f"{SCHEDULES}/{schedule.json['id']}", {"notify_emails": new}),
        (
            "POST",
            "/api/schedules",
            {**generic, "plan": {"fiche_selection": {"fiche_ids": ["1"]}, "notify_emails": new}},
        ),
        ("PATCH", f"/api/schedules/{schedule.json['id']}", {"plan": {"notify_emails": new}}),
    ]:
        refused = client.ask(method, path, body)
        assert refused.status == 429, (path, refused.json)
        assert refusal(refused)[:3] == (429, "LIMIT_REACHED", ["mail_addresses"]), path
    assert used(client)["mail_addresses"] == 3
    assert client.ask("PATCH", f"{SCHEDULES}/{schedule.json['id']}", {"notify_emails": ["a@example.com"]}).status == 200


def test_changes_that_name_no_mail_addresses_do_not_wait_for_those_that_do(tenant, shared_dsn):
    client = tenant("admin")
    mail = {"kind": "mail", "events": ["*"], "addresses": ["a@example.com"]}
    endpoint = client.post("/api/notifications/endpoints", mail).json["id"]
    schedule = client.post(SCHEDULES, {**plan(), "notify_emails": ["a@example.com"]}).json["id"]
    with psycopg.connect(shared_dsn) as blocker:
        whose = client.get("/api/me").json["tenant_id"]
        blocker.execute("SELECT FROM tenants WHERE id = %s FOR NO KEY UPDATE", (whose,))
        for path, body in [
            (f"/api/notifications/endpoints/{endpoint}", {"description": "x"}),
            (f"{SCHEDULES}/{schedule}", {"name": f"schedule {next(NAMES)}"}),
            (f"/api/schedules/{schedule}", {"enabled": False}),
            (f"/api/schedules/{schedule}", {"plan": {"fiche_selection": {"fiche_ids": ["2"]}}}),
        ]:
            answer = client.ask("PATCH", path, body)
            assert answer.status == 200, (path, answer.json)


def test_new_mail_addresses_named_at_once_do_not_pass_their_limit(tenant, shared_dsn):
    client, waiting = tenant(), "SELECT count(*) FROM pg_locks WHERE NOT granted"

    def name(one):
        return client.post("/api/notifications/addresses", {"address": f"{one}@example.com"})

    assert [name("a").status, name("b").status] == [200, 200]
    with ThreadPoolExecutor(3) as together:
        with psycopg.connect(shared_dsn) as connection:
            connection.execute("LOCK TABLE mail_addresses IN SHARE MODE")  # none of the three is ahead
            answers = [together.submit(name, one) for one in "cde"]
            wait_for(lambda: connection.execute(waiting).fetchone()[0] >= 3)
        statuses = sorted(one.result().status for one in answers)
    assert (statuses, used(client)["mail_addresses"]) == ([200, 429, 429], 3)


def test_what_is_deleted_makes_room(tenant):
    client = tenant()
    made = [client.post(SCHEDULES, plan()).json["id"] for _ in range(3)]
    assert client.post(SCHEDULES, plan()).status == 429
    assert client.ask("DELETE", f"{SCHEDULES}/{made[0]}").status == 200
    assert client.post(SCHEDULES, plan()).status == 201


def used(client):
    return {one["name"]: one["used"] for one in client.get("/api/limits").json["limits"]}


def test_server_instances_are_limited(tenant):
    client = tenant("admin")
    host = client.post("/api/jobs/hosts", {"name": "h"}).json["id"]
    made = [client.post("/api/jobs/servers", {"name": f"s{n}", "hostId": host}) for n in range(3)]
    assert [one.status for one in made] == [201, 201, 429]
    assert refusal(made[-1])[1:3] == ("LIMIT_REACHED", ["job_servers"])


def test_schedules_of_jobs_are_schedules(tenant):
    client = tenant("admin")
    host = client.post("/api/jobs/hosts", {"name": "h"}).json["id"]
    server = client.post("/api/jobs/servers", {"name": "s", "hostId": host}).json["id"]
    nightly = {"serverInstanceId": server, "cronExpression": "0 2 * * *", "jobType": "shell", "payload": {}}
    made = [client.post("/api/jobs/schedules", {**nightly, "name": f"n{n}"}) for n in range(3)]
    assert [one.status for one in made] == [201] * 3, made[0].json
    refused = client.post("/api/jobs/schedules", {**nightly, "name": "one more"})
    assert refusal(refused)[:3] == (429, "LIMIT_REACHED", ["schedules"])


def test_projects_rules_and_rule_runs_are_limited(tenant, sandbox):
    client = tenant("admin")
    shop = {"connector": "shopify", "base_url": f"{sandbox.url}/shopify/unlimited/", "currency": "EUR"}
    rule = {"selection": {"tags": ["summer"]}, "change": {"kind": "percent", "percent": "-15"}, "floor": 300}

    def first_and_second(path, body):
        first, second = client.post(path, {**body, "name": "a"}), client.post(path, {**body, "name": "b"})
        assert first.status in (201, 202), first.json
        return first.json["id"], refusal(second)[:3]

    project, refused = first_and_second("/api/pricing/projects", {**shop, "access_token": "shpat_x"})
    assert refused == (429, "LIMIT_REACHED", ["pricing_projects"])
    made, refused = first_and_second("/api/pricing/rules", {**rule, "project_id": project})
    assert refused == (429, "LIMIT_REACHED", ["pricing_rules"])
    previews = [client.post("/api/pricing/runs", {"rule_id": made}) for _ in range(2)]
    assert previews[0].status == 201, previews[0].json
    assert refusal(previews[1])[:3] == (429, "LIMIT_REACHED", ["rule_runs"])


def test_the_bytes_of_a_body_and_the_fiches_of_a_batch_count(tenant, slow_line):
    client = slow_line()
    for _ in range(2):
        assert client.post("/api/runs", {"flow": "nothing", "key": "x" * 700_000}).status in (422, 429)
    assert refusal(client.get("/api/me"))[2] == ["key_megabytes"]
    batch = tenant()
    assert batch.post("/api/transcriptions/batch", {"fiche_ids": [str(n) for n in range(900)]}).status in (200, 202)
    assert 90 <= used(batch)["key_requests"] <= 97


def test_a_revoked_key_makes_room(tenant):
    client = tenant("admin")
    made = [client.post("/api/keys", {"name": "k", "role": "viewer"}) for _ in range(4)]
    assert [one.status for one in made] == [201, 201, 201, 429]
    assert client.ask("DELETE", f"/api/keys/{made[0].json['id']}").status == 200
    assert client.post("/api/keys", {"name": "k", "role": "viewer"}).status == 201


def test_a_key_and_a_tenant_have_so_many_streams_of_events_however_fast_they_are_opened(tenant):
    mine, other = tenant(), tenant()

    def stream(client):
        return opened(client, "/api/events", Authorization=f"Bearer {client.key}")

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(6) as together:
        streams = list(together.map(lambda _: stack.enter_context(stream(mine)), range(6)))
        assert sorted(one.status for one in streams) == [200, 200, 429, 429, 429, 429]
        refused = next(one for one in streams if one.status == 429)
        error = json.loads(refused.read())["error"]
        assert (error["code"], error["details"][0]["where"]) == ("TOO_MANY_CONNECTIONS", "key_streams")
        assert refused.headers["Retry-After"] == "10"
        others = [stack.enter_context(stream(other)) for _ in range(2)]
        assert [one.status for one in others] == [200, 429]
        assert json.loads(others[1].read())["error"]["details"][0]["where"] == "tenant_streams"
        assert (used(mine)["key_streams"], used(mine)["tenant_streams"]) == (2, 3)
    wait_for(lambda: used(mine)["tenant_streams"] == 0)


@contextlib.contextmanager
def opened(client, path, **headers):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)) as connection:
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as answer:
            yield answer


def test_an_agent_has_so_many_polls(tenant, limited):
    client = tenant("admin")
    host = client.post("/api/jobs/hosts", {"name": "h"}).json["id"]
    token = client.post(f"/api/jobs/hosts/{host}/token", {}).json["token"]
    about = {"token": token, "hostname": "h", "version": "1", "platform": "linux"}
    agent = limited.with_key(limited.post("/api/agent/enrol", about).json["credential"])
    claim = {"max": 1, "types": [], "version": "1", "waitSeconds": 2}
    with ThreadPoolExecutor(4) as together:
        asked = [
            together.submit(agent.post, "/api/agent/jobs/claim", {**claim, "claimKey": str(uuid.uuid4())})
            for _ in range(4)
        ]
        answers = [one.result() for one in asked]
    assert sorted(one.status for one in answers) == [200, 200, 429, 429]
    assert refusal(next(one for one in answers if one.status == 429))[:3] == (
        429,
        "TOO_MANY_CONNECTIONS",
        ["key_polls"],
    )


def test_limits_of_mails_sockets_and_worker_slots_are_shown(tenant):
    found = {one["name"]: one for one in tenant("viewer").get("/api/limits").json["limits"]}
    mails, sockets, slots = found["mails_per_day"], found["tenant_sockets"], found["worker_slots"]
    assert (mails["knob"], mails["limit"], mails["used"]) == ("ECLUSE_MAILS_PER_DAY", 7, 0)
    assert (sockets["knob"], sockets["limit"], sockets["used"]) == ("ECLUSE_LIMIT_TENANT_SOCKETS", 2_000, 0)
    assert (slots["knob"], slots["limit"], slots["used"]) == ("ECLUSE_TENANT_SLOTS_SHARE", 150, 0)


def test_limits_of_one_answer_and_of_what_a_tenant_does_at_once_are_shown(tenant, limited, shared_dsn):
    client, other = tenant(), tenant("viewer")

    def shown():
        return {one["name"]: one for one in other.get("/api/limits").json["limits"]}

    def figures(name):
        one = shown()[name]
        return one["knob"], one["limit"], one["used"]

    assert figures("answer_megabytes") == ("ECLUSE_LIMIT_ANSWER_MEGABYTES", 10, None)
    assert figures("reads_at_once") == ("ECLUSE_DB_POOL", 2, 1), "this request"
    assert figures("writes_at_once") == ("ECLUSE_DB_POOL", 3, 0)
    assert figures("large_bodies_at_once") == (None, 1, 0)
    with ThreadPoolExecutor(1) as beside, psycopg.connect(shared_dsn) as blocker:
        blocker.execute("LOCK TABLE schedules IN SHARE MODE")
        writing = beside.submit(client.post, SCHEDULES, plan())
        wait_for(lambda: figures("writes_at_once")[2] == 1)
        blocker.rollback()
        assert writing.result().status == 201
    assert figures("writes_at_once")[2] == 0


@pytest.fixture(scope="module")
def slow_line(databases):
    """A server whose keys may have a megabyte a minute."""
    with databases.one() as dsn, serving(dsn, FLOW, ECLUSE_LIMIT_KEY_MEGABYTES=1) as client:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(TRAIL)
            connection.execute(RUNS)
        yield lambda: client.with_key(new_key(dsn, "admin"))


def test_the_bytes_of_a_download_count(slow_line):
    client = slow_line()
    answer = client.get("/api/audit-trail/export")
    assert (answer.status, len(answer.body) > 1_500_000) == (200, True)
    assert refusal(client.get("/api/me"))[:3] == (429, "RATE_LIMITED", ["key_megabytes"])


@pytest.mark.parametrize("path", ["/ui/runs", "/ui/runs/live"], ids=["page", "stream of a page"])
def test_the_bytes_of_pages_count(slow_line, path):
    client = slow_line()
    for _ in range(300):
        with opened(client, path, Cookie=f"ecluse_key={client.key}") as answer:
            if answer.status == 429:
                assert b"key_megabytes" in answer.read()
                return
            assert answer.status == 200
            assert answer.read(5_000)
    pytest.fail("never refused")
