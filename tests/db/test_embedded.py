"""Real servers in fresh directories, and processes that are really killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from ecluse.base.data_dir import default_data_dir
from ecluse.base.errors import SetUpError
from ecluse.db import embedded, postgres_user
from tests.support.processes import assert_nothing_runs, processes_of

pytestmark = pytest.mark.long

CHILD = Path(__file__).with_name("embedded_child.py")
NOBODY = 65534
HASTE = embedded.Patience(pauses=(0.0, 0.1))
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="is about what root may do")


@contextlib.contextmanager
def fresh_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ecl-")).resolve()
    path.chmod(0o711)  # the server's user has to enter it
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def base() -> Iterator[Path]:
    """An empty directory; at the end nothing may run in it any more."""
    with fresh_directory() as path:
        yield path
        assert_nothing_runs(path)


@pytest.fixture(scope="module")
def prepared() -> Iterator[Path]:
    with fresh_directory() as path:
        embedded.start(path / "d").release()
        yield path / "d"


@pytest.fixture
def data_dir(prepared: Path) -> Iterator[Path]:
    """A data directory that has been used before; at the end nothing may run in it any more."""
    yield prepared
    assert_nothing_runs(prepared)


class Child:
    """A process of its own that uses the server of `data_dir`."""

    def __init__(self, data_dir: Path, *, uid: int | None = None, go: bool = True, **environment: str) -> None:
        command = [sys.executable, "-W", "error", str(CHILD), str(data_dir), str(os.geteuid() if uid is None else uid)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | environment,
        )
        assert self.hear() == "up"
        if go:
            self.tell("go")

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        self.tell(command)
        return self.hear()

    def wait(self) -> int:
        """Close the input, unless the process is ending already, wait for its end and return the exit code."""
        with self.process:
            pass
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        assert self.wait() == -signal.SIGKILL


@contextlib.contextmanager
def started(data_dir: Path) -> Iterator[embedded.Embedded]:
    server = embedded.start(data_dir)
    try:
        yield server
    finally:
        server.release()


def postmaster(data_dir: Path) -> int:
    return int((data_dir / "pg" / "postmaster.pid").read_text().split()[0])


def kill_postmaster(server: embedded.Embedded) -> int:
    pid = postmaster(server.data_dir)
    os.kill(pid, signal.SIGKILL)
    while server.status() is not None:
        time.sleep(0.005)
    return pid


def execute(server: embedded.Embedded, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.dsn()) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def test_the_last_of_two_processes_stops_the_server(base: Path) -> None:
    data_dir = base / "d"
    first, second = Child(data_dir), Child(data_dir)
    pid = int(first.hear())
    assert int(second.hear()) == pid
    assert first.wait() == 0
    with started(data_dir) as server:
        assert second.wait() == 0
        assert server.is_running()
        assert postmaster(data_dir) == pid
        assert execute(server, "SELECT current_database()::text, current_user::text") == [("ecluse", "ecluse")]
    assert not server.is_running()
    assert not (data_dir / "pg" / "postmaster.pid").exists()


def test_a_server_whose_starter_was_killed_is_taken_over_and_finally_stopped(data_dir: Path) -> None:
    child = Child(data_dir)
    orphan = int(child.hear())
    child.kill()
    with started(data_dir) as server:
        assert postmaster(data_dir) == orphan
        assert server.is_running()
    assert not server.is_running()


def test_processes_that_start_at_the_same_moment_share_one_server(base: Path) -> None:
    children = [Child(base / "d", go=False) for _ in range(3)]
    for child in children:
        child.tell("go")
    pids = {child.hear() for child in children}
    for child in children:
        assert child.wait() == 0
    assert len(pids) == 1
    assert pids.pop().isdigit()
    assert (base / "d" / "log").read_text().count("starting PostgreSQL") == 1


def test_a_dead_postmaster_is_restarted_once_and_the_data_is_there(data_dir: Path) -> None:
    with started(data_dir) as server:
        execute(server, "CREATE TABLE kept AS SELECT 42 AS answer")
        child = Child(data_dir)
        assert int(child.hear()) == postmaster(data_dir)
        dead = kill_postmaster(server)
        assert not server.is_running()
        child.tell("ensure")
        assert sorted([str(server.ensure_running()), child.hear()]) == ["False", "True"]
        assert postmaster(data_dir) != dead
        assert server.is_running()
        assert server.ensure_running() is False
        assert execute(server, "SELECT answer FROM kept") == [(42,)]
        assert child.wait() == 0
        assert server.is_running()


def test_pids_of_strangers_in_the_lock_files_do_not_prevent_a_restart(data_dir: Path) -> None:
    with started(data_dir) as server, contextlib.ExitStack() as at_end:
        kill_postmaster(server)
        user = server.account.uid if os.geteuid() == 0 else None
        stranger = at_end.enter_context(subprocess.Popen(["sleep", "60"], user=user))
        at_end.callback(stranger.kill)
        for file in (server.pgdata / "postmaster.pid", server.socket_dir / ".s.PGSQL.5432.lock"):
            lines = file.read_text().splitlines()
            file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        assert not server.is_running()
        assert server.ensure_running() is True
        assert execute(server, "SELECT 1") == [(1,)]
        assert stranger.poll() is None


def test_a_server_that_lost_its_socket_is_restarted(data_dir: Path) -> None:
    with started(data_dir) as server:
        shutil.rmtree(server.socket_dir)
        assert not server.is_running()
        assert server.ensure_running() is True
        assert execute(server, "SELECT 1") == [(1,)]


def test_a_server_that_is_still_recovering_is_waited_for(data_dir: Path) -> None:
    with started(data_dir) as server:
        pid_file = server.pgdata / "postmaster.pid"
        ready = pid_file.read_text()
        pid_file.write_text(ready.replace("ready", "starting"))
        recovered = threading.Timer(0.6, pid_file.write_text, [ready])
        recovered.start()
        began = time.monotonic()
        with started(data_dir):
            assert time.monotonic() - began >= 0.5
        recovered.join()


def test_a_server_that_recovers_for_too_long_is_reported_and_left_alone(data_dir: Path) -> None:
    server = embedded.start(data_dir)
    pid_file = server.pgdata / "postmaster.pid"
    ready = pid_file.read_text()
    pid_file.write_text(ready.replace("ready", "starting"))
    server.release()
    with pytest.raises(SetUpError, match="still starting"):
        embedded.start(data_dir, replace(HASTE, ready_seconds=0.1))
    assert server.accepts_connections()
    pid_file.write_text(ready)
    with started(data_dir):
        assert postmaster(data_dir) == int(ready.split()[0])


def test_a_server_out_of_sight_is_not_doubled(data_dir: Path) -> None:
    with started(data_dir) as server:
        pass
    with socket.socket(socket.AF_UNIX) as elsewhere:
        elsewhere.bind(str(server.socket_dir / ".s.PGSQL.5432"))
        elsewhere.listen()
        with pytest.raises(SetUpError, match="another container"):
            embedded.start(data_dir, HASTE)
    assert processes_of(data_dir) == []


def test_a_failed_start_shows_the_log_and_the_way_out(base: Path) -> None:
    with started(base / "d") as server:
        pass
    with (server.pgdata / "postgresql.conf").open("a") as config:
        config.write("no_such_setting = 1\n")
    with pytest.raises(SetUpError) as caught:
        embedded.start(base / "d", HASTE)
    for part in ("no_such_setting", str(base / "d" / "log"), "DATABASE_URL"):
        assert part in caught.value.message


def test_ctrl_c_at_one_user_leaves_the_server_to_the_others(data_dir: Path) -> None:
    child = Child(data_dir)
    pid = int(child.hear())
    with started(data_dir) as server:
        os.killpg(child.process.pid, signal.SIGINT)
        assert child.wait() == -signal.SIGINT
        assert server.is_running()
        assert postmaster(data_dir) == pid


def test_a_forked_child_does_not_give_up_its_parents_use(data_dir: Path) -> None:
    child = Child(data_dir)
    assert child.hear().isdigit()
    assert child.ask("fork") == "True"
    assert child.wait() == 0


def test_a_released_handle_starts_nothing(data_dir: Path) -> None:
    server = embedded.start(data_dir)
    server.release()
    server.release()
    assert server.ensure_running() is False
    assert not server.is_running()


def test_a_long_path_moves_the_socket_and_nothing_else(base: Path) -> None:
    data_dir = base / ("n" * 100) / "d"
    with started(data_dir) as server:
        assert server.socket_dir.parent == Path("/tmp")  # noqa: S108
        assert stat.S_IMODE(server.socket_dir.stat().st_mode) == 0o700
        assert execute(server, "SELECT 1") == [(1,)]
        assert (data_dir / "pg" / "PG_VERSION").exists()
    if os.geteuid() == 0:
        os.chown(server.socket_dir, NOBODY, NOBODY)
        with pytest.raises(SetUpError, match="belongs to another user"):
            embedded.start(data_dir)
    server.socket_dir.rmdir()


@pytest.mark.parametrize("name", ["a b%c&q\"u'o$(te)", "com,ma"])
def test_awkward_directory_names_work(base: Path, name: str) -> None:
    with started(base / name) as server:
        assert execute(server, "SELECT 1") == [(1,)]
    if "," in name:
        server.socket_dir.rmdir()


def make_pgdata(base: Path, **files: str) -> Path:
    pgdata = base / "pg"
    pgdata.mkdir()
    for name, content in files.items():
        (pgdata / name).write_text(content)
    if os.geteuid() == 0:
        os.chown(pgdata, NOBODY, NOBODY)
    return pgdata


def test_a_directory_of_another_version_is_refused(base: Path) -> None:
    pgdata = make_pgdata(base, PG_VERSION="16\n")
    with pytest.raises(SetUpError) as caught:
        embedded.start(base)
    for part in ("PostgreSQL 16", "brings 18", str(pgdata), "pg_dump", "ECLUSE_DATA_DIR", "DATABASE_URL"):
        assert part in caught.value.message


def test_foreign_files_in_place_of_the_data_are_refused_and_kept(base: Path) -> None:
    pgdata = make_pgdata(base, letter="dear")
    with pytest.raises(SetUpError, match="no PG_VERSION"):
        embedded.start(base)
    assert [path.name for path in pgdata.iterdir()] == ["letter"]


def test_an_interrupted_initdb_is_redone(base: Path) -> None:
    child = Child(base / "d")
    while not (base / "d" / "pg.new" / "PG_VERSION").exists():
        time.sleep(0.001)
    child.kill()
    assert not (base / "d" / "pg").exists()
    with started(base / "d") as server:
        assert execute(server, "SELECT 1") == [(1,)]
    assert not (base / "d" / "pg.new").exists()


def test_a_file_in_place_of_the_directory_is_refused(base: Path) -> None:
    (base / "d").write_text("")
    with pytest.raises(SetUpError, match="is a file, not a directory") as caught:
        embedded.start(base / "d")
    assert "DATABASE_URL" in caught.value.message
    with pytest.raises(SetUpError, match="is a file, not a directory"):
        embedded.start(base / "d" / "below")


def test_a_directory_that_all_users_may_write_to_is_refused(base: Path) -> None:
    base.chmod(0o777)
    with pytest.raises(SetUpError, match="All users may write"):
        embedded.start(base)
    assert list(base.iterdir()) == []


def test_settings_and_sort_order(data_dir: Path) -> None:
    with started(data_dir) as server:
        shown = {name: execute(server, f"SHOW {name}")[0][0] for name in embedded.SETTINGS}
        assert shown == embedded.SETTINGS
        database = "SELECT pg_encoding_to_char(encoding), datlocprovider::text, datlocale FROM pg_database"
        assert set(execute(server, database)) == {("UTF8", "b", "C.UTF-8")}
        assert execute(server, "SELECT lower('É'), 'Z' < 'a'") == [("é", True)]


def test_a_big_log_is_put_aside_at_the_start(data_dir: Path) -> None:
    with started(data_dir) as server:
        pass
    with server.log_file.open("a") as log:
        log.write("x" * (embedded.MAX_LOG_BYTES + 1))
    with started(data_dir):
        assert server.log_file.stat().st_size < 10_000
        assert (data_dir / "log.1").stat().st_size > embedded.MAX_LOG_BYTES


def test_an_ordinary_user_is_not_shut_out_by_others_files_or_variables(base: Path) -> None:
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    shared, home = base / "tmp", base / "home"
    shared.mkdir(mode=0o755)
    (shared / ".lockfile").touch(mode=0o600)
    home.mkdir(mode=0o700)
    os.chown(home, uid, -1)
    child = Child(home / "d", uid=uid, TMPDIR=str(shared), PGPORT="9999", PGDATA="/nowhere")
    assert child.hear().isdigit()
    assert stat.S_IMODE((home / "d").stat().st_mode) == 0o700
    assert {(home / "d" / name).stat().st_uid for name in ("pg", "run", "log", "users.lock")} == {uid}
    assert child.wait() == 0
    assert [path.name for path in shared.iterdir()] == [".lockfile"]


@only_root
def test_an_ordinary_user_gets_an_error_about_directories_that_cannot_be_used(base: Path) -> None:
    (base / "locked").mkdir(mode=0o700)
    (base / "mine").mkdir(mode=0o755)
    for data_dir, words in ((base / "locked" / "d", "Permission denied"), (base / "mine", "belongs to another user")):
        child = Child(data_dir, uid=NOBODY)
        answer = child.hear()
        assert answer.startswith("error ")
        assert words in answer
        assert "ECLUSE_DATA_DIR" in answer
        assert child.wait() == 0


@only_root
def test_as_root_the_server_runs_as_a_system_user(base: Path) -> None:
    old = os.umask(0o077)
    try:
        with started(base / "deep" / "d") as server:
            modes = {name: stat.S_IMODE((base / "deep" / name).stat().st_mode) for name in (".", "d", "d/pg", "d/run")}
            assert modes == {".": 0o755, "d": 0o711, "d/pg": 0o700, "d/run": 0o700}
            owners = {name: (base / "deep" / name).stat().st_uid for name in ("d", "d/pg", "d/run", "d/start.lock")}
            assert owners == {"d": 0, "d/pg": server.account.uid, "d/run": server.account.uid, "d/start.lock": 0}
            assert server.account.uid != 0
            assert (base / "deep/d/start.lock").stat().st_mode & 0o077 == 0
    finally:
        os.umask(old)


@only_root
def test_as_root_a_closed_directory_is_refused_and_stays_closed(base: Path) -> None:
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(SetUpError, match="cannot enter") as caught:
        embedded.start(closed / "a" / "d")
    assert "ECLUSE_DATA_DIR" in caught.value.message
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert list(closed.iterdir()) == []


@only_root
def test_as_root_programs_out_of_reach_are_copied(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, package = base / "closed", postgres_user.binaries().parents[1]
    closed.mkdir(mode=0o700)
    for path in (package, *package.parent.glob(f"{package.name}.libs")):
        (closed / path.name).symlink_to(path)
    monkeypatch.syspath_prepend(str(closed))
    assert embedded.binaries().is_relative_to(closed)
    for _ in range(2):
        with started(base / "d") as server:
            assert server.bin_dir.is_relative_to(base / "d")
            assert execute(server, "SELECT 1") == [(1,)]
    assert [path.name for path in (base / "d").glob("postgres-*")] == ["postgres-18.4"]
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@only_root
def test_as_root_data_that_belongs_to_root_is_refused_with_the_remedy(base: Path) -> None:
    (base / "pg").mkdir()
    with pytest.raises(SetUpError, match="chown -R"):
        embedded.start(base)


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        assert default_data_dir() == Path("/var/lib/ecluse")
        return
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert default_data_dir() == Path("/somewhere/ecluse")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_data_dir() == Path.home() / ".local" / "share" / "ecluse"


def test_the_programs_are_those_of_postgresql_18() -> None:
    shown = subprocess.run([embedded.binaries() / "psql", "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("psql (PostgreSQL) 18.")
