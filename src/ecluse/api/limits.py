"""`GET /api/limits`: the limits that apply to the caller's key, and what is used of each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.limits import KNOB, Limiter
from ecluse.access.surface import Look, Surface
from ecluse.access.wire import Shape
from ecluse.db.query import Row

surface = Surface("access")


class LimitRow(Shape):
    name: str = Field(examples=["key_requests"])
    per: Literal["key", "tenant"]
    knob: str = Field(description="The setting.", examples=["ECLUSE_LIMIT_KEY_REQUESTS"])
    limit: int | None = Field(description="null: no limit. Of requests and megabytes: per minute.")
    used: int = Field(
        description="What is used now. Requests, megabytes and streams are counted by each replica for itself: this is "
        "the count of the replica that answers."
    )
    resets_in_seconds: int | None = Field(
        description="Time until nothing is used any more; null: it does not reset by itself."
    )


class LimitList(Shape):
    replica: str
    limits: list[LimitRow]


@surface.read("/api/limits", needs="me.read", narrowed=True, answer=LimitList, command=Command("limits"))
async def show_limits(look: Look) -> Row:
    """Show the limits of the key and its tenant, and what is used of each. A request beyond a limit is answered 429."""
    limiter: Limiter = look.state.limits
    rows = [
        {
            **one._asdict(),
            "per": "key" if one.name.startswith("key_") else "tenant",
            "knob": f"{KNOB}{one.name.upper()}",
            "limit": one.limit or None,
        }
        for one in await limiter.standing(look.connection, look.caller)
    ]
    return {"replica": look.kit.replica, "limits": rows}
