"""Changes of tables with many rows while servers use them: each statement locks a table only for a moment.

The functions commit what the revision has done before. A revision that uses them may therefore be interrupted and run
again: its statements before them must be repeatable (`IF NOT EXISTS`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psycopg
from alembic import op

BATCH = 5_000
INTERRUPTED = "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(%s) AND NOT indisvalid"


def build_indexes(indexes: Mapping[str, str]) -> None:
    """Build indexes without blocking writes to their tables: `{name: "[UNIQUE] table (columns) [WHERE …]"}`. An index
    that exists is left unchanged; one whose build was interrupted is built again."""
    with _outside_transaction() as connection:
        for name, definition in indexes.items():
            if connection.execute(INTERRUPTED, (name,)).fetchone():
                connection.execute(f"DROP INDEX CONCURRENTLY {name}")
            unique, table = ("UNIQUE ", definition[7:]) if definition.startswith("UNIQUE ") else ("", definition)
            connection.execute(f"CREATE {unique}INDEX CONCURRENTLY IF NOT EXISTS {name} ON {table}")


def update_in_batches(table: str, change: str, where: str = "true", *, key: str = "id") -> None:
    """Run `UPDATE table SET change WHERE where`, BATCH values of `key` at a time, each batch in its own transaction: a
    writer waits for one batch at most. `key` is a number with an index; rows added meanwhile may be left unchanged."""
    with _outside_transaction() as connection:
        (last,) = connection.execute(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone() or (0,)  # noqa: S608
        for start in range(0, last, BATCH):
            statement = f"UPDATE {table} SET {change} WHERE {key} > %s AND {key} <= %s AND ({where})"  # noqa: S608
            connection.execute(statement, (start, start + BATCH))


def validate(table: str, constraint: str) -> None:
    """Check a constraint that was added NOT VALID against the rows that existed before it, without blocking writes."""
    with _outside_transaction() as connection:
        connection.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {constraint}")


@contextmanager
def _outside_transaction() -> Iterator[psycopg.Connection]:
    with op.get_context().autocommit_block():
        connection = op.get_bind().connection.driver_connection
        assert isinstance(connection, psycopg.Connection)  # noqa: S101 - for the type checker
        # While these statements wait for a lock, no statement of a server waits behind them: their wait needs no limit.
        (limit,) = connection.execute("SELECT current_setting('lock_timeout')").fetchone() or ("0",)
        connection.execute("SET lock_timeout = 0")
        yield connection
        connection.execute("SELECT set_config('lock_timeout', %s, false)", (limit,))
