"""Tenants, the owners of runs, keys and secrets. A disabled tenant keeps its data, but its keys are refused; admins of
the tenant `default` can still read it."""

from __future__ import annotations

from ecluse.base.errors import InvalidInput, NotFound
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row
from ecluse.engine import check_tenant_name

LONGEST_NAME = 200
DEFAULT = "default"  # always exists; its administrators administer all tenants


async def create(connection: Connection, tenant: str, name: str | None = None) -> bool:
    """Create the tenant; return False if it exists already. Raise InvalidInput if its id is not valid. `name` (default:
    the id) is cut to LONGEST_NAME characters."""
    check_tenant_name(tenant)
    cursor = await connection.execute(
        "INSERT INTO tenants (id, name, created_at) VALUES (%s, %s, ecluse_now()) ON CONFLICT (id) DO NOTHING",
        (tenant, storable(name or tenant, LONGEST_NAME)),
    )
    return bool(cursor.rowcount)


async def set_disabled(connection: Connection, tenant: str, disabled: bool) -> bool:
    """Disable or enable the tenant; return False if it was in that state already. Raise NotFound if there is no such
    tenant."""
    await require(connection, tenant)
    cursor = await connection.execute(
        "UPDATE tenants SET disabled_at = CASE WHEN %(disabled)s THEN ecluse_now() END"
        " WHERE id = %(tenant)s AND (disabled_at IS NOT NULL) <> %(disabled)s",
        {"tenant": tenant, "disabled": disabled},
    )
    return bool(cursor.rowcount)


async def is_disabled(connection: Connection, tenant: str) -> bool:
    """Return whether the tenant is disabled; raise NotFound if there is no such tenant."""
    known = await fetch_row(connection, "SELECT disabled_at IS NOT NULL FROM tenants WHERE id = %s", (tenant,))
    if known is None:
        raise NotFound(f"There is no tenant {tenant!r}. Create it with `ecluse tenants create {tenant}`.")
    return bool(known[0])


async def require(connection: Connection, tenant: str, *, enabled: bool = False) -> None:
    """Raise NotFound if there is no such tenant; with `enabled`, raise InvalidInput if it is disabled."""
    if await is_disabled(connection, tenant) and enabled:
        raise InvalidInput(f"Tenant {tenant!r} is disabled. Enable it first: `ecluse tenants enable {tenant}`.")
