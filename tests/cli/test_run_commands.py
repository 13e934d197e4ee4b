"""`ecluse runs …`: started, listed, shown, explained, ended, followed."""

from __future__ import annotations

import csv
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import psycopg
import pytest

from ecluse.cli.follow import Pace, ending, progress
from tests.support.command_line import environment

START = ("runs", "start", "hello")


def test_runs_are_started_listed_and_shown(operator, one):
    assert operator("runs", "list").err.startswith("no runs")
    operator.done("--tenant", "default", *START)
    first = operator.done(*START, "--key", "due-1", "--input", '{"articles": 3}')
    again = operator.done(*START, "--key", "due-1", "--input", '{"articles": 9}')
    assert (again["run_id"], first["deduplicated"], again["deduplicated"]) == (first["run_id"], False, True)
    shown = operator.done("runs", "show", first["run_id"])
    assert shown["input"] == {"articles": 3, "skus": [], "raise_percent": "0", "twins": False}
    head, newest, oldest = operator("runs", "list").out.splitlines()
    assert head.split()[:3] == ["id", "flow", "status"]
    assert newest.split()[:3] == [first["run_id"], "hello", "queued"]
    for option, value, others in [("--flow", "hello", "audit"), ("--state", "queued", "failed")]:
        assert len(operator.done("runs", "list", option, value)["runs"]) == 2
        assert operator.done("runs", "list", option, others)["runs"] == []
    assert oldest.split()[0] == operator.done("runs", "list", "--limit", "1", "--offset", "1")["runs"][0]["id"]
    assert one("SELECT count(*) FROM runs") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("start", "hello", "--input", "{articles: 3}"), "--input is not valid JSON"),
        (("start", "hello", "--input", ""), "--input is not valid JSON"),
        (("start", "hello", "--input", "[1]"), "input"),
        (("start", "hello", "--input", '{"articles": -1}'), "greater than or equal to 0"),
        (("start", "hello", "--input", r'{"skus": ["a\u0000b"]}'), "NUL"),
        (("start", "hello", "--input", r'{"skus": ["\ud800"]}'), "surrogates"),
        (("start", "hello", "--input", '{"articles": ' + "9" * 5000 + "}"), "--input is not valid JSON"),
        (("start", "hello", "--input", "[" * 100_000), "--input is not valid JSON"),
        (("start", "no-such-flow"), "There is no flow 'no-such-flow'"),
        (("start", "hello", "--key", "x" * 501), "key"),
        (("start", "hello", "--key", ""), "key"),
        (("start", "automation"), "automation"),
        (("show", "4711"), "There is no run 4711"),
        (("show", str(10**30)), "There is no run"),
        (("watch", "4711"), "There is no run 4711"),
        (("end", "4711", "--reason", "x", "--yes"), "There is no run 4711"),
        (("end", "1"), "missing: --reason"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_explained_and_changes_nothing(operator, one, arguments, said):
    answer = operator("runs", *arguments)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer
    assert said.lower() in answer.err.lower()
    assert one("SELECT count(*) FROM runs") == 0


def test_the_account_of_a_run_is_read_in_order(operator, query):
    run_id = operator.done(*START)["run_id"]
    assert operator("runs", "log", run_id).err.startswith("no log")
    query(
        "INSERT INTO run_log (run_id, at, level, message, data) VALUES (%(run)s, now(), 'info', 'first', NULL),"
        " (%(run)s, now(), 'error', E'second\n\x1b[31m', '{\"code\": \"X\"}')".replace("%(run)s", run_id)
    )
    lines = operator("runs", "log", run_id).out.splitlines()
    assert " first " in lines[-2]
    assert r"second\n\u001b[31m" in lines[-1]
    assert [
        row["message"] for row in operator.done("runs", "log", run_id, "--order", "desc", "--limit", "1")["log"]
    ] == ["second\n\x1b[31m"]


WAITING = """
WITH lane AS (
    INSERT INTO lanes (name, paused_at, paused_by, paused_reason) VALUES ('lane', now(), 'bob', 'night shift')
    RETURNING id),
stage AS (
    INSERT INTO stages (run_id, stage, budget, started_at, deadline_at, progress_at)
    SELECT id, 'read', 1, now(), now(), now() FROM runs RETURNING run_id)
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)
SELECT 'default', run_id, 'hello', 'read', n::text, n::text, id, now() FROM lane, stage, generate_series(1, %s) n
"""


def test_why_a_run_waits_is_explained(operator, query):
    run_id = operator.done(*START)["run_id"]
    assert "no live replica leads the run: start one that has flow hello" in operator("runs", "why", run_id).out
    query(WAITING, 3)
    shown = operator("runs", "why", run_id).out
    assert re.search(r"^summary +\S", shown, re.MULTILINE)
    assert re.search(r"^  paused +hello +read ", shown, re.MULTILINE)
    assert "night shift" in shown
    assert len(re.findall("night shift", shown)) == 2, "in the summary and of the group, not of each item"
    told = operator.done("runs", "why", run_id)
    assert (told["total"], told["groups"][0]["cause"], told["blocked"]) == (3, "paused", True)
    assert [row["key"] for row in told["waiting"]] == ["1", "2", "3"]


def test_the_outcome_of_every_target_is_a_csv_file(operator, query):
    run_id = operator.done(*START)["run_id"]
    query("INSERT INTO outcomes (run_id, target) SELECT %s, unnest(ARRAY['a', 'b'])", run_id)
    rows = list(csv.DictReader(io.StringIO(operator("runs", "outcomes", run_id).out)))
    assert [row["target"] for row in rows] == ["a", "b"]
    assert operator.done("runs", "outcomes", run_id)["rows"] == rows
    assert [row["target"] for row in operator.done("runs", "targets", run_id, "--outcome", "open")["targets"]] == [
        "a",
        "b",
    ]


@pytest.mark.req("G-89", "ENG-28", "G-73")
def test_an_operator_ends_a_run_and_its_key_is_free_again(operator, query):
    start = (*START, "--key", "monday", "--input", '{"articles": 3}')
    run_id = operator.done(*start)["run_id"]
    wanted = ("runs", "end", run_id, "--reason", "wrong catalogue")
    silent = operator(*wanted)
    assert (silent.code, silent.out) == (2, ""), "no one is there to be asked"
    assert re.search(r"^finished +0$", silent.err, re.MULTILINE), "what would happen is shown"
    assert "stdin is no terminal. Use --yes" in silent.err
    assert query("SELECT state FROM runs") == [("queued",)]
    assert operator.done(*wanted, "--yes") == {"run_id": run_id, "ended": True}
    shown = operator.done("runs", "show", run_id)
    assert (shown["status"], shown["state"], shown["reason"]) == ("failed", "cancelled", "wrong catalogue")
    assert (shown["end_cause"], shown["ended_by"]) == ("operator", "a test")
    again = operator("runs", "end", run_id, "--reason", "too late", "--yes")
    assert (again.code, "ALREADY_ENDED" in again.err) == (2, True)
    trail = (
        "SELECT tenant_id, actor LIKE 'key:%%', action, subject, reason FROM audit_trail WHERE action <> 'run.start'"
    )
    assert query(trail) == [("default", True, "run.end", f"run:{run_id}", "wrong catalogue")]
    second = operator.done(*start)
    assert (second["run_id"] != run_id, second["deduplicated"]) == (True, False)
    assert query("SELECT event_key FROM runs ORDER BY id") == [("request:monday",), ("request:monday-retry-1",)]


@pytest.fixture
def at_terminal(operator):
    """A command with a person who answers: exit code, what it printed."""

    def run(answer, *arguments):
        ours, theirs = pty.openpty()
        os.write(ours, f"{answer}\n".encode())
        command = [sys.executable, "-m", "ecluse", *arguments]
        given = environment(**operator.variables)
        done = subprocess.run(command, env=given, stdin=theirs, capture_output=True, text=True, timeout=90, check=False)
        os.close(ours)
        os.close(theirs)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.req("G-89")
def test_a_run_is_ended_by_a_yes_and_by_nothing_else(operator, at_terminal, query):
    run_id = operator.done(*START)["run_id"]
    end = ("runs", "end", run_id, "--reason", "wrong catalogue")
    code, out, err = at_terminal("n", *end)
    assert (code, out) == (1, "")
    assert "runs end: continue? [y/N]" in err
    assert "Nothing was done." in err
    assert query("SELECT state FROM runs") == [("queued",)]
    code, out, err = at_terminal("y", *end)
    assert (code, out.split()) == (0, ["run", "id", run_id, "ended", "yes"])
    assert query("SELECT state FROM runs") == [("cancelled",)]


@pytest.mark.req("G-89")
def test_a_cancelled_run_is_shown_as_on_the_pages(operator, query):
    run_id = operator.done(*START)["run_id"]
    query("INSERT INTO outcomes (run_id, target, outcome, error_code) SELECT %s, unnest(ARRAY['a', 'b']), 'failed',"
          " 'CANCELLED'", run_id)  # fmt: skip
    query("UPDATE runs SET status = 'failed', state = 'cancelled', selected = 2, successful = 0, failed = 2,"
          " ignored = 0, cancelled = 2, ended_at = now(), end_cause = 'operator', ended_by = 'ann'")  # fmt: skip
    assert operator.done("runs", "show", run_id)["status"] == "failed", "the value on the wire stays"
    assert operator("runs", "list").out.splitlines()[1].split()[:7] == [run_id, "hello", "cancelled", *"2002"]
    shown = operator("runs", "show", run_id).out
    for name, value in {"status": "cancelled", "failed": 0, "cancelled": 2}.items():
        assert re.search(rf"^{name} +{value}$", shown, re.MULTILINE)
    assert re.search(r"^a +cancelled +CANCELLED", operator("runs", "targets", run_id).out, re.MULTILINE)


def end_run(query, status, state):
    query(
        "UPDATE runs SET status = %s, state = %s, selected = 0, successful = 0, failed = 0, ignored = 0,"
        " started_at = now(), ended_at = now(), end_cause = 'normal' WHERE ended_at IS NULL",
        status,
        state,
    )


@pytest.mark.parametrize(
    ("status", "state", "code"), [("completed", "succeeded", 0), ("partial", "partial", 1), ("failed", "failed", 1)]
)
def test_the_exit_code_says_how_the_run_ended(operator, query, status, state, code):
    run_id = operator.done(*START)["run_id"]
    end_run(query, status, state)
    answer = operator("runs", "watch", run_id)
    assert answer.code == code
    assert answer.out.startswith(f"run {run_id} hello: {status} in 0.0 s: 0 = 0 successful + 0 failed + 0 ignored")
    told = operator("runs", "watch", run_id, "--json")
    assert (told.code, told.json["status"]) == (code, status)


def test_a_run_that_stays_open_is_exit_code_4(operator):
    late = operator(*START, "--wait", "--timeout", "0.3")
    assert (late.code, late.out) == (4, "")
    said = r"run (\d+) hello queued\nrun \1 is queued after 0.3 s and continues. Stopped following it; `ecluse runs "
    assert re.match(said, late.err)
    assert operator(*START, "--wait", "--timeout", "0.3", "--json").json["status"] == "queued"


@pytest.fixture
def watching(operator):
    """`ecluse runs watch …` in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def watch(run_id, **options):
        command = [sys.executable, "-m", "ecluse", "runs", "watch", run_id]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        started.append(subprocess.Popen(command, env=environment(**operator.variables), text=True, **streams))
        return started[-1]

    yield watch
    for process in started:
        with process:
            if process.poll() is None:
                process.kill()


def test_a_run_is_followed_through_an_outage_of_the_database_until_it_ends(operator, watching, query, server, one):
    run_id = operator.done(*START)["run_id"]
    process = watching(run_id)
    assert process.stderr.readline() == f"run {run_id} hello queued\n"
    name = one("SELECT current_database()")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")  # type: ignore[arg-type]
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        assert "retrying: The database is unavailable. (DATABASE_AWAY" in process.stderr.readline()
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")  # type: ignore[arg-type]
    query("UPDATE runs SET status = 'running', state = 'running', phase = 'reading'")
    assert process.stderr.readline() == f"run {run_id} hello running | reading\n"
    end_run(query, "completed", "succeeded")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, "completed" in out) == (0, True)


def test_at_a_terminal_one_line_is_rewritten_and_an_interrupt_says_how_to_go_on(operator, watching):
    run_id = operator.done(*START)["run_id"]
    ours, theirs = pty.openpty()
    process = watching(run_id, stderr=theirs)
    os.close(theirs)
    seen: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 1000):
                seen.append(part)
        except OSError:  # its side is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    until = time.monotonic() + 30
    while b"queued" not in b"".join(seen) and time.monotonic() < until:
        time.sleep(0.02)
    assert b"".join(seen).startswith(b"\r\x1b[K")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    reader.join(10)
    os.close(ours)
    assert f"`ecluse runs watch {run_id}` follows it again".encode() in b"".join(seen)


def run_of(**stage):
    facts = {"stage": "read", "expected": 200, "done": 0, "failed": 0, "ignored": 0, "in_flight": 0, "waiting": 0}
    facts |= {"round": 0, "ended_at": None, "end_cause": None} | stage
    run = {"id": "7", "flow": "hello", "status": "running", "phase": None, "stages": [facts]}
    return run | {"will_fail": {"count": 0, "codes": {}}}


def test_a_line_tells_counts_pace_and_what_is_left():
    pace: dict[str, Pace] = {}
    assert progress(run_of(waiting=200), pace, 100.0) == (
        "run 7 hello running | read 0/200 (0 %), 0 failed, 0 ignored, 0 in flight, 200 waiting, 0/s"
    )
    said = progress(run_of(done=47, failed=3, in_flight=10, waiting=140), pace, 105.0)
    assert said.endswith("read 50/200 (25 %), 3 failed, 0 ignored, 10 in flight, 140 waiting, 10/s, 0:00:15 left")
    drawn = progress(run_of(done=50, waiting=150), {}, 100.0, bar=True)
    assert "read █████░░░░░░░░░░░░░░░ 50/200 (25 %)" in drawn
    assert progress(run_of(done=200, ended_at="x", end_cause="done"), pace, 106.0).endswith("| read done 200/200")
    failed = progress(run_of(done=176, failed=24, ended_at="x", end_cause="done"), pace, 107.0)
    assert failed.endswith("| read done 200/200, 24 failed")


def test_a_line_tells_how_many_will_fail_and_why():
    run = run_of(waiting=200) | {"will_fail": {"count": 3, "codes": {"NO_URL": 2, "DOWN": 1}}}
    assert progress(run, {}, 100.0).endswith(" | 3 will fail (2 NO_URL, 1 DOWN)")


def test_the_pace_is_of_the_last_seconds_only():
    pace = Pace()
    for second in range(100):
        rate = pace.per_second(float(second), 10 * second if second < 50 else 500)
    assert rate == 0


def test_the_end_is_summed_up_by_reason():
    run = {"id": "7", "flow": "hello", "status": "partial", "state": "partial", "reason": "x\x1b", "selected": 3,
           "successful": 1, "failed": 2, "ignored": 0, "outcomes": {"successful": 1, "DOWN": 2}, "started_at": None,
           "created_at": "2026-01-01T00:00:00Z", "ended_at": "2026-01-01T00:00:02Z", "cancelled": 0}  # fmt: skip
    assert ending(run | {"ended_by": None}).splitlines() == [
        "run 7 hello: partial in 2.0 s (x\\u001b): 3 = 1 successful + 2 failed + 0 ignored",
        "         2  DOWN",
        "         1  successful",
    ]
    incomplete = ending(run | {"ended_by": None, "selection_incomplete": "CRM answered 401 for 2026-01-01"})
    assert incomplete.endswith("\n  selection incomplete: CRM answered 401 for 2026-01-01")
    cancelled = ending(run | {"state": "cancelled", "ended_by": "run:9", "cancelled": 2, "reason": None})
    assert "cancelled with run 9 in 2.0 s: 3 = 1 successful + 0 failed + 2 cancelled + 0 ignored" in cancelled
