"""Subscriptions of this process by tenant and channel, and the send queue of each listener.

Publishing never blocks: every listener has a bounded queue of its own. A listener that does not keep up loses ephemeral
events; if a durable event does not fit, it is disconnected, and can catch up after it reconnects.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from pydantic_core import from_json

from ecluse.engine import EphemeralEvent, PublishedEvent
from ecluse.realtime.channels import WHOLE_TENANT, channels_of, encoded, fit

LONGEST_QUEUE = 500
LARGEST_PAYLOAD = 9_000
LONGEST_NAME = 200

# Close codes of the Pusher protocol: they tell the client whether and how to reconnect.
DISABLED = (4003, "This application is disabled")
UNAUTHORISED = (4009, "The API key that authorised this connection is no longer valid for its channels")
TOO_SLOW = (4100, "Too slow: too much was waiting to be sent")
RECONNECT = (4200, "This server is stopping: connect again")

Key = tuple[str, str]  # tenant, channel
Transport = Literal["websocket", "sse"]


@dataclass(frozen=True, eq=False)
class Message:
    """An event for listeners, serialized once for all of them. `data` is its payload as text: JSON, unless an external
    publisher sent something else. `seq` is the outbox position of a durable event; None for an ephemeral one."""

    tenant: str
    event: str
    channels: Sequence[str]
    data: str
    seq: int | None = None
    ids: Mapping[str, Any] = field(default_factory=dict)
    not_to: str | None = None  # the id of the socket that sent it, which does not get it back

    _frames: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def payload(self) -> Any:
        """The data parsed as JSON, or unchanged if it is not JSON."""
        try:
            return from_json(self.data)
        except ValueError:
            return self.data

    def frame(self, channel: str) -> str:
        """Return the WebSocket frame for this channel, cached."""
        if channel not in self._frames:
            self._frames[channel] = frame(self.event, self.data, channel)
        return self._frames[channel]

    @cached_property
    def text(self) -> bytes:
        """The message as a server-sent event."""
        fields = {"event": self.event, "channels": self.channels, **self.ids, "payload": self.payload}
        place = b"" if self.seq is None else b"id: %d\n" % self.seq
        name = " ".join(self.event.split()).encode()  # without line breaks, which would end the field
        return place + b"event: " + name + b"\ndata: " + encoded(fields) + b"\n\n"


def frame(event: str, data: str, channel: str | None = None) -> str:
    """Return a WebSocket frame of the Pusher protocol: JSON in which the data is text."""
    parts = {"event": event, "data": data} if channel is None else {"event": event, "channel": channel, "data": data}
    return encoded(parts).decode()


class Listener:
    """A socket or a stream with its send queue of at most `longest` messages. It is woken when there is something to
    send, or when it is to be closed."""

    def __init__(
        self, tenant: str, transport: Transport, socket_id: str | None = None, *, longest: int = LONGEST_QUEUE
    ) -> None:
        self.tenant, self.transport, self.socket_id, self._longest = tenant, transport, socket_id, longest
        self.channels: set[str] = set()
        self.api_keys: dict[str, int] = {}  # by channel: the id of the API key that authorised a socket to join it
        self.leave: tuple[int, str] | None = None  # close code and reason, once it is to be closed
        self._queue: deque[tuple[Message, Sequence[str]] | str] = deque()
        self._wake = asyncio.Event()

    def offer(self, message: Message, channels: Sequence[str]) -> bool:
        """Queue a message. `channels`: the channels of the message that this listener subscribes to. Return False if
        the message is dropped, because the queue is full or the listener is being closed. A dropped durable event
        closes the listener: a later event would hide the gap."""
        if self.leave is not None:
            return False
        if len(self._queue) < self._longest:
            self._queue.append((message, channels))
            self._wake.set()
            return True
        if message.seq is not None:
            self.disconnect(*TOO_SLOW)
        return False

    def queue_frame(self, text: str) -> None:
        """Queue a frame for this listener alone, in order with the messages. A listener with twice `longest` entries in
        its queue is closed instead."""
        if len(self._queue) < 2 * self._longest:
            self._queue.append(text)
            self._wake.set()
        else:
            self.disconnect(*TOO_SLOW)

    def disconnect(self, code: int, why: str) -> None:
        """Request that the connection be closed with this code and reason; only the first call counts."""
        self.leave = self.leave or (code, why)
        self._wake.set()

    async def wait(self, seconds: float) -> None:
        """Wait until there is something to send or the listener is to be closed, at most `seconds`."""
        if not self._queue and self.leave is None:
            self._wake.clear()
            timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()

    def taken(self) -> Iterator[tuple[Message, Sequence[str]] | str]:
        """Remove and yield everything in the queue: messages with the channels they are for, and frames."""
        while self._queue:
            yield self._queue.popleft()


class Onward(Protocol):
    """A further destination of ephemeral messages besides the listeners of this process: other replicas, hosted Pusher.
    `wants` returns whether it takes messages on these channels; `take` queues one."""

    def wants(self, tenant: str, channels: Sequence[str]) -> bool: ...

    def take(self, message: Message) -> None: ...


class Hub:
    """The listeners of this process and their subscriptions; delivers messages to them. `private`: channels of Ecluse's
    own events have the prefix `private-`; `largest`: the maximum payload in bytes."""

    def __init__(self, *, private: bool = True, largest: int = LARGEST_PAYLOAD) -> None:
        self.private, self.largest = private, largest
        self.stopping = False
        self.onward: list[Onward] = []
        self.changed: Callable[[], None] = lambda: None  # called after a subscription was added or removed
        self.delivered: Counter[str] = Counter()  # by transport
        self.dropped: Counter[str] = Counter()  # by reason
        self.listeners: set[Listener] = set()
        self._left = asyncio.Event()
        self._by_key: dict[Key, dict[Listener, None]] = {}

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[Listener]:
        """Register a listener for the duration of the context; afterwards its subscriptions are removed."""
        self.listeners.add(listener)
        try:
            yield listener
        finally:
            self.listeners.discard(listener)
            self._left.set()
            for channel in list(listener.channels):
                self.unsubscribe(listener, channel)

    def subscribe(self, listener: Listener, channel: str) -> None:
        """Add a channel to the subscriptions of a listener."""
        listener.channels.add(channel)
        self._by_key.setdefault((listener.tenant, channel), {})[listener] = None
        self.changed()

    def unsubscribe(self, listener: Listener, channel: str) -> None:
        listener.channels.discard(channel)
        listener.api_keys.pop(channel, None)
        key = (listener.tenant, channel)
        if others := self._by_key.get(key):
            others.pop(listener, None)
            if not others:
                del self._by_key[key]
            self.changed()

    def counts(self) -> dict[Key, int]:
        """Return the number of listeners by tenant and channel."""
        return {key: len(listeners) for key, listeners in self._by_key.items()}

    def connections(self) -> Counter[Transport]:
        """Return the number of listeners by transport."""
        return Counter(listener.transport for listener in self.listeners)

    def emit(self, lives: Sequence[EphemeralEvent]) -> None:
        """Publish ephemeral events that have subscribers, with payloads shortened to `largest` bytes. Never waits,
        never raises."""
        for live in lives:
            channels = channels_of(live.payload, self.private)
            if self._heard(live.tenant_id, channels) or self._wanted(live.tenant_id, channels):
                data = fit(live.payload, self.largest).decode()
                self.publish(Message(live.tenant_id, live.event[:LONGEST_NAME], channels, data))

    def emit_durable(self, event: PublishedEvent) -> None:
        """Deliver an event of the outbox to local listeners only: every replica reads the outbox itself."""
        channels = channels_of(event.payload, self.private) if is_realtime(event) else []
        if self._heard(event.tenant_id, channels):
            self.deliver(durable(event, channels, self.largest))

    def publish(self, message: Message) -> None:
        """Deliver the message to local listeners, and pass it on to the destinations in `onward` that want it."""
        self.deliver(message)
        for onward in self.onward:
            if onward.wants(message.tenant, message.channels):
                onward.take(message)

    def deliver(self, message: Message) -> None:
        """Queue the message once for each local listener of its channels, but not for the socket that sent it. Messages
        that a listener cannot take are dropped and counted."""
        found: dict[Listener, list[str]] = {}
        for channel in (*message.channels, WHOLE_TENANT):
            for listener in self._by_key.get((message.tenant, channel), ()):
                found.setdefault(listener, []).append(channel)
        for listener, channels in found.items():
            if message.not_to is not None and listener.socket_id == message.not_to:
                continue
            if listener.offer(message, channels):
                self.delivered[listener.transport] += 1
            else:
                self.dropped["too slow"] += 1

    def _heard(self, tenant: str, channels: Sequence[str]) -> bool:
        """Return True if a listener of this process subscribes to one of the channels or to the whole tenant."""
        return any((tenant, channel) in self._by_key for channel in (*channels, WHOLE_TENANT))

    def _wanted(self, tenant: str, channels: Sequence[str]) -> bool:
        """Return True if a further destination wants events of these channels."""
        return any(onward.wants(tenant, channels) for onward in self.onward)

    async def drain(self, seconds: float = 0.5) -> None:
        """Set `stopping` and close all listeners, so that clients reconnect to another replica; wait for them at most
        `seconds`."""
        self.stopping = True
        for listener in self.listeners:
            listener.disconnect(*RECONNECT)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.listeners:
                    self._left.clear()
                    await self._left.wait()


def is_realtime(event: PublishedEvent) -> bool:
    """Return True if the event is sent on the channels of its records, such as `transcription.completed`. Events with a
    slash in their name, such as `fiche/transcribed`, are for programs: they are sent only to subscribers of the whole
    tenant."""
    return "/" not in event.event_type


def durable(event: PublishedEvent, channels: Sequence[str], largest: int = LARGEST_PAYLOAD) -> Message:
    """Return an event of the outbox as a message for these channels, its payload shortened to `largest` bytes."""
    ids = {
        "event_id": str(event.id),
        "event_key": event.event_key,
        "aggregate": event.aggregate,
        "correlation_id": event.correlation_id,
        "occurred_at": event.occurred_at,
    }
    data = fit(event.payload, largest).decode()
    return Message(event.tenant_id, event.event_type, channels, data, event.seq, ids)
