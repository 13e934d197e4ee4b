"""The database that the servers use, for one command: opened, migrated if it is new, and let go again."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection

R = TypeVar("R")


def operator() -> str:
    """Who acts, for the audit trail."""
    return f"cli:{getpass.getuser()}"


def with_connection(use: Callable[[Connection], Awaitable[R]]) -> R:
    logging.configure("WARNING")
    database = bootstrap.open_database(settings.load())

    async def opened() -> R:
        async with await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection:
            return await use(connection)

    try:
        try:
            return asyncio.run(opened())
        except psycopg.errors.UndefinedTable:  # a new database: nobody has migrated it yet
            from ecluse.migrations import runner  # slow to import, and seldom needed

            runner.upgrade(database.dsn)
            return asyncio.run(opened())
    except psycopg.DataError as error:
        raise InvalidInput(f"The database cannot hold this input: {error.diag.message_primary}.") from error
    finally:
        database.release()
