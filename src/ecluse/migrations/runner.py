"""Migration of a database to this program's schema, under a lock, so that replicas that start together take turns.

Order: the engine's tables (Alembic), the schema of DBOS, then the tables of other packages: their revisions, which are
counted in a version table of their own, and the idempotent DDL of their flows. A database that a newer program has
migrated is refused and not changed.

A revision may run beside servers of the version before. It waits half a second for a lock, because statements of those
servers wait behind it, and is tried again a moment later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.resources import files

import psycopg
import sqlalchemy
import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from ecluse.base.errors import SetUpError
from ecluse.db.outage import one_line
from ecluse.engine import Flow
from ecluse.engine.lead.durable import migrate
from ecluse.flow import Package

LOCK = 0x6563_6C75_7365  # "ecluse"
LOOK_AGAIN_SECONDS = 0.1
LOCK_SECONDS = 0.5
PATIENCE_SECONDS = 300.0

log = structlog.get_logger(__name__)


def upgrade(dsn: str, flows: Iterable[Flow] = (), packages: Iterable[Package] = ()) -> str:
    """Migrate the database; return the revision of our own schema. Raise SetUpError if it is newer than this program,
    or the user lacks privileges. Blocking: call it in a thread."""
    try:
        return _upgrade(dsn, flows, packages)
    except (psycopg.errors.InsufficientPrivilege, sqlalchemy.exc.ProgrammingError) as error:
        why = str(error).strip().splitlines()[0]
        raise SetUpError(
            f"The database refuses the schema: {why}. A user who may create schemas must run `ecluse migrate`."
        ) from error


def _upgrade(dsn: str, flows: Iterable[Flow], packages: Iterable[Package]) -> str:
    # A session of its own holds the lock: a migration may commit transactions, which a session lock outlives.
    with psycopg.connect(dsn, autocommit=True, application_name="ecluse migrate") as guard:
        # Poll for the lock instead of waiting in a statement: a waiting statement holds a snapshot, and CREATE INDEX
        # CONCURRENTLY in the migrations of DBOS waits for every snapshot. Nothing would break that cycle.
        while guard.execute("SELECT 1 WHERE pg_try_advisory_lock(%s)", (LOCK,)).fetchone() is None:
            time.sleep(LOOK_AGAIN_SECONDS)
        engine = sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=lambda: _connect(dsn), poolclass=sqlalchemy.NullPool
        )
        with engine.connect() as connection:
            config = _config(connection)
            _refuse_newer(connection, config)
            _patiently(lambda: command.upgrade(config, "head"))
            connection.commit()
            revision = MigrationContext.configure(connection).get_current_revision()
        migrate(dsn)
        with engine.connect() as connection:
            for package in packages:
                if package.migrations is not None:
                    _patiently(partial(command.upgrade, _config(connection, package), "head"))
                    connection.commit()
        for flow in flows:
            if flow.schema:
                guard.execute(flow.schema)  # type: ignore[arg-type, unused-ignore]
    return str(revision)


def _connect(dsn: str) -> psycopg.Connection:
    connection = psycopg.connect(dsn)
    connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{LOCK_SECONDS}s",))
    connection.commit()
    return connection


def _patiently(migrate: Callable[[], None]) -> None:
    """Run the revisions that are missing, again as long as one waits too long for a lock. What was committed stays."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return migrate()
        except (psycopg.errors.LockNotAvailable, sqlalchemy.exc.OperationalError) as error:
            cause = error.orig if isinstance(error, sqlalchemy.exc.OperationalError) else error
            if not isinstance(cause, psycopg.errors.LockNotAvailable) or time.monotonic() > until:
                raise
            log.info("migrate: a table is in use, trying again", error=one_line(cause))
            time.sleep(LOCK_SECONDS)


def _config(connection: sqlalchemy.Connection, package: Package | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("ecluse.migrations")))
    config.attributes["connection"] = connection
    if package is not None:
        config.set_main_option("path_separator", "newline")
        config.set_main_option("version_locations", str(package.migrations))
        config.attributes["version_table"] = f"alembic_version_{package.name}"
    return config


def _refuse_newer(connection: sqlalchemy.Connection, config: Config) -> None:
    current = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    connection.rollback()
    if current is not None and current not in known:
        raise SetUpError(
            f"This database has schema {current}, which this version of Ecluse does not know: a newer one has migrated "
            f"it (newest known here: {max(known)}). Start the newer version again, or restore a backup from before "
            "the upgrade. Nothing was changed."
        )
