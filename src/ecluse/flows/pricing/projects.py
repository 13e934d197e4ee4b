"""Projects: the connected shops of a tenant. The access token of a project is sealed; a client of the shop is guarded,
because users give its URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Literal

import psycopg

from ecluse.access.envelope import Refused
from ecluse.base.errors import Conflict, NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_value
from ecluse.engine import retire_lanes
from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.price_list import PriceListShop
from ecluse.vendors.shopify import Shopify
from ecluse.vendors.shops import Shop

Connector = Literal["shopify", "price_list"]
CONNECTORS: Mapping[str, type[Shop]] = {"shopify": Shopify, "price_list": PriceListShop}

COLUMNS = """id, tenant_id, name, connector, base_url, currency, token_ends, created_by, created_at, updated_by,
    updated_at"""
INSERT = f"""
INSERT INTO pricing_projects (tenant_id, name, connector, base_url, currency, token_ends, created_by, created_at,
                              updated_by, updated_at)
VALUES (%(tenant)s, %(name)s, %(connector)s, %(base_url)s, %(currency)s, %(token_ends)s, %(by)s, ecluse_now(), %(by)s,
        ecluse_now())
RETURNING {COLUMNS}
"""  # noqa: S608 - our own names
SHOW = f"""
SELECT {COLUMNS} FROM pricing_projects WHERE tenant_id = %s AND id = %s AND deleted_at IS NULL
"""  # noqa: S608 - our own names
OPEN_RUNS = "SELECT id FROM rule_runs WHERE project_id = %s AND status IN ('QUEUED', 'APPLYING') ORDER BY id LIMIT 1"
DELETE_RULES = """
UPDATE pricing_rules SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s
WHERE project_id = %s AND deleted_at IS NULL
"""
DELETE = """
UPDATE pricing_projects SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s WHERE id = %s
"""


def secret_name(project: int) -> str:
    """Return the name under which the access token of a project is sealed."""
    return f"pricing-project:{project}"


def lane_name(tenant: str, project: int) -> str:
    """Return the name of the lane of a project: the limits of a shop are those of its access token."""
    return f"shop/{tenant}/project-{project}"


@asynccontextmanager
async def opened(
    connector: str,
    base_url: str,
    token: str,
    currency: str,
    *,
    allowed_networks: Sequence[str],
    now: Callable[[], datetime],
    deadline: float = 30.0,
) -> AsyncIterator[Shop]:
    """Open a client of a shop for the duration of the context."""
    kind, guard = CONNECTORS[connector], GuardedHttp(allowed_networks)
    try:
        resolver = guard.resolver(base_url)
        async with VendorHttp(
            connector, base_url, headers=kind.headers(token), resolver=resolver, now=now, deadline=deadline
        ) as http:
            http.hide(token)
            yield kind(http, currency)
    finally:
        await guard.close()


async def show(connection: Connection, tenant: str, project: int, *, lock: bool = False) -> Row:
    """Return the row of a project; raise NotFound if there is none. `lock`: keep it locked until the end of the
    transaction."""
    row = await fetch_one(connection, dict, SHOW + (" FOR NO KEY UPDATE" if lock else ""), (tenant, project))
    if row is None:
        raise NotFound(f"There is no pricing project {project}.")
    return row


async def create(connection: Connection, tenant: str, given: Mapping[str, Any], by: str) -> Row:
    """Insert a project and return its row. Raise Refused NAME_TAKEN."""
    try:
        (row,) = await fetch_all(connection, dict, INSERT, {**given, "tenant": tenant, "by": by})
    except psycopg.errors.UniqueViolation as error:
        raise name_taken("pricing project", given["name"]) from error
    return row


async def change(connection: Connection, known: Row, given: Mapping[str, Any], by: str) -> Row:
    """Change columns of a project that was read before the transaction; return its row. Raise Conflict if it was
    changed since: what was tested would not be what is stored."""
    row = await show(connection, known["tenant_id"], known["id"], lock=True)
    if row["updated_at"] != known["updated_at"]:
        raise Conflict(f"Pricing project {row['id']} was changed meanwhile: read it again.")
    sets = ", ".join(f"{name} = %({name})s" for name in ("name", "base_url", "token_ends") if name in given)
    if not sets:
        return row
    sql = f"""
    UPDATE pricing_projects SET {sets}, updated_by = %(by)s, updated_at = ecluse_now() WHERE id = %(id)s
    RETURNING {COLUMNS}
    """  # noqa: S608 - our own names
    try:
        (row,) = await fetch_all(connection, dict, sql, {**given, "by": by, "id": row["id"]})
    except psycopg.errors.UniqueViolation as error:
        raise name_taken("pricing project", given["name"]) from error
    return row


async def delete(connection: Connection, tenant: str, project: int, by: str) -> None:
    """Mark a project and its rules as deleted. Raise Conflict while one of its runs changes prices."""
    await show(connection, tenant, project, lock=True)
    if (run := await fetch_value(connection, OPEN_RUNS, (project,))) is not None:
        raise Conflict(f"Rule run {run} of pricing project {project} is not finished: wait for its end.")
    await retire_lanes(connection, [lane_name(tenant, project)])
    await connection.execute(DELETE_RULES, (by, project))
    await connection.execute(DELETE, (by, project))


def name_taken(noun: str, name: str) -> Refused:
    return Refused(409, "NAME_TAKEN", f"There is a {noun} {name!r} already: choose another name.")
