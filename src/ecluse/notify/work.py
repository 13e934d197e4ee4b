"""Resources of the notifications flow, and the work function for webhooks, Slack and PagerDuty: writes of class C1,
retried under the same message id until the receiver accepts.

The row of `deliveries` is committed before anything is sent. No database connection is held during a call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound, PermanentError, TransientError
from ecluse.base.masking import ORIGIN_ENDS
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool, pool
from ecluse.db.pools import DELIVERING
from ecluse.db.query import fetch_one
from ecluse.engine import Done, Item, Postponed, Result, WorkContext
from ecluse.notify import endpoints, posts
from ecluse.notify.rules import Kind, message_id, patience
from ecluse.notify.webhook_signature import OLD_SECRET_SIGNS, old_name, signed
from ecluse.vendors.hiding import HiddenKeys, secret_parts

if TYPE_CHECKING:
    from ecluse.vendors.guarded import GuardedHttp

ReadSecret = Callable[[Connection, str, str], Awaitable[str]]  # by tenant and name

EXCERPT = 300  # characters of an answer
JSON = {"Content-Type": "application/json"}
IN_ORDER_AFTER = timedelta(seconds=2)

# `superseded`, `too_early`: an incident must not be triggered after it was resolved. A trigger that is claimed later
# than the resolving delivery was stored finds that one; a trigger that is in flight is waited for.
LOAD = """
SELECT d.run_id, d.tenant_id, d.endpoint_id, d.kind, coalesce(e.url, d.recipient) AS recipient, d.secret_name,
       coalesce('webhook:' || d.endpoint_id || ':url', d.url_name) AS url_name,
       d.event_key, d.event_type, d.about_run, d.message, d.sending_at IS NOT NULL AS begun,
       d.sent_at IS NOT NULL AS sent,
       d.endpoint_id IS NULL OR (e.is_active AND (d.kind <> 'mail' OR d.recipient = ANY(e.addresses))) IS TRUE
           AS wanted,
       EXISTS (SELECT FROM mail_addresses m WHERE m.tenant_id = d.tenant_id AND m.address = lower(d.recipient)
               AND m.confirmed_at IS NOT NULL) AS confirmed,
       EXISTS (SELECT FROM secrets o WHERE o.tenant_id = d.tenant_id AND o.name = d.secret_name || ':old'
               AND o.updated_at > ecluse_now() - %(old_signs)s) AS rotating,
       d.dedup_key, related.superseded IS TRUE AS superseded, related.too_early IS TRUE AS too_early, v.aggregate
FROM deliveries d LEFT JOIN notification_endpoints e ON e.id = d.endpoint_id AND e.tenant_id = d.tenant_id
LEFT JOIN events_outbox v ON v.tenant_id = d.tenant_id AND v.event_key = d.event_key
LEFT JOIN LATERAL (
    SELECT bool_or((o.message->>'timestamp')::timestamptz > (d.message->>'timestamp')::timestamptz) AS superseded,
           bool_or((o.message->>'timestamp')::timestamptz < (d.message->>'timestamp')::timestamptz
                   AND i.claim_id IS NOT NULL) AS too_early
    FROM deliveries o LEFT JOIN items i ON i.run_id = o.run_id AND i.status = 'open'
    WHERE d.kind = 'pagerduty' AND o.endpoint_id = d.endpoint_id AND o.dedup_key = d.dedup_key) related ON true
