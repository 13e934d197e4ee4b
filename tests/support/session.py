"""A test's own session on its database."""

from __future__ import annotations

from typing import Any

import psycopg


class Session:
    """Each statement finds the session as new. It is one session all the same: a test may ask fifty times a second, and
    to connect costs more than most answers."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None

    def ask(self, sql: str, *parameters: object) -> list[Any]:
        if self._connection is not None:
            try:
                return _answer(self._connection, sql, parameters)
            except psycopg.OperationalError:
                if not self._connection.closed:
                    raise
        # There is none yet, or it was cut off: the test may have stopped the server.
        self._connection = psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None)
        return _answer(self._connection, sql, parameters)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _answer(connection: psycopg.Connection[Any], sql: str, parameters: tuple[object, ...]) -> list[Any]:
    cursor = connection.execute(sql, parameters or None)  # type: ignore[arg-type]
    rows = cursor.fetchall() if cursor.description else []
    connection.execute("DISCARD ALL")
    return rows
