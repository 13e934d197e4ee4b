"""The embedded PostgreSQL, which Ecluse runs itself when no DATABASE_URL is set.

Every process that uses it holds a shared lock on `users.lock` in the data directory for as long as it lives; the kernel
releases the lock however the process ends. The last process to leave stops the server; a server whose starter was
killed is taken over by the next process. Starts and stops are serialised by an exclusive lock on `start.lock`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import psycopg
import structlog

from ecluse.db.postgres_user import (
    MAJOR,
    SOCKET,
    Account,
    account_for,
    binaries,
    binaries_for,
    clear_errors,
    make_data_dir,
    open_private,
    psql,
    set_up_error,
    socket_dir_for,
    start_lock,
)

__all__ = ["Embedded", "binaries", "psql", "start"]

log = structlog.get_logger(__name__)

ROLE = "ecluse"
MAX_LOG_BYTES = 10_000_000
SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "300",
    "max_wal_size": "4GB",
    "jit": "off",
    "fsync": "on",
    "synchronous_commit": "on",
    "log_min_messages": "warning",
    "client_connection_check_interval": "5s",
}


@dataclass(frozen=True)
class Patience:
    """Time limits of a start of the server: seconds to become ready, and the pauses before each attempt."""

    ready_seconds: float = 60.0
    # Before each attempt: the child processes of a killed postmaster take a moment to end.
    pauses: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)


PATIENCE = Patience()


def pgdata_of(data_dir: Path) -> Path:
    return data_dir / "pg"


def start(data_dir: Path, patience: Patience = PATIENCE) -> Embedded:
    """Start the server of this directory, or join the running one; create directory and database if needed. Blocking.
    Raise SetUpError if PostgreSQL is not installed, the directory cannot be used, or the server does not start.

    `release` is called at exit. No signal handler is installed: on SIGTERM the program has to exit normally, or the
    server keeps running until the next process that uses the same directory has exited.
    """
    binaries()  # first, so that nothing is created if they are missing
    data_dir = data_dir.expanduser().resolve()
    with clear_errors(data_dir):
        account = account_for(data_dir / "pg")
        make_data_dir(data_dir, account)
        with start_lock(data_dir) as lock, contextlib.ExitStack() as on_failure:
            account = account_for(data_dir / "pg")  # again: another process may have created the data meanwhile
            server = Embedded(
                data_dir,
                socket_dir_for(data_dir, account),
                account,
                binaries_for(account, data_dir),
                open_private(data_dir / "users.lock"),
                patience,
            )
            on_failure.callback(server.leave)
            fcntl.flock(server.users, fcntl.LOCK_SH)
            server.init_if_absent(lock)
            server.bring_up()
            server.create_database_if_absent()
            on_failure.pop_all()
    atexit.register(server.release)
    return server


@dataclass(frozen=True)
class Embedded:
    """The running server of a data directory, as used by this process. The lock on `users` is held until `release`."""

    data_dir: Path
    socket_dir: Path
    account: Account = field(repr=False)
    bin_dir: Path = field(repr=False)
    users: BinaryIO = field(repr=False)
    patience: Patience = field(default=PATIENCE, repr=False)
    owner_pid: int = field(default_factory=os.getpid, repr=False)

    @property
    def pgdata(self) -> Path:
        return pgdata_of(self.data_dir)

    @property
    def log_file(self) -> Path:
        return self.data_dir / "log"

    def dsn(self, database: str = "ecluse") -> str:
        """Return the address of a database of this server."""
        return f"postgresql://{ROLE}@/{quote(database, safe='')}?host={quote(str(self.socket_dir))}&port=5432"

    def is_running(self) -> bool:
        """Return True if a live postmaster serves this directory and accepts connections."""
        return self.status() is not None and self.accepts_connections()

    def ensure_running(self) -> bool:
        """Start the server again if it has died; return True if this call started it. Raise SetUpError if it does not
        start. Safe for several processes at once. After `release` nothing is started."""
        if self.is_running():
            return False
        with clear_errors(self.data_dir), start_lock(self.data_dir):
            return not self.users.closed and self.bring_up()

    def release(self) -> None:
        """End the use of the server by this process; the last process that uses it stops it. A second call does
        nothing."""
        # A forked child shares the parent's lock, and must not release it.
        if self.users.closed or os.getpid() != self.owner_pid:
            return
        with start_lock(self.data_dir):
            self.leave()
        atexit.unregister(self.release)

    def status(self) -> str | None:
        """Return the status that the live postmaster of this directory reports (starting, ready, stopping); None
        without one."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return None
        if not lines or not _is_postmaster(int(lines[0]), self.pgdata):
            return None
        return lines[7].strip() if len(lines) > 7 else "starting"

    def accepts_connections(self) -> bool:
        """Return True if a server listens on the socket of this directory."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            # Any other result, such as a full queue, comes from a live server.
            return probe.connect_ex(str(self.socket_dir / SOCKET)) not in (errno.ENOENT, errno.ECONNREFUSED)

    # The methods below are called only under the start lock.

    def leave(self) -> None:
        """Release this process's lock, and stop the server if no other process uses it and it is ready (not in
        recovery)."""
        if self.users.closed:
            return
        try:
            fcntl.flock(self.users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            # A server still in recovery is left running: stopped, it would begin the recovery anew at the next start.
            if self.status() == "ready":
                self.stop()
        self.users.close()

    def init_if_absent(self, lock: BinaryIO) -> None:
        """Create the database cluster if there is none. Raise SetUpError if it has another major version than MAJOR, if
        the directory holds other files, or if initdb fails. `lock`: the open start lock, which initdb inherits."""
        version_file = self.pgdata / "PG_VERSION"
        if version_file.exists():
            if (found := version_file.read_text().strip()) != MAJOR:
                raise set_up_error(
                    f"{self.pgdata} was written by PostgreSQL {found}, and this release of Ecluse brings {MAJOR}. "
                    f"Dump it (pg_dump) with the release of Ecluse that brought {found} and restore it into a new "
                    "directory, or set ECLUSE_DATA_DIR to another directory."
                )
            return
        if self.pgdata.exists() and any(self.pgdata.iterdir()):
            raise set_up_error(
                f"{self.pgdata} holds files but no PG_VERSION, so it is no PostgreSQL directory: move it away, "
                "or set ECLUSE_DATA_DIR to another directory."
            )
        half = self.data_dir / "pg.new"
        if half.exists():
            shutil.rmtree(half)
        self.account.make_private_dir(half)
        options = (
            "--encoding=UTF8",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--locale=C",
            "--auth=trust",
        )
        # initdb inherits the start lock: if this process is killed, the next one waits until initdb has ended.
        done = self.account.run(self.bin_dir / "initdb", *options, "-U", ROLE, "-D", half, pass_fds=(lock.fileno(),))
        if done.returncode != 0:
            raise set_up_error(f"initdb could not make {self.pgdata}:\n{(done.stderr or done.stdout).strip()}")
        half.rename(self.pgdata)
        _sync(self.data_dir)

    def bring_up(self) -> bool:
        """Wait for the server to be ready, or start it; return True if it was started here. Raise SetUpError, with the
        end of the server's log, if it is not ready after all attempts of `patience`."""
        self.account.make_private_dir(self.socket_dir)
        launched = False
        for pause in self.patience.pauses:
            time.sleep(pause)
            status = self._settled_status()
            if status is None and self.accepts_connections():
                problem = f"a server that this process cannot see, perhaps in another container, uses {self.socket_dir}"
                continue
            if status is None:
                self._launch()
                launched = True
                status = self._settled_status()
            if status == "ready" and self.accepts_connections():
                return launched
            waited = f"{self.patience.ready_seconds:.0f} s"
            problem = f"it is still {status} after {waited}" if status else "it ended at once"
            if status == "ready":
                self.stop()  # its socket file was removed
        tail = "\n".join(self.log_file.read_text(errors="replace").splitlines()[-15:]) if self.log_file.exists() else ""
        raise set_up_error(
            f"PostgreSQL does not start in {self.pgdata}: {problem}. The end of {self.log_file}:\n{tail}"
        )

    def stop(self) -> None:
        """Stop the server in mode `fast` or, if it does not stop within 30 s, in mode `immediate`. If that fails, too,
        it is only logged."""
        for mode in ("fast", "immediate"):
            done = self.account.run(self.bin_dir / "pg_ctl", "stop", "-D", self.pgdata, "-m", mode, "-t", "30")
            if done.returncode == 0:
                return
        log.error("embedded PostgreSQL: does not stop", directory=str(self.pgdata), error=done.stderr.strip())

    def create_database_if_absent(self) -> None:
        """Create the database `ecluse` if the server has none; raise SetUpError if the server refuses."""
        try:
            with psycopg.connect(self.dsn("postgres"), autocommit=True, connect_timeout=10) as connection:
                if not connection.execute("SELECT 1 FROM pg_database WHERE datname = 'ecluse'").fetchone():
                    connection.execute("CREATE DATABASE ecluse")
        except psycopg.Error as error:
            raise set_up_error(
                f"PostgreSQL runs in {self.pgdata} but refuses work: {error} (its log: {self.log_file})"
            ) from error

    def _settled_status(self) -> str | None:
        """Wait until the server is ready or gone, for at most `patience.ready_seconds`; return its status."""
        began = report = time.monotonic()
        until = began + self.patience.ready_seconds
        while (status := self.status()) not in (None, "ready") and time.monotonic() < until:
            if time.monotonic() > report + 5:
                report = time.monotonic()
                waited = round(report - began)
                log.warning(
                    "embedded PostgreSQL: not ready yet", directory=str(self.pgdata), status=status, seconds=waited
                )
            time.sleep(0.02)
        return status

    def _launch(self) -> None:
        """Start a server process, and wait until it reports a status or has ended."""
        # The pid in these files may by now be another process or a zombie: PostgreSQL would take it for a live server.
        (self.pgdata / "postmaster.pid").unlink(missing_ok=True)
        (self.socket_dir / f"{SOCKET}.lock").unlink(missing_ok=True)
        if self.log_file.exists() and self.log_file.stat().st_size > MAX_LOG_BYTES:
            self.log_file.replace(self.log_file.with_suffix(".1"))
        quoted = str(self.socket_dir).replace('"', '""')
        settings = SETTINGS | {"unix_socket_directories": f'"{quoted}"'}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open_private(self.log_file) as output:
            # Through a shell that exits at once, so that the server is not our child and outlives this process.
            script = ("/bin/sh", "-c", 'exec "$@" >&2 & echo $!', "sh")
            done = self.account.run(*script, self.bin_dir / "postgres", "-D", self.pgdata, *options, stderr=output)
        pid = int(done.stdout)
        while self.status() is None and _is_postmaster(pid, self.pgdata):
            time.sleep(0.01)


def _is_postmaster(pid: int, pgdata: Path) -> bool:
    """Return True if this process is alive and is the server of this directory (by its command line, which a zombie
    does not have)."""
    if Path("/proc/self/cmdline").exists():
        try:
            return os.fsencode(pgdata) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
    command = ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)]
    return f"-D {pgdata} " in subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603


def _sync(directory: Path) -> None:
    """Flush the entries of a directory to disk (fsync)."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