WHERE d.run_id = %(run)s
"""


@dataclass(frozen=True)
class Smtp:
    """Address of the mail server, sender of mails, log-in and encryption; `timeout` in seconds, per command."""

    host: str
    port: int
    sender: str
    username: str | None = None
    password: str | None = None
    starttls: bool | None = None  # None: where the server offers it
    tls: bool = False
    timeout: float = 30.0


@dataclass(frozen=True)
class Setup:
    """Settings of notifications, passed in by the composition root. No `smtp`: mail is not configured; no
    `read_secret`: there is no key to decrypt secrets with. `pages`: by the kind in the aggregate of an event, the path
    of the page about the record, with {} for its id."""

    dsn: str
    read_secret: ReadSecret | None = None
    allowed_networks: tuple[str, ...] = ()
    webhook_timeout: float = 15.0
    smtp: Smtp | None = None
    public_url: str | None = None
    pages: Mapping[str, str] = field(default_factory=dict)
    mails_per_day: int = 500  # per tenant
    connections: int = DELIVERING


@dataclass(frozen=True)
class Resources:
    """The resources of the notifications flow, which its work functions get as `context.vendors`."""

    setup: Setup
    pool: Pool
    http: GuardedHttp


@asynccontextmanager
async def resources(setup: Setup, _: Clock) -> AsyncIterator[Resources]:
    """Open the pool and the HTTP client of the flow for the duration of the context."""
    from ecluse.vendors.guarded import GuardedHttp  # slow to import: only load it where calls are made

    http = GuardedHttp(setup.allowed_networks, deadline=setup.webhook_timeout)
    async with pool(setup.dsn, size=setup.connections) as own:
        try:
            yield Resources(setup, own, http)
        finally:
            await http.close()


@dataclass(frozen=True)
class NewDelivery:
    """One event for one recipient, before its run exists; `message` is the body that is sent."""

    tenant_id: str
    event_key: str
    event_type: str
    about_run: int | None
    message: dict[str, Any]
    kind: Kind
    recipient: str
    endpoint_id: int | None
    secret_name: str | None
    url_name: str | None
    dedup_key: str | None


@dataclass(frozen=True)
class Delivery(NewDelivery):
    """A delivery as stored, with its progress: `begun`: its text may have been handed over; `sent`: it was accepted."""

    run_id: int
    begun: bool
    sent: bool
    wanted: bool  # it has no endpoint, or its endpoint is active and still has this recipient
    confirmed: bool  # of a mail address
    rotating: bool  # the previous secret signs as well
    superseded: bool  # of PagerDuty: a later event of its incident is stored
    too_early: bool  # of PagerDuty: an earlier event of its incident is being sent
    aggregate: str | None  # of its event: kind and id of a record; None: the event is not in the outbox, or no longer

    @property
    def name(self) -> str:
        """The message id, by which receivers deduplicate."""
        return message_id(self.tenant_id, self.event_key)


async def load(connection: Connection, run_id: int) -> Delivery:
    """Return the delivery of a run. Raise PermanentError if there is none, or its endpoint was deleted, switched off or
    no longer has the recipient."""
    delivery = await fetch_one(connection, Delivery, LOAD, {"run": run_id, "old_signs": OLD_SECRET_SIGNS})
    if delivery is None:
        raise PermanentError("There is nothing to deliver: deliveries are created by events", code="NO_DELIVERY")
    if not delivery.wanted:
        raise PermanentError("The endpoint of this delivery was deleted or switched off", code="ENDPOINT_OFF")
    return delivery


async def post(context: WorkContext, item: Item) -> Result:
    """Post the message of a delivery to its URL: the work of the stage `webhook`. Any refusal is retried, except 410
    Gone, which disables the endpoint. An event of a PagerDuty incident is not sent after a later one, and waits for an
    earlier one that is being sent."""
    own: Resources = context.vendors
    async with own.pool.connection() as connection:
        delivery = await load(connection, item.run_id)
        if delivery.superseded:
            return Done({"not_sent": "A later event of the same incident took its place."})
        if delivery.too_early:
            return Postponed(context.now() + IN_ORDER_AFTER, "an earlier event of the same incident is being sent")
        url, keys = await _opened(connection, own.setup.read_secret, delivery)
    body = _body(delivery, keys)
    headers = signed(keys, delivery.name, context.now(), body.decode()) if delivery.kind == "webhook" else {}
    hidden = HiddenKeys(*secret_parts(url), *keys)  # a receiver may repeat the request
    reply = await own.http.post(url, body, JSON | headers)
    reply = replace(reply, body=bytes(hidden.in_answer(bytearray(reply.body))))
    refused = reply.refusal(context.now())
    if refused is None:
        return Done({"status": reply.status, "answer": storable(reply.body.decode("utf-8", "replace"), EXCERPT)})
    if reply.status == 410:
        if delivery.endpoint_id is not None:
            async with own.pool.connection() as connection:
                why = f"Its receiver answered 410 Gone at {context.now():%Y-%m-%d %H:%M:%S} UTC"
                await endpoints.switch_off(connection, delivery.tenant_id, delivery.endpoint_id, why)
        raise PermanentError(refused.message, code="GONE")
    # Retry any refusal: the receiver may be fixed tomorrow. A notification reports a fact; it is not a command that the
    # receiver could reject.
    asked = refused.retry_after if isinstance(refused, TransientError) else None
    raise TransientError(
        refused.message, code=refused.code, retry_after=patience(asked, item.executions), ambiguous=False
    )


def _body(delivery: Delivery, keys: Sequence[str]) -> bytes:
    """Return the body to post, in the format of the receiver."""
    if delivery.kind == "slack":
        return to_json(posts.slack(delivery.message))
    if delivery.kind == "pagerduty":
        source, incident = f"ecluse/{delivery.tenant_id}", delivery.dedup_key or delivery.name
        return to_json(posts.pagerduty(delivery.message, routing_key=keys[0], source=source, dedup_key=incident))
    return to_json(delivery.message)


async def _opened(connection: Connection, read: ReadSecret | None, delivery: Delivery) -> tuple[str, list[str]]:
    """Return the decrypted URL of the delivery and its secrets: the current one and, while it is being rotated, the
    previous one; [] if the recipient has none. Raise TransientError if this server has no key to decrypt with,
    PermanentError if URL or secret was deleted."""
    names = [delivery.secret_name] if delivery.secret_name is not None else []
    names += [old_name(names[0])] if names and delivery.rotating else []
    sealed = (
        delivery.url_name if delivery.recipient.endswith(ORIGIN_ENDS) else None
    )  # None: an earlier version stored the URL as it is
    if sealed is None and not names:
        return delivery.recipient, []
    if read is None:
        raise TransientError(
            "This server has no key to decrypt its URL and secret: set ECLUSE_SECRET_KEY", code="NO_SECRET_KEY"
        )
    try:
        url = delivery.recipient if sealed is None else await read(connection, delivery.tenant_id, sealed)
        return url, [await read(connection, delivery.tenant_id, name) for name in names]
    except NotFound as error:  # deleted with its endpoint or schedule
        raise PermanentError("Its URL or secret was deleted: it is not sent", code="NO_SECRET") from error
