"""The agent protocol, call by call: enrolment, claims, leases, results, logs, and what it refuses."""

from __future__ import annotations

import re
import time
import uuid
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import psycopg
import pytest

from ecluse.access.keys import FRESH_SECONDS
from ecluse.db.shares import WRITE_SETTINGS
from ecluse.flows.jobs.states import CLAIM, END, Claim
from tests.flows.jobs.conftest import LEASE
from tests.support.api_server import add_tenant, new_key
from tests.support.job_world import JobWorld, attempts, claim, in_background, report
from tests.support.waits import wait_for


@pytest.fixture
def ask(shared_dsn):
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        yield lambda sql, *given: connection.execute(sql, given)


def claimed(client, **more):
    (job,) = claim(client, **more).json["jobs"]
    return job


def test_an_enrolment_token_is_used_once_and_expires(world, ask):
    host, nobody = world.host(), world.api.with_key(None)
    about = {"hostname": "here", "version": "1", "platform": "test"}
    token = world.token(host)
    first = nobody.post("/api/agent/enrol", {"token": token, **about})
    assert (first.status, sorted(first.json)) == (201, ["agentId", "credential", "hostId", "leaseSeconds"])
    late = world.token(host)
    ask("UPDATE enrolment_tokens SET expires_at = ecluse_now() WHERE host_id = %s AND used_at IS NULL", host)
    for refused in (token, late, "ecl_enrol_nonsense"):
        answer = nobody.post("/api/agent/enrol", {"token": refused, **about})
        assert (answer.status, answer.code) == (401, "ENROLMENT_REFUSED")
    assert nobody.post("/api/agent/enrol", {"token": world.token(host)}).status == 422
    assert claim(world.api.with_key(first.json["credential"])).status == 200


def test_an_agent_enrolled_anew_replaces_the_one_before(world):
    host = world.host()
    old, new = world.credential(host), world.credential(host)
    wait_for(lambda: claim(old).status == 401)
    assert claim(new).status == 200


def test_enrolments_and_new_credentials_are_in_the_audit_trail(world, shared_dsn):
    host = world.host()
    about = {"hostname": "here", "version": "1", "platform": "test"}
    made = world.api.with_key(None).post("/api/agent/enrol", {"token": world.token(host), **about}).json
    assert world.api.with_key(made["credential"]).post("/api/agent/rotate").status == 200
    admin = world.api.with_key(new_key(shared_dsn, "admin"))
    found = admin.get(f"/api/audit-trail?subject=job_agent:{made['agentId']}").json["entries"]
    assert [(row["action"], row["actor"], row["address"], row["reason"]) for row in found] == [
        ("job_agent.rotate", f"agent:{made['agentId']}", "127.0.0.1", None),
        ("job_agent.enrol", f"agent:{made['agentId']}", "127.0.0.1", f"host {host}"),
    ]


@pytest.mark.req("ENG-102")
def test_agents_do_nothing_but_execute_and_no_other_role_executes(world, shared_dsn):
    agent = world.credential(world.host())
    for path in ("/api/jobs", "/api/jobs/agents", "/api/runs", "/api/me"):
        assert (agent.get(path).status, agent.get(path).code) == (403, "FORBIDDEN")
    for role in ("viewer", "operator", "admin"):
        refused = claim(world.api.with_key(new_key(shared_dsn, role)))
        assert (refused.status, refused.code) == (403, "FORBIDDEN")
    assert claim(world.api.with_key(None)).code == "UNAUTHENTICATED"
    assert claim(world.api.with_key("ecl_agent_nonsense")).code == "CREDENTIAL_REVOKED"


@pytest.mark.req("JOB-21", "JOB-48", "G-53")
def test_a_claim_gets_the_jobs_of_its_own_host_in_order_several_at_once(world):
    host, other = world.host(), world.host()
    jobs = [world.job(host, payload={"seconds": n}) for n in range(4)]
    world.job(other)
    agent = world.credential(host)
    first = claim(agent, most=3).json["jobs"]
    assert [one["jobId"] for one in first] == jobs[:3]
    assert (first[1]["payload"], first[1]["attempt"], first[1]["type"]) == ({"seconds": 1}, 1, "noop")
    assert first[0]["leaseSeconds"] == pytest.approx(LEASE, abs=0.1)
    assert claim(agent, types=["shell"]).json["jobs"] == []
    assert [one["jobId"] for one in claim(agent, most=3).json["jobs"]] == jobs[3:]
    shown = world.shown(jobs[0])
    assert (shown["status"], shown["queue"], shown["orgId"]) == ("running", "jobs:default", "default")


