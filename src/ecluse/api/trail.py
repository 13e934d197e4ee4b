"""Routes of the audit trail, for admins, and of the outbox of events. Read-only."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.surface import Command, Surface
from ecluse.access.wire import Filter, Instant, Shape
from ecluse.api.shapes import Id

surface = Surface("trail")
EventState = Literal["waiting", "failing", "published"]


class TrailRow(Shape):
    id: Id
    at: datetime
    actor: str = Field(description="`key:<id>` over HTTP, `cli:<user>` on the command line.", examples=["key:3"])
    actor_name: str | None = Field(description="Name of the key.")
    action: str = Field(examples=["run.end"])
    subject: str = Field(examples=["run:7"])
    reason: str | None
    request_id: str | None


class TrailFilters(Filters):
    actor: Filter = None
    action: Filter = None
    subject: Filter = None
    since: Annotated[Instant, Where("t.at >= %(since)s")] = None
    until: Annotated[Instant, Where("t.at < %(until)s")] = None


class EventRow(Shape):
    id: Id
    event_key: str
    event_type: str = Field(examples=["automation.run.completed"])
    aggregate: str = Field(description="Events of one aggregate are published in order.", examples=["run:7"])
    correlation_id: str
    producer: str
    occurred_at: datetime
    state: EventState
    tries: int
    try_at: datetime | None = Field(description="Not published before then; null: at once.")
    error: str | None
    published_at: datetime | None


class EventFilters(Filters):
    event_type: Filter = None
    aggregate: Filter = None
    state: EventState | None = None


TRAIL = Listing("entries", TrailRow, "trail", "trail.read", filters=TrailFilters)
EVENTS = Listing("events", EventRow, "event_list", "runs.read", filters=EventFilters)

surface.listing(
    "/api/audit-trail",
    TRAIL,
    list_trail="List the changes made by people and programs, the newest first. Admins of the tenant `default` also see"
    " the changes that belong to no tenant.",
    command=Command("trail", columns=("at", "actor", "actor_name", "action", "subject", "reason")),
)
surface.listing(
    "/api/events/outbox",
    EVENTS,
    list_outbox="List events, the newest first: published, waiting to be, or failing, with their tries and last error.",
    command=Command("events list", columns=("id", "event_type", "aggregate", "state", "tries", "error", "occurred_at")),
)
