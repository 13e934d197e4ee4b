"""Which server a command talks to: the one of this host, which may still be starting, a profile, the environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import psycopg
import pytest

from ecluse.cli import operator_file
from tests.support.api_server import new_key
from tests.support.command_line import Server, environment, free_port, operating

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def dsn(databases):
    with databases.one() as dsn:
        yield dsn


@pytest.fixture
def host(dsn, tmp_path):
    """The variables of a host: its data directory, and a database of its own."""
    return {"DATABASE_URL": dsn, "ECLUSE_DATA_DIR": str(tmp_path / "data")}


@pytest.fixture
def servers(fork_server):
    started: list[Server] = []

    def start(*arguments: str, **variables: str) -> Server:
        started.append(Server(fork_server, *arguments, **variables))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def written(host):
    return json.loads((operator_file.Path(host["ECLUSE_DATA_DIR"]) / operator_file.NAME).read_text())


def keys(dsn):
    with psycopg.connect(dsn) as connection:
        found = "SELECT count(*) FROM api_keys WHERE name = 'local' AND role = 'admin' AND tenant_id = 'default'"
        return connection.execute(found).fetchone()[0]


def test_a_command_waits_for_the_server_that_is_starting_on_this_host_and_needs_no_key(servers, bare, host, dsn):
    before = keys(dsn)
    server = servers(**host)
    me = bare("audits", "configs", "list", "--json", **host)  # at once: it waits
    assert (me.code, me.json["configs"]) == (0, []), me
    file = operator_file.Path(host["ECLUSE_DATA_DIR"]) / operator_file.NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first = written(host)
    assert first["servers"] == [{"pid": server.process.pid, "url": f"http://127.0.0.1:{server.port}/"}]

    with psycopg.connect(dsn) as connection:
        made = (
            "SELECT t.actor, k.name FROM audit_trail t JOIN api_keys k ON t.subject = 'key:' || k.id"
            " ORDER BY t.id DESC LIMIT 1"
        )
        assert connection.execute(made).fetchone() == ("server", "local")

    replica = servers(**host)
    replica.wait_until_ready()
    second = written(host)
    assert (second["key"], len(second["servers"]), keys(dsn)) == (first["key"], 2, before + 1)
    assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert bare("audits", "list", **host).code == 0, "the other replica answers"
    assert replica.end()[0] == 0
    assert written(host)["servers"] == []
    gone = bare("audits", "list", **host)
    assert (gone.code, "No server is running on this host" in gone.err, "ecluse serve" in gone.err) == (3, True, True)

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE api_keys SET revoked_at = ecluse_now() WHERE name = 'local'")
    servers(**host)
    assert bare("audits", "list", **host).code == 0
    assert (written(host)["key"] != first["key"], keys(dsn)) == (True, before + 2)


def test_a_server_that_cannot_write_its_key_serves_all_the_same(servers, dsn):
    server = servers(DATABASE_URL=dsn, ECLUSE_DATA_DIR=os.devnull)
    server.wait_until_ready()
    code, _, said = server.end()
    assert (code, "operator.json was not written" in said) == (0, True)


def test_a_server_that_only_works_is_not_one_to_talk_to(servers, bare, host):
    server = servers("--role", "worker", **host)
    server.wait_until_ready()
    assert not (operator_file.Path(host["ECLUSE_DATA_DIR"]) / operator_file.NAME).exists()
    assert bare("audits", "list", **host).code == 3


def test_a_start_that_fails_takes_its_announcement_back(bare, host):
    assert bare("serve", **host | {"DATABASE_URL": "nonsense"}).code == 2
    assert written(host)["servers"] == []


def test_servers_that_start_at_once_make_one_file_of_it(tmp_path):
    code = (
        "import sys, pathlib; from ecluse.cli import operator_file as f; f.announce(pathlib.Path(sys.argv[1])); input()"
    )
    starting = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path / "data"], stdin=subprocess.PIPE, env=environment())
        for _ in range(6)
    ]
    try:
        until = time.monotonic() + 60
        while len(found := operator_file.read(tmp_path / "data")["servers"]) < len(starting):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert {one["pid"] for one in found} == {one.pid for one in starting}
    finally:
        for process in starting:
            process.communicate(b"\n", timeout=30)
    assert operator_file.read(tmp_path / "data")["servers"] == []


@pytest.fixture(scope="module")
def operator(bare, dsn):
    with operating(bare, dsn) as one:
        yield one


def test_a_profile_names_a_server_until_it_is_removed(operator, bare, tmp_path, dsn):
    home, key = {"XDG_CONFIG_HOME": str(tmp_path)}, tmp_path / "key"
    url = operator.variables["ECLUSE_URL"]
    key.write_text(operator.variables["ECLUSE_KEY"] + "\n")
    made = bare("login", "--url", url, "--key-file", str(key), "--json", **home)
    assert (made.code, made.json["profile"], made.json["role"]) == (0, "default", "admin")
    file = tmp_path / "ecluse" / "profiles.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert bare("audits", "list", **home).code == 0
    viewer = tmp_path / "viewer"
    viewer.write_text(new_key(dsn, "viewer"))
    said = bare("login", "--url", url, "--key-file", str(viewer), "--profile", "read", **home)
    assert (said.code, said.out) == (0, f"logged in to {url} as viewer of tenant default, profile read\n")
    delete = ("audits", "configs", "delete", "1")
    assert "permission audits.write" in bare(*delete, "--profile", "read", **home).err
    assert "permission audits.write" in bare("--profile", "read", *delete, **home | operator.variables).err
    assert "NOT_FOUND" in bare(*delete, **home).err
    assert "permission audits.write" in bare(*delete, "--key-file", str(viewer), **home).err, "an option comes first"
    closed = f"http://127.0.0.1:{free_port()}"
    assert closed in bare("audits", "list", **home, ECLUSE_URL=closed, ECLUSE_KEY="x").err, "then the environment"

    wrong = bare("login", "--url", url, "--key-file", "-", "--profile", "other", **home)
    assert (wrong.code, "is empty" in wrong.err) == (2, True)
    key.write_text("ecl_unknown")
    assert bare("login", "--url", url, "--key-file", str(key), **home).code == 2
    assert set(json.loads(file.read_text())) == {"default", "read"}, "what does not work is not stored"
    assert bare("login", "--url", url, **home).code == 2

    assert bare("logout", "--profile", "read", **home).out == f"logged out of {url}, profile read\n"
    assert "There is no profile 'read'" in bare("audits", "list", "--profile", "read", **home).err
    assert bare("logout", "--json", **home).json == {"profile": "default", "removed": True}
    assert bare("logout", **home).out == "there is no profile default; nothing was changed\n"
    assert bare("audits", "list", **home).code == 3


def test_a_key_comes_from_stdin(operator):
    command = [sys.executable, "-m", "ecluse", "audits", "list", "--key-file", "-", "--json"]
    given = environment(**operator.variables | {"ECLUSE_KEY": "ecl_wrong"})
    key = operator.variables["ECLUSE_KEY"]
    done = subprocess.run(command, env=given, input=f"{key}\n", capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["audits"]) == (0, [])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_choices(bare, shell):
    script = bare("completion", shell)
    assert (script.code, "ecluse complete --" in script.out) == (0, True)
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script.out, text=True, check=True)
        test = f"{script.out}\nCOMP_WORDS=(ecluse audits l); COMP_CWORD=2; _ecluse; echo ${{COMPREPLY[@]}}"
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # noqa: PTH120
        done = subprocess.run(
            ["bash", "-c", test], env=environment(PATH=path), capture_output=True, text=True, check=True
        )
        assert done.stdout == "list\n"

    def words(*given):
        return bare("complete", "--", *given).out.splitlines()

    assert "audits" in words("")
    assert {"serve", "sandbox"} <= set(words("s"))
    assert words("audits", "configs", "c") == ["create"]
    assert words("audits", "list", "--fi") == ["--fiche-id"]
    assert words("audits", "list", "--status", "") == ["pending", "running", "completed", "failed"]
    assert words("no-such", "") == []


def test_an_interrupt_ends_a_command_with_130(operator):
    """As Ctrl-C does, while it waits for an answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "ecluse", "audits", "list"]
        given = environment(**operator.variables | {"ECLUSE_URL": url})
        with subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()
            threading.Timer(0.1, process.send_signal, [signal.SIGINT]).start()
            _, said = process.communicate(timeout=30)
            connection.close()
    assert (process.returncode, said) == (130, "")
