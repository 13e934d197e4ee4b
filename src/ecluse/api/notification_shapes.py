"""Models of the bodies and answers of the notification routes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from ecluse.access.wire import Body, Page, Shape
from ecluse.api.shapes import Id
from ecluse.base.validation import partial_of
from ecluse.notify.rules import PATTERN, MailAddress

EVENTS = (
    "Event types, or those with a common prefix (`transcription.*`, `hello/*`), or `*`. Every run publishes "
    "`{flow}/started`, `{flow}/selected` and, at its end, `{flow}/completed` (whose `status` says how: completed, "
    "partial or failed) or, if it was cut short, `{flow}/failed`; flows add their own, such as "
    "`transcription.completed`. Deliveries themselves publish no events."
)


Events = Annotated[
    list[Annotated[str, StringConstraints(max_length=200, pattern=PATTERN)]],
    Field(min_length=1, max_length=50, description=EVENTS, examples=[["hello/completed", "transcription.*"]]),
]
Url = Annotated[str, Field(min_length=1, max_length=2000, examples=["https://hooks.example.com/ecluse"])]
Addresses = Annotated[
    list[MailAddress],
    Field(min_length=1, max_length=50, examples=[["ops@example.com"]]),
]
Description = Annotated[str | None, Field(max_length=500)]


EXAMPLES = [
    {"kind": "webhook", "url": "https://hooks.example.com/ecluse", "events": ["hello/completed", "transcription.*"]},
    {"kind": "mail", "addresses": ["ops@example.com"], "events": ["hello/failed"]},
]


class Subscription(Body):
    events: Events
    description: Description = None
    is_active: bool = True


class NewWebhook(Subscription):
    kind: Literal["webhook"]
    url: Url


class NewMail(Subscription):
    kind: Literal["mail"]
    addresses: Addresses


@partial_of(Subscription)
class EndpointChanges(Body):
    """The fields to change; fields that are left out stay as they are."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"events": ["*"], "is_active": False}]})

    url: Url | None = None
    addresses: Addresses | None = None


class EndpointRow(Shape):
    id: Id
    tenant_id: str
    kind: Literal["webhook", "mail"]
    url: str | None = Field(description="Where it goes; its path and query, which may be secret, are hidden.")
    addresses: list[str]
    events: list[str]
    description: str | None
    is_active: bool
    disabled_reason: str | None = Field(
        description="Why it was switched off by itself: its receiver answered 410 Gone."
    )
    created_at: datetime
    updated_at: datetime


class NewEndpoint(EndpointRow):
    secret: str | None = Field(
        description="Of a webhook: what its signatures are made with (Standard Webhooks). Not shown again.",
        examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"],
    )


class EndpointPage(Page):
    endpoints: list[EndpointRow]


class DeletedEndpoint(Shape):
    id: Id
    deleted: Literal[True]


State = Literal["pending", "delivered", "failed"]


class DeliveryRow(Shape):
    id: Id = Field(description="Also the id of its run.")
    tenant_id: str
    endpoint_id: Id | None
    kind: Literal["webhook", "mail"]
    recipient: str
    message_id: str = Field(description="What a receiver sees as `webhook-id`: the same in every attempt.")
    event_key: str
    event_type: str
    about_run_id: Id | None
    state: State
    executions: int
    error_code: str | None
    error: str | None
    created_at: datetime
    next_attempt_at: datetime | None
    ended_at: datetime | None


class Attempt(Shape):
    execution: int
    at: datetime
    error_code: str
    error: str
    retry_at: datetime | None


class DeliveryInFull(DeliveryRow):
    message: dict[str, Any]
    attempts: list[Attempt] = Field(description="Those that failed.")
    result: dict[str, Any] | None = Field(description="What the receiver answered when it took it.")


class DeliveryPage(Page):
    deliveries: list[DeliveryRow]


class Begun(Shape):
    deliveries: list[Id]
