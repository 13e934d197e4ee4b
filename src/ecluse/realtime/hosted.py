"""Sending of events to hosted Pusher, if configured: in batches, best effort, in the background. A hosted app has one
set of channels, which cannot separate tenants: only the events of the tenant `default` are sent there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import structlog
from pydantic import BaseModel
from pydantic_core import to_json

from ecluse.base.errors import VendorError
from ecluse.engine import PublishedEvent
from ecluse.realtime.channels import channels_of
from ecluse.realtime.hub import Hub, Message, durable, is_realtime
from ecluse.realtime.pusher_signatures import signed_query
from ecluse.vendors.http import VendorHttp

log = structlog.get_logger(__name__)

TENANT = "default"
AT_ONCE = 10  # Pusher's limit for a batch
LONGEST_QUEUE = 1_000
DEADLINE = 5.0
AFTER_TROUBLE_SECONDS = 1.0


@dataclass(frozen=True)
class HostedApp:
    """An app at hosted Pusher."""

    app_id: str
    key: str
    secret: str = field(repr=False)
    cluster: str | None = None
    host: str | None = None  # instead of the cluster's: host, host:port or a URL

    @property
    def url(self) -> str:
        """The address of Pusher's HTTP API for this app."""
        if self.host:
            return self.host if "://" in self.host else f"https://{self.host}"
        return f"https://api-{self.cluster}.pusher.com" if self.cluster else "https://api.pusherapp.com"


class Accepted(BaseModel):
    """The answer to a batch; none of its fields are used."""


class Hosted:
    """Sender of events to a hosted app. It registers itself with the hub for ephemeral events; `sink` takes durable
    ones; `run` sends them. `now` is the clock for signatures."""

    def __init__(self, app: HostedApp, hub: Hub, now: Callable[[], datetime]) -> None:
        self._app, self._hub, self._now = app, hub, now
        self._http = VendorHttp("pusher", app.url, deadline=DEADLINE, now=now)
        self._queue: deque[dict[str, Any]] = deque()
        self._wake = asyncio.Event()
        hub.onward.append(self)

    def wants(self, tenant: str, channels: Sequence[str]) -> bool:
        """Return True if events of this tenant and channels are sent to the hosted app."""
        return tenant == TENANT and bool(channels)

    def take(self, message: Message) -> None:
        """Queue a message for each of its channels; what does not fit into the queue is dropped and counted."""
        for channel in message.channels:
            if len(self._queue) >= LONGEST_QUEUE:
                self._hub.dropped["hosted full"] += 1
                continue
            self._queue.append({"name": message.event, "channel": channel, "data": message.data})
            self._wake.set()

    async def sink(self, events: Sequence[PublishedEvent]) -> None:
        """Queue durable events. A sink of the publisher, on the replica that publishes: a queued event counts as
        published, so that an outage of Pusher does not delay the outbox."""
        for event in events:
            channels = channels_of(event.payload, self._hub.private) if is_realtime(event) else []
            if self.wants(event.tenant_id, channels):
                self.take(durable(event, channels, self._hub.largest))

    async def run(self) -> None:
        """Send queued events until cancelled, one batch after the other, so that they stay in order."""
        while True:
            self._wake.clear()
            while self._queue:
                await self._send([self._queue.popleft() for _ in range(min(AT_ONCE, len(self._queue)))])
            await self._wake.wait()

    async def close(self) -> None:
        """Close the HTTP client."""
        await self._http.close()

    async def _send(self, batch: Sequence[dict[str, Any]]) -> None:
        """Send a batch; a failure is logged and its events are dropped."""
        path, body = f"/apps/{self._app.app_id}/batch_events", {"batch": batch}
        query = signed_query(self._app.key, self._app.secret, "POST", path, to_json(body), self._now().timestamp())
        try:
            await self._http.call("POST", path, Accepted, query=query, json=body)
        except VendorError as error:
            self._hub.dropped["hosted refused"] += len(batch)
            log.warning(
                "realtime: hosted Pusher rejected events, they are dropped", events=len(batch), error=error.message
            )
            await asyncio.sleep(AFTER_TROUBLE_SECONDS)  # events queue up meanwhile; those beyond its limit are dropped
        else:
            self._hub.delivered["hosted"] += len(batch)
