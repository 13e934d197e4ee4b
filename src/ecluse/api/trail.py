"""Routes of the audit trail, for admins, as a list and as a file, and of the outbox of events. Read-only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Literal

from fastapi import Query, Request
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import StreamingResponse

from ecluse.access import door
from ecluse.access.changes import change
from ecluse.access.commands import Command
from ecluse.access.door import caller_of, needs
from ecluse.access.listing import Filters, Listing, Where, read_page
from ecluse.access.surface import Surface
from ecluse.access.wire import Filter, Instant, Shape, reads_of
from ecluse.api.outcomes import WRITTEN_AT_ONCE, lines
from ecluse.api.shapes import Id
from ecluse.db.query import Row

surface = Surface("trail")
PAGE = 2_000  # rows of an export that are read at once
EventState = Literal["waiting", "failing", "published"]


class TrailRow(Shape):
    id: Id
    at: datetime
    actor: str = Field(
        description="`key:<id>` and `agent:<id>` over HTTP, `cli:<user>` of commands that use the database, `server` of"
        " a server's start, `address:<…>` of invalid credentials.",
        examples=["key:3"],
    )
    actor_name: str | None = Field(description="Name of the key.")
    action: str = Field(examples=["run.end"])
    subject: str = Field(examples=["run:7"])
    reason: str | None
    request_id: str | None
    address: str | None = Field(description="The client's, over HTTP; of refusals that of the first.")
    times: int | None = Field(description="Of refusals: their number within the minute that begins at `at`.")


class TrailFilters(Filters):
    actor: Filter = None
    action: Filter = None
    subject: Filter = None
    address: Filter = None
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
    list_trail="List the audit trail, the newest entry first: starts, changes and exports by people and programs,"
    " log-ins and refusals. Admins of the tenant `default` also see entries that belong to no tenant.",
    command=Command("trail", columns=("at", "actor", "actor_name", "address", "action", "subject", "times", "reason")),
)
surface.listing(
    "/api/events/outbox",
    EVENTS,
    list_outbox="List the events of the outbox, the newest first: published, waiting or failing, with tries and error.",
    command=Command("events list", columns=("id", "event_type", "aggregate", "state", "tries", "error", "occurred_at")),
)


@surface.routes.get(
    "/api/audit-trail/export",
    openapi_extra=needs("trail.read") | {"x-command": {"name": "trail export"}},
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {}, "application/x-ndjson": {}}, "description": "All entries"}},
)
async def export_trail(
    request: Request,
    format: Annotated[Literal["csv", "ndjson"], Query(description="`ndjson`: one JSON object per line.")] = "csv",  # noqa: A002
    actor: Filter = None,
    action: Filter = None,
    subject: Filter = None,
    address: Filter = None,
    since: Instant = None,
    until: Instant = None,
) -> StreamingResponse:
    """Export the entries of the audit trail, the newest first, with the filters of the list."""
    given = {"actor": actor, "action": action, "subject": subject, "address": address, "since": since, "until": until}
    kind = "text/csv; charset=utf-8; header=present" if format == "csv" else "application/x-ndjson"
    name = {"Content-Disposition": f'attachment; filename="audit-trail.{format}"'}
    first = await _page(request, given, None)  # before the answer begins: an error is still an answer
    filters = "&".join(f"{one}={value}" for one, value in request.query_params.items())
    async with change(request, "trail.export", "trail", filters or None):
        pass  # nothing changes: only the row in the audit trail is stored
    return StreamingResponse(_exported(request, given, format, first), media_type=kind, headers=name)


async def _exported(request: Request, given: Row, form: str, page: Row) -> AsyncIterator[str | bytes]:
    columns = list(TrailRow.model_fields)
    if form == "csv":
        yield lines([columns])
    while True:
        for start in range(0, len(page["entries"]), WRITTEN_AT_ONCE):
            some = page["entries"][start : start + WRITTEN_AT_ONCE]
            if form == "csv":
                yield lines([row[name] for name in columns] for row in some)
            else:
                yield b"".join(to_json(row) + b"\n" for row in some)
            await asyncio.sleep(0)  # sending to a quick client does not wait
        if page["next_cursor"] is None:
            return
        await door.admit_rest(request, "trail.read")
        page = await _page(request, given, page["next_cursor"])


async def _page(request: Request, given: Row, cursor: str | None) -> Row:
    caller = caller_of(request)
    return await reads_of(request).to_the_end(lambda c: read_page(c, caller, TRAIL, given, limit=PAGE, cursor=cursor))
