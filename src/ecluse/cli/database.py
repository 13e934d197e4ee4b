"""The servers' database for one command: open it, migrate it if it is new, release it at the end."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg
import typer

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.base.errors import InvalidInput, SetUpError
from ecluse.db.connect import Connection, open_blocking_session, open_session
from ecluse.db.outage import one_line
from ecluse.db.query import fetch_value

R = TypeVar("R")


def operator() -> str:
    """Return the actor for the audit trail."""
    return f"cli:{getpass.getuser()}"


def with_connection(use: Callable[[Connection], Awaitable[R]]) -> R:
    return with_database(lambda connection, _: use(connection))


def with_database(use: Callable[[Connection, bootstrap.Database], Awaitable[R]]) -> R:
    logging.configure("WARNING")
    database = bootstrap.open_database(settings.load())

    async def opened() -> R:
        async with await open_session(database.dsn) as connection:
            return await use(connection, database)

    try:
        try:
            return asyncio.run(opened())
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            _refuse_unless_new(database.dsn, error)
            from ecluse.migrations import runner  # slow to import, and seldom needed

            runner.upgrade(database.dsn)
            return asyncio.run(opened())
    except UnicodeEncodeError as error:  # escaped in JSON, or from an argument that is not UTF-8
        raise InvalidInput(
            "The database cannot store this input: it contains half a character (a lone surrogate)."
        ) from error
    except psycopg.DataError as error:
        why = error.diag.message_primary or one_line(error)  # before sending, only the driver reports the error
        raise InvalidInput(f"The database cannot store this input: {why}.") from error
    except psycopg.Error as error:
        raise SetUpError(f"The database reported an error: {one_line(error)}.") from error
    finally:
        database.release()


async def warn_without_server(connection: Connection) -> None:
    """Print a warning if no replica is live: the run that was just started waits for one."""
    if await fetch_value(connection, "SELECT 1 FROM replicas WHERE state = 'live' LIMIT 1") is None:
        typer.echo("no server is running: the run waits until one is started (`ecluse serve`)", err=True)


def _refuse_unless_new(dsn: str, error: psycopg.Error) -> None:
    """Refuse unless the database is new: migrating one that is in use is its operator's decision."""
    with open_blocking_session(dsn) as connection:
        if connection.execute("SELECT 1 WHERE to_regclass('alembic_version') IS NULL").fetchone():
            return
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    raise SetUpError(
        f"The database has schema {row[0] if row else 'none'}, which does not fit this version of the program "
        f"({error.diag.message_primary}). Migrate it with `ecluse migrate`, or use the version that the servers run."
    ) from error
