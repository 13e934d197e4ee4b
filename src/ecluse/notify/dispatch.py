"""Creation of deliveries from events, set-based, one per recipient and event.

The publisher may offer an event twice. The key of a delivery's run is computed from recipient and event, so dispatching
the event a second time is a no-op.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import psycopg
import structlog

from ecluse.base.errors import Conflict, EcluseError, NotFound
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.query import Row, as_json, fetch_one, fetch_rows, fetch_value
from ecluse.engine import Event, PublishedEvent, Start, Started, start_runs
from ecluse.notify import endpoints
from ecluse.notify.flow import FLOW
from ecluse.notify.rules import CONFIRM, FLOW_NAME, Kind, about_run, message, run_key, shown_to
from ecluse.notify.work import NewDelivery

log = structlog.get_logger(__name__)

OURS = f"{FLOW_NAME}/"
PING = "ping"

WANTED = """
SELECT e.place, n.id, n.kind, n.url, n.addresses
FROM jsonb_to_recordset(%s::jsonb) AS e(place integer, tenant_id text, event_type text)
JOIN notification_endpoints n ON n.tenant_id = e.tenant_id AND n.is_active
WHERE EXISTS (SELECT FROM unnest(n.events) AS p(pattern) WHERE pattern = e.event_type
              OR (right(pattern, 1) = '*' AND starts_with(e.event_type, left(pattern, -1))))
ORDER BY e.place, n.id
"""
KEEP = """
INSERT INTO deliveries (run_id, tenant_id, endpoint_id, kind, recipient, secret_name, url_name, event_key, event_type,
                        about_run, message, dedup_key, created_at)
SELECT run_id, tenant_id, endpoint_id, kind, recipient, secret_name, url_name, event_key, event_type, about_run,
       message, dedup_key, ecluse_now()
FROM jsonb_to_recordset(%s::jsonb) AS t(run_id bigint, tenant_id text, endpoint_id bigint, kind text, recipient text,
    secret_name text, url_name text, event_key text, event_type text, about_run bigint, message jsonb,
    dedup_key text)
"""
AGAIN = """
SELECT tenant_id, event_key, event_type, about_run, message, kind, recipient, endpoint_id, secret_name,
       url_name, dedup_key
