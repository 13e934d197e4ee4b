"""Agents as real processes, over real HTTP: what they run, and what they do when they, the server or the way to it
fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from ecluse.demo.fleet import Proxy
from tests.support.api_server import new_key, serving
from tests.support.job_world import JobWorld, attempts
from tests.support.waits import wait_for
from tools import agent_zip

pytestmark = pytest.mark.long
SHELL = ["/bin/sh", "-c"]


def processes_with(text):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in command and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@pytest.mark.req("JOB-18", "G-53")
def test_an_agent_runs_what_its_file_allows_and_refuses_the_rest(world):
    host = world.host()
    agent = world.agent(host, slots=16)
    port = world.api.port
    wanted = {
        ("noop", "succeeded", None): {"seconds": 0.01},
        ("shell", "succeeded", None): {"command": [*SHELL, "echo one; echo two >&2"]},
        ("http", "succeeded", None): {"url": f"http://127.0.0.1:{port}/healthz"},
        ("counted", "succeeded", None): {"a": 1},
        ("shell", "failed", "EXIT_CODE"): {"command": f"{SHELL[0]} -c 'exit 7'"},
        ("shell", "failed", "NOT_ALLOWED"): {"command": "/bin/echo goodbye"},
        ("http", "failed", "NOT_ALLOWED"): {"url": f"http://127.0.0.1:{port}/api/me"},
        ("noop", "failed", "BAD_PAYLOAD"): {"second": 1},
        ("backup", "failed", "UNKNOWN_TYPE"): {},
    }
    jobs = {key: world.job(host, key[0], payload) for key, payload in wanted.items()}
    for (kind, status, code), job in jobs.items():
        assert attempts(world.ended(job)) == [(1, status, code)], (kind, agent.log)
    assert world.log(jobs[("shell", "succeeded", None)]) == "one\ntwo\n"
    assert world.log(jobs[("counted", "succeeded", None)]).strip() == "8"  # the payload as JSON
    assert world.log(jobs[("http", "succeeded", None)]).startswith("200 OK\n")
    assert world.shown(jobs[("shell", "failed", "EXIT_CODE")])["runs"][0]["exitCode"] == 7


def test_a_shell_job_has_a_clean_environment_a_limit_of_output_and_a_time_limit(world):
    host, mark = world.host(), f"3{time.time_ns() % 10**8}"
    agent = world.agent(host)
    clean = world.job(host, "shell", {"command": "/usr/bin/env", "env": {"JOB_MODE": "full"}})
    refused = world.job(host, "shell", {"command": "/usr/bin/env", "env": {"LD_PRELOAD": "x.so"}})
    long = world.job(host, "shell", {"command": [*SHELL, "yes | head -c 50000"]})
    slow = world.job(host, "shell", {"command": [*SHELL, f"sleep {mark} & sleep {mark}"]}, timeoutSeconds=1)
    names = {line.split("=")[0] for line in (world.ended(clean) and world.log(clean)).splitlines()}
    assert names == {"PATH", "LANG", "HOME", "JOB_MODE", "ECLUSE_JOB_RUN_ID"}, agent.log
    assert attempts(world.ended(refused)) == [(1, "failed", "NOT_ALLOWED")]
    assert attempts(world.ended(long)) == [(1, "succeeded", None)]
    assert world.log(long).endswith("\n[further output is not kept]\n")
    assert len(world.log(long)) < 2_100
    assert attempts(world.ended(slow)) == [(1, "failed", "TIMEOUT")]
    assert processes_with(f"sleep\0{mark}") == []


@pytest.mark.req("G-53")
def test_a_killed_agent_leaves_nothing_running_and_its_job_is_tried_again(world, tmp_path):
    host, mark, done = world.host(), f"4{time.time_ns() % 10**8}", tmp_path / "begun"
    agent = world.agent(host)
    command = [*SHELL, f"test -e {done} && exit 0; touch {done}; sleep {mark}"]
    job = world.job(host, "shell", {"command": command}, retryPolicy={"maxRetries": 1, "backoffMs": 0})
    wait_for(lambda: processes_with(f"sleep\0{mark}"))
    agent.kill()
    assert processes_with(f"sleep\0{mark}") != []
    agent.start()
    assert attempts(world.ended(job)) == [(1, "failed", "AGENT_RESTARTED"), (2, "succeeded", None)], agent.log
    assert processes_with(f"sleep\0{mark}") == []


@pytest.mark.req("G-53")
def test_a_lost_agent_is_a_failed_attempt_and_the_job_is_offered_again(world):
    host = world.host()
    agent = world.agent(host)
    job = world.job(host, "noop", {"seconds": 600}, retryPolicy={"maxRetries": 1, "backoffMs": 0})
    world.until(job, "running")
    agent.kill()
    found = wait_for(lambda: len((found := world.shown(job))["runs"]) == 2 and found)
    lost, again = found["runs"]
    assert attempts(found) == [(1, "failed", "LEASE_LOST"), (2, "pending", None)]
    late = datetime.fromisoformat(again["dueAt"]) - datetime.fromisoformat(lost["leaseEndsAt"])
    assert 0 <= late.total_seconds() <= 15


@pytest.mark.req("G-53")
def test_an_agent_that_is_cut_off_stops_its_job_before_the_lease_ends(world, tmp_path):
    host, proxy, stopped = world.host(), Proxy(world.api.port), tmp_path / "stopped"
    agent = world.agent(host, port=proxy.port)
    script = f"trap 'date +%s.%N > {stopped}; exit 1' TERM; while true; do sleep 0.02; done"
    job = world.job(host, "shell", {"command": [*SHELL, script]})
    world.until(job, "running")
    proxy.cut()
    at = float(wait_for(lambda: stopped.exists() and stopped.read_text()))
    run = world.shown(job)["runs"][0]
    assert at < datetime.fromisoformat(run["leaseEndsAt"]).timestamp()
    wait_for(lambda: agent.kept)
    proxy.mend()
    ended = world.ended(job)
    assert attempts(ended) == [(1, "failed", "LEASE_LOST")]
    wait_for(lambda: not agent.kept)
    proxy.close()


@pytest.mark.req("G-53")
def test_a_result_outlives_restarts_of_server_and_agent(dsn, tmp_path):
    flag = tmp_path / "go"
    roles = frozenset({"api", "scheduler"})
    key = new_key(dsn)
    with serving(dsn, roles=roles) as client:
        world = JobWorld(client.with_key(key), tmp_path)
        host, port = world.host(), client.port
        agent = world.agent(host)
        job = world.job(host, "shell", {"command": [*SHELL, f"while [ ! -e {flag} ]; do sleep 0.02; done; echo done"]})
        world.until(job, "running")
    flag.touch()
    wait_for(lambda: agent.kept)
    agent.kill()
    agent.start()
    with serving(dsn, roles=roles, port=port) as client:
        world.api = client.with_key(key)
        assert attempts(world.ended(job)) == [(1, "succeeded", None)], agent.log
        assert world.log(job) == "done\n"
        world.close()


def test_a_stopped_agent_lets_its_jobs_finish_and_claims_no_more(world):
    host = world.host()
    agent = world.agent(host)
    job = world.job(host, "noop", {"seconds": 1.5})
    world.until(job, "running")
    agent.signal(signal.SIGTERM)
    later = world.job(host)
    assert agent.ended() == 0
    assert attempts(world.shown(job)) == [(1, "succeeded", None)]
    assert world.shown(later)["status"] == "pending"
    idle = world.agent(world.host())
    wait_for(lambda: "serving" in idle.log)
    began = time.monotonic()
    idle.signal(signal.SIGTERM)
    assert idle.ended() == 0
    assert time.monotonic() - began < 5


def test_a_revoked_agent_stops_its_job_and_exits_until_it_is_enrolled_again(world):
    host, mark = world.host(), f"5{time.time_ns() % 10**8}"
    agent = world.agent(host)
    job = world.job(host, "shell", {"command": [*SHELL, f"sleep {mark}; true"]})
    world.until(job, "running")
    (known,) = [one for one in world.api.get("/api/jobs/agents?limit=200").json["agents"] if one["hostId"] == host]
    assert (known["online"], known["running"]) == (True, 1)
    world.made(f"/api/jobs/agents/{known['id']}/revoke", {})
    assert agent.ended() == 2
    assert "enrol the agent again, with a new token." in agent.log
    assert processes_with(f"sleep {mark}") == []
    (agent.folder / "token").write_text(world.token(host))
    agent.start()
    assert world.ended(world.job(host))["status"] == "succeeded"


def test_a_cancelled_job_is_stopped_by_its_agent(world):
    host = world.host()
    world.agent(host)
    job = world.job(host, "noop", {"seconds": 600}, retryPolicy={"maxRetries": 3})
    world.until(job, "running")
    world.made(f"/api/jobs/{job}/cancel", {})
    assert attempts(world.ended(job)) == [(1, "failed", "CANCELLED")]


def test_the_agent_is_one_file_for_a_bare_interpreter(world, tmp_path):
    target = tmp_path / "agent.pyz"
    agent_zip.write(target)
    host = world.host()
    agent = world.agent(host)
    agent.kill()
    agent.command[:3] = [sys.executable, "-S", "-I", str(target)]
    agent.start()
    url = f"http://127.0.0.1:{world.api.port}/healthz"
    jobs = [world.job(host), world.job(host, "http", {"url": url})]
    assert [world.ended(one)["status"] for one in jobs] == ["succeeded", "succeeded"], agent.log
    wrong = [*agent.command[:4], "--server", "nowhere", "--config", "/nonexistent"]
    refused = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert (refused.returncode, "/nonexistent cannot be read" in refused.stderr) == (2, True)
