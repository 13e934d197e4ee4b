"""A real server process: it takes up what it is asked for, and leaves nothing behind when it is told to go."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

from tests.support.command_line import Server
from tests.support.processes import assert_nothing_runs

pytestmark = pytest.mark.long

FLOW = "hello_flow:FLOW"
PATIENCE = 30.0


@pytest.fixture
def hello(serve, sandbox):
    """A server of the example flow, ready, with the sandbox as its vendor."""

    def start(**variables: str) -> Server:
        server = serve("--flow", FLOW, PRICE_LIST_URL=f"{sandbox.url}/price-list", **variables)
        server.wait_until_ready()
        return server

    return start


def wait_for(condition):
    until = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return value


def test_a_run_started_from_the_command_line_is_taken_up_at_once_and_the_server_leaves_in_peace(
    hello, sandbox, one, query
):
    server = hello()
    status, ready = server.get("/readyz")
    assert (status, ready["status"]) == (200, "ready")
    status, health = server.get("/healthz")
    assert (status, health["status"]) == (200, "ok")
    assert one("SELECT id, state FROM replicas") == (ready["replica"], "live")

    began = time.monotonic()
    run_id = server.done("runs", "start", "hello", "--input", json.dumps({"articles": 40}))["run_id"]
    wait_for(lambda: sandbox.ledger(kind="call"))
    print(f"{time.monotonic() - began:.2f} s from the start of the command to the first vendor call")  # pytest -rP
    wait_for(lambda: one("SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", run_id))

    shown = server.done("runs", "show", run_id)
    counts = [shown[name] for name in ("status", "selected", "successful", "failed", "ignored")]
    assert counts == ["completed", 40, 40, 0, 0]
    assert one("SELECT count(*) FROM hello_prices") == 40
    assert len(sandbox.ledger(kind="call")) == 40
    assert "completed" in server.ecluse("runs", "list").out

    code, seconds, said = server.end(signal.SIGTERM)
    assert code == 0, said
    assert seconds < 10
    assert "Traceback" not in said
    assert query("SELECT id, state FROM replicas") == [(ready["replica"], "left")]


def test_a_server_that_is_told_to_go_gives_back_what_it_has_in_hand(hello, sandbox, one, query):
    sandbox.set_faults([{"kind": "latency", "seconds": 20}])
    server = hello(ECLUSE_HANDS="20")
    run_id = server.done("runs", "start", "hello", "--input", '{"articles": 60}')["run_id"]
    wait_for(lambda: one("SELECT coalesce(sum(in_flight), 0) FROM claims") >= 20)

    code, seconds, said = server.end(signal.SIGTERM)
    assert code == 0, said
    assert seconds < 10
    assert "Traceback" not in said
    assert query("SELECT state FROM replicas") == [("left",)]
    assert one("SELECT sum(in_flight) FROM claims") == 0
    assert query("SELECT status, claim_id IS NULL, count(*), sum(crashes) FROM items GROUP BY 1, 2") == [
        ("open", True, 60, 0)
    ]

    sandbox.set_faults([])
    successor = hello()
    wait_for(lambda: one("SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", run_id))
    assert one("SELECT status, successful FROM runs WHERE id = %s", run_id) == ("completed", 60)
    code, _, said = successor.end(signal.SIGINT)
    assert code == 0, said
    assert "Traceback" not in said


def test_a_server_whose_engine_broke_ends_with_an_error_so_that_a_supervisor_starts_it_again(serve, query):
    server = serve()
    server.wait_until_ready()
    query("ALTER TABLE runs RENAME COLUMN orchestrated TO gone")
    query("SELECT pg_notify('ecluse_runs', '')")
    server.process.wait(PATIENCE)
    code, _, said = server.end()
    assert code == 70, said
    assert "engine: loop died" in said
    assert query("SELECT state FROM replicas") == [("left",)]


@pytest.mark.req("G-02")
def test_a_server_starts_its_embedded_database_again_when_that_dies_and_the_run_goes_on(sandbox, fork_server):
    sandbox.set_faults([{"kind": "latency", "seconds": 0.1}])
    folder = Path(tempfile.mkdtemp(prefix="ecl-")).resolve()
    folder.chmod(0o711)
    variables = {"ECLUSE_DATA_DIR": str(folder / "data"), "PRICE_LIST_URL": f"{sandbox.url}/price-list"}
    server = Server(fork_server, "--flow", FLOW, ECLUSE_HANDS="5", **variables)
    try:
        server.wait_until_ready()
        dsn = f"postgresql://ecluse@/ecluse?host={folder}/data/run"
        server.done("runs", "start", "hello", "--input", '{"articles": 150}')

        def ask(sql: str):
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as connection:
                return connection.execute(sql).fetchone()

        wait_for(lambda: (ask("SELECT count(*) FROM items WHERE status = 'succeeded'") or [0])[0] > 20)
        os.kill(int((folder / "data/pg/postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        wait_for(lambda: (ask("SELECT ended_at IS NOT NULL FROM runs") or [False])[0])
        assert ask("SELECT status, selected, successful FROM runs") == ("completed", 150, 150)
        assert ask("SELECT count(*), bool_and(state = 'live') FROM replicas") == (1, True), "the server did not leave"
        code, _, said = server.end(signal.SIGTERM)
        assert code == 0, said
        assert_nothing_runs(folder)
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.req("G-02")
def test_a_server_on_the_embedded_database_stops_it_when_it_is_told_to_go(fork_server):
    folder = Path(tempfile.mkdtemp(prefix="ecl-")).resolve()
    folder.chmod(0o711)
    server = Server(fork_server, ECLUSE_DATA_DIR=str(folder / "data"))
    try:
        server.wait_until_ready()
        assert subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, check=False).stdout
        code, _, said = server.end(signal.SIGTERM)
        assert code == 0, said
        assert_nothing_runs(folder)
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
        shutil.rmtree(folder)