FROM deliveries WHERE run_id = %s AND tenant_id = %s
"""


@dataclass(frozen=True)
class Recipient:
    """A recipient of a delivery. `to`: a mail address or the origin of a URL; `endpoint_id` None: a schedule names the
    recipient, and its URL is stored encrypted under `url_name`; `secret_name`: the name of an encrypted secret, which
    signs a webhook or is the routing key of PagerDuty."""

    kind: Kind
    to: str
    endpoint_id: int | None = None
    secret_name: str | None = None
    url_name: str | None = None


async def dispatch(pool: Pool, events: Sequence[PublishedEvent]) -> None:
    """Create the deliveries of published events, as a sink of the publisher. If a batch fails, the error is raised, and
    the publisher offers the events one by one. A single event that fails while the database is available is logged and
    dropped: later events would wait for it forever. Events of deliveries, and of runs that ended with their parent, are
    skipped."""
    wanted_events = [
        event for event in events if not event.event_type.startswith(OURS) and not _ended_with_parent(event)
    ]
    if not wanted_events:
        return
    try:
        async with pool.connection() as connection:
            if wanted := await _wanted(connection, wanted_events):
                async with connection.transaction():
                    await deliver(connection, wanted)
    except (psycopg.Error, EcluseError) as error:
        if len(wanted_events) > 1 or is_unavailable(error):
            raise
        log.error(
            "notify: event dropped, its deliveries cannot be stored",
            event_key=wanted_events[0].event_key,
            error=one_line(error),
        )


async def notify(connection: Connection, recipients: Sequence[Recipient], about: Event) -> None:
    """Create a delivery of the event for each recipient, in the caller's transaction. Idempotent per recipient and
    event."""
    now = await fetch_value(connection, "SELECT ecluse_now()")
    await deliver(connection, [_new_delivery(about, now, one) for one in recipients])


async def ping(connection: Connection, tenant: str, endpoint: Row) -> list[Started]:
    """Create the delivery of a test message to this endpoint only, one per address of a mail endpoint; return their
    runs."""
    now = await fetch_value(connection, "SELECT ecluse_now()")
    key, payload = f"{PING}-{endpoint['id']}-{uuid.uuid4()}", {"endpoint_id": str(endpoint["id"])}
    event = Event(tenant, key, PING, f"endpoint:{endpoint['id']}", payload, correlation_id=key)
    return await deliver(connection, [_new_delivery(event, now, one) for one in _recipients(endpoint)])


async def redeliver(connection: Connection, tenant: str, run_id: int) -> Started:
    """Deliver the message of an earlier delivery again, to the current URL of its endpoint; return the new run, or the
    run of the earlier delivery if that is still pending (deduplicated). Raise NotFound if the tenant has no such
    delivery, Conflict if it is a request to confirm an address, which is not repeated."""
    delivery = await fetch_one(connection, NewDelivery, AGAIN, (run_id, tenant))
    if delivery is None:
        raise NotFound(f"There is no delivery {run_id}.")
    if delivery.event_type == CONFIRM:
        raise Conflict(
            "A request to confirm an address is not repeated. Send a new link: "
            f"`ecluse notifications addresses confirm {delivery.recipient}`."
        )
    if delivery.endpoint_id is not None and delivery.kind != "mail":
        endpoint = await endpoints.show(connection, tenant, delivery.endpoint_id)
        delivery = replace(delivery, recipient=endpoint["url"])
    (started,) = await deliver(connection, [delivery], again=True)
    return started


async def deliver(
    connection: Connection, new_deliveries: Sequence[NewDelivery], *, again: bool = False
) -> list[Started]:
    """Insert the runs and rows of these deliveries in the caller's transaction, each once per recipient and event;
    return the runs, among them those that existed already. `again`: events that were delivered before are delivered
    again."""
    if not new_deliveries:
        return []
    new_deliveries = list({(one.tenant_id, _key(one)): one for one in new_deliveries}.values())
    starts = [
        Start(
            FLOW,
            _key(one),
            tenant_id=one.tenant_id,
            input={
                "kind": one.kind,
                "to": str(one.endpoint_id or shown_to(one.kind, one.recipient))[:200],
                "lasting": one.endpoint_id is not None,
            },
            again=again,
        )
        for one in new_deliveries
    ]
    started = await start_runs(connection, starts)
    rows = [
        {"run_id": new.run.id, **vars(one)}
        for new, one in zip(started, new_deliveries, strict=True)
        if not new.deduplicated
    ]
    if rows:
        await connection.execute(KEEP, (as_json(rows),))
    return started


def _key(delivery: NewDelivery) -> str:
    """Return the event key of the delivery's run, which deduplicates by recipient and event."""
    which = (delivery.event_key, delivery.event_type, delivery.about_run)
    return run_key(delivery.endpoint_id, delivery.recipient, delivery.kind, *which)


def _ended_with_parent(event: PublishedEvent) -> bool:
    """Return True if the event is the end of a run that was ended together with its parent. The parent's end is
    notified; up to thousands of notifications for its children would add nothing."""
    return event.payload.get("end_cause") == "parent"


async def _wanted(connection: Connection, events: Sequence[PublishedEvent]) -> list[NewDelivery]:
    """Return a delivery for each of these events and each recipient of an endpoint that subscribes to it."""
    asked = [
        {"place": place, "tenant_id": event.tenant_id, "event_type": event.event_type}
        for place, event in enumerate(events)
    ]
    return [
        _new_delivery(events[place], events[place].occurred_at, recipient)
        for place, *endpoint in await fetch_rows(connection, WANTED, (as_json(asked),))
        for recipient in _recipients(dict(zip(("id", "kind", "url", "addresses"), endpoint, strict=True)))
    ]


def _recipients(endpoint: Row) -> list[Recipient]:
    """Return the recipients of an endpoint: its URL, or each of its addresses."""
    number, kind = endpoint["id"], endpoint["kind"]
    if kind == "mail":
        return [Recipient("mail", address, number) for address in endpoint["addresses"]]
    secret = endpoints.secret_name(number) if kind in endpoints.WITH_SECRET else None
    return [Recipient(kind, endpoint["url"], number, secret)]


def _new_delivery(event: Event | PublishedEvent, occurred_at: datetime, to: Recipient) -> NewDelivery:
    """Return the delivery of an event to a recipient."""
    return NewDelivery(
        event.tenant_id,
        event.event_key,
        event.event_type,
        about_run(event.aggregate, event.payload),
        message(event.event_type, occurred_at, event.payload),
        to.kind,
        to.to,
        to.endpoint_id,
        to.secret_name,
        to.url_name,
        event.payload.get("dedup_key"),
    )
