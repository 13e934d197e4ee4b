"""Commands that ask before they act, at a terminal: what will happen is said first, and a no changes nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tests.cli.test_automation_command import HOPELESS, ended
from tests.support.command_line import environment

FLOW = "hello_flow.flow:FLOW"


@pytest.fixture
def at_terminal(dsn):
    """A command with a person who answers: exit code, what it printed."""

    def run(answer, *arguments):
        ours, theirs = pty.openpty()
        os.write(ours, f"{answer}\n".encode())
        done = subprocess.run(
            [sys.executable, "-m", "ecluse", *arguments],
            env=environment(DATABASE_URL=dsn),
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=60,
        )
        os.close(ours)
        os.close(theirs)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.req("G-89")
def test_a_run_is_ended_by_a_yes_and_by_nothing_else(ecluse, at_terminal, query):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    end = ("runs", "end", run_id, "--reason", "wrong catalogue", "--flow", FLOW)
    code, out, err = at_terminal("n", *end)
    assert (code, out.strip()) == (1, "")
    assert "will be cancelled: 0 targets are finished" in err
    assert f"Cancel run {run_id}?" in err
    assert query("SELECT state FROM runs") == [("queued",)]
    code, out, err = at_terminal("y", *end)
    assert (code, f"run {run_id}: cancelled by cli:" in out) == (0, True)
    assert query("SELECT state FROM runs") == [("cancelled",)]


def test_a_fiche_is_erased_by_a_yes_and_by_nothing_else(at_terminal, query):
    query("INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at) VALUES ('default', '7', now(), now())")
    for answer, code, left in (("n", 1, 1), ("y", 0, 0)):
        said, _, err = at_terminal(answer, "erase", "fiche", "7")
        assert (said, "Erase fiche 7?" in err) == (code, True)
        assert query("SELECT count(*) FROM fiche_cache") == [(left,)]


def test_who_redrives_may_leave_out_what_cannot_succeed(ecluse, at_terminal, dsn, query):
    schedule = ecluse("automation", "schedules", "create", "--name", "two", "--fiches", "1 2").json["schedule_id"]
    run = ecluse("automation", "trigger", schedule).json["run_id"]
    ended(dsn, run, f1="failed", f2="failed")
    for statement in HOPELESS:
        query(statement.replace("RUN", run))
    code, _, err = at_terminal("y", "automation", "redrive", run)
    assert (code, "Leave them out?" in err) == (0, True)
    given = "SELECT input->'override_fiche_selection'->'fiche_ids' FROM runs WHERE redrive_of = %s"
    assert query(given, int(run)) == [(["2"],)]
