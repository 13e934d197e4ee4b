"""Projects: the connected shops of a tenant, as rows. The access token of a project is sealed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg

from ecluse.access.envelope import Refused
from ecluse.base.errors import Conflict, NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one
from ecluse.engine import retire_lanes

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
LANE = "shop/%s/project-%s"  # of tenant and project, also as a format of SQL
DELETE = """
UPDATE pricing_projects SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s WHERE id = %s
"""


def secret_name(project: int) -> str:
    """Return the name under which the access token of a project is sealed."""
    return f"pricing-project:{project}"


def lane_name(tenant: str, project: int) -> str:
    """Return the name of the lane of a project: the limits of a shop are those of its access token."""
    return LANE % (tenant, project)


async def show(connection: Connection, tenant: str, project: int, *, lock: bool = False) -> Row:
    """Return the row of a project; raise NotFound if there is none. `lock`: keep it locked until the end of the
    transaction."""
    row = await fetch_one(connection, dict, SHOW + (" FOR NO KEY UPDATE" if lock else ""), (tenant, project))
    if row is None:
        raise NotFound(f"There is no pricing project {project}.")
    return row


async def create(connection: Connection, tenant: str, given: Mapping[str, Any], by: str) -> Row:
    """Insert a project and return its row. Raise Refused NAME_TAKEN."""
    with naming("pricing project", given["name"]):
        (row,) = await fetch_all(connection, dict, INSERT, {**given, "tenant": tenant, "by": by})
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
    with naming("pricing project", given.get("name", row["name"])):
        (row,) = await fetch_all(connection, dict, sql, {**given, "by": by, "id": row["id"]})
    return row


async def delete(connection: Connection, tenant: str, project: int, by: str) -> None:
    """Mark a project as deleted."""
    await show(connection, tenant, project, lock=True)
    await retire_lanes(connection, [lane_name(tenant, project)])
    await connection.execute(DELETE, (by, project))


@contextmanager
def naming(noun: str, name: str) -> Iterator[None]:
    """Raise Refused NAME_TAKEN if the name that a statement stores is another row's."""
    try:
        yield
    except psycopg.errors.UniqueViolation as error:
        raise Refused(409, "NAME_TAKEN", f"There is a {noun} {name!r} already: choose another name.") from error
