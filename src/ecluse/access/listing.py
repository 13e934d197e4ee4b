"""Lists of rows, declared once: columns from a shape, a table or view to read them from, filters and an order. A list
is always limited to the tenant and the scope of its caller. Pages are cut by a cursor, which stays valid while rows are
added, or by an offset."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from fastapi import Query
from pydantic import BaseModel, ConfigDict, create_model
from pydantic_core import to_jsonable_python

from ecluse.access.keys import Caller
from ecluse.access.wire import Page, Shape, with_ids_as_text
from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all

Cursor = Annotated[
    str | None,
    Query(max_length=500, description="`next_cursor` of the page before; the other parameters must be the same."),
]


class Visible(NamedTuple):
    """An SQL condition on the rows of a source, `t`, and its parameters, whose names begin with `scope_`."""

    condition: str
    parameters: Row


def every_row(_: Caller) -> Visible:
    """For rows that callers of every scope see."""
    return Visible("true", {})


class Where(NamedTuple):
    """The SQL condition of a filter; without it a filter compares the column of its name. `otherwise` is the condition
    where the filter is not given."""

    condition: str
    otherwise: str = ""


class Filters(BaseModel):
    """Base of the filters of a list: one optional field each, annotated with `Where` if it is not a column."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Listing:
    """`order` names columns of `row`, the last of them unique; `-` before a name is descending, and NULL comes last.
    `within` names path parameters that are columns of the source: ids, and in `named` texts."""

    name: str  # of the rows in the answer
    row: type[Shape]
    source: str  # a table or view with the columns of `row`, and `tenant_id`
    needs: str  # permission
    filters: type[Filters] = Filters
    order: Sequence[str] = ("-id",)
    where: str = ""  # a condition on every row `t`
    within: Sequence[str] = ()
    named: Sequence[str] = ()
    visible: Callable[[Caller], Visible] | None = None  # None: callers of a narrower scope than ALL are refused
    every_tenant: bool = False  # the rows belong to no tenant
    page: type[Page] = field(init=False)

    def __post_init__(self) -> None:
        named = f"{self.row.__name__.removesuffix('Row')}Page"
        fields: Any = {self.name: (list[self.row], ...), "next_cursor": (str | None, ...)}  # type: ignore[name-defined]
        object.__setattr__(self, "page", create_model(named, __base__=Page, __module__=self.row.__module__, **fields))

    def conditions(self, given: Mapping[str, Any]) -> list[str]:
        found = [self.where] if self.where else []
        found += [f"t.{name} = %({name})s" for name in (*self.within, *self.named)]
        for name, declared in self.filters.model_fields.items():
            plain = Where(f"t.{name} = %({name})s")
            where = next((one for one in declared.metadata if isinstance(one, Where)), plain)
            found.append(where.otherwise if given.get(name) is None else where.condition)
        return [one for one in found if one]


async def read_page(
    connection: Connection,
    caller: Caller,
    listing: Listing,
    given: Mapping[str, Any],
    *,
    limit: int,
    offset: int = 0,
    cursor: str | None = None,
) -> Row:
    """Return one page as it is answered. `given` has the filters and the path parameters."""
    conditions, parameters = listing.conditions(given), {**given, "tenant": caller.tenant}
    if not listing.every_tenant:
        conditions.append("t.tenant_id = %(tenant)s")
    if listing.visible is not None:
        seen = listing.visible(caller)
        conditions, parameters = [*conditions, seen.condition], {**parameters, **seen.parameters}
    if cursor is not None:
        after, values = _after(listing, cursor)
        conditions, parameters = [*conditions, after], {**parameters, **values}
    statement = _statement(listing, conditions)
    rows = await fetch_all(connection, dict, statement, {**parameters, "limit": limit + 1, "offset": offset})
    more, rows = len(rows) > limit, rows[:limit]
    following = _cursor(listing, rows[-1]) if more else None
    return {listing.name: with_ids_as_text(rows), "limit": limit, "offset": offset, "next_cursor": following}


def _statement(listing: Listing, conditions: Sequence[str]) -> str:
    columns = ", ".join(f"t.{name}" for name in listing.row.model_fields)
    order = ", ".join(f"t.{name} {'DESC' if falls else 'ASC'} NULLS LAST" for name, falls in _columns(listing))
    if not _nullable(listing):  # an index in the plain order cannot be used for NULLS LAST
        order = order.replace(" NULLS LAST", "")
    where = " AND ".join(conditions) or "true"
    return (
        f"SELECT {columns} FROM {listing.source} t WHERE {where}"  # noqa: S608 - our own names
        f" ORDER BY {order} LIMIT %(limit)s OFFSET %(offset)s"
    )


def _columns(listing: Listing) -> list[tuple[str, bool]]:
    return [(name.removeprefix("-"), name.startswith("-")) for name in listing.order]


def _nullable(listing: Listing) -> bool:
    return any(_may_be_null(listing.row.model_fields[name].annotation) for name, _ in _columns(listing))


def _may_be_null(annotation: Any) -> bool:
    return type(None) in get_args(annotation) or (
        get_origin(annotation) is Annotated and _may_be_null(get_args(annotation)[0])
    )


def _cursor(listing: Listing, last: Row) -> str:
    place = [to_jsonable_python(last[name]) for name, _ in _columns(listing)]
    return base64.urlsafe_b64encode(json.dumps([listing.name, *place]).encode()).decode().rstrip("=")


def _after(listing: Listing, cursor: str) -> tuple[str, Row]:
    """Return the condition for the rows that follow the cursor's, and its parameters."""
    columns = _columns(listing)
    try:
        found = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        name, *place = found
    except (ValueError, TypeError, binascii.Error) as error:
        raise _foreign() from error
    if name != listing.name or len(place) != len(columns) or any(isinstance(one, dict | list) for one in place):
        raise _foreign()
    values = {f"after_{n}": value for n, value in enumerate(place)}
    if not _nullable(listing) and len({falls for _, falls in columns}) == 1:  # a range of the index in this order
        names, marks = (", ".join(f"t.{name}" for name, _ in columns), ", ".join(f"%({one})s" for one in values))
        return f"({names}) {'<' if columns[0][1] else '>'} ({marks})", values
    alternatives = []
    for last, (column, falls) in enumerate(columns):
        if place[last] is None:  # NULL comes last: no row follows it in this column
            continue
        same = [
            f"t.{name} IS NULL" if place[n] is None else f"t.{name} = %(after_{n})s"
            for n, (name, _) in enumerate(columns[:last])
        ]
        beyond = f"t.{column} {'<' if falls else '>'} %(after_{last})s"
        if _may_be_null(listing.row.model_fields[column].annotation):
            beyond = f"({beyond} OR t.{column} IS NULL)"
        alternatives.append(" AND ".join([*same, beyond]))
    return f"({' OR '.join(alternatives) or 'false'})", values


def _foreign() -> InvalidInput:
    return InvalidInput("cursor: it is not from this list; begin again without a cursor")
