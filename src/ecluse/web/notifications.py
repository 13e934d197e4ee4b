"""Page of the notification endpoints (webhooks, mail addresses, Slack, PagerDuty) and of the deliveries to them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from markupsafe import Markup
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import Listing, read_page
from ecluse.access.wire import IdFilter, Offset, reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.notify.log import DeliveryState
from ecluse.web import live, render
from ecluse.web.actions import Button, buttons
from ecluse.web.authentication import Page
from ecluse.web.live import Context
from ecluse.web.shops import Column

READ = "notifications.read"
HERE = "/ui/connections/notifications"
ROWS, MOST = 25, 200  # deliveries, and endpoints, on the page
KINDS = {"webhook": "New webhook", "mail": "New mail", "slack": "New Slack", "pagerduty": "New PagerDuty"}
STATES = {"pending": "running", "delivered": "succeeded", "failed": "failed"}  # colours

routes = APIRouter(route_class=Page, include_in_schema=False)
PAGE = live.Page("notifications_live.html", ("endpoints", "deliveries"))
OF_ENDPOINTS = (
    Column("name", "Endpoint"),
    Column("status", "State"),
    Column("recipient", "Recipient"),
    Column("events", "Events"),
    Column("note", "Note"),
    Column("updated_at", "Changed"),
)
OF_DELIVERIES = (
    Column("name", "Delivery"),
    Column("status", "State"),
    Column("event", "Event and recipient"),
    Column("executions", "Attempts", figure=True),
    Column("problem", "Last error"),
    Column("created_at", "Created"),
    Column("ended", "Ended"),
)


class PageFilters(BaseModel):
    """Filters and offset of the list of deliveries."""

    endpoint_id: IdFilter = None
    state: DeliveryState | None = None
    offset: Offset = 0


FiltersOfPage = Annotated[PageFilters, Query()]


@routes.get(HERE, openapi_extra=needs(READ))
async def show_notifications(request: Request, wanted: FiltersOfPage) -> Response:
    shown = await _shown(request, wanted)
    return render.page(request, "notifications.html", regions=PAGE.regions(request, **shown), **shown)


@routes.get(f"{HERE}/live", openapi_extra=needs(READ))
async def follow_notifications(request: Request, wanted: FiltersOfPage) -> Response:
    return live.stream(request, READ, PAGE, lambda: _shown(request, wanted), lambda _: False)


async def _shown(request: Request, wanted: PageFilters) -> Context:
    listings: Mapping[str, Listing] = request.app.state.listings
    caller, given = caller_of(request), wanted.model_dump(exclude={"offset"})

    async def ask(connection: Connection) -> tuple[list[Row], list[Row]]:
        endpoints = await read_page(connection, caller, listings["list_endpoints"], {}, limit=MOST)
        deliveries = await read_page(
            connection, caller, listings["list_deliveries"], given, limit=ROWS + 1, offset=wanted.offset
        )
        return endpoints["endpoints"], deliveries["deliveries"]

    endpoints, deliveries = await reads_of(request)(ask)
    return {
        "endpoints": [_endpoint(request, row) for row in endpoints],
        "of_endpoints": OF_ENDPOINTS,
        "new": _new(request),
        "deliveries": [_delivery(request, row) for row in deliveries[:ROWS]],
        "of_deliveries": OF_DELIVERIES,
        "states": list(STATES),
        "wanted": wanted,
        "more": len(deliveries) > ROWS,
        "size": ROWS,
        "busy": any(row["ended_at"] is None for row in deliveries),
        "over": False,
    }


def _endpoint(request: Request, row: Row) -> Row:
    named = {"endpoint_id": row["id"]}
    acts = ["test_endpoint"] if row["is_active"] else []
    acts += ["change_endpoint", *(["rotate_endpoint_secret"] if row["kind"] == "webhook" else []), "delete_endpoint"]
    return {
        **row,
        "name": f"{row['kind']} {row['id']}",
        "href": f"{HERE}?endpoint_id={row['id']}#deliveries",
        "status": "on" if row["is_active"] else "off",
        "state": "succeeded" if row["is_active"] else "skipped",
        "recipient": row["url"] or ", ".join(row["addresses"]),
        "events": ", ".join(row["events"]),
        "note": row["disabled_reason"] or row["description"],
        "buttons": buttons(request, *((act, named) for act in acts), back=HERE),
    }


def _delivery(request: Request, row: Row) -> Row:
    again = () if row["state"] == "pending" else (("redeliver", {"delivery_id": row["id"]}),)
    return {
        **row,
        "name": row["id"],
        "href": f"/ui/runs/{row['id']}",  # a delivery is a run
        "status": row["state"],
        "state": STATES[row["state"]],
        "event": Markup("{}<small>{}</small>").format(row["event_type"], row["recipient"]),
        "ended": row["ended_at"] or _next_attempt(row["next_attempt_at"]),
        "problem": f"{row['error_code']}: {row['error']}" if row["error_code"] else None,
        "buttons": buttons(request, *again, back=HERE),
    }


def _next_attempt(at: datetime | None) -> Markup | None:
    return None if at is None else Markup("<small>next attempt</small>{}").format(render.instant(at))


def _new(request: Request) -> list[Button]:
    """Return a button for each kind of endpoint."""
    return [
        one._replace(label=label)
        for kind, label in KINDS.items()
        for one in buttons(request, ("create_endpoint", {}), back=HERE, kind=kind)
    ]
