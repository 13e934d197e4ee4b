"""Two replicas with a role that owns its database and may nothing else, on whatever server the tests run on."""

from __future__ import annotations

import os
import signal
import time
import uuid

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.command_line import Server
from tests.support.servers import OWNER_URL, database, ordinary_role

FICHES = [str(number) for number in range(1000, 1012)]
KNOBS = {
    "CRM_API_KEY": "key",
    "ELEVENLABS_API_KEY": "key",
    "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": "60000",
    "AUTOMATION_TRANSCRIPTION_POLL_INTERVAL_SECONDS": "1",
    "ECLUSE_HEARTBEAT_SECONDS": "0.5",
    "ECLUSE_DEAD_AFTER_SECONDS": "2",
    "ECLUSE_LOG_LEVEL": "WARNING",
}
LEADER = """
SELECT p.pid FROM dbos.workflow_status w JOIN replicas p ON p.id = w.executor_id
WHERE w.workflow_uuid LIKE 'default/automation-%' AND w.status = 'PENDING'
"""


@pytest.fixture
def owned(server):
    """An empty database, and its owner."""
    with ordinary_role(server) as role:
        if role is None:
            pytest.skip(f"the role of DATABASE_URL is no superuser: name a role that it is a member of in {OWNER_URL}")
        user, password = role
        name = f"ecluse_owned_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        with database(server, name, "template0", owner=user) as dsn:
            yield make_conninfo(dsn, user=user, password=password)


@pytest.fixture
def knobs(owned, sandbox):
    return KNOBS | {
        "DATABASE_URL": owned,
        "CRM_BASE_URL": f"{sandbox.url}/crm",
        "ELEVENLABS_BASE_URL": f"{sandbox.url}/elevenlabs",
    }


@pytest.fixture
def replicas(knobs, fork_server):
    servers = []

    def start():
        servers.append(Server(fork_server, **knobs))
        return servers[-1]

    yield start
    for one in servers:
        if one.process.poll() is None:
            one.end(signal.SIGKILL)


def wait_for(true, what, seconds=90):
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, what
        time.sleep(0.05)
    return found


def test_a_schedule_survives_the_death_of_a_replica_although_the_role_owns_only_its_database(
    owned, knobs, replicas, sandbox, fork_server
):
    def ecluse(*arguments):
        code, out, err = fork_server.run("ecluse", arguments, knobs)
        assert code == 0, (arguments, out, err)
        return out

    def query(sql):
        with psycopg.connect(owned, autocommit=True) as connection:
            return connection.execute(sql).fetchall()

    may = "SELECT rolsuper, rolcreatedb, rolcreaterole FROM pg_roles WHERE rolname = current_user"
    assert query(may) == [(False, False, False)]
    sandbox.set_faults([{"kind": "latency", "seconds": 1.0, "vendor": "elevenlabs"}])
    ecluse("migrate")
    both = [replicas(), replicas()]
    for one in both:
        one.wait_until_ready()
    both[0].done("schedules", "create", "automation", "--name", "first", "--mode", "manual",
                 "--fiches", ",".join(FICHES), "--no-run-audits")  # fmt: skip
    ((schedule,),) = query("SELECT id FROM schedules")
    both[0].done("schedules", "run", str(schedule))
    wait_for(lambda: len(sandbox.ledger(vendor="elevenlabs", kind="paid")) >= 3, "nothing is transcribed")
    ((pid,),) = wait_for(lambda: query(LEADER), "no replica leads the run")
    (leader,) = [one for one in both if one.process.pid == pid]
    assert leader.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert query("SELECT count(*) > 0 FROM items WHERE status = 'open'") == [(True,)], "it was over before the kill"
    sandbox.set_faults([])
    ended = "SELECT status, selected, successful_fiches FROM automation_runs WHERE completed_at IS NOT NULL"
    assert wait_for(lambda: query(ended), "no replica continues the run") == [("completed", len(FICHES), len(FICHES))]
    assert query("SELECT count(*) FROM replicas WHERE state = 'dead'") == [(1,)]
    assert "clean" in ecluse("verify", "--ledger", sandbox.url)
