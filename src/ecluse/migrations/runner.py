"""Migration of a database to this program's schema, under a lock, so that replicas that start together take turns.

Order: the engine's tables (`revisions.py`), the schema of DBOS, then the tables of other packages: their revisions and
the idempotent DDL of their flows. A database that a newer program has migrated is refused and not changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from importlib.resources import files

import psycopg
import sqlalchemy

from ecluse.base.errors import SetUpError
from ecluse.engine import Flow
from ecluse.engine.lead.durable import migrate
from ecluse.flow import Package

LOCK = 0x6563_6C75_7365  # "ecluse"
LOOK_AGAIN_SECONDS = 0.1


def newest_revision() -> str:
    """Return the number of this program's newest revision, from the names of the revision files."""
    numbered = (one.name for one in files("ecluse.migrations").joinpath("versions").iterdir() if one.name[0].isdigit())
    return max(numbered).partition("_")[0]


def upgrade(dsn: str, flows: Iterable[Flow] = (), packages: Iterable[Package] = ()) -> str:
    """Migrate the database; return the revision of Ecluse's own schema. Raise SetUpError if the database is newer than
    this program, if the user lacks privileges, or if a revision has an invalid statement (SQLAlchemy's
    ProgrammingError); other errors of the database are raised as they are. Blocking: call it in a thread."""
    try:
        return _upgrade(dsn, flows, packages)
    except (psycopg.errors.InsufficientPrivilege, sqlalchemy.exc.ProgrammingError) as error:
        why = str(error).strip().splitlines()[0]
        raise SetUpError(
            f"The database refuses the schema: {why}. A user who may create schemas must run `ecluse migrate`."
        ) from error


def _upgrade(dsn: str, flows: Iterable[Flow], packages: Iterable[Package]) -> str:
    newest, with_revisions = newest_revision(), [one for one in packages if one.migrations is not None]
    # A session of its own holds the lock: a migration may commit transactions, which a session lock outlives.
    with psycopg.connect(dsn, autocommit=True, application_name="ecluse migrate") as guard:
        # Poll for the lock instead of waiting in a statement: a waiting statement holds a snapshot, and CREATE INDEX
        # CONCURRENTLY in the migrations of DBOS waits for every snapshot. Nothing would break that cycle.
        while guard.execute("SELECT 1 WHERE pg_try_advisory_lock(%s)", (LOCK,)).fetchone() is None:
            time.sleep(LOOK_AGAIN_SECONDS)
        behind = _revision(guard) != newest
        if behind or with_revisions:
            # Here, because Alembic takes longer to load than a server's start takes otherwise.
            from ecluse.migrations import revisions
        if behind:
            revisions.run_own(dsn)
        migrate(dsn)
        if with_revisions:
            revisions.run_packages(dsn, with_revisions)
        for flow in flows:
            if flow.schema:
                guard.execute(flow.schema)  # type: ignore[arg-type, unused-ignore]
    return newest


def _revision(connection: psycopg.Connection) -> str | None:
    """Return the revision of Ecluse's own schema in the database; None if the database has no schema yet."""
    if connection.execute("SELECT to_regclass('alembic_version')").fetchone() == (None,):
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])
