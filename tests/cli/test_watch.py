"""Following a run from another process: lines, exit codes, and a database that goes away in between."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ecluse.cli.watch import Pace, ending, line
from tests.support.command_line import environment

FLOW = "hello_flow:FLOW"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
END = "UPDATE runs SET status = %s, state = %s, selected = 0, successful = 0, failed = 0, ignored = 0,"


@pytest.fixture
def run_id(ecluse):
    return ecluse("runs", "start", FLOW).json["run_id"]


@pytest.fixture
def watching(dsn):
    """`ecluse runs watch …` in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def watch(run_id, **options):
        command = [sys.executable, "-m", "ecluse", "runs", "watch", run_id, "--every", "0.1"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        started.append(subprocess.Popen(command, env=environment(DATABASE_URL=dsn), text=True, **streams))
        return started[-1]

    yield watch
    for process in started:
        with process:
            if process.poll() is None:
                process.kill()


def end_run(query, status, state):
    query(f"{END} started_at = now(), ended_at = now(), end_cause = 'normal' WHERE ended_at IS NULL", status, state)


@pytest.mark.parametrize(
    ("status", "state", "code"), [("completed", "succeeded", 0), ("partial", "partial", 1), ("failed", "failed", 1)]
)
def test_the_exit_code_says_how_the_run_ended(ecluse, run_id, query, status, state, code):
    end_run(query, status, state)
    answer = ecluse("runs", "watch", run_id)
    assert answer.code == code
    assert answer.out.startswith(f"run {run_id} hello: {status} in 0.0 s: 0 = 0 successful + 0 failed + 0 ignored")


WORKER = """
INSERT INTO replicas (id, host, pid, roles, work, beat_at)
VALUES (%s, 'here', 1, '{worker}', ARRAY[%s], clock_timestamp() + %s::interval)
"""


def test_a_run_that_no_worker_can_go_on_with_is_not_followed_for_ever(watching, run_id, query, ecluse):
    query(WORKER, "of another flow", "other/read", "1 day")
    query(WORKER, "silent", "hello/read", "-1 minute")
    process = watching(run_id)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (4, f"run {run_id} hello queued\n")
    assert "no worker of its flow is live: start one with `ecluse serve`" in err
    query(WORKER, "live", "hello/read", "1 day")
    late = ecluse("runs", "watch", run_id, "--timeout", "0.5", "--every", "0.1")
    assert (late.code, late.err.startswith(f"run {run_id} is queued after 0.5 s and continues.")) == (4, True)


def test_a_run_that_does_not_exist(ecluse, bare, empty_dsn):
    assert (ecluse("runs", "watch", "4711").code, ecluse("runs", "watch", "4711").out) == (2, "")
    assert bare("runs", "watch", "4711", DATABASE_URL=empty_dsn).code == 2


def test_a_run_is_followed_through_a_restart_of_the_database_until_it_ends(run_id, watching, query, server, one):
    query(WORKER, "live", "hello/read", "1 day")
    process = watching(run_id)
    assert process.stdout.readline() == f"run {run_id} hello queued\n"
    name = one("SELECT current_database()")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")  # type: ignore[arg-type]
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        assert "database unavailable" in process.stderr.readline()
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")  # type: ignore[arg-type]
    query("UPDATE runs SET status = 'running', state = 'running', phase = 'reading'")
    assert process.stdout.readline() == f"run {run_id} hello running | reading\n"
    end_run(query, "completed", "succeeded")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert "completed" in out


def test_at_a_terminal_one_line_is_rewritten(run_id, watching, query):
    ours, theirs = pty.openpty()
    process = watching(run_id, stdout=theirs)
    os.close(theirs)
    seen, until = b"", time.monotonic() + 30
    while b"queued" not in seen and time.monotonic() < until:
        seen += os.read(ours, 1000)
    assert seen.startswith(b"\r\x1b[K")
    end_run(query, "completed", "succeeded")
    with contextlib.suppress(OSError):  # its side is closed
        while True:
            seen += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(30) == 0
    assert seen.count(b"\n") == 1


def run_of(**stage):
    facts = {"stage": "read", "expected": 200, "done": 0, "failed": 0, "ignored": 0, "in_flight": 0, "waiting": 0}
    facts |= {"round": 0, "ended_at": None, "end_cause": None} | stage
    run = {"id": 7, "flow": "hello", "status": "running", "phase": None, "stages": [facts]}
    return run | {"will_fail": {"count": 0, "codes": {}}}


def test_a_line_tells_counts_pace_and_what_is_left():
    pace: dict[str, Pace] = {}
    assert line(run_of(waiting=200), pace, 100.0) == (
        "run 7 hello running | read 0/200 (0 %), 0 failed, 0 ignored, 0 in flight, 200 waiting, 0/s"
    )
    said = line(run_of(done=47, failed=3, in_flight=10, waiting=140), pace, 105.0)
    assert said.endswith("read 50/200 (25 %), 3 failed, 0 ignored, 10 in flight, 140 waiting, 10/s, 0:00:15 left")
    assert line(run_of(done=200, ended_at=NOW, end_cause="done"), pace, 106.0).endswith("| read done 200/200")


def test_a_line_tells_how_many_will_fail_and_why():
    run = run_of(waiting=200) | {"will_fail": {"count": 3, "codes": {"NO_URL": 2, "DOWN": 1}}}
    assert line(run, {}, 100.0).endswith(" | 3 will fail (2 NO_URL, 1 DOWN)")


def test_the_pace_is_of_the_last_seconds_only():
    pace = Pace()
    for second in range(100):
        rate = pace.per_second(float(second), 10 * second if second < 50 else 500)
    assert rate == 0


def test_the_end_is_summed_up_by_reason():
    run = {
        "id": 7,
        "flow": "hello",
        "status": "partial",
        "state": "partial",
        "reason": "x\x1b",
        "selected": 3,
        "successful": 1,
        "failed": 2,
    }
    run |= {"ignored": 0, "outcomes": {"successful": 1, "DOWN": 2}, "created_at": NOW, "started_at": None}
    run |= {"state": "partial", "cancelled": 0, "ended_by": None}
    assert ending(run | {"ended_at": NOW + timedelta(seconds=2)}).splitlines() == [
        "run 7 hello: partial in 2.0 s (x\\u001b): 3 = 1 successful + 2 failed + 0 ignored",
        "         2  DOWN",
        "         1  successful",
    ]
