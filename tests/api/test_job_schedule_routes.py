"""Job schedules over HTTP: every field under its wire name, run now, pause, preview, slots; secrets that are sealed;
what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from typing import Any

import psycopg
import pytest

from ecluse.flows.jobs.schedule_shapes import LARGEST_PAYLOAD
from ecluse.flows.jobs.schedule_surface import SCHEDULES, SLOTS, JobScheduleInFull, JobSchedulePreview, MadeJob
from tests.support.api_server import Client, new_key
from tests.support.job_rows import PLACES
from tests.support.loop_probe import probing
from tests.support.session import Session

PATH = "/api/jobs/schedules"
TENANTS = count()
WIRE = {
    "id", "orgId", "serverInstanceId", "hostId", "name", "description", "cronExpression", "jobType", "payload",
    "enabled", "executionWindowStart", "executionWindowEnd", "retryPolicy", "lastRunAt", "nextRunAt", "lastRunStatus",
    "lastRunJobId", "lastJobStatus", "runCount", "failureCount", "createdById", "createdAt", "updatedAt", "timezone",
    "overlap", "catchUp", "timeoutSeconds", "error",
}  # fmt: skip


@pytest.fixture
def tenant(shared_dsn: str) -> str:
    """A tenant of its own, with a server."""
    name = f"jobs-{next(TENANTS):03}"
    add_server(shared_dsn, name)
    return name


def add_server(dsn: str, tenant: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(PLACES, {"tenant": tenant, "server": server_of(tenant), "host": f"host of {tenant}"})


def server_of(tenant: str) -> str:
    return "cserver" + tenant.replace("-", "0").ljust(18, "0")


@pytest.fixture
def client(shared_api: Client, shared_dsn: str, tenant: str) -> Client:
    return shared_api.with_key(new_key(shared_dsn, tenant=tenant))


@pytest.fixture
def ask(shared_dsn: str) -> Iterator[Any]:
    session = Session(shared_dsn)
    yield session.ask
    session.close()


def new(tenant: str, **given: Any) -> dict[str, Any]:
    needed = {
        "name": "Backup",
        "serverInstanceId": server_of(tenant),
        "cronExpression": "0 2 * * *",
        "jobType": "shell",
    }
    return {**needed, **given}


@pytest.fixture
def made(client: Client, tenant: str) -> dict[str, Any]:
    answer = client.post(PATH, new(tenant, payload={"command": "backup"}))
    assert answer.status == 201, answer.json
    return dict(answer.json)


@pytest.mark.alone
def test_a_list_has_no_payloads_so_that_large_ones_hold_neither_it_nor_the_loop(client, tenant, made, ask):
    """Of many small values, which take the longest to read: 256 KiB each are 51 MB of a page."""
    large = json.dumps({"d": [{"a": n} for n in range(18_000)]})
    assert len(large) < LARGEST_PAYLOAD
    for n in range(49):
        client.post(PATH, new(tenant, name=f"Backup {n}"))
    ask("UPDATE job_schedules SET payload = %s::jsonb WHERE tenant_id = %s", large, tenant)
    with probing(client) as held:
        listed = client.get(PATH)
    assert (listed.status, len(listed.json["schedules"])) == (200, 50)
    assert set(listed.json["schedules"][0]) == WIRE - {"payload"}
    print(f"the loop was held for {held.longest * 1000:.0f} ms")
    assert held.longest < 0.15  # as measured with payloads, 0.25
    assert client.get(f"{PATH}/{made['id']}").json["payload"] == json.loads(large)


@pytest.mark.req(
    "JOB-01", "JOB-02", "JOB-03", "JOB-04", "JOB-05", "JOB-06", "JOB-07", "JOB-08", "JOB-09", "JOB-10", "JOB-11",
    "JOB-12", "JOB-13", "JOB-41", "G-37", "G-52", "G-54", "G-81",
)  # fmt: skip
def test_a_schedule_has_every_field_of_the_contract_under_its_wire_name(client, tenant, made, ask):
    assert set(made) == WIRE
    row = JobScheduleInFull.model_validate(made)
    assert row.id.startswith("c")
    assert len(row.id) == 25
    assert (row.org_id, row.server_instance_id, row.created_by_id) == (tenant, server_of(tenant), "a test")
    assert made["retryPolicy"] == {"maxRetries": 0, "backoffMs": 1000, "backoffType": "fixed"}
    assert (row.timezone, row.overlap, row.catch_up, row.enabled) == ("UTC", "allow", "latest", True)
    assert (row.run_count, row.failure_count, row.last_run_status, row.last_run_at) == (0, 0, None, None)
    assert made["nextRunAt"].endswith("02:00:00+00:00") or made["nextRunAt"].endswith("02:00:00Z")
    assert client.get(f"{PATH}/{row.id}").json == made
    (listed,) = SCHEDULES.page.model_validate(client.get(PATH).json).schedules
    assert listed.model_dump() == row.model_dump(exclude={"payload"})
    assert ask("SELECT action, subject FROM audit_trail WHERE tenant_id = %s", tenant) == [
        ("job_schedule.create", f"job_schedule:{row.id}")
    ]


@pytest.mark.req("JOB-04")
def test_two_schedules_may_have_the_same_name_and_lists_are_read_by_cursor(client, tenant, made):
    assert client.post(PATH, new(tenant)).status == 201
    first = client.get(f"{PATH}?limit=1").json
    second = client.get(f"{PATH}?limit=1&cursor={first['next_cursor']}").json
    assert first["schedules"][0]["id"] == made["id"] != second["schedules"][0]["id"]
    assert second["next_cursor"] is None


@pytest.mark.req("JOB-09")
def test_a_change_replaces_the_given_fields_in_either_spelling(client, made):
    one = f"{PATH}/{made['id']}"
    changes = {
        "cronExpression": "30 3 * * 1",
        "execution_window_start": "02:00",
        "execution_window_end": "06:00",
        "retryPolicy": {"maxRetries": 5, "backoffType": "exponential"},
        "timezone": "Europe/Paris",
        "overlap": "skip",
    }
    changed = client.ask("PATCH", one, changes)
    assert changed.status == 200, changed.json
    assert changed.json["executionWindowEnd"] == "06:00"
    assert changed.json["retryPolicy"] == {"maxRetries": 5, "backoffMs": 1000, "backoffType": "exponential"}
    assert (changed.json["timezone"], changed.json["overlap"], changed.json["name"]) == (
        "Europe/Paris",
        "skip",
        "Backup",
    )
    assert changed.json["payload"] == {"command": "backup"}
    cleared = client.ask("PATCH", one, {"executionWindowStart": None, "executionWindowEnd": None})
    assert (cleared.json["executionWindowStart"], cleared.json["cronExpression"]) == (None, "30 3 * * 1")


@pytest.mark.req("JOB-14", "JOB-35")
def test_an_enabled_schedule_stores_its_next_due_time_by_cron_and_window(client, tenant, ask):
    given = {"cronExpression": "0 1 * * *", "executionWindowStart": "02:00", "executionWindowEnd": "06:00"}
    made = client.post(PATH, new(tenant, **given)).json
    assert datetime.fromisoformat(made["nextRunAt"]).strftime("%H:%M %z") == "02:00 +0000"
    stored = "SELECT s.next_due_at FROM schedules s JOIN job_schedules j ON j.schedule_id = s.id WHERE j.id = %s"
    assert ask(stored, made["id"]) == [(datetime.fromisoformat(made["nextRunAt"]),)]
    off = client.post(PATH, new(tenant, **given, enabled=False)).json
    assert off["nextRunAt"] is None


@pytest.mark.req("JOB-05", "JOB-08", "JOB-29", "JOB-37", "G-51", "G-52", "G-54")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cronExpression": "61 * * * *"}, "Cron expression '61 * * * *': bad minute"),
        ({"cronExpression": "every day"}, "Cron expression 'every day': 2 fields; a cron expression has 5. "),
        ({"cronExpression": "bogus"}, "Cron expression 'bogus': 1 field; a cron expression has 5. "),
        ({"cronExpression": None}, "cronExpression"),
        ({"timezone": "Europe/Atlantis"}, "Atlantis"),
        ({"executionWindowStart": "02:00"}, "window"),
        ({"executionWindowStart": "02:00", "executionWindowEnd": "02:00"}, "window"),
        ({"executionWindowStart": "26:00", "executionWindowEnd": "27:00"}, "26:00"),
        ({"retryPolicy": {"maxRetries": -1}}, "maxRetries"),
        ({"retryPolicy": {"maxRetries": 10_000}}, "maxRetries"),
        ({"retryPolicy": {"backoffMs": -1}}, "backoffMs"),
        ({"retryPolicy": {"backoffType": "linear"}}, "backoffType"),
        ({"retryPolicy": {"retries": 1}}, "retries"),
        ({"payload": {"data": "x" * 256 * 1024}}, "at most 262144"),
        ({"payload": [1]}, "payload"),
        ({"jobType": ""}, "jobType"),
        ({"overlap": "wait"}, "overlap"),
        ({"timeoutSeconds": 0}, "timeoutSeconds"),
        ({"serverInstanceId": "7"}, "serverInstanceId"),
        ({"name": " "}, "name"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(client, tenant, ask, made, given, says):
    answer = client.post(PATH, new(tenant, **given))
    assert (answer.status, answer.code) == (422, "INVALID_INPUT"), answer.json
    assert says in str(answer.json)
    change = client.ask("PATCH", f"{PATH}/{made['id']}", given)
    assert (change.status, change.code) == (422, "INVALID_INPUT"), change.json
    assert client.get(f"{PATH}/{made['id']}").json == made
    assert ask("SELECT count(*) FROM schedules WHERE tenant_id = %s", tenant) == [(1,)]


@pytest.mark.req("JOB-03")
@pytest.mark.parametrize("which", ["unknown", "foreign", "deleted"])
def test_an_unknown_foreign_or_deleted_server_is_refused(client, shared_dsn, tenant, ask, made, which):
    wanted = "cunknown00000000000000000"
    if which == "foreign":
        wanted = server_of(f"{tenant}-f")
        add_server(shared_dsn, f"{tenant}-f")
    if which == "deleted":
        wanted = made["serverInstanceId"]
        ask("UPDATE job_servers SET deleted_at = ecluse_now() WHERE id = %s", wanted)
    for answer in (
        client.post(PATH, new(tenant, serverInstanceId=wanted)),
        client.ask("PATCH", f"{PATH}/{made['id']}", {"serverInstanceId": wanted}),
    ):
        assert (answer.status, answer.code) == (404, "NOT_FOUND")
        assert wanted in str(answer.json)
    assert ask("SELECT count(*) FROM job_schedules WHERE tenant_id = %s", tenant) == [(1,)]


def test_run_now_answers_with_the_job_and_pause_and_resume_switch_it(client, tenant, made, ask):
    one = f"{PATH}/{made['id']}"
    paused = client.post(f"{one}/pause").json
    assert (paused["enabled"], paused["nextRunAt"]) == (False, None)
    ran = client.post(f"{one}/run", headers={"Idempotency-Key": "once"})
    assert ran.status == 201, ran.json
    job = MadeJob.model_validate(ran.json)
    assert client.post(f"{one}/run", headers={"Idempotency-Key": "once"}).json == ran.json
    assert ask("SELECT id, created_by, status FROM jobs WHERE tenant_id = %s", tenant) == [
        (job.job_id, "a test", "pending")
    ]
    shown = client.get(one).json
    assert (shown["lastRunJobId"], shown["lastRunStatus"], shown["lastJobStatus"], shown["runCount"]) == (
        job.job_id, "success", "pending", 1,
    )  # fmt: skip
    assert client.post(f"{one}/resume").json["nextRunAt"] == made["nextRunAt"]
    ask("UPDATE job_servers SET deleted_at = ecluse_now() WHERE tenant_id = %s", tenant)
    refused = client.post(f"{one}/run")
    assert (refused.status, refused.code) == (409, "SERVER_GONE")
    assert client.get(one).json["error"].startswith("Its server was deleted")


@pytest.mark.req("JOB-34", "JOB-35", "JOB-49")
def test_the_preview_marks_clock_changes_and_clamps(client, tenant):
    given = {"executionWindowStart": "02:15", "executionWindowEnd": "06:00", "timezone": "Europe/Paris"}
    windowed = client.post(PATH, new(tenant, cronExpression="0 0,4 * * *", **given)).json
    answer = client.get(f"{PATH}/{windowed['id']}/preview?count=4").json
    marks = [
        (fire["at"][11:16], fire["mark"])
        for fire in JobSchedulePreview.model_validate(answer).model_dump(mode="json")["fires"]
    ]
    assert {mark for mark in marks if "clocks" not in str(mark)} <= {
        ("02:15", "moved to the start of the window"), ("04:00", None),
    }  # fmt: skip
    daily = client.post(PATH, new(tenant, cronExpression="30 2 * * 0", timezone="Europe/Paris")).json
    fires = client.get(f"{PATH}/{daily['id']}/preview").json["fires"]
    assert len(fires) == 50
    assert any("moved out of the gap" in str(fire["mark"]) for fire in fires), "the Sunday in March"
    assert client.get(f"{PATH}/{daily['id']}/preview?count=51").status == 422


def test_slots_are_listed_with_their_jobs_also_of_a_deleted_schedule(client, tenant, made, ask):
    ask(
        "INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, decided_at)"
        " SELECT schedule_id, ecluse_now(), tenant_id, 'failed', 'no server', ecluse_now() FROM job_schedules"
        " WHERE id = %s",
        made["id"],
    )
    one = f"{PATH}/{made['id']}"
    assert client.ask("DELETE", one).json == {"id": made["id"], "deleted": True}
    assert (client.get(one).status, client.post(f"{one}/run").status) == (404, 404)
    (slot,) = SLOTS.page.model_validate(client.get(f"{one}/slots").json).slots
    assert (slot.state, slot.reason, slot.job_id) == ("failed", "no server", None)
    assert client.get(f"{PATH}/cnone/slots").status == 404
    assert client.get(PATH).json["schedules"] == []


def test_secrets_of_a_payload_are_sealed_at_rest_and_hidden_in_answers(client, tenant, ask, shared_dsn):
    secret = "hunter2-very-secret"  # noqa: S105
    payload = {
        "url": f"https://user:{secret}@example.com/x",
        "password": secret,
        "deep": [{"api_token": secret, "n": 1}],
    }
    answer = client.post(PATH, new(tenant, payload=payload))
    assert answer.status == 201, answer.json
    shown = {"url": "https://***@example.com/x", "password": "***", "deep": [{"api_token": "***", "n": 1}]}
    assert answer.json["payload"] == shown
    one = f"{PATH}/{answer.json['id']}"
    client.post(f"{one}/run")
    ((name, copy),) = ask("SELECT payload_secret, payload FROM jobs WHERE tenant_id = %s", tenant)
    assert copy == shown
    assert ask("SELECT payload_secret FROM job_schedules WHERE tenant_id = %s", tenant) == [(name,)]
    rows = ask("SELECT to_jsonb(j)::text FROM job_schedules j WHERE tenant_id = %s", tenant)
    rows += ask("SELECT to_jsonb(e)::text FROM events_outbox e WHERE tenant_id = %s", tenant)
    rows += ask("SELECT to_jsonb(a)::text FROM audit_trail a WHERE tenant_id = %s", tenant)
    assert len(rows) >= 3
    assert secret not in str(rows)
    assert json.loads(opened(shared_dsn, tenant, name)) == payload
    echoed = client.ask("PATCH", one, {"payload": shown})
    assert (echoed.status, echoed.code) == (422, "INVALID_INPUT"), "hidden values would replace the secrets"
    client.ask("PATCH", one, {"payload": {"password": "another"}})
    assert json.loads(opened(shared_dsn, tenant, name)) == payload, "the job that was made keeps its own"


def opened(dsn: str, tenant: str, name: str) -> str:
    import asyncio
    import base64

    from ecluse.access.secrets import Secrets
    from tests.support.api_server import SECRET_KEY

    async def get() -> str:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            return await Secrets(base64.b64decode(SECRET_KEY)).get(connection, tenant, name)

    return asyncio.run(get())


def test_schedules_of_every_flow_show_those_of_jobs_and_refuse_to_make_or_run_them(client, tenant, made, ask):
    ((number,),) = ask("SELECT schedule_id FROM job_schedules WHERE id = %s", made["id"])
    shown = client.get(f"/api/schedules/{number}").json
    assert (shown["flow"], shown["plan"]["job_type"], shown["plan"]["id"]) == ("jobs", "shell", made["id"])
    for answer in (
        client.post("/api/schedules", {"flow": "jobs", "name": "x", "cron": "@daily"}),
        client.post(f"/api/schedules/{number}/run"),
        client.ask("PATCH", f"/api/schedules/{number}", {"plan": {"job_type": "noop"}}),
        client.post("/api/runs", {"flow": "jobs"}),
    ):
        assert answer.status == 422, answer.json
        assert "jobs schedules" in str(answer.json)
    assert client.post(f"/api/schedules/{number}/disable").status == 200
    assert client.get(f"{PATH}/{made['id']}").json["enabled"] is False
