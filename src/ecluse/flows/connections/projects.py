"""Storage of projects, the connected shops of a tenant. The access token of a project is stored encrypted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecluse.access.records import Records
from ecluse.base.errors import Conflict
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine import retire_lanes

PROJECTS = Records("pricing project", "pricing_projects")
show, create = PROJECTS.show, PROJECTS.insert
LANE = "shop/%s/project-%s"  # of tenant and project, also as a format of SQL


def secret_name(project: int) -> str:
    """Return the name of the secret that holds the access token of a project."""
    return f"pricing-project:{project}"


def lane_name(tenant: str, project: int) -> str:
    """Return the name of the lane of a project. Each project has its own: the limits of a shop apply per access
    token."""
    return LANE % (tenant, project)


async def change(connection: Connection, known: Row, given: Mapping[str, Any], by: str) -> Row:
    """Change columns of a project that was read before the transaction; return its row. Raise Conflict if it was
    changed since: what was tested would not be what is stored."""
    row = await show(connection, known["tenant_id"], known["id"], lock=True)
    if row["updated_at"] != known["updated_at"]:
        raise Conflict(f"Pricing project {row['id']} was changed meanwhile: read it again.")
    return await PROJECTS.update(connection, row, given, by) if given else row


async def delete(connection: Connection, tenant: str, project: int, by: str) -> None:
    """Mark a project as deleted, and retire its lane."""
    await PROJECTS.delete(connection, tenant, project, by)
    await retire_lanes(connection, [lane_name(tenant, project)])
