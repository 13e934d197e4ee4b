"""Migrated, empty databases: copies of one template, made and dropped by a thread of their own.

Making one takes a twentieth of a second and dropping it a tenth; tests wait for neither, because a spare one is made
while they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from ecluse.db.connect import normalise
from tests.support.servers import Server, create, drop, own_name


class Databases:
    def __init__(self, server: Server, template: str) -> None:
        self._server, self._template = server, template
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="databases")
        self._connection: psycopg.Connection[Any] | None = None
        self._dropped: list[Future[None]] = []
        self._spare = self._thread.submit(self._make)

    @contextmanager
    def one(self) -> Iterator[str]:
        name = self._spare.result()
        self._spare = self._thread.submit(self._make)
        try:
            yield normalise(self._server.dsn(name))
        finally:
            self._dropped.append(self._thread.submit(self._drop, name))

    def close(self) -> None:
        """Fails if a database could not be dropped."""
        self._dropped.append(self._thread.submit(self._drop, self._spare.result()))
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
        for dropped in self._dropped:
            dropped.result()

    def _make(self) -> str:
        name = own_name("test")
        create(self._server, self._connected(), name, self._template)
        return name

    def _drop(self, name: str) -> None:
        drop(self._connected(), name)

    def _connected(self) -> psycopg.Connection[Any]:
        """A test may have killed the server, or its sessions."""
        try:
            if self._connection is not None:
                self._connection.execute("SELECT 1")
                return self._connection
        except psycopg.OperationalError:
            self._connection = None
        self._server.ensure_running()
        self._connection = psycopg.connect(self._server.dsn(), autocommit=True)
        return self._connection


def everything_stored(dsn: str) -> str:
    """All rows of all tables, as text."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute(
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables"
            " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
        texts = [
            connection.execute(f"SELECT string_agg(t::text, ' ') FROM {table} t").fetchone()[0] or ""  # noqa: S608
            for (table,) in tables
        ]
    return "\n".join(texts)
