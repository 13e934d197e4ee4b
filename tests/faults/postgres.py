"""The database of a world: a clone of a migrated template on an embedded server, and what can be done to the server."""

from __future__ import annotations

import contextlib
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
from ecluse.db.postgres_user import start_lock
from ecluse.migrations.runner import upgrade

TEMPLATE = "template_faults"
_migrating = threading.Lock()  # Alembic keeps its context in a global
_names = itertools.count(1)


@dataclass(frozen=True)
class Postgres:
    server: embedded.Embedded
    template: str

    @contextlib.contextmanager
    def clone(self, tablespace: str = "pg_default") -> Iterator[str]:
        """A migrated, empty database; whoever still uses it at the end is thrown out."""
        name = f"faults_{os.getpid()}_{next(_names)}"
        self.admin(f"CREATE DATABASE {name} TEMPLATE {self.template} STRATEGY wal_log TABLESPACE {tablespace}")
        try:
            yield normalise(self.server.dsn(name))
        finally:
            self.up()
            self.admin(f"DROP DATABASE {name} WITH (FORCE)")

    def admin(self, statement: str) -> None:
        with psycopg.connect(self.server.dsn("postgres"), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type, unused-ignore]

    def stop(self, mode: Literal["fast", "immediate"]) -> None:
        """`immediate` is a crash: no checkpoint, recovery at the next start."""
        server = self.server
        with start_lock(server.data_dir):
            done = server.account.run(server.bin_dir / "pg_ctl", "stop", "-D", server.pgdata, "-m", mode, "-t", "30")
        if done.returncode != 0:
            raise RuntimeError(f"PostgreSQL does not stop: {done.stderr}")

    def up(self) -> None:
        self.server.ensure_running()


@contextlib.contextmanager
def own_postgres(folder: Path) -> Iterator[Postgres]:
    """A server that the case may stop, crash or fill up."""
    folder.chmod(0o711)  # the account that runs PostgreSQL must get through, nobody else may look
    server = embedded.start(folder / "postgres")
    try:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {TEMPLATE}")  # type: ignore[arg-type, unused-ignore]
        with _migrating:
            upgrade(normalise(server.dsn(TEMPLATE)))
        yield Postgres(server, TEMPLATE)
    finally:
        server.release()


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
        postgres.server.account.make_private_dir(space)
        postgres.admin(f"CREATE TABLESPACE {SmallDisk.NAME} LOCATION '{space}'")
        yield SmallDisk(space, place / "ballast")
        postgres.admin(f"DROP TABLESPACE {SmallDisk.NAME}")
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
