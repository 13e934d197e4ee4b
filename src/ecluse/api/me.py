"""`GET /api/me`: what the caller's key may do."""

from __future__ import annotations

from fastapi import Request, Response

from ecluse.access import door
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import as_json
from ecluse.access.permissions import ROLES
from ecluse.api.shapes import Me

routes = door.routes("access")


@routes.get("/api/me", openapi_extra=needs("me.read", narrowed=True), response_model=Me)
async def me(request: Request) -> Response:
    """Show the key's tenant, role, scope and permissions."""
    caller = caller_of(request)
    return as_json(
        {
            "key_id": str(caller.key_id),
            "tenant_id": caller.tenant,
            "role": caller.role,
            "scope": caller.scope,
            "groupes": caller.groupes,
            "crm_user_id": caller.crm_user_id,
            "permissions": sorted(ROLES[caller.role]),
        }
    )
