"""`GET /api/limits`: the limits that apply to the caller's key, and what is used of each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.limits import KNOB, Limiter, LimitUse
from ecluse.access.surface import Look, Surface
from ecluse.access.wire import Shape
from ecluse.db.query import Row, fetch_value
from ecluse.db.shares import Shares

surface = Surface("access")
MAILS = "SELECT sent FROM mail_counts WHERE tenant_id = %s AND day = (ecluse_now() AT TIME ZONE 'UTC')::date"
# Of the vendor at which this replica has most of the tenant's calls in flight.
SLOTS = """
SELECT coalesce(max(n), 0)::int FROM (
    SELECT sum(c.in_flight) AS n FROM claims c JOIN runs r ON r.id = c.run_id JOIN lanes l ON l.id = c.lane_id
    WHERE c.in_flight > 0 AND c.replica_id = %s AND r.tenant_id = %s GROUP BY l.base) v
"""
KNOBS: dict[str, str | None] = {
    "mails_per_day": "ECLUSE_MAILS_PER_DAY",
    "worker_slots": "ECLUSE_TENANT_SLOTS_SHARE",
    "reads_at_once": "ECLUSE_DB_POOL",
    "writes_at_once": "ECLUSE_DB_POOL",
    "large_bodies_at_once": None,
}


class LimitRow(Shape):
    name: str = Field(examples=["key_requests"])
    per: Literal["key", "tenant"]
    knob: str | None = Field(
        description="The setting that it follows from; null: it is fixed.", examples=["ECLUSE_LIMIT_KEY_REQUESTS"]
    )
    limit: int | None = Field(
        description="null: no limit. Of requests and megabytes: per minute; of `answer_megabytes`: one answer."
    )
    used: int | None = Field(
        description="What is used now. Requests, megabytes, streams, polls, sockets, worker slots and what is in "
        "flight at once (this request included) are counted by each replica for itself: this is the count of the "
        "replica that answers. null: a limit of one answer."
    )
    resets_in_seconds: int | None = Field(
        description="Time until nothing is used any more; null: it does not reset by itself."
    )


class LimitList(Shape):
    replica: str
    limits: list[LimitRow]


@surface.read("/api/limits", needs="me.read", narrowed=True, answer=LimitList, command=Command("limits"))
async def show_limits(look: Look) -> Row:
    """Show the limits of the key and its tenant, and what is used of each. A request beyond a limit is answered 429;
    calls and mails wait."""
    limiter: Limiter = look.state.limits
    rows = [
        {
            **one._asdict(),
            "per": "key" if one.name.startswith("key_") else "tenant",
            "knob": KNOBS.get(one.name, f"{KNOB}{one.name.upper()}"),
            "limit": one.limit,
        }
        for one in [*await limiter.standing(look.connection, look.caller), *await _others(look)]
    ]
    return {"replica": look.kit.replica, "limits": rows}


async def _others(look: Look) -> list[LimitUse]:
    """Return the limits that other parts of the server enforce: sockets, mails, worker slots, and what is read, written
    and made at once."""
    pusher, kit, limiter = look.state.realtime.pusher, look.kit, look.state.limits
    at_once: list[Shares] = [look.state.reads.shares, look.state.writes.shares, limiter.large]
    mails = await fetch_value(look.connection, MAILS, (look.tenant,)) or 0
    claimed = await fetch_value(look.connection, SLOTS, (kit.replica, look.tenant))
    calls = min(claimed, kit.tenant_slots or claimed)  # claimed ahead, further items wait for a slot
    return [
        LimitUse("tenant_sockets", pusher.limits.sockets or None, pusher.sockets(look.tenant)),
        LimitUse("mails_per_day", look.state.notify.mails_per_day, mails),
        LimitUse("worker_slots", kit.tenant_slots, calls),
        LimitUse("answer_megabytes", limiter.allowed.answer_megabytes or None),
        *(LimitUse(one.limit, one.most, one.used(look.tenant)) for one in at_once),
    ]
