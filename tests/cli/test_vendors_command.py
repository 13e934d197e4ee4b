"""`ecluse vendors …`: lanes looked at, paused and resumed by an operator."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

LANES = """
INSERT INTO lanes (name, max_in_flight, per_second, burst, held_until, held_reason) VALUES
    ('crm', NULL, NULL, 1, now() + interval '1 hour', 'Retry-After: 429'), ('speech', 5, 10 / 60.0, 2, NULL, NULL)
"""


def test_every_lane_is_shown_with_its_caps_and_why_nothing_starts(ecluse, query):
    assert "no lanes yet" in ecluse("vendors", "list").out
    query(LANES)
    crm, speech = ecluse("vendors", "list").out.splitlines()
    assert crm.startswith("crm ")
    assert "no caps" in crm
    assert "HELD until" in crm
    assert crm.endswith("Retry-After: 429")
    assert "max 5 in flight, 10/min burst 2" in speech
    assert speech.endswith("0 waiting  open")


def test_an_operator_pauses_and_resumes_a_lane_by_its_name(ecluse, query, one):
    query(LANES)
    assert ecluse("vendors", "pause", "speech", "--reason", "invoice unpaid").code == 0
    by, reason = one("SELECT paused_by, paused_reason FROM lanes WHERE paused_at IS NOT NULL")
    assert (by.split(":")[0], reason) == ("cli", "invoice unpaid")
    assert f"PAUSED by {by} at " in ecluse("vendors", "list").out
    assert ecluse("vendors", "resume", "speech", "--reason", "paid").out == "lane speech is resumed\n"
    assert one("SELECT count(*) FROM lanes WHERE paused_at IS NOT NULL") == 0
    assert query("SELECT actor, action, subject, reason FROM audit_trail ORDER BY id") == [
        (by, "lane.pause", "lane:speech", "invoice unpaid"),
        (by, "lane.resume", "lane:speech", "paid"),
    ]
    assert "lane speech is not paused" in ecluse("vendors", "resume", "speech", "--reason", "paid").err


RUN = """
WITH run AS (
    INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, started_at)
    VALUES ('default', 'automation', 'a', true, 'running', 'running', now(), now()) RETURNING id),
stage AS (
    INSERT INTO stages (run_id, stage, started_at, deadline_at, progress_at)
    SELECT id, 'audit', now(), '2030-01-02 03:04:05Z', now() FROM run)
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)
SELECT 'default', run.id, 'automation', 'audit', 'k', 'k', l.id, now() FROM run, lanes l WHERE l.name = 'speech'
"""


def test_a_pause_names_the_runs_that_will_fail_and_when(ecluse, query, one):
    query(LANES)
    query(RUN)
    run = one("SELECT id FROM runs")
    answer = ecluse("vendors", "pause", "speech", "--reason", "invoice unpaid", "--yes")
    assert answer.code == 0
    told = f"run {run} (automation, default): stage audit fails items that still wait at 2030-01-02 03:04:05+0000"
    assert answer.err.splitlines()[0] == told
    assert ecluse("vendors", "resume", "speech", "--reason", "paid").out == "lane speech is resumed\n"
    assert one("SELECT deadline_at::text FROM stages").startswith("2030-01-02 03:04:05")


def test_of_many_runs_that_a_pause_concerns_twenty_are_named_and_the_others_counted(ecluse, query):
    query(LANES)
    for n in range(23):
        query(RUN.replace("'a'", f"'a-{n}'"))
    assert ecluse("vendors", "pause", "speech", "--reason", "unpaid", "--yes").err.splitlines()[20] == "and 3 more"
    query("UPDATE stages SET started_at = now() - interval '1 day'")
    query("UPDATE lanes SET clock_stopped_at = now() - interval '1 hour' WHERE name = 'speech'")
    _, *moved, more = ecluse("vendors", "resume", "speech", "--reason", "paid").out.splitlines()
    assert (len(moved), more) == (20, "and 3 more")


@pytest.mark.parametrize(("said", "code", "paused"), [("n", 1, 0), ("y", 0, 1)])
def test_on_a_terminal_it_asks_first_if_runs_may_fail(dsn, query, one, said, code, paused):
    query(LANES)
    query(RUN)
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "ecluse", "vendors", "pause", "speech", "--reason", "x"]
    streams = {"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"DATABASE_URL": dsn}, text=True, **streams) as process:
        os.write(terminal, f"{said}\n".encode())
        out, err = process.communicate(timeout=60)
    for end in (terminal, theirs):
        os.close(end)
    assert ("Pause the lane anyway?" in err, "Pause the lane" in out) == (True, False)
    assert "stage audit fails items that still wait at" in err
    assert (process.returncode, one("SELECT count(*) FROM lanes WHERE paused_at IS NOT NULL")) == (code, paused)


def test_without_a_terminal_a_pause_that_may_fail_runs_has_to_be_confirmed(ecluse, query, one):
    query(LANES)
    query(RUN)
    refused = ecluse("vendors", "pause", "speech", "--reason", "x")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert one("SELECT count(*) FROM lanes WHERE paused_at IS NOT NULL") == 0


def test_a_pause_may_stop_the_clock_and_the_resume_says_what_it_moved(ecluse, query, one):
    query(LANES)
    query(RUN)
    run = one("SELECT id FROM runs")
    answer = ecluse("vendors", "pause", "speech", "--reason", "invoice unpaid", "--stop-clock")
    assert answer.err.endswith("\nthe clock of stages that need the lane is stopped until then: 1 runs now\n")
    assert "fails" not in answer.err
    assert ", clock stopped: invoice unpaid" in ecluse("vendors", "list").out
    assert one("SELECT reason FROM audit_trail") == "invoice unpaid (clock stopped)"
    query("UPDATE stages SET started_at = now() - interval '1 day'")
    query("UPDATE lanes SET clock_stopped_at = now() - interval '1 hour' WHERE name = 'speech'")
    resumed, moved = ecluse("vendors", "resume", "speech", "--reason", "paid").out.splitlines()
    assert resumed == "lane speech is resumed"
    assert moved.startswith(f"run {run} (automation, default): stage audit has the deadline 2030-01-02 04:0")
    assert ": its clock was stopped for 1:00:" in moved


def test_a_vendor_that_is_down_is_listed_as_such_with_since_when_and_why(ecluse, query):
    query(LANES)
    query(
        "UPDATE lanes SET failures = 5, trips = 3, failing_since = '2026-03-01 10:02:11Z', last_failure = '503 gone',"
        " held_until = now() + interval '1 hour', held_reason = 'Circuit breaker triggered' WHERE name = 'speech'"
    )
    speech = ecluse("vendors", "list").out.splitlines()[1]
    assert "DOWN since 2026-03-01 10:02:11+0000, probed at 20" in speech
    assert speech.endswith(": 503 gone")
    query("UPDATE lanes SET held_until = NULL")
    assert "+0000, probed with the next call: 503 gone" in ecluse("vendors", "list").out


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_an_unknown_lane_is_exit_code_2_and_the_known_ones_are_named(ecluse, query, command):
    query(LANES)
    answer = ecluse("vendors", command, "speach", "--reason", "x")
    assert (answer.code, answer.err) == (2, "ecluse: There is no lane 'speach' (known: crm, speech).\n")
