"""Cursors of lists: the position of a row, as its values in the columns that order the list. A cursor names its list
and grants nothing: the rows after it are limited to the tenant and the scope of the caller who sends it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import get_args

from pydantic_core import to_jsonable_python

from ecluse.access.wire import Shape
from ecluse.base.errors import InvalidInput
from ecluse.db.query import Row


def columns(row: type[Shape], order: Sequence[str]) -> list[tuple[str, bool, bool]]:
    """Return the columns of `order`, each with its name, whether it is descending (`-name`) and whether it may be
    NULL."""
    names = [(one.removeprefix("-"), one.startswith("-")) for one in order]
    return [(name, falls, type(None) in get_args(row.model_fields[name].annotation)) for name, falls in names]


def made(row: type[Shape], order: Sequence[str], last: Row) -> str:
    names = [row.model_fields[name].alias or name for name, _, _ in columns(row, order)]
    place = [to_jsonable_python(last[name]) for name in names]
    return base64.urlsafe_b64encode(json.dumps([row.__name__, *place]).encode()).decode().rstrip("=")


def after(row: type[Shape], order: Sequence[str], cursor: str) -> tuple[str, Row]:
    """Return the SQL condition for the rows after the cursor, and its parameters. Raise InvalidInput if the cursor
    cannot be decoded or is not from this list. Values are not checked here: the query fails if one does not have the
    type of its column."""
    try:
        name, *place = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        json.dumps(place, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, TypeError) as error:
        raise foreign() from error
    if name != row.__name__ or len(place) != len(order):
        raise foreign()
    # As text, which the server reads as a value of the column's type, or refuses.
    values = {f"after_{n}": None if value is None else str(value) for n, value in enumerate(place)}
    parts = columns(row, order)
    if not any(nullable for _, _, nullable in parts) and len({falls for _, falls, _ in parts}) == 1:
        if None in place:
            raise foreign()
        names, marks = (", ".join(f"t.{column}" for column, _, _ in parts), ", ".join(f"%({one})s" for one in values))
        return f"({names}) {'<' if parts[0][1] else '>'} ({marks})", values  # a range of the index in this order
    alternatives: list[str] = []
    same: list[str] = []
    for n, (column, falls, nullable) in enumerate(parts):
        if place[n] is None:  # NULL comes last: no row follows it in this column
            same.append(f"t.{column} IS NULL")
            continue
        beyond = f"t.{column} {'<' if falls else '>'} %(after_{n})s"
        alternatives.append(" AND ".join([*same, f"({beyond} OR t.{column} IS NULL)" if nullable else beyond]))
        same.append(f"t.{column} = %(after_{n})s")
    return f"({' OR '.join(alternatives) or 'false'})", values


def foreign() -> InvalidInput:
    return InvalidInput("cursor: not from this list; begin again without a cursor")
