"""Helpers for queries: rows as tuples or as instances of a class, one row, one column, one value, the database's time;
JSON parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from psycopg import AsyncCursor
from psycopg.rows import class_row, dict_row
from pydantic_core import to_json

from ecluse.db.connect import Connection

T = TypeVar("T")
Parameters = Sequence[Any] | Mapping[str, Any] | None
Row = dict[str, Any]
ROWS_AT_ONCE = 1_000  # converted in one piece, which takes a few milliseconds; in between the event loop is free


async def fetch_all(connection: Connection, kind: type[T], statement: str, parameters: Parameters = None) -> list[T]:
    """Return the rows as instances of `kind`, by column name; `dict` gives dictionaries."""
    factory: Any = dict_row if kind is dict else class_row(kind)
    async with connection.cursor(row_factory=factory) as cursor:
        await cursor.execute(statement, parameters)
        return await fetched(cursor)


async def fetch_one(connection: Connection, kind: type[T], statement: str, parameters: Parameters = None) -> T | None:
    """Return the first row as an instance of `kind`, or None if there is none."""
    found = await fetch_all(connection, kind, statement, parameters)
    return found[0] if found else None


async def fetch_rows(
    connection: Connection, statement: str, parameters: Parameters = None, *, prepare: bool | None = None
) -> list[tuple[Any, ...]]:
    """Return the rows as tuples. `prepare`: whether the server prepares the statement; None lets psycopg decide."""
    return await fetched(await connection.execute(statement, parameters, prepare=prepare))


async def fetch_column(connection: Connection, statement: str, parameters: Parameters = None) -> list[Any]:
    """Return the first column of all rows."""
    return [row[0] for row in await fetch_rows(connection, statement, parameters)]


async def fetch_row(
    connection: Connection, statement: str, parameters: Parameters = None, *, prepare: bool | None = None
) -> tuple[Any, ...] | None:
    """Return the first row as a tuple, or None if there is none. `prepare` as in `fetch_rows`."""
    return await (await connection.execute(statement, parameters, prepare=prepare)).fetchone()


async def fetch_value(connection: Connection, statement: str, parameters: Parameters = None) -> Any:
    """Return the first column of the first row, or None if there is no row."""
    row = await fetch_row(connection, statement, parameters)
    return None if row is None else row[0]


async def fetch_now(connection: Connection) -> datetime:
    """Return the database's time, which counts for all replicas."""
    at: datetime = await fetch_value(connection, "SELECT ecluse_now()")
    return at


async def fetched(cursor: AsyncCursor[T], at_once: int = ROWS_AT_ONCE) -> list[T]:
    """Return all rows of an executed statement; `at_once` are converted in one piece."""
    rows: list[T] = []
    while len(some := await cursor.fetchmany(at_once)) == at_once:
        rows += some
        await asyncio.sleep(0)
    return rows + some


def as_json(value: Any) -> str:
    """Return the value as JSON text, for a statement's parameter."""
    return to_json(value).decode()
