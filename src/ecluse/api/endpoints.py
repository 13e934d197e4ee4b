"""Routes of notification endpoints: webhooks, mail addresses, Slack and PagerDuty. The signing secret of a webhook is
shown only when it is created or rotated; every change is recorded in the audit trail."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Body as JsonBody
from pydantic import ConfigDict, Field, SecretStr, StringConstraints

from ecluse.access import secrets as sealed
from ecluse.access.envelope import Refused
from ecluse.access.listing import Listing
from ecluse.access.resource import Resource
from ecluse.access.secrets import Secrets
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Body, Shape
from ecluse.api.shapes import Id
from ecluse.base.errors import InvalidInput
from ecluse.base.validation import partial_of
from ecluse.db.query import Row
from ecluse.notify import confirmation_requests, dispatch, endpoints
from ecluse.notify.endpoints import old_secret_name, secret_name, url_name
from ecluse.notify.rules import PATTERN, Kind, MailAddress, why_refused
from ecluse.notify.webhook_signature import new_secret
from ecluse.notify.work import Setup

surface = Surface("notifications")
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
RoutingKey = Annotated[
    SecretStr,
    Field(
        min_length=32,
        max_length=32,
        description="The integration key of a service (Events API v2). Stored encrypted, and never shown.",
        examples=["0123456789abcdef0123456789abcdef"],
    ),
]
Description = Annotated[str | None, Field(max_length=500)]


EXAMPLES = [
    {"kind": "webhook", "url": "https://hooks.example.com/ecluse", "events": ["hello/completed", "transcription.*"]},
    {"kind": "mail", "addresses": ["ops@example.com"], "events": ["hello/failed"]},
    {"kind": "slack", "url": "https://hooks.slack.com/services/T0/B0/x", "events": ["pricing.alert.*"]},
    {"kind": "pagerduty", "routing_key": "0123456789abcdef0123456789abcdef", "events": ["pricing.alert.critical.*"]},
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


class NewSlack(Subscription):
    kind: Literal["slack"]
    url: Url = Field(description="URL of an incoming webhook.", examples=["https://hooks.slack.com/services/T0/B0/x"])


class NewPagerDuty(Subscription):
    kind: Literal["pagerduty"]
    routing_key: RoutingKey
    url: Url = Field(
        "https://events.pagerduty.com/v2/enqueue",
        description="URL of the Events API; accounts in the EU have another one.",
    )


@partial_of(Subscription)
class ChangedEndpoint(Body):
    """Changes to an endpoint: fields that are left out stay as they are."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"events": ["*"], "is_active": False}]})

    url: Url | None = None
    addresses: Addresses | None = None
    routing_key: RoutingKey | None = None


class EndpointRow(Shape):
    id: Id
    tenant_id: str
    kind: Kind
    url: str | None = Field(description="Its URL; path and query, which may be secret, are hidden.")
    addresses: list[str]
    events: list[str]
    description: str | None
    is_active: bool
    disabled_reason: str | None = Field(
        description="Why it was disabled automatically: its receiver answered 410 Gone."
    )
    created_at: datetime
    updated_at: datetime


class NewEndpoint(EndpointRow):
    secret: str | None = Field(
        description="Of a webhook: the secret of its signatures (Standard Webhooks). Not shown again.",
        examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"],
    )


class Begun(Shape):
    deliveries: list[Id]


READ, WRITE = "notifications.read", "notifications.write"
HAVE = {"addresses": {"mail"}, "url": {"webhook", "slack", "pagerduty"}, "routing_key": {"pagerduty"}}
ENDPOINTS = Listing("endpoints", EndpointRow, "notification_endpoints", READ, order=("id",), shown=endpoints.shown)
EndpointNumber = Annotated[int, Noun("endpoint")]
ENDPOINT = Resource(
    surface,
    "/api/notifications/endpoints/{endpoint_id}",
    area="notifications",
    kind="endpoint",
    words="notifications endpoints",
    answer=EndpointRow,
)

ENDPOINT.lists(
    ENDPOINTS,
    list_endpoints="List the notification endpoints, by id.",
    columns=("id", "kind", "url", "addresses", "events", "is_active", "disabled_reason"),
    empty="no endpoints: `ecluse notifications endpoints create`",
)


@ENDPOINT.shows()
async def show_endpoint(look: Look, endpoint_id: EndpointNumber) -> Row:
    """Show one endpoint."""
    return endpoints.shown(await endpoints.show(look.connection, look.tenant, endpoint_id))


