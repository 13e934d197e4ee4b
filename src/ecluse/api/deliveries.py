"""Deliveries of notifications: the log of messages sent to each endpoint, and their redelivery."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import Query
from pydantic import AfterValidator, Field

from ecluse.access.commands import Command
from ecluse.access.envelope import Refused
from ecluse.access.listing import Filters, Listing
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Shape, number
from ecluse.api.endpoints import READ, WRITE, Begun, check_active
from ecluse.api.shapes import Id
from ecluse.db.query import Row
from ecluse.notify import dispatch, endpoints, log
from ecluse.notify.log import DeliveryState
from ecluse.notify.rules import Kind

surface = Surface("notifications")


class DeliveryRow(Shape):
    id: Id = Field(description="Also the id of its run.")
    tenant_id: str
    endpoint_id: Id | None
    kind: Kind
    recipient: str
    message_id: str = Field(description="The header `webhook-id` of a webhook: the same in every attempt.")
    event_key: str
    event_type: str
    about_run_id: Id | None
    state: DeliveryState
    executions: int
    error_code: str | None
    error: str | None
    created_at: datetime
    next_attempt_at: datetime | None
    ended_at: datetime | None


class DeliveryAttempt(Shape):
    execution: int
    at: datetime
    error_code: str
    error: str
    retry_at: datetime | None


class DeliveryInFull(DeliveryRow):
    message: dict[str, Any]
    attempts: list[DeliveryAttempt] = Field(description="The failed attempts.")
    result: dict[str, Any] | None = Field(description="The receiver's answer when it accepted the message.")


OfEndpoint = Annotated[
    str | None,
    Query(max_length=200),
    AfterValidator(lambda text: None if text is None else number("endpoint", text)),
]


class DeliveryFilters(Filters):
    endpoint_id: OfEndpoint = None
    state: DeliveryState | None = None


DELIVERIES = Listing(
    "deliveries",
    DeliveryRow,
    "delivery_list",
    READ,
    filters=DeliveryFilters,
    shown=log.shown,
    added=("message_id",),
)
DeliveryNumber = Annotated[int, Noun("delivery")]
OF_DELIVERY = "/api/notifications/deliveries/{delivery_id}"

surface.listing(
    "/api/notifications/deliveries",
    DELIVERIES,
    list_deliveries="List deliveries, the newest first.",
    command=Command(
        "notifications deliveries list",
        columns=("id", "state", "kind", "event_type", "recipient", "executions", "error_code", "error"),
        options={"endpoint": "endpoint_id"},
        empty="no deliveries yet",
    ),
)


@surface.read(OF_DELIVERY, needs=READ, answer=DeliveryInFull, command=Command("notifications deliveries show"))
async def show_delivery(look: Look, delivery_id: DeliveryNumber) -> Row:
    """Show one delivery: the message, each failed attempt with its error, the answer of the receiver."""
    return await log.show_delivery(look.connection, look.tenant, delivery_id)


@surface.operation(
    "POST",
    OF_DELIVERY + "/redeliver",
    needs=WRITE,
    answer=Begun,
    action="delivery.redeliver",
    subject="delivery:{delivery_id}",
    refuses=("ENDPOINT_OFF", "STILL_PENDING", "CONFLICT"),
    command=Command("notifications deliveries redeliver"),
)
async def redeliver(act: Act, delivery_id: DeliveryNumber) -> Row:
    """Deliver the message again, under the same message id, by which the receiver can recognise a duplicate. Refused
    while it is still being delivered."""
    row = await log.show_delivery(act.connection, act.tenant, delivery_id)
    if row["endpoint_id"] is not None:
        check_active(await endpoints.show(act.connection, act.tenant, row["endpoint_id"]))
    started = await dispatch.redeliver(act.connection, act.tenant, delivery_id)
    if started.deduplicated:
        due = (await log.show_delivery(act.connection, act.tenant, started.run.id))["next_attempt_at"]
        later = due is not None and due > act.kit.clock.now()
        when = f"at {due.isoformat(timespec='seconds')}" if later else "now"
        told = f"The message is still being delivered, as delivery {started.run.id}: its next attempt is due {when}."
        raise Refused(409, "STILL_PENDING", told)
    return {"deliveries": [str(started.run.id)]}