def test_a_repeated_claim_gets_the_same_jobs_and_no_new_ones(world):
    host, key = world.host(), str(uuid.uuid4())
    agent = world.credential(host)
    assert claim(agent, most=0, key=key).json["jobs"] == []
    job = world.job(host)
    world.job(host)
    first = claimed(agent, key=key)
    again = claimed(agent, key=key, most=5)
    assert (first["jobId"], again["jobRunId"], again["fence"]) == (job, first["jobRunId"], first["fence"])
    assert again["leaseSeconds"] < first["leaseSeconds"]
    report(agent, first)
    assert claim(agent, key=key, most=5).json["jobs"] == []


def test_a_long_poll_is_woken_by_a_job_and_by_the_end_of_its_time(world):
    host = world.host()
    agent, schedule = world.credential(host), world.schedule(host)
    began = time.monotonic()
    assert claim(agent, wait=0.2).json["jobs"] == []
    assert 0.2 <= time.monotonic() - began < 5
    with in_background(lambda: claim(agent, wait=30)) as found:
        time.sleep(0.3)
        began = time.monotonic()
        job = world.run(schedule)
    (answer, _) = found[0]
    assert answer.json["jobs"][0]["jobId"] == job
    assert time.monotonic() - began < 2
    assert answer.json["waitedSeconds"] > 0.2


def test_a_revoked_credential_is_refused_within_a_second_and_ends_a_long_poll(world):
    host = world.host()
    agent = world.credential(host)
    (known,) = [one for one in world.api.get("/api/jobs/agents?limit=200").json["agents"] if one["hostId"] == host]
    with in_background(lambda: claim(agent, wait=30)) as found:
        time.sleep(0.3)
        revoked = world.made(f"/api/jobs/agents/{known['id']}/revoke", {})
    ((answer, seconds),) = found
    assert (answer.status, answer.code, seconds < 3) == (401, "CREDENTIAL_REVOKED", True)
    assert revoked["revokedAt"] is not None
    time.sleep(1)
    assert (claim(agent).status, claim(agent).code) == (401, "CREDENTIAL_REVOKED")


def test_a_disabled_tenant_ends_the_long_polls_of_its_agents(world, ask):
    host = world.host()
    agent = world.credential(host)
    try:
        with in_background(lambda: claim(agent, wait=30)) as found:
            time.sleep(0.3)
            ask("UPDATE tenants SET disabled_at = ecluse_now()")
    finally:
        ask("UPDATE tenants SET disabled_at = NULL")
    ((answer, seconds),) = found
    assert (answer.status, answer.code, seconds < 15) == (403, "TENANT_DISABLED", True)
    time.sleep(FRESH_SECONDS)


def test_a_rotated_credential_is_valid_until_the_new_one_claims(world):
    old = world.credential(world.host())
    lost = old.post("/api/agent/rotate", {}).json["credential"]
    new = old.with_key(old.post("/api/agent/rotate", {}).json["credential"])
    assert claim(old).status == 200
    assert claim(new).status == 200
    wait_for(lambda: claim(old).status == 401)
    assert claim(old.with_key(lost)).status == 401
    assert claim(new).status == 200


@pytest.mark.req("JOB-21")
def test_a_claim_planned_while_few_jobs_waited_does_not_read_the_many_of_other_hosts(world, shared_dsn):
    """The plan is kept until the statistics are renewed: 50,000 jobs that another organisation makes at once would be
    read by every claim until then."""
    world.job(world.host())
    given = Claim("cnone", uuid.uuid4(), 16, [], "1", b"", timedelta(seconds=30), timedelta(seconds=60))
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        connection.execute("ANALYZE jobs, job_runs")
        for name, value in WRITE_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        plans = [connection.execute(f"EXPLAIN {CLAIM}", given._asdict()).fetchall()]
        plans.append(connection.execute(f"EXPLAIN {END}", {"rows": "[]", "now": datetime.now(UTC)}).fetchall())
    assert "job_runs_waiting" in str(plans[0])
    assert re.findall(r"Seq Scan on (jobs|job_runs|job_schedules)\b", str(plans)) == []


