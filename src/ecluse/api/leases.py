"""Routes that list the leases held, and take a lease from a holder that never releases it; the reason is recorded."""

from __future__ import annotations

from datetime import datetime

from fastapi import Request, Response
from pydantic import Field

from ecluse.access import door
from ecluse.access.changes import change
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import as_json
from ecluse.access.wire import Limit, Offset, Page, Shape, reads_of, with_ids_as_text
from ecluse.api.shapes import Id, Reason
from ecluse.base.errors import NotFound
from ecluse.engine import force_release, list_leases

routes = door.routes("leases")


class LeaseRow(Shape):
    tenant_id: str
    key: str
    owner: str
    run_id: Id | None
    replica_id: str | None
    fence: int = Field(description="Strictly growing per key: the holder of an older number cannot write.")
    attempt: int
    token: str = Field(description="Its first characters.")
    acquired_at: datetime
    remaining_seconds: float | None = Field(description="None: for as long as its run is open.")


class LeasePage(Page):
    leases: list[LeaseRow]


class Release(Reason):
    key: str = Field(min_length=1, max_length=500)


class Released(Shape):
    key: str
    released: bool


@routes.get("/api/leases", openapi_extra=needs("leases.read"), response_model=LeasePage)
async def list_held(request: Request, limit: Limit = 50, offset: Offset = 0) -> Response:
    """List the leases that are held, by key."""
    tenant = caller_of(request).tenant
    rows = await reads_of(request)(lambda c: list_leases(c, tenant, limit=limit, offset=offset))
    return as_json({"leases": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.post("/api/leases/release", openapi_extra=needs("leases.write"), response_model=Released)
async def release(request: Request, body: Release) -> Response:
    """End a lease. Its holder cannot write under it any more. The lease of a dead holder expires by itself."""
    caller = caller_of(request)
    async with change(request, "lease.release", f"lease:{body.key}", body.reason) as connection:
        if not await force_release(connection, caller.tenant, body.key, reason=body.reason, by=caller.actor):
            raise NotFound(f"there is no lease on {body.key!r}")
    return as_json({"key": body.key, "released": True})
