"""The database of a world: a clone of a migrated template on an embedded server, and what can be done to the server."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psycopg

from ecluse.db import embedded
from ecluse.db.connect import normalise
from ecluse.db.postgres_user import account_for, make_data_dir, open_private, socket_dir_for, start_lock
from ecluse.migrations.runner import upgrade
from tests.support.servers import Server, database

TEMPLATE = "template_faults"
OTHER_PROGRAMS = "ECLUSE_TEST_POSTGRES_BIN"  # programs of another PostgreSQL, for a case's own server
_migrating = threading.Lock()  # Alembic keeps its context in a global
_names = itertools.count(1)


@dataclass(frozen=True)
class Postgres:
    server: Server
    template: str

    @contextlib.contextmanager
    def clone(self, tablespace: str | None = None) -> Iterator[str]:
        """Yield the address of a migrated, empty database; connections left at the end are closed."""
        name = f"ecluse_faults_{os.getpid()}_{next(_names)}"
        with database(self.server, name, self.template, tablespace) as dsn:
            yield dsn

    @property
    def own(self) -> embedded.Embedded:
        if not isinstance(self.server, embedded.Embedded):
            raise TypeError("a given server is left alone")
        return self.server

    def admin(self, statement: str) -> None:
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type, unused-ignore]

    def stop(self, mode: Literal["fast", "immediate"]) -> None:
        """`immediate` is a crash: no checkpoint, recovery at the next start."""
        server = self.own
        with start_lock(server.data_dir):
            done = server.account.run(server.bin_dir / "pg_ctl", "stop", "-D", server.pgdata, "-m", mode, "-t", "30")
        if done.returncode != 0:
            raise RuntimeError(f"PostgreSQL does not stop: {done.stderr}")

    def up(self) -> None:
        self.server.ensure_running()


@contextlib.contextmanager
def own_postgres(folder: Path) -> Iterator[Postgres]:
    """A server that the case may stop, crash or fill up."""
    folder.chmod(0o711)  # the account that runs PostgreSQL must get through, other users must not list it
    other = os.environ.get(OTHER_PROGRAMS)
    server = _start_other(folder / "postgres", Path(other)) if other else embedded.start(folder / "postgres")
    try:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {TEMPLATE}")  # type: ignore[arg-type, unused-ignore]
        with _migrating:
            upgrade(normalise(server.dsn(TEMPLATE)))
        yield Postgres(server, TEMPLATE)
    finally:
        server.release()


def _start_other(data_dir: Path, programs: Path) -> embedded.Embedded:
    """What `embedded.start` does, with the programs of any version from 14 on."""
    account = account_for(data_dir / "pg")
    make_data_dir(data_dir, account)
    users = open_private(data_dir / "users.lock")
    server = embedded.Embedded(data_dir, socket_dir_for(data_dir, account), account, programs, users)
    with start_lock(data_dir):
        fcntl.flock(users, fcntl.LOCK_SH)
        account.make_private_dir(server.pgdata)
        options = ("--encoding=UTF8", "--locale=C", "--auth=trust", "-U", embedded.ROLE)
        done = account.run(programs / "initdb", *options, "-D", server.pgdata)
        if done.returncode != 0:
            raise RuntimeError(f"initdb: {done.stderr}")
        server.bring_up()
        server.create_database_if_absent()
    return server


class SmallDisk:
    """A tablespace on a disk of a few megabytes. Needs root: see `possible`."""

    NAME = "small_disk"

    def __init__(self, place: Path, ballast: Path) -> None:
        self.place = place
        self._ballast = ballast

    @staticmethod
    def possible() -> bool:
        return os.geteuid() == 0 and Path("/proc/mounts").exists()

    def fill(self) -> None:
        """To the last byte."""
        with self._ballast.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(b"\0" * 4096):
                pass

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(postgres: Postgres, folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    place = folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place], check=True)
    try:
        space = place / "space"
        postgres.own.account.make_private_dir(space)
        postgres.admin(f"CREATE TABLESPACE {SmallDisk.NAME} LOCATION '{space}'")
        yield SmallDisk(space, place / "ballast")
        postgres.admin(f"DROP TABLESPACE {SmallDisk.NAME}")
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
