"""What each command prints and leaves behind when all is well."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import time

import psycopg
import pytest

from tests.support.command_line import environment
from tests.support.servers import HEAD

FLOW = "hello_flow:FLOW"
COMMANDS = [
    (),
    ("serve",),
    ("migrate",),
    ("psql",),
    ("sandbox",),
    ("verify",),
    ("doctor",),
    ("demo",),
    ("demo", "automation"),
    ("demo", "hello"),
    ("demo", "transcription"),
    ("runs",),
    ("runs", "start"),
    ("runs", "end"),
    ("runs", "list"),
    ("runs", "show"),
    ("runs", "log"),
    ("runs", "watch"),
    ("runs", "why"),
    ("tenants",),
    ("tenants", "create"),
    ("tenants", "list"),
    ("tenants", "disable"),
    ("tenants", "enable"),
    ("keys",),
    ("keys", "create"),
    ("keys", "list"),
    ("keys", "revoke"),
    ("leases",),
    ("leases", "list"),
    ("leases", "release"),
    ("notifications",),
    *(("notifications", name) for name in ("endpoints", "deliveries", "redeliver")),
    ("schedules",),
    *(("schedules", name) for name in ("create", "list", "show", "preview", "enable", "disable", "delete", "run")),
    ("fiches",),
    ("fiches", "list"),
    ("fiches", "show"),
    ("transcriptions",),
    *(("transcriptions", name) for name in ("start", "batch", "status", "logs")),
    ("realtime",),
    ("realtime", "show"),
    ("automation",),
    *(("automation", name) for name in ("trigger", "runs", "show", "logs", "fiches", "redrive")),
    ("automation", "schedules"),
    *(
        ("automation", "schedules", name)
        for name in ("create", "list", "show", "update", "rotate-secret", "preview", "enable", "disable", "delete")
    ),
    ("audits",),
    *(("audits", name) for name in ("configs", "list", "show", "run")),
    ("vendors",),
    ("vendors", "list"),
    ("vendors", "pause"),
    ("vendors", "resume"),
    ("prune",),
    ("erase",),
    ("erase", "fiche"),
    ("erase", "tenant"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_without_a_database(bare, command):
    answer = bare(*command, "--help", DATABASE_URL="nonsense")
    assert (answer.code, answer.err) == (0, "")
    assert "Usage: " in answer.out
    assert " ".join(("ecluse", *command)) in answer.out


def test_the_list_of_commands_here_is_complete(bare):
    groups = ("runs", "demo", "tenants", "keys", "leases", "schedules", "fiches", "transcriptions", "vendors")
    groups += ("audits", "realtime", "notifications", "automation", "erase")
    shown = bare("--help").out + "".join(bare(group, "--help").out for group in groups)
    shown += bare("automation", "schedules", "--help").out
    listed = {line.split()[1] for line in shown.splitlines() if line.startswith("│ ") and line[2].isalpha()}
    assert listed == {command[-1] for command in COMMANDS if command}


def test_commands_that_only_look_do_not_wait_for_what_they_do_not_use():
    """The orchestration and the migrations take longer to import than all the rest."""
    code = (
        "import sys; import ecluse.cli.main, ecluse.cli.watch, ecluse.cli.doctor;"
        "print(*{'dbos', 'alembic', 'sqlalchemy', 'fastapi', 'uvicorn', 'prometheus_client'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_installed_module_is_the_same_program(dsn):
    command = [sys.executable, "-m", "ecluse", "migrate"]
    done = subprocess.run(command, env=environment(DATABASE_URL=dsn), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"schema {HEAD}\n", "")


def test_migrate_makes_the_schema_and_the_tables_of_the_flows_named(bare, empty_dsn):
    for _ in range(2):
        answer = bare("migrate", "--flow", FLOW, DATABASE_URL=empty_dsn)
        assert (answer.code, answer.out, answer.err) == (0, f"schema {HEAD}\n", "")
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM hello_prices").fetchone() == (0,)


def test_flows_may_be_named_in_the_environment_too(ecluse, one):
    assert ecluse("migrate", ECLUSE_FLOWS=f" {FLOW} ,").code == 0
    assert one("SELECT count(*) FROM hello_prices") == 0
    assert ecluse("runs", "start", "hello", ECLUSE_FLOWS=FLOW).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [
        (["-Atc", "select 41 + 1"], 0, "42\n"),
        (["-A", "-t", "-c", "select 1", "-c", "select 2"], 0, "1\n2\n"),
        (["-v", "ON_ERROR_STOP=1", "-c", "select no_such_column"], 1, ""),
    ],
)
def test_psql_gets_the_further_arguments_and_its_exit_code_is_ours(ecluse, arguments, code, out):
    answer = ecluse("psql", *arguments)
    assert (answer.code, answer.out) == (code, out)


def test_psql_prints_tables_for_people(ecluse):
    answer = ecluse("psql", "-c", "select 1 as answer")
    assert answer.code == 0
    assert "answer" in answer.out
    assert "(1 row)" in answer.out


def test_psql_does_not_show_the_password_to_everybody_on_the_machine(ecluse, dsn):
    with_password = psycopg.conninfo.make_conninfo(dsn, password="s3cr3t")  # noqa: S106 - not a real one
    shown = ecluse(
        "psql", "-Atc", r"\! tr '\0' ' ' </proc/$PPID/cmdline; echo; echo $PGPASSWORD", DATABASE_URL=with_password
    )
    command_line, password = shown.out.splitlines()
    assert "psql" in command_line
    assert "s3cr3t" not in command_line
    assert password == "s3cr3t"  # noqa: S105


def test_an_interrupt_stops_the_query_and_is_left_to_psql(dsn, query):
    """As Ctrl-C does: everybody in the foreground hears it."""
    command = [sys.executable, "-m", "ecluse", "psql", "-c", "select pg_sleep(60)"]
    with subprocess.Popen(
        command, env=environment(DATABASE_URL=dsn), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        sleeping = "SELECT 1 FROM pg_stat_activity WHERE query = 'select pg_sleep(60)' AND state = 'active'"
        until = time.monotonic() + 20
        while not query(sleeping) and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert "canceling statement due to user request" in said
    assert "Traceback" not in said
    assert process.returncode == 1


def test_runs_are_started_listed_and_shown(ecluse, one):
    empty = ecluse("runs", "list")
    assert (empty.code, empty.err) == (0, "")
    assert "no runs yet" in empty.out

    ecluse("tenants", "create", "acme")
    first = ecluse("runs", "start", FLOW, "--key", "due-1", "--input", '{"articles": 3}', "--tenant", "acme")
    assert first.code == 0
    run_id = first.json["run_id"]
    assert first.json == {"run_id": run_id, "deduplicated": False}
    again = ecluse("runs", "start", FLOW, "--key", "due-1", "--input", '{"articles": 9}', "--tenant", "acme")
    assert (again.code, again.json) == (0, {"run_id": run_id, "deduplicated": True})
    unnamed = [ecluse("runs", "start", FLOW).json for _ in range(2)]
    assert len({run_id, *(answer["run_id"] for answer in unnamed)}) == 3

    shown = ecluse("runs", "show", run_id)
    assert shown.code == 0
    assert shown.json["input"] == {"articles": 3, "skus": [], "raise_percent": "0", "twins": False}
    assert (shown.json["tenant_id"], shown.json["flow"], shown.json["status"]) == ("acme", "hello", "queued")

    listed = ecluse("runs", "list").out.splitlines()
    assert [line.split()[0] for line in listed] == [unnamed[1]["run_id"], unnamed[0]["run_id"], run_id]
    assert listed[-1].split()[1:3] == ["hello", "queued"]
    assert "due-1" in listed[-1]
    assert ecluse("runs", "list", "--limit", "1", "--offset", "2").out.splitlines() == listed[2:]
    for option, value, others in [
        ("--tenant", "acme", "nobody"),
        ("--flow", "hello", "audit"),
        ("--state", "queued", "failed"),
    ]:
        assert ecluse("runs", "list", option, value).out.splitlines()[-1] == listed[-1]
        assert ecluse("runs", "list", option, others).out == "no matching runs\n"
    assert ecluse("runs", "list", "--flow", "hello", "--offset", "9").out == "no matching runs\n"
    unknown = ecluse("runs", "list", "--flow", "nope")
    assert (unknown.code, unknown.out) == (2, "")
    assert "There is no flow 'nope' (known: transcription, audit, automation, notifications)." in unknown.err
    assert ecluse("runs", "list", "--state", "nope").code == 2
    assert one("SELECT count(*) FROM runs") == 3


def test_the_account_of_a_run_is_read_in_order(ecluse, query):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    assert ecluse("runs", "log", run_id).err == "no log lines yet\n"
    assert "WORKFLOW_LOG_DB_ENABLED" in ecluse("runs", "log", run_id, "--trace").err
    query(
        "INSERT INTO run_log (run_id, at, level, message, data) VALUES (%(run)s, now(), 'info', 'first', NULL),"
        " (%(run)s, now(), 'error', E'second\n\x1b[31m', '{\"code\": \"X\"}')".replace("%(run)s", run_id)
    )
    lines = ecluse("runs", "log", run_id).out.splitlines()
    assert lines[0].endswith(" info    first")
    assert lines[1].endswith(r' error   second\n\u001b[31m {"code": "X"}')
    assert ecluse("runs", "log", run_id, "--tail", "1").out.splitlines() == lines[1:]
    assert ecluse("runs", "log", "4711").code == 2


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


def test_why_the_items_of_a_run_wait_is_told(ecluse, query):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    query(WAITING, 3)
    lines = ecluse("runs", "why", run_id, "--items").out.splitlines()
    assert [line.split()[0] for line in lines] == ["read/1", "read/2", "read/3"]
    assert all("night shift" in line for line in lines)
    first, group, example = ecluse("runs", "why", run_id).out.splitlines()
    assert first == "3 waiting, 0 in flight"
    assert group.startswith("       3  paused: hello/read: lane lane was paused by bob: night shift")
    assert f"1 (run {run_id})" in example
    told = ecluse("runs", "why", run_id, "--json").json
    assert (told["waiting"], told["groups"][0]["cause"], told["blocked"]) == (3, "paused", True)
    assert "items" not in told
    listed = ecluse("runs", "why", run_id, "--json", "--items", "--limit", "2").json["items"]
    assert [row["key"] for row in listed] == ["1", "2"]
    query("UPDATE lanes SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, per_second = 1")
    query("INSERT INTO replicas (id, host, pid, work, hands) VALUES ('r', 'here', 1, '{hello/read}', 1)")
    assert [line.count("before it") for line in ecluse("runs", "why", run_id, "--items").out.splitlines()] == [1, 1, 1]
    assert "the first starts at about 20" in ecluse("runs", "why", run_id).out
    assert len(ecluse("runs", "why", run_id, "--items", "--limit", "1", "--offset", "2").out.splitlines()) == 1
    assert ecluse("runs", "why", "4711").code == 2


def test_of_a_run_without_waiting_items_it_is_told_where_it_stands(ecluse, query):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]

    def told(*options):
        return ecluse("runs", "why", run_id, *options)

    assert "no live replica leads the run: start one that has flow hello" in told().out
    assert "no live replica leads the run" in told("--items").err
    query("INSERT INTO replicas (id, host, pid, work) VALUES ('r', 'here', 1, '{hello/read}')")
    assert "a replica is about to take the run up" in told().out
    query("UPDATE runs SET status = 'running', state = 'running', started_at = now()")
    assert "no live replica leads the run" in told().out
    assert ecluse("runs", "end", run_id, "--reason", "enough", "--flow", FLOW, "--yes").code == 0
    assert told().out == "nothing of it waits: it has ended, cancelled\n"


def test_that_more_items_wait_than_are_shown_is_told_with_how_to_see_them(ecluse, query):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    query(WAITING, 100)
    command, seen = ["runs", "why", run_id, "--items"], []
    for said in (f"more items wait: `ecluse runs why {run_id} --items --limit 50 --offset 50`\n", ""):
        answer = ecluse(*command)
        assert (answer.code, answer.err) == (0, said)
        seen += [line.split()[0] for line in answer.out.splitlines()]
        command = said.strip("`\n").split()[4:]  # as it says
    assert seen == [f"read/{n}" for n in range(1, 101)]
    assert ecluse("runs", "why", run_id, "--items", "--offset", "100").err == "no more waiting items\n"
    assert ecluse("runs", "why", run_id, "--items", "--limit", "100").err == ""


@pytest.mark.req("G-89", "ENG-28")
def test_an_operator_ends_a_run_and_its_key_is_free_again(ecluse, query):
    start = ("runs", "start", FLOW, "--key", "monday", "--input", '{"articles": 3}')
    run_id = ecluse(*start).json["run_id"]
    wanted = ("runs", "end", run_id, "--reason", " wrong catalogue ", "--flow", FLOW)
    silent = ecluse(*wanted)
    will = f"run {run_id} (hello, queued) will be cancelled: 0 targets are finished and keep their outcome, 0 are"
    will += " cancelled (0 in flight, 0 waiting)\n"
    assert (silent.code, silent.out) == (2, ""), "nobody is there to be asked"
    assert silent.err.startswith(will)
    assert "--yes" in silent.err
    assert query("SELECT state FROM runs") == [("queued",)]
    ended = ecluse(*wanted, "--yes")
    assert (ended.code, ended.err) == (0, will)
    counts = "0 = 0 successful + 0 failed + 0 ignored"
    assert ended.out == f"run {run_id}: cancelled by cli:{getpass.getuser()}: {counts}\n"
    shown = ecluse("runs", "show", run_id).json
    assert (shown["status"], shown["state"], shown["reason"]) == ("failed", "cancelled", "wrong catalogue")
    assert (shown["end_cause"], shown["ended_by"].startswith("cli:")) == ("operator", True)
    (line,) = ecluse("runs", "list").out.splitlines()
    assert line.split()[:3] == [run_id, "hello", "cancelled"]
    again = ecluse("runs", "end", run_id, "--reason", "too late", "--flow", FLOW, "--json")
    assert (again.code, again.json["reason"]) == (1, "wrong catalogue")
    assert f"run {run_id}: had ended already (cancelled), nothing was changed" in again.err

    second = ecluse(*start).json
    assert second == {"run_id": second["run_id"], "deduplicated": False}
    assert second["run_id"] != run_id
    assert ecluse(*start).json == {"run_id": second["run_id"], "deduplicated": True}
    assert query("SELECT event_key FROM runs ORDER BY id") == [("monday",), ("monday-retry-1",)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--reason", " ", "--flow", FLOW), "--reason must not be empty"),
        (("--reason", "enough"), "Load it with --flow"),
        (("--flow", FLOW), "--reason"),
    ],
)
def test_an_end_that_cannot_be_is_refused_and_changes_nothing(ecluse, one, arguments, said):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    answer = ecluse("runs", "end", run_id, *arguments)
    assert answer.code == 2
    assert said in answer.err
    assert one("SELECT status FROM runs") == "queued"


def test_a_run_that_does_not_exist_cannot_be_ended(ecluse):
    answer = ecluse("runs", "end", "4711", "--reason", "why not", "--flow", FLOW)
    assert (answer.code, answer.err) == (2, "ecluse: there is no run 4711\n")


def test_a_run_that_an_error_stopped_is_shown_so_in_plain_words(ecluse, query, one):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    query(
        "UPDATE runs SET status = 'failed', state = 'failed', selected = 0, successful = 0, failed = 0, ignored = 0,"
        " end_cause = 'catastrophic', error_code = 'BUG', ended_at = now()"
    )
    shown = ecluse("runs", "show", run_id)
    assert shown.json["end_cause"] == "stopped by an error"
    assert "catastrophic" not in shown.out
    assert one("SELECT end_cause FROM runs") == "catastrophic"
