"""Routes of notification endpoints (webhooks and mail) and of the log of deliveries. The signing secret of an endpoint
is shown only when it is made or rotated; every change is recorded in the audit trail."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, Request, Response

from ecluse.access import door
from ecluse.access import secrets as sealed
from ecluse.access.changes import change, record
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import Refused, as_json
from ecluse.access.secrets import Secrets
from ecluse.access.wire import Filter, Limit, Offset, id_as_text, kit_of, number, reads_of, with_ids_as_text
from ecluse.api.notification_shapes import (
    EXAMPLES,
    Begun,
    DeletedEndpoint,
    DeliveryInFull,
    DeliveryPage,
    EndpointChanges,
    EndpointPage,
    EndpointRow,
    NewEndpoint,
    NewMail,
    NewWebhook,
    State,
)
from ecluse.base.errors import InvalidInput
from ecluse.db.query import Row
from ecluse.notify import dispatch, endpoints, log
from ecluse.notify.endpoints import old_secret_name, secret_name
from ecluse.notify.rules import why_refused
from ecluse.notify.webhook_signature import new_secret
from ecluse.notify.work import Setup

routes = door.routes("notifications")


@routes.get("/api/notifications/endpoints", openapi_extra=needs("notifications.read"), response_model=EndpointPage)
async def list_endpoints(request: Request, limit: Limit = 50, offset: Offset = 0) -> Response:
    """List the notification endpoints, by id."""
    tenant = caller_of(request).tenant
    rows = await reads_of(request)(lambda c: endpoints.list_endpoints(c, tenant, limit=limit, offset=offset))
    shown = [endpoints.shown(row) for row in rows]
    return as_json({"endpoints": with_ids_as_text(shown), "limit": limit, "offset": offset})


@routes.get(
    "/api/notifications/endpoints/{endpoint_id}", openapi_extra=needs("notifications.read"), response_model=EndpointRow
)
async def show_endpoint(request: Request, endpoint_id: str) -> Response:
    """Show one endpoint."""
    tenant, wanted = caller_of(request).tenant, number("endpoint", endpoint_id)
    return _answer(await reads_of(request)(lambda c: endpoints.show(c, tenant, wanted)))


@routes.post(
    "/api/notifications/endpoints",
    openapi_extra=needs("notifications.write", refuses=("NO_SECRET_KEY", "MAIL_NOT_CONFIGURED", "TOO_MANY_ENDPOINTS")),
    status_code=201,
    response_model=NewEndpoint,
)
async def create_endpoint(
    request: Request, body: Annotated[NewWebhook | NewMail, Body(discriminator="kind", examples=EXAMPLES)]
) -> Response:
    """Create an endpoint. The answer holds the secret that its webhooks are signed with; it is not shown again."""
    given, secret = body.model_dump(exclude={"kind"}), None
    _check(request, given)
    if body.kind == "webhook":
        keys, secret = _secrets(request), new_secret()
    else:
        _check_mail(request)
    async with kit_of(request).pool.connection() as connection, connection.transaction():
        try:
            row = await endpoints.create(connection, caller_of(request).tenant, body.kind, **given)
        except endpoints.TooManyEndpoints as error:
            raise Refused(
                409, "TOO_MANY_ENDPOINTS", f"A tenant has {endpoints.MOST} endpoints at most: delete one first."
            ) from error
        if secret is not None:
            await keys.put(connection, row["tenant_id"], secret_name(row["id"]), secret)
        await record(connection, request, "endpoint.create", f"endpoint:{row['id']}")
    return _answer(row, 201, secret=secret)


@routes.patch(
    "/api/notifications/endpoints/{endpoint_id}", openapi_extra=needs("notifications.write"), response_model=EndpointRow
)
async def change_endpoint(request: Request, endpoint_id: str, body: EndpointChanges) -> Response:
    """Change the given fields of an endpoint, and only those."""
    tenant, wanted = caller_of(request).tenant, number("endpoint", endpoint_id)
    # null means no change, but a description can be removed by it.
    given = body.model_dump(exclude_unset=True)
    changes = {name: value for name, value in given.items() if value is not None or name == "description"}
    async with change(request, "endpoint.change", f"endpoint:{wanted}") as connection:
        kind = (await endpoints.show(connection, tenant, wanted, lock=True))["kind"]
        if (other := "addresses" if kind == "webhook" else "url") in changes:
            raise InvalidInput(f"{other}: a {kind} endpoint has none")
        _check(request, changes)
        row = await endpoints.update(connection, tenant, wanted, changes)
    return _answer(row)


@routes.delete(
    "/api/notifications/endpoints/{endpoint_id}",
    openapi_extra=needs("notifications.write"),
    response_model=DeletedEndpoint,
)
async def delete_endpoint(request: Request, endpoint_id: str) -> Response:
    """Delete an endpoint. Nothing more is sent to it; its past deliveries stay in the log."""
    tenant, wanted = caller_of(request).tenant, number("endpoint", endpoint_id)
    async with change(request, "endpoint.delete", f"endpoint:{wanted}") as connection:
        await endpoints.delete(connection, tenant, wanted)
        for name in (secret_name(wanted), old_secret_name(wanted)):
            await sealed.delete(connection, tenant, name)
    return as_json({"id": endpoint_id, "deleted": True})


@routes.post(
    "/api/notifications/endpoints/{endpoint_id}/rotate-secret",
    openapi_extra=needs("notifications.write", refuses=("NO_SECRET_KEY", "NOT_SIGNED")),
    response_model=NewEndpoint,
)
async def rotate_endpoint_secret(request: Request, endpoint_id: str) -> Response:
    """Make a new signing secret for a webhook. For a day messages are signed with the old one as well, so that the
    receiver can change over."""
    tenant, wanted = caller_of(request).tenant, number("endpoint", endpoint_id)
    keys, secret = _secrets(request), new_secret()
    async with change(request, "endpoint.rotate-secret", f"endpoint:{wanted}") as connection:
        if (await endpoints.show(connection, tenant, wanted, lock=True))["kind"] != "webhook":
            raise Refused(409, "NOT_SIGNED", "Mails are not signed: only a webhook has a secret.")
        old = await keys.get(connection, tenant, secret_name(wanted))
        await keys.put(connection, tenant, old_secret_name(wanted), old)
        await keys.put(connection, tenant, secret_name(wanted), secret)
        row = await endpoints.rotated(connection, tenant, wanted)
    return _answer(row, secret=secret)


@routes.post(
    "/api/notifications/endpoints/{endpoint_id}/test",
    openapi_extra=needs("notifications.write", refuses=("ENDPOINT_OFF",)),
    response_model=Begun,
)
async def test_endpoint(request: Request, endpoint_id: str) -> Response:
    """Send the endpoint a `ping`. The result is in the log of deliveries."""
    tenant, wanted = caller_of(request).tenant, number("endpoint", endpoint_id)
    async with change(request, "endpoint.test", f"endpoint:{wanted}") as connection:
        endpoint = await endpoints.show(connection, tenant, wanted)
        _check_active(endpoint)
        started = await dispatch.ping(connection, tenant, endpoint)
    return as_json({"deliveries": [str(one.run.id) for one in started]})


@routes.get("/api/notifications/deliveries", openapi_extra=needs("notifications.read"), response_model=DeliveryPage)
async def list_deliveries(
    request: Request, limit: Limit = 50, offset: Offset = 0, endpoint_id: Filter = None, state: State | None = None
) -> Response:
    """List deliveries, the newest first."""
    tenant = caller_of(request).tenant
    wanted = None if endpoint_id is None else number("endpoint", endpoint_id)
    rows = await reads_of(request)(
        lambda c: log.list_deliveries(c, tenant, endpoint_id=wanted, state=state, limit=limit, offset=offset)
    )
    return as_json({"deliveries": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.get(
    "/api/notifications/deliveries/{delivery_id}",
    openapi_extra=needs("notifications.read"),
    response_model=DeliveryInFull,
)
async def show_delivery(request: Request, delivery_id: str) -> Response:
    """Show one delivery: the message, each failed attempt with its error, the answer of the receiver."""
    tenant, wanted = caller_of(request).tenant, number("delivery", delivery_id)
    return as_json(id_as_text(await reads_of(request)(lambda c: log.show_delivery(c, tenant, wanted))))


@routes.post(
    "/api/notifications/deliveries/{delivery_id}/redeliver",
    openapi_extra=needs("notifications.write", refuses=("ENDPOINT_OFF", "STILL_PENDING")),
    response_model=Begun,
)
async def redeliver(request: Request, delivery_id: str) -> Response:
    """Deliver the message again, under the same message id, by which the receiver can recognise a duplicate."""
    tenant, wanted = caller_of(request).tenant, number("delivery", delivery_id)
    async with change(request, "delivery.redeliver", f"delivery:{wanted}") as connection:
        row = await log.show_delivery(connection, tenant, wanted)
        if row["endpoint_id"] is not None:
            _check_active(await endpoints.show(connection, tenant, row["endpoint_id"]))
        started = await dispatch.redeliver(connection, tenant, wanted)
        if started.deduplicated:
            due = (await log.show_delivery(connection, tenant, started.run.id))["next_attempt_at"]
            later = due is not None and due > kit_of(request).clock.now()
            when = f"at {due.isoformat(timespec='seconds')}" if later else "now"
            told = f"This is still on its way, as delivery {started.run.id}: its next attempt is due {when}."
            raise Refused(409, "STILL_PENDING", told)
    return as_json({"deliveries": [str(started.run.id)]})


def _check(request: Request, given: dict[str, Any]) -> None:
    if "url" in given and (why := why_refused(given["url"], request.app.state.guard)) is not None:
        raise InvalidInput(f"url: {why}")


def _check_mail(request: Request) -> None:
    setup: Setup = request.app.state.notify
    if setup.smtp is None:
        raise Refused(409, "MAIL_NOT_CONFIGURED", "This server sends no mail: set SMTP_HOST and MAIL_FROM first.")


def _check_active(endpoint: Row) -> None:
    if not endpoint["is_active"]:
        raise Refused(409, "ENDPOINT_OFF", f"Endpoint {endpoint['id']} is switched off: set is_active first.")


def _secrets(request: Request) -> Secrets:
    keys: Secrets | None = request.app.state.secrets
    if keys is None:
        raise Refused(
            409,
            "NO_SECRET_KEY",
            "Webhooks are signed, and there is no key here to seal their secrets with: set ECLUSE_SECRET_KEY or "
            "ECLUSE_SECRET_KEY_FILE.",
        )
    return keys


def _answer(row: Row, status: int = 200, **more: Any) -> Response:
    return as_json(id_as_text({**endpoints.shown(row), **more}), status)
