"""Statements for tables whose rows belong to a tenant, have a name, record who changed them last, and are marked as
deleted instead of being removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from pydantic import Field

from ecluse.access.envelope import Refused
from ecluse.access.wire import Shape
from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one


class RecordRow(Shape):
    """A record as answers show it, with the fields of its kind."""

    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    name: str
    created_by: str
    created_at: datetime
    updated_by: str
    updated_at: datetime


async def show(connection: Connection, tenant: str, number: int, *, noun: str, table: str, lock: bool = False) -> Row:
    """Return a row of a table with ids and tenants; raise NotFound if the tenant has none, or it is marked as deleted.
    `lock`: keep it locked until the end of the transaction."""
    sql = f"SELECT * FROM {table} WHERE tenant_id = %s AND id = %s"  # noqa: S608 - our own names
    row = await fetch_one(connection, dict, sql + (" FOR NO KEY UPDATE" if lock else ""), (tenant, number))
    if row is None or row.get("deleted_at") is not None:
        raise NotFound(f"There is no {noun} {number}.")
    return _shown(row)


@dataclass(frozen=True)
class Records:
    """The statements for one kind of record. `noun` names the kind in messages. Names in `table` are unique, by an
    index, within the tenant or within the record that the rows belong to."""

    noun: str
    table: str

    async def show(self, connection: Connection, tenant: str, number: int, *, lock: bool = False) -> Row:
        """Return a row, as `show` does."""
        return await show(connection, tenant, number, noun=self.noun, table=self.table, lock=lock)

    async def insert(self, connection: Connection, tenant: str, given: Mapping[str, Any], by: str) -> Row:
        """Insert a row with the columns `given` (`name` among them) and return it. Raise Refused (NAME_TAKEN) if the
        name is in use. `by`: the actor."""
        names, values = ", ".join(given), ", ".join(f"%({one})s" for one in given)
        sql = f"""
        INSERT INTO {self.table} (tenant_id, {names}, created_by, created_at, updated_by, updated_at)
        VALUES (%(tenant)s, {values}, %(by)s, ecluse_now(), %(by)s, ecluse_now()) RETURNING *
        """  # noqa: S608 - our own names
        return await self._stored(connection, sql, {**given, "tenant": tenant, "by": by}, given["name"])

    async def update(self, connection: Connection, known: Row, given: Mapping[str, Any], by: str) -> Row:
        """Change the columns `given` of the row `known`, which the caller has locked, and return it. Raise Refused
        (NAME_TAKEN) if the new name is in use."""
        sets = ", ".join(f"{one} = %({one})s" for one in given)
        sql = f"""
        UPDATE {self.table} SET {sets}, updated_by = %(by)s, updated_at = ecluse_now() WHERE id = %(id)s RETURNING *
        """  # noqa: S608 - our own names
        return await self._stored(connection, sql, {**given, "id": known["id"], "by": by}, given.get("name"))

    async def delete(self, connection: Connection, tenant: str, number: int, by: str) -> None:
        """Mark a row as deleted. Raise NotFound if the tenant has no such row or it is deleted already."""
        await self.show(connection, tenant, number, lock=True)
        sql = f"""
        UPDATE {self.table} SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s WHERE id = %s
        """  # noqa: S608 - our own names
        await connection.execute(sql, (by, number))

    async def _stored(self, connection: Connection, sql: str, given: Row, name: str | None) -> Row:
        values = {one: Jsonb(value) if isinstance(value, dict | list) else value for one, value in given.items()}
        try:
            (row,) = await fetch_all(connection, dict, sql, values)
        except psycopg.errors.UniqueViolation as error:
            why = f"There is a {self.noun} {name!r} already: choose another name."
            raise Refused(409, "NAME_TAKEN", why) from error
        return _shown(row)


def _shown(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "deleted_at"}