@pytest.mark.req("G-53")
def test_a_lease_is_renewed_and_a_lost_one_is_a_failed_attempt(world):
    host = world.host()
    agent = world.credential(host)
    job = world.job(host, retryPolicy={"maxRetries": 1, "backoffMs": 0})
    run = claimed(agent)
    path = f"/api/agent/job-runs/{run['jobRunId']}/renew"
    renewed = agent.post(path, {"fence": run["fence"]}).json
    assert (renewed["cancel"], renewed["leaseSeconds"]) == (False, LEASE)
    assert datetime.fromisoformat(renewed["leaseEndsAt"]) > datetime.fromisoformat(run["leaseEndsAt"])
    again = wait_for(lambda: claim(agent).json["jobs"])[0]
    lost = agent.post(path, {"fence": run["fence"]})
    assert (lost.status, lost.code) == (409, "LEASE_LOST")
    assert (again["jobId"], again["attempt"]) == (job, 2)
    late = report(agent, run, output="it had worked")
    assert (late.status, late.json) == (200, {"status": "failed", "kept": "evidence"})
    assert report(agent, run).json["kept"] == "repeated"
    assert report(agent, again, "failed", errorCode="EXIT_CODE", exitCode=2).json == {
        "status": "failed",
        "kept": "result",
    }
    ended = world.shown(job)
    assert attempts(ended) == [(1, "failed", "LEASE_LOST"), (2, "failed", "EXIT_CODE")]
    assert (ended["status"], ended["runs"][0]["lateStatus"]) == ("failed", "succeeded")
    assert ended["runs"][0]["lateResult"]["output"] == "it had worked"


@pytest.mark.req("JOB-30", "JOB-39", "JOB-40")
def test_a_failed_attempt_is_repeated_after_its_delay(world):
    host = world.host()
    agent = world.credential(host)
    job = world.job(host, retryPolicy={"maxRetries": 2, "backoffMs": 100, "backoffType": "exponential"})
    for _ in range(3):
        assert report(agent, claimed(agent, wait=10), "failed").json["kept"] == "result"
    ended = world.shown(job)
    assert attempts(ended) == [(n, "failed", "FAILED") for n in (1, 2, 3)]
    times = [[datetime.fromisoformat(one[name]) for name in ("dueAt", "endedAt")] for one in ended["runs"]]
    delays = [(due - before[1]).total_seconds() for before, (due, _) in pairwise(times)]
    assert delays == pytest.approx([0.1, 0.2], abs=0.002)


@pytest.mark.req("G-53")
def test_results_are_idempotent_and_only_of_the_own_host_and_fence(world, shared_dsn):
    host = world.host()
    agent, stranger = world.credential(host), world.credential(world.host())
    job = world.job(host)
    run = claimed(agent)
    add_tenant(shared_dsn, "strangers")
    other = JobWorld(world.api.with_key(new_key(shared_dsn, tenant="strangers")), world.folder)
    far = other.credential(other.host())
    for one in (stranger, far):
        for what, body in (("renew", {}), ("result", {"status": "succeeded"}), ("logs", {"offset": 0, "text": "x"})):
            answer = one.post(f"/api/agent/job-runs/{run['jobRunId']}/{what}", {"fence": run["fence"], **body})
            assert (answer.status, answer.code) == (404, "NOT_FOUND"), what
    for fence in (0, run["fence"] + 1):
        answer = report(agent, {**run, "fence": fence})
        assert (answer.status, answer.code) == (409, "FENCE_UNKNOWN")
    assert world.shown(job)["status"] == "running"
    assert report(agent, run, exitCode=0).json == {"status": "succeeded", "kept": "result"}
    assert report(agent, run, "failed").json == {"status": "succeeded", "kept": "repeated"}
    assert other.api.get(f"/api/jobs/{job}").status == 404


@pytest.mark.req("JOB-31", "G-49")
def test_the_last_attempt_that_fails_marks_the_schedule_unless_a_newer_job_was_made(world):
    host = world.host()
    agent, schedule = world.credential(host), world.schedule(host)
    status = lambda: world.api.get(f"/api/jobs/schedules/{schedule}").json["lastRunStatus"]  # noqa: E731
    world.run(schedule)
    older = claimed(agent)
    newer = world.run(schedule)
    report(agent, older, "failed")
    assert status() == "success"
    report(agent, claimed(agent), "failed")
    assert (status(), world.api.get(f"/api/jobs/schedules/{schedule}").json["lastRunJobId"]) == ("failed", newer)


