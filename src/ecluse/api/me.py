"""`GET /api/me`: tenant, role, scope and permissions of the caller's key."""

from __future__ import annotations

from typing import Literal

from ecluse.access.commands import Command
from ecluse.access.permissions import OF_SERVER, permissions_of
from ecluse.access.surface import Look, Surface
from ecluse.access.wire import Shape
from ecluse.api.shapes import Role
from ecluse.db.query import Row

surface = Surface("access")


class Me(Shape):
    key_id: str
    tenant_id: str
    role: Role
    scope: Literal["ALL", "GROUP", "SELF"]
    groupes: list[str]
    crm_user_id: str | None
    permissions: list[str]


@surface.read("/api/me", needs="me.read", narrowed=True, answer=Me, command=Command("me"))
async def show_me(look: Look) -> Row:
    """Show tenant, role, scope and permissions of the caller's key."""
    caller = look.caller
    return {
        "key_id": caller.key_id,
        "tenant_id": caller.tenant,
        "role": caller.role,
        "scope": caller.scope,
        "groupes": caller.groupes,
        "crm_user_id": caller.crm_user_id,
        "permissions": sorted(permissions_of(caller.role) - (set() if caller.administers_tenants else OF_SERVER)),
    }
