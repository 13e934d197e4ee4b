"""Mistakes of the operator: exit code 2 and one line that says what to do, never a traceback."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.command_line import EXAMPLES, Answer, environment, free_port
from tests.support.processes import assert_nothing_runs
from tests.support.servers import HEAD

FLOW = "hello_flow:FLOW"


@pytest.fixture(scope="module")
def dsn(databases):
    """One database for the whole file: what is refused leaves nothing behind."""
    with databases.one() as dsn:
        yield dsn


def assert_refused(answer: Answer, *said: str) -> None:
    assert (answer.code, answer.out) == (2, ""), answer
    said_first = re.match(r"\[WELCOME\|-\] STEP: ecluse: starting version=.*\n", answer.err)  # by a server
    assert answer.err.count("\n") == (2 if said_first else 1), answer.err
    assert "Traceback" not in answer.err
    for text in said:
        assert text in answer.err


@pytest.mark.parametrize("command", [("serve",), ("migrate",), ("psql",), ("verify",)], ids=" ".join)
@pytest.mark.req("G-02")
def test_an_address_that_cannot_be_used_is_refused_by_every_command_that_needs_it(bare, command):
    assert_refused(bare(*command, DATABASE_URL="nonsense", ECLUSE_PORT="0"), "DATABASE_URL", "postgresql://user:")
    began = time.monotonic()
    closed = f"postgresql://ecluse:hidden@127.0.0.1:{free_port()}/ecluse"
    answer = bare(*command, DATABASE_URL=closed, ECLUSE_PORT="0")
    assert_refused(answer, "Connection refused", "Check that PostgreSQL is running", "DATABASE_URL")
    assert "hidden" not in answer.err
    assert time.monotonic() - began < 10


@pytest.mark.req("ENG-101")
def test_a_knob_that_cannot_be_read_is_named(ecluse):
    assert_refused(ecluse("serve", ECLUSE_HANDS="many"), "ECLUSE_HANDS='many'", "docs/configuration.md")


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("migrate",)], ids=lambda command: command[0])
def test_a_database_of_a_newer_program_is_refused_and_left_alone(ecluse, one, query, command):
    known = one("SELECT version_num FROM alembic_version")
    query("UPDATE alembic_version SET version_num = '9999'")
    try:
        assert_refused(ecluse(*command, ECLUSE_LOG_LEVEL="ERROR"), "9999", "newer", "Nothing was changed")
        assert one("SELECT version_num FROM alembic_version") == "9999"
    finally:
        query("UPDATE alembic_version SET version_num = %s", known)
    assert one("SELECT count(*) FROM replicas") == 0


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        ("no_such_package:FLOW", "no_such_package"),
        ("hello_flow:NO_SUCH_NAME", "NO_SUCH_NAME"),
        ("hello_flow", "package:NAME"),
        (":FLOW", "package:NAME"),
        (".relative:FLOW", "package:NAME"),
        ("broken_flow:FLOW", "broken_flow.py, line 1"),
        ("hello_flow.flow:Input", "is not a Flow or a Package but a"),
    ],
)
def test_a_flow_that_cannot_be_loaded_is_named(ecluse, tmp_path, flow, said):
    (tmp_path / "broken_flow.py").write_text("FLOW = (\n")
    answer = ecluse("migrate", "--flow", flow, PYTHONPATH=f"{EXAMPLES}:{tmp_path}")
    assert_refused(answer, repr(flow), said)


def test_a_flow_is_found_where_the_installed_program_is_started(dsn, tmp_path):
    (tmp_path / "parcels.py").write_text(
        "from dataclasses import replace\nfrom hello_flow import FLOW as HELLO\nFLOW = replace(HELLO, name='parcels')\n"
    )
    program = Path(sys.executable).with_name("ecluse")
    command = [program, "migrate", "--flow", "parcels:FLOW"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(DATABASE_URL=dsn), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_a_flow_is_named_by_the_other_commands_too(ecluse, command):
    assert_refused(ecluse(command, "--flow", "no_such_package:FLOW"), "'no_such_package:FLOW'", "package:NAME")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-command"], "there is no command 'no-such-command'"),
        (["serv"], "Did you mean serve?"),
        (["serve", "--prot", "1"], "there is no option --prot. Did you mean --port?"),
        (["serve", "--port", "many"], "'many' is not a port"),
        (["serve", "--port", "70000"], "'70000' is not a port"),
        (["serve", "--role", "manager"], "invalid choice: 'manager'"),
        (["demo", "--fiches", "3"], "--fiches: 3 is not from 10 to 1000"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
        (["runs", "watch"], "missing: RUN_ID"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_does_not_exist_or_lacks_something_is_explained(bare, arguments, said):
    assert_refused(bare(*arguments, DATABASE_URL="nonsense"), said)


@pytest.mark.parametrize("command", ["serve", "sandbox"])
def test_a_port_that_is_taken_is_refused_before_anything_is_started(ecluse, one, command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_refused(ecluse(command, "--port", port), f"annot listen on 127.0.0.1:{port}", "ddress already in use")
    assert one("SELECT count(*) FROM replicas") == 0


@pytest.fixture
def data_dir():
    folder = Path(tempfile.mkdtemp(prefix="ecl-")).resolve()
    folder.chmod(0o711)  # the server's user has to enter it
    yield folder / "data"
    assert_nothing_runs(folder)
    shutil.rmtree(folder)


@pytest.mark.req("G-02")
def test_without_an_address_the_embedded_database_serves_each_command_and_then_stops(bare, data_dir):
    knobs = {"ECLUSE_DATA_DIR": str(data_dir), "DATABASE_URL": ""}
    migrated = bare("migrate", **knobs)
    assert (migrated.code, migrated.out, migrated.err) == (0, f"schema {HEAD}\n", "")
    assert_nothing_runs(data_dir)
    version = bare("psql", "-Atc", "select version_num from alembic_version", **knobs)
    assert (version.code, version.out, version.err) == (0, f"{HEAD}\n", "")
    assert_nothing_runs(data_dir)
    assert bare("verify", **knobs).code == 0


def test_a_data_directory_of_another_postgres_is_refused(bare, data_dir):
    """As root it belongs to the server's own user; the version is looked at first either way."""
    knobs = {"ECLUSE_DATA_DIR": str(data_dir)}
    assert bare("psql", "-c", "select 1", **knobs).code == 0
    (data_dir / "pg" / "PG_VERSION").write_text("17\n")
    for arguments in (["migrate"], ["psql", "-c", "select 1"]):
        answer = bare(*arguments, **knobs)
        assert (answer.code, answer.out) == (2, "")
        assert "was written by PostgreSQL 17, and this release of Ecluse brings 18" in answer.err
        assert "set DATABASE_URL" in answer.err
        assert "Traceback" not in answer.err