def test_a_tenant_that_is_disabled_with_stop_has_no_jobs_left_to_do(world, shared_dsn, ask):
    add_tenant(shared_dsn, "stopped")
    admin = world.api.with_key(new_key(shared_dsn, "admin"))
    theirs = JobWorld(world.api.with_key(new_key(shared_dsn, tenant="stopped")), world.folder)
    host = theirs.host()
    agent, running = theirs.credential(host), theirs.job(host, retryPolicy={"maxRetries": 3})
    assert claimed(agent)["jobId"] == running
    waiting = theirs.job(host)
    assert admin.get("/api/tenants/stopped/disable").json["open_jobs"] == 2
    done = admin.post("/api/tenants/stopped/disable", {"reason": "unpaid", "stop": True})
    assert (done.status, done.json["ended_jobs"], done.json["ended_runs"]) == (200, 2, 0)
    again = admin.post("/api/tenants/stopped/disable", {"reason": "unpaid", "stop": True})
    assert again.json["ended_jobs"] == 0
    wait_for(lambda: claim(agent).status == 403)
    ends = "SELECT id, status, cancel_requested_by FROM jobs WHERE tenant_id = 'stopped' AND ended_at IS NOT NULL"
    assert ask(ends).fetchall() == [(waiting, "failed", "a test")]
    ask("UPDATE job_runs SET lease_ends_at = ecluse_now() WHERE job_id = %s", running)
    wait_for(lambda: len(ask(ends).fetchall()) == 2)
    attempts_made = "SELECT status, error_code FROM job_runs WHERE job_id = %s"
    assert ask(attempts_made, running).fetchall() == [("failed", "CANCELLED")]


def test_a_job_is_cancelled_while_it_waits_and_repeated_by_hand(world):
    host = world.host()
    agent, schedule = world.credential(host), world.schedule(host, retryPolicy={"maxRetries": 3})
    job = world.run(schedule)
    assert world.api.post(f"/api/jobs/{job}/retry").code == "CONFLICT"
    assert attempts(world.made(f"/api/jobs/{job}/cancel", {})) == [(1, "failed", "CANCELLED")]
    again = world.api.post(f"/api/jobs/{job}/cancel")
    assert (again.status, again.code) == (409, "ALREADY_ENDED")
    assert claim(agent).json["jobs"] == []
    copy = world.made(f"/api/jobs/{job}/retry", {})
    assert (copy["status"], copy["scheduleId"], copy["id"] != job) == ("pending", schedule, True)
    run = claimed(agent)
    world.made(f"/api/jobs/{copy['id']}/cancel", {})
    renewed = agent.post(f"/api/agent/job-runs/{run['jobRunId']}/renew", {"fence": run["fence"]}).json
    assert renewed["cancel"] is True
    report(agent, run, "failed", errorCode="CANCELLED")
    assert attempts(world.shown(copy["id"])) == [(1, "failed", "CANCELLED")]
    failed = world.api.get(f"/api/jobs?scheduleId={schedule}&status=failed").json["jobs"]
    assert [one["id"] for one in failed] == [copy["id"], job]


def test_a_job_that_no_agent_claims_fails(world, ask):
    host = world.host()
    job = world.job(host, retryPolicy={"maxRetries": 3})
    assert world.shown(job)["waiting"].startswith(
        "No agent of its host has enrolled: without one, the job fails NO_AGENT at "
    )
    ask("UPDATE job_runs SET due_at = due_at - interval '61 minutes' WHERE job_id = %s", job)
    assert attempts(world.ended(job)) == [(1, "failed", "NO_AGENT")]


def test_a_pending_job_says_that_its_agent_was_revoked_or_its_host_deleted(world):
    host = world.host()
    world.credential(host)
    schedule = world.schedule(host)
    job = world.run(schedule)
    listed = world.api.get("/api/jobs/agents?limit=200").json["agents"]
    (agent,) = [one["id"] for one in listed if one["hostId"] == host]
    world.made(f"/api/jobs/agents/{agent}/revoke", {})
    waiting = world.shown(job)["waiting"]
    assert waiting.startswith("The agent of its host was revoked at ")
    assert f"`ecluse jobs hosts token {host}`: without one, the job fails NO_AGENT at " in waiting
    server = world.shown(job)["serverInstanceId"]
    assert world.api.ask("DELETE", f"/api/jobs/servers/{server}").status == 200
    shown = world.api.get(f"/api/jobs/hosts/{host}").json
    assert (shown["id"], shown["pending"], shown["running"]) == (host, 1, 0)
    assert world.api.ask("DELETE", f"/api/jobs/hosts/{host}").status == 200
    assert re.fullmatch(
        r"Its host was deleted at .+\. No agent can execute it: the job fails NO_AGENT at .+\.",
        world.shown(job)["waiting"],
    )


