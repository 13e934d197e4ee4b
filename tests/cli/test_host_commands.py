"""Commands of the host: help, migrate, psql."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psycopg
import pytest

from ecluse.cli.catalogue import packaged
from ecluse.cli.failure import EXIT_CODES
from ecluse.cli.local import COMMANDS
from tests.support.command_line import environment
from tests.support.servers import HEAD

FLOW = "hello_flow:FLOW"
LOCAL = [one.name for one in COMMANDS if one.help]
GROUPS = sorted({" ".join(name.split()[:n]) for name in (*LOCAL, *(one["name"] for one in packaged())) for n in (1, 2)})
GROUPS = [one for one in GROUPS if one not in (*LOCAL, *(command["name"] for command in packaged()))]


@pytest.mark.parametrize("name", LOCAL)
def test_every_command_of_the_host_explains_itself_without_a_database(bare, name):
    answer = bare(*name.split(), "--help", DATABASE_URL="nonsense")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.lower().startswith(f"usage: ecluse {name} ")  # the agent has a parser of its own


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_lists_its_commands(bare, group):
    asked, bare_name = bare(*group.split(), "--help"), bare(*group.split())
    assert (asked.code, bare_name.code, asked.out) == (0, 2, bare_name.out)
    for name in [one["name"] for one in packaged() if one["name"].startswith(f"{group} ")]:
        assert f"  {name.removeprefix(group).split()[0]} " in asked.out


def test_the_help_names_every_command_and_exit_code(bare):
    shown = bare("--help").out
    for name in {one.split()[0] for one in (*LOCAL, *(command["name"] for command in packaged()))}:
        assert f"\n  {name} " in shown
    for code, meaning in EXIT_CODES.items():
        assert f"\n  {code} " in shown
        assert meaning.split(",")[0] in " ".join(shown.split())
    assert bare().out == shown


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
