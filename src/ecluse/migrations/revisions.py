"""Revisions of Ecluse and of packages, run by Alembic. `runner.py` imports this module only where a revision may be
missing: a database that is up to date costs a start one query.

A revision may run beside servers of the version before. It waits half a second for a lock, because statements of those
servers wait behind it, and is tried again a moment later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
from ecluse.flow import Package

LOCK_SECONDS = 0.5
PATIENCE_SECONDS = 300.0
IN_USE = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)

log = structlog.get_logger(__name__)


def run_own(dsn: str, to: str = "head") -> None:
    """Run the missing revisions of Ecluse up to this one. Raise SetUpError if the database is newer than this
    program."""
    with _engine(dsn).connect() as connection:
        config = config_for(connection)
        _refuse_newer(connection, config)
        _patiently(lambda: command.upgrade(config, to))
        connection.commit()


def run_packages(dsn: str, packages: Sequence[Package]) -> None:
    """Run the missing revisions of these packages. Each package has a version table of its own."""
    with _engine(dsn).connect() as connection:
        for package in packages:
            _patiently(partial(command.upgrade, config_for(connection, package), "head"))
            connection.commit()


def config_for(connection: sqlalchemy.Connection | None, package: Package | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("ecluse.migrations")))
    config.attributes["connection"] = connection
    if package is not None:
        config.set_main_option("path_separator", "newline")
        config.set_main_option("version_locations", str(package.migrations))
        config.attributes["version_table"] = f"alembic_version_{package.name}"
    return config


def _engine(dsn: str) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: _connect(dsn), poolclass=sqlalchemy.NullPool
    )


def _connect(dsn: str) -> psycopg.Connection:
    connection = psycopg.connect(dsn)
    connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{LOCK_SECONDS}s",))
    connection.commit()
    return connection


def _patiently(migrate: Callable[[], None]) -> None:
    """Run the missing revisions. If one does not get a lock within LOCK_SECONDS, or deadlocks with a server, run those
    still missing again, for up to PATIENCE_SECONDS; revisions that were committed stay."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return migrate()
        except (*IN_USE, sqlalchemy.exc.OperationalError) as error:
            cause = error.orig if isinstance(error, sqlalchemy.exc.OperationalError) else error
            if not isinstance(cause, IN_USE) or time.monotonic() > until:
                raise
            log.info("migrate: a table is in use, trying again", error=one_line(cause))
            time.sleep(LOCK_SECONDS)


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
