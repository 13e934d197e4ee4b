"""The PostgreSQL that tests make their databases on, embedded or a given server of any version, and how they make them.

A given server is one that a URL leads to. Its role must be allowed to create databases (CREATEDB) and needs no more.
One test wants a role that owns its database and nothing else: a superuser makes one; any other role has to be a member
of one that ECLUSE_TEST_OWNER_URL leads to.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ecluse.db import embedded
from ecluse.db.connect import normalise
from ecluse.migrations import revisions
from ecluse.migrations.runner import newest_revision

OWNER_URL = "ECLUSE_TEST_OWNER_URL"
STRATEGIES_SINCE = 150_000  # before, CREATE DATABASE always copies files
HEAD = newest_revision()


@dataclass(frozen=True)
class Given:
    url: str

    def dsn(self, database: str | None = None) -> str:
        return make_conninfo(self.url, dbname=database) if database else self.url

    def ensure_running(self) -> bool:
        """Not ours to start."""
        return False


Server = embedded.Embedded | Given


@contextmanager
def database(
    server: Server, name: str, template: str, tablespace: str | None = None, owner: str | None = None
) -> Iterator[str]:
    """A copy of `template`, dropped at the end, together with the sessions of those who still use it."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        create(server, connection, name, template, tablespace, owner)
    try:
        yield normalise(server.dsn(name))
    finally:
        server.ensure_running()
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            drop(connection, name)


def own_name(kind: str) -> str:
    return f"ecluse_{kind}_{os.getpid()}_{uuid.uuid4().hex[:8]}"


def create(
    server: Server,
    connection: psycopg.Connection[Any],
    name: str,
    template: str,
    tablespace: str | None = None,
    owner: str | None = None,
) -> None:
    # In memory, where the embedded server has its files, a copy of the files takes half the processor time of a copy by
    # the log. On a disk its checkpoints take longer than that.
    strategy = " STRATEGY wal_log" if isinstance(server, Given) else " STRATEGY file_copy"
    copy = strategy if connection.info.server_version >= STRATEGIES_SINCE else ""
    more = copy + (f" TABLESPACE {tablespace}" if tablespace else "") + (f" OWNER {owner}" if owner else "")
    connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}{more}")  # type: ignore[arg-type]


def drop(connection: psycopg.Connection[Any], name: str) -> None:
    """An ordinary role is refused while an autovacuum worker, which is of no role, is in the database."""
    until = time.monotonic() + 30
    while True:
        try:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]
            return
        except psycopg.errors.InsufficientPrivilege:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@contextmanager
def ordinary_role(server: Server) -> Iterator[tuple[str, str] | None]:
    """Name and password of a role that may create neither databases nor roles; None where there is none."""
    if url := os.environ.get(OWNER_URL):
        parts = conninfo_to_dict(url)
        yield str(parts["user"]), str(parts["password"])
        return
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        cursor = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        if cursor.fetchone() != (True,):
            yield None
            return
        name, password = f"owner_{secrets.token_hex(6)}", secrets.token_hex(6)
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")  # type: ignore[arg-type]
        try:
            yield name, password
        finally:
            server.ensure_running()
            connection.execute(f"DROP ROLE {name}")  # type: ignore[arg-type]


def address(dsn: str) -> Path | tuple[str, int]:
    """Where its server listens: a socket's path, or host and port."""
    parts = conninfo_to_dict(dsn)
    host, port = str(parts["host"]), int(str(parts.get("port") or 5432))
    return Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port)


def upgrade_to(dsn: str, revision: str) -> None:
    """Bring the schema of a database to this revision, which may be an old one."""
    revisions.run_own(dsn, revision)
