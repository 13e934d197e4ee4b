"""Storage of connections: one per tenant and kind; the key is encrypted in `secrets`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import psycopg

from ecluse.access.tenants import DEFAULT
from ecluse.base.errors import Conflict, NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_rows, fetch_value

Kind = Literal["crm", "speech", "llm"]
KINDS: tuple[Kind, ...] = ("crm", "speech", "llm")
VENDORS = {"crm": "the CRM", "speech": "speech to text", "llm": "the language model"}

CHANGEABLE = ("base_url", "model", "max_in_flight", "per_minute", "api_key_ends")
LOAD = "SELECT * FROM {source} c WHERE tenant_id = %s AND kind = %s"
OF_TENANTS = """
SELECT tenant_id, base_url, model, max_in_flight, per_minute FROM connections WHERE kind = %s AND tenant_id = ANY(%s)
"""
DELETE = "DELETE FROM connections WHERE tenant_id = %s AND kind = %s"
KNOWN = "SELECT tenant_id, kind FROM connections WHERE tenant_id = ANY(%s)"
PUT = """
INSERT INTO connections (tenant_id, kind, base_url, model, max_in_flight, per_minute, api_key_ends,
                         created_by, created_at, updated_by, updated_at)
SELECT %(tenant)s, %(kind)s, %(base_url)s, %(model)s, %(max_in_flight)s, %(per_minute)s, %(api_key_ends)s,
       %(by)s, now, %(by)s, now FROM (SELECT ecluse_now() AS now) clock
"""
# By compare-and-set: what was tested is what was read.
CHANGE = f"""
UPDATE connections SET {", ".join(f"{name} = %({name})s" for name in CHANGEABLE)}, updated_by = %(by)s,
    updated_at = greatest(ecluse_now(), updated_at + interval '1 microsecond')
WHERE tenant_id = %(tenant)s AND kind = %(kind)s AND updated_at = %(read_at)s RETURNING 1
"""  # noqa: S608 - our own names


@dataclass(frozen=True)
class Record:
    """A stored connection, as flows need it."""

    tenant_id: str
    base_url: str
    model: str | None
    max_in_flight: int | None
    per_minute: float | None


def secret_name(kind: Kind) -> str:
    """Return the name of the secret that holds the key of a connection."""
    return f"connection:{kind}"


def schedule_crm_key_name(schedule_id: int) -> str:
    """Return the name of the secret that holds a schedule's own CRM key."""
    return f"schedule:{schedule_id}"


async def of_tenants(connection: Connection, kind: Kind, tenants: Collection[str]) -> dict[str, Record]:
    """Return the stored connections of this kind, by tenant; tenants without one are left out."""
    rows = await fetch_all(connection, Record, OF_TENANTS, (kind, sorted(set(tenants))))
    return {one.tenant_id: one for one in rows}


async def require(connection: Connection, needed: Collection[tuple[str, Kind]]) -> None:
    """Raise Conflict NO_CONNECTION if a tenant lacks a connection in `needed`, (tenant, kind) pairs. The tenant
    `default` is not checked: it has the connections of the environment, and a call reports what is missing there."""
    others = {one for one in needed if one[0] != DEFAULT}
    if not others:
        return
    rows = await fetch_rows(connection, KNOWN, (sorted({tenant for tenant, _ in others}),))
    lacking = sorted(others - {(tenant, kind) for tenant, kind in rows})
    if lacking:
        tenant = lacking[0][0]
        raise no_connection(tenant, [kind for one, kind in lacking if one == tenant])


async def of_environment(connection: Connection, tenant: str, kinds: Collection[Kind]) -> list[Kind]:
    """Return the kinds among `kinds` for which the tenant uses the environment: only the tenant `default` does, where
    it has no stored connection."""
    if tenant != DEFAULT:
        return []
    stored = {kind for _, kind in await fetch_rows(connection, KNOWN, ([tenant],))}
    return [kind for kind in kinds if kind not in stored]


async def lacking(connection: Connection, tenant: str, environment: Collection[Kind]) -> list[Kind]:
    """Return the kinds of vendors to which the tenant has no connection. `environment`: the kinds that the environment
    has a key for, which count for the tenant `default`."""
    has = {kind for _, kind in await fetch_rows(connection, KNOWN, ([tenant],))}
    has |= set(environment) if tenant == DEFAULT else set()
    return [kind for kind in KINDS if kind not in has]


def no_connection(tenant: str, kinds: Collection[Kind]) -> Conflict:
    """Return the error for a tenant that lacks connections of these kinds; it says how to add them."""
    *others, last = [f"{VENDORS[kind]} (kind {kind})" for kind in sorted(kinds)]
    named = f"{', '.join(others)} and {last}" if others else last
    command = f"`ecluse connections create KIND --tenant {tenant} --base-url URL --api-key-file FILE`"
    how = f"with {command} (llm: also --model NAME), POST /api/connections or on the page Connections"
    what = "it" if len(kinds) == 1 else "them"
    return Conflict(f"Tenant {tenant} has no connection to {named}: add {what} {how}.", code="NO_CONNECTION")


async def load(connection: Connection, tenant: str, kind: Kind, source: str = "connections") -> Row:
    """Return the row of a connection. `source`: the table, or a query that adds columns. Raise NotFound if the tenant
    has no stored connection of this kind."""
    row = await fetch_one(connection, dict, LOAD.format(source=source), (tenant, kind))
    if row is None:
        raise _unknown(kind)
    return row


def _unknown(kind: Kind) -> NotFound:
    return NotFound(f"There is no connection {kind}. `ecluse connections list` shows them.")


async def create(connection: Connection, tenant: str, kind: Kind, values: Row, by: str) -> None:
    """Insert a connection. Raise Conflict if the tenant has one of this kind already."""
    try:
        async with connection.transaction():
            await connection.execute(PUT, {**values, "tenant": tenant, "kind": kind, "by": by})
    except psycopg.errors.UniqueViolation as error:
        message = f"There is a connection {kind} already: change it, or delete it first."
        raise Conflict(message, code="CONNECTION_EXISTS") from error


async def change(connection: Connection, known: Row, changes: Row, by: str) -> None:
    """Change a connection that was read as `known`. Raise Conflict if it was changed or deleted since then."""
    values = {name: changes.get(name, known[name]) for name in CHANGEABLE}
    which: dict[str, Any] = {"tenant": known["tenant_id"], "kind": known["kind"], "read_at": known["updated_at"]}
    if not await fetch_value(connection, CHANGE, {**values, **which, "by": by}):
        raise Conflict(f"Connection {known['kind']} was changed or deleted meanwhile: read it again.")


async def delete(connection: Connection, tenant: str, kind: Kind) -> None:
    """Delete a connection; its secret is left to the caller. Raise NotFound if the tenant has none of this kind."""
    if (await connection.execute(DELETE, (tenant, kind))).rowcount == 0:
        raise _unknown(kind)
