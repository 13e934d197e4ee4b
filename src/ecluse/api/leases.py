"""Routes of leases: the list of held leases, and the release by force of one whose holder does not release it, with a
reason that is recorded."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.listing import Listing
from ecluse.access.surface import Act, Surface
from ecluse.access.wire import Shape
from ecluse.api.shapes import Id, Reason
from ecluse.base.errors import NotFound
from ecluse.db.query import Row
from ecluse.engine import force_release

surface = Surface("leases")


class LeaseRow(Shape):
    tenant_id: str
    key: str
    owner: str
    run_id: Id | None
    replica_id: str | None
    fence: int = Field(description="Strictly growing per key: the holder of an older number cannot write.")
    attempt: int
    token: str = Field(description="The first characters of the token.")
    acquired_at: datetime
    remaining_seconds: float | None = Field(description="null: held for as long as its run is open.")


class Release(Reason):
    key: str = Field(min_length=1, max_length=500)


class Released(Shape):
    key: str
    released: bool


LEASES = Listing("leases", LeaseRow, "lease_list", "leases.read", order=("key",))

surface.listing(
    "/api/leases",
    LEASES,
    list_leases="List the leases that are held, by key.",
    command=Command(
        "leases list", columns=("key", "owner", "run_id", "attempt", "remaining_seconds"), empty="no leases are held"
    ),
)


@surface.operation(
    "POST",
    "/api/leases/release",
    needs="leases.write",
    answer=Released,
    action="lease.release",
    subject="lease:{key}",
    command=Command("leases release", arguments=("key",)),
)
async def release_lease(act: Act, body: Release) -> Row:
    """Release a lease by force: its holder can no longer write under it. The lease of a dead process expires by
    itself."""
    if not await force_release(act.connection, act.tenant, body.key, reason=body.reason, by=act.caller.actor):
        raise NotFound(f"There is no lease on {body.key!r}.")
    return {"key": body.key, "released": True}