@ENDPOINT.creates(
    refuses=["NO_SECRET_KEY", "MAIL_NOT_CONFIGURED", "LIMIT_REACHED"], answer=NewEndpoint, arguments=("kind",)
)
async def create_endpoint(
    act: Act,
    body: Annotated[NewWebhook | NewMail | NewSlack | NewPagerDuty, JsonBody(discriminator="kind", examples=EXAMPLES)],
) -> Row:
    """Create an endpoint. The answer for a webhook has the secret that its messages are signed with; it is not shown
    again. A mail address is first sent a link that confirms it, and gets no other mail until then."""
    given = body.model_dump(exclude={"kind", "routing_key"})
    _check(act, given)
    keys = _secrets(act) if body.kind != "mail" else None
    setup: Setup = act.state.notify
    if body.kind == "mail" and (setup.smtp is None or setup.public_url is None):
        unset = (
            "SMTP_HOST and MAIL_FROM" if setup.smtp is None else "ECLUSE_PUBLIC_URL, for the link that confirms them,"
        )
        raise Refused(409, "MAIL_NOT_CONFIGURED", f"This server sends no mail to new addresses: set {unset} first.")
    await act.require_room("endpoints")  # every event is matched against all of them
    row = await endpoints.create(act.connection, act.tenant, body.kind, **given)
    if keys is not None:
        await keys.put(act.connection, act.tenant, url_name(row["id"]), given["url"])
    if keys is not None and body.kind == "webhook":
        secret = new_secret()
        await keys.put(act.connection, act.tenant, secret_name(row["id"]), secret)
        act.answers(201, secret=secret)
    elif keys is not None and body.kind == "pagerduty":
        await keys.put(act.connection, act.tenant, secret_name(row["id"]), body.routing_key.get_secret_value())
    async with act.room_kept("mail_addresses", bool(row["addresses"])):
        await confirmation_requests.ask(act.connection, act.tenant, row["addresses"])
    return {**endpoints.shown(row), "secret": None}


@ENDPOINT.changes(refuses=["NO_SECRET_KEY", "LIMIT_REACHED"])
async def change_endpoint(act: Act, endpoint_id: EndpointNumber, body: ChangedEndpoint) -> Row:
    """Change an endpoint: only the given fields change."""
    changes = body.changes("description")
    kind = (await endpoints.show(act.connection, act.tenant, endpoint_id, lock=True))["kind"]
    for name, kinds in HAVE.items():
        if name in changes and kind not in kinds:
            raise InvalidInput(f"{name}: a {kind} endpoint has none")
    _check(act, changes)
    routing_key: SecretStr | None = changes.pop("routing_key", None)
    if kind == "pagerduty" and "url" in changes and routing_key is None:
        raise InvalidInput("routing_key: give it again with a new url: a key is sent to its own URL only")
    if routing_key is not None:
        await _secrets(act).put(act.connection, act.tenant, secret_name(endpoint_id), routing_key.get_secret_value())
    if "url" in changes:
        await _secrets(act).put(act.connection, act.tenant, url_name(endpoint_id), changes["url"])
    addresses = changes.get("addresses", ())
    async with act.room_kept("mail_addresses", bool(addresses)):
        await confirmation_requests.ask(act.connection, act.tenant, addresses)
    return endpoints.shown(await endpoints.update(act.connection, act.tenant, endpoint_id, changes))


@ENDPOINT.deletes()
async def delete_endpoint(act: Act, endpoint_id: EndpointNumber) -> Row:
    """Delete an endpoint. Nothing more is sent to it; its past deliveries stay in the log."""
    await endpoints.delete(act.connection, act.tenant, endpoint_id)
    for name in (secret_name(endpoint_id), old_secret_name(endpoint_id), url_name(endpoint_id)):
        await sealed.delete(act.connection, act.tenant, name)
    return {"id": str(endpoint_id), "deleted": True}


@ENDPOINT.does("rotate-secret", refuses=["NO_SECRET_KEY", "NOT_SIGNED"], answer=NewEndpoint)
async def rotate_endpoint_secret(act: Act, endpoint_id: EndpointNumber) -> Row:
    """Create a new signing secret for a webhook. For a day messages are signed with the old one as well, so that the
    receiver can change over."""
    keys, secret = _secrets(act), new_secret()
    if (await endpoints.show(act.connection, act.tenant, endpoint_id, lock=True))["kind"] != "webhook":
        raise Refused(409, "NOT_SIGNED", f"Endpoint {endpoint_id} is no webhook: only webhooks have a signing secret.")
    old = await keys.get(act.connection, act.tenant, secret_name(endpoint_id))
    await keys.put(act.connection, act.tenant, old_secret_name(endpoint_id), old)
    await keys.put(act.connection, act.tenant, secret_name(endpoint_id), secret)
    act.answers(200, secret=secret)
    return {**endpoints.shown(await endpoints.update(act.connection, act.tenant, endpoint_id, {})), "secret": None}


@ENDPOINT.does("test", refuses=["ENDPOINT_OFF"], answer=Begun)
async def test_endpoint(act: Act, endpoint_id: EndpointNumber) -> Row:
    """Send the endpoint a `ping`. The result is in the log of deliveries."""
    endpoint = await endpoints.show(act.connection, act.tenant, endpoint_id)
    check_active(endpoint)
    return {"deliveries": [str(one.run.id) for one in await dispatch.ping(act.connection, act.tenant, endpoint)]}


def _check(act: Act, given: dict[str, Any]) -> None:
    if "url" in given and (why := why_refused(given["url"], act.state.guard)) is not None:
        raise InvalidInput(f"url: {why}")


def check_active(endpoint: Row) -> None:
    """Raise Refused if the endpoint is switched off."""
    if not endpoint["is_active"]:
        raise Refused(409, "ENDPOINT_OFF", f"Endpoint {endpoint['id']} is switched off: set is_active to true first.")


def _secrets(act: Act) -> Secrets:
    """Return the store of secrets; raise Refused if this server has no key to encrypt them with."""
    keys: Secrets | None = act.state.secrets
    if keys is None:
        raise Refused(
            409,
            "NO_SECRET_KEY",
            "This server has no encryption key, so the URL and the secret of an endpoint cannot be stored: set "
            "ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE.",
        )
    return keys
