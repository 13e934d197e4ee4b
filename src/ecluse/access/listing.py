"""Lists of rows, declared once: columns from a shape, a table or view to read them from, filters and an order. A list
is limited to the tenant of its caller, unless its rows belong to no tenant, and to the caller's scope. Pages are read
by a cursor, which stays valid while rows are added, or by an offset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import psycopg
from fastapi import Query
from psycopg.rows import dict_row
from pydantic import BaseModel, ConfigDict, create_model

from ecluse.access import cursors
from ecluse.access.keys import Caller
from ecluse.access.wire import Page, Shape, with_ids_as_text
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetched

ROWS_AT_ONCE = 25
Cursor = Annotated[
    str | None,
    Query(max_length=500, description="`next_cursor` of the page before; the other parameters must be the same."),
]


class Visible(NamedTuple):
    """An SQL condition for the rows `t` of a source that a caller may see, and its parameters, whose names begin with
    `scope_`."""

    condition: str
    parameters: Row


def every_row(_: Caller) -> Visible:
    """Return the condition for lists that callers of every scope may read in full."""
    return Visible("true", {})


class Where(NamedTuple):
    """The SQL condition of a filter; a filter without it compares the column of its name. `otherwise` is the condition
    that applies if the filter is not given."""

    condition: str
    otherwise: str = ""


class Filters(BaseModel):
    """Base of the filters of a list: one optional field each, annotated with `Where` if it is not a column."""

    model_config = ConfigDict(extra="forbid")


def equal(*others: type[Filters], **columns: Any) -> type[Filters]:
    """Return filters by the value of these columns, given with the type of each, and `others`."""
    fields: Any = {name: (kind | None, None) for name, kind in columns.items()}
    return create_model("Filters", __base__=others or (Filters,), **fields)


@dataclass(frozen=True)
class Listing:
    """The declaration of a list. `order` names columns of `row`, the last of them unique; `-` before a name is
    descending, and NULL comes last. `within` names path parameters that are columns of the source and hold ids, `named`
    those that hold texts."""

    name: str  # of the rows in the answer
    row: type[Shape]
    source: str  # a table, a view or a query in parentheses, with the columns of `row`, and `tenant_id`
    needs: str  # permission
    filters: type[Filters] = Filters
    order: Sequence[str] = ("-id",)
    where: str = ""  # a condition on every row `t`
    within: Sequence[str] = ()
    named: Sequence[str] = ()
    visible: Callable[[Caller], Visible] | None = None  # None: callers of a narrower scope than ALL are refused
    every_tenant: bool = False  # the rows belong to no tenant
    shown: Callable[[Row], Row] | None = None  # hides what must not be read, adds what SQL cannot express
    added: Sequence[str] = ()  # fields that `shown` adds: the source does not have them
    base: type[Page] = Page  # with the fields that the answer has beside the rows
    page: type[Page] = field(init=False)

    def __post_init__(self) -> None:
        named = f"{self.row.__name__.removesuffix('Row')}Page"
        fields: Any = {self.name: (list[self.row], ...), "next_cursor": (str | None, ...)}  # type: ignore[name-defined]
        object.__setattr__(
            self, "page", create_model(named, __base__=self.base, __module__=self.row.__module__, **fields)
        )

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
    """Read one page of a list and return it in the form of its answer. `given`: the filters and the path parameters.
    Raise InvalidInput if the cursor is not from this list."""
    conditions, parameters = listing.conditions(given), {**given, "tenant": caller.tenant}
    if not listing.every_tenant:
        conditions.append("t.tenant_id = %(tenant)s")
    if listing.visible is not None:
        seen = listing.visible(caller)
        conditions, parameters = [*conditions, seen.condition], {**parameters, **seen.parameters}
    if cursor is not None:
        after, values = cursors.after(listing.row, listing.order, cursor)
        conditions, parameters = [*conditions, after], {**parameters, **values}
    statement = _statement(listing, conditions)
    try:
        async with connection.cursor(row_factory=dict_row) as reading:
            await reading.execute(statement, {**parameters, "limit": limit + 1, "offset": offset})
            rows = await fetched(reading, ROWS_AT_ONCE)
    except psycopg.DataError as error:  # a value in the cursor is not of its column's type
        raise error if cursor is None else cursors.foreign() from error
    more, rows = len(rows) > limit, rows[:limit]
    following = cursors.made(listing.row, listing.order, rows[-1]) if more else None
    rows = rows if listing.shown is None else [listing.shown(row) for row in rows]
    return {listing.name: with_ids_as_text(rows), "limit": limit, "offset": offset, "next_cursor": following}


def _statement(listing: Listing, conditions: Sequence[str]) -> str:
    columns = ", ".join(
        f't.{name} AS "{field.alias or name}"'
        for name, field in listing.row.model_fields.items()
        if name not in listing.added
    )
    order = ", ".join(  # NULLS LAST only where needed: an index in the plain order cannot be used for it
        f"t.{name}{' DESC' if falls else ''}{' NULLS LAST' if falls and nullable else ''}"
        for name, falls, nullable in cursors.columns(listing.row, listing.order)
    )
    where = " AND ".join(conditions) or "true"
    return (
        f"SELECT {columns} FROM {listing.source} t WHERE {where}"  # noqa: S608 - our own names
        f" ORDER BY {order} LIMIT %(limit)s OFFSET %(offset)s"
    )
