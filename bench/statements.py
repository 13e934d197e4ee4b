"""Count statements from the server log: the embedded build has no pg_stat_statements."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

# continuation lines of a long statement start with a tab, so they are not counted again
_STATEMENT = re.compile(rb"^[^\t].*?LOG:  (?:statement|execute [^:]*): ")
_SETTINGS = {"log_statement": "all", "log_parameter_max_length": "0", "log_min_duration_statement": "-1"}


@dataclass
class Counted:
    """The count, set when the block ends."""

    count: int = 0


def count_in_log(server_log: Path, start: int, end: int) -> int:
    """Count the logged statements between two byte offsets of the log."""
    with server_log.open("rb") as log:
        log.seek(start)
        return sum(1 for line in log.read(end - start).splitlines() if _STATEMENT.match(line))


@contextmanager
def count_statements(dsn: str, server_log: Path) -> Iterator[Counted]:
    """Count all statements (BEGIN and COMMIT too) of the connections to `dsn`'s database OPENED INSIDE the block.

    Only this database logs, so the lines need no database name; the server must not log statements on its own.
    Needs a superuser. Logging slows the server: never time what runs inside.
    """
    counted = Counted()
    with psycopg.connect(dsn, autocommit=True) as admin:
        row = admin.execute("SELECT current_database(), current_setting('log_statement')").fetchone()
        assert row is not None
        if row[1] != "none":
            raise RuntimeError("the server logs statements already: the count would include other databases")
        database = sql.Identifier(row[0])
        for name, value in _SETTINGS.items():
            setting = sql.SQL("ALTER DATABASE {} SET {} = {}")
            admin.execute(setting.format(database, sql.Identifier(name), sql.Literal(value)))
        start = server_log.stat().st_size
        try:
            yield counted
        finally:
            # a statement is logged before it runs, so every answered statement is in the file
            counted.count = count_in_log(server_log, start, server_log.stat().st_size)
            for name in _SETTINGS:
                admin.execute(sql.SQL("ALTER DATABASE {} RESET {}").format(database, sql.Identifier(name)))
