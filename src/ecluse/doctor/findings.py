"""Findings of `ecluse doctor`: each is ok, warn or fail, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from psycopg.rows import namedtuple_row

from ecluse.db.connect import Connection


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    what: str
    says: str
    do: str = ""


async def rows_of(connection: Connection, query: str) -> list[Any]:
    async with connection.cursor(row_factory=namedtuple_row) as cursor:
        await cursor.execute(query)  # type: ignore[arg-type, unused-ignore]
        return await cursor.fetchall()


def graded(value: float, warn: float, fail: float) -> Literal["ok", "warn", "fail"]:
    """Grade a value by two upper limits. For lower limits, negate the value and both limits."""
    return "fail" if value > fail else "warn" if value > warn else "ok"