def test_a_log_is_appended_once_without_gaps_and_up_to_its_limit(world):
    host = world.host()
    agent = world.credential(host)
    job = world.job(host)
    run = claimed(agent)

    def send(offset, text):
        body = {"fence": run["fence"], "offset": offset, "text": text}
        return agent.post(f"/api/agent/job-runs/{run['jobRunId']}/logs", body)

    assert send(0, "one\n").json == {"next": 4, "capped": False}
    assert send(0, "one\n").json == {"next": 4, "capped": False}
    assert send(2, "e\ntwo\n").json == {"next": 8, "capped": False}
    gap = send(9, "four\n")
    assert (gap.status, gap.code, gap.json["error"]["details"]) == (
        409,
        "LOG_GAP",
        [{"where": "offset", "problem": "8"}],
    )
    assert world.log(job) == "one\ntwo\n"
    assert send(8, "x" * 65_537).status == 422
    offset = 8
    while not (answer := send(offset, "y" * 65_000).json)["capped"]:
        offset = answer["next"]
    assert send(answer["next"], "z").json == {"next": answer["next"] + 1, "capped": True}
    assert world.shown(job)["runs"][0]["logCapped"] is True
    report(agent, run)


def test_secrets_of_a_payload_reach_the_agent_alone(world, ask):
    host, secret = world.host(), f"s3cret-{uuid.uuid4()}"
    agent = world.credential(host)
    payload = {"command": "backup", "env": {"DB_PASSWORD": secret}}
    job = world.job(host, "shell", payload)
    run = claimed(agent)
    assert run["payload"] == payload
    body = {"fence": run["fence"], "offset": 0, "text": f"connecting with {secret}\n"}
    agent.post(f"/api/agent/job-runs/{run['jobRunId']}/logs", body)
    report(agent, run, "failed", errorCode="EXIT_CODE", error=f"{secret} was refused", output={"tried": [secret]})
    shown = world.api.get(f"/api/jobs/{job}")
    assert shown.json["payload"]["env"] == {"DB_PASSWORD": "***"}
    assert world.log(job) == "connecting with ***\n"
    assert (shown.json["error"], shown.json["runs"][0]["output"]) == ("*** was refused", {"tried": ["***"]})
    stored = ask("SELECT j::text || r::text || l::text FROM jobs j JOIN job_runs r ON r.job_id = j.id"
                 " JOIN job_logs l ON l.job_run_id = r.id WHERE j.id = %s", job).fetchall()  # fmt: skip
    events = ask("SELECT event_type, payload::text FROM events_outbox WHERE aggregate = %s ORDER BY id", f"job:{job}")
    types, payloads = zip(*events.fetchall(), strict=True)
    assert types == ("job.created", "job.failed")
    assert secret not in f"{stored}{payloads}{shown.body}"


def test_hosts_and_servers_are_made_renamed_moved_and_deleted(world):
    host, other = world.host(), world.host()
    name = f"db {uuid.uuid4()}"
    server = world.made("/api/jobs/servers", {"name": name, "hostId": host})
    assert world.api.post("/api/jobs/servers", {"name": name, "hostId": other}).code == "NAME_TAKEN"
    foreign = world.api.post("/api/jobs/servers", {"name": "x", "hostId": "c" + "0" * 24})
    assert (foreign.status, foreign.code) == (404, "NOT_FOUND")
    assert foreign.json["error"]["message"].startswith("hostId: there is no host c000")
    moved = world.api.ask("PATCH", f"/api/jobs/servers/{server['id']}", {"hostId": other}).json
    assert (moved["name"], moved["hostId"]) == (name, other)
    in_use = world.api.ask("DELETE", f"/api/jobs/hosts/{other}")
    assert (in_use.status, in_use.code) == (409, "CONFLICT")
    agent = world.credential(host)
    assert world.api.ask("DELETE", f"/api/jobs/hosts/{host}").json == {"id": host, "deleted": True}
    wait_for(lambda: claim(agent).status == 401)
    assert world.api.ask("DELETE", f"/api/jobs/servers/{server['id']}").status == 200
    assert server["id"] not in {one["id"] for one in world.api.get("/api/jobs/servers?limit=200").json["servers"]}
    assert world.api.post(f"/api/jobs/hosts/{host}/token", {}).status == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"max": 17},
        {"max": -1},
        {"waitSeconds": 31},
        {"claimKey": "no uuid"},
        {"types": "noop"},
        {"more": 1},
    ],
)
def test_a_claim_that_is_not_as_documented_is_refused(world, wrong):
    agent = world.credential(world.host())
    answer = claim(agent, **wrong)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
