"""Who listens to what in this process, keyed by tenant and channel, and what each of them is still to be sent.

Whoever tells waits for nobody: every listener has a queue of its own, with an end. One that does not keep up loses what
is ephemeral; when something durable does not fit any more it is sent away, and can come back for what it missed.
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

# Close codes of the Pusher protocol, which say what the client is to do.
DISABLED = (4003, "This application is disabled")
TOO_SLOW = (4100, "Too slow: too much was waiting to be sent")
RECONNECT = (4200, "This server stops: connect again")

Key = tuple[str, str]  # tenant, channel
Transport = Literal["websocket", "sse"]


@dataclass(frozen=True, eq=False)
class Message:
    """As all listeners get it, written down once for all of them. `data` is what the event says, as text: JSON, except
    where a publisher outside sent something else. `seq` is the place of a durable event; an ephemeral one has none."""

    tenant: str
    event: str
    channels: Sequence[str]
    data: str
    seq: int | None = None
    ids: Mapping[str, Any] = field(default_factory=dict)
    not_to: str | None = None  # the socket that it came from

    _frames: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def payload(self) -> Any:
        try:
            return from_json(self.data)
        except ValueError:
            return self.data

    def frame(self, channel: str) -> str:
        """For sockets."""
        if channel not in self._frames:
            self._frames[channel] = frame(self.event, self.data, channel)
        return self._frames[channel]

    @cached_property
    def text(self) -> bytes:
        """For streams (server-sent events)."""
        told = {"event": self.event, "channels": self.channels, **self.ids, "payload": self.payload}
        place = b"" if self.seq is None else b"id: %d\n" % self.seq
        name = " ".join(self.event.split()).encode()  # a line of its own, whatever it is called
        return place + b"event: " + name + b"\ndata: " + encoded(told) + b"\n\n"


def frame(event: str, data: str, channel: str | None = None) -> str:
    """As a socket gets it: JSON in which the data is text."""
    parts = {"event": event, "data": data} if channel is None else {"event": event, "channel": channel, "data": data}
    return encoded(parts).decode()


class Listener:
    """A socket or a stream. It is woken when something is to be sent, or when it has to leave."""

    def __init__(self, tenant: str, transport: Transport, socket_id: str | None = None) -> None:
        self.tenant, self.transport, self.socket_id = tenant, transport, socket_id
        self.channels: set[str] = set()
        self.leave: tuple[int, str] | None = None  # the code that a socket is closed with, and why
        self._queue: deque[tuple[Message, Sequence[str]] | str] = deque()
        self._wake = asyncio.Event()

    def offer(self, message: Message, channels: Sequence[str]) -> bool:
        """`channels`: those of the message that it listens to. False: there is no room, or it leaves: whatever comes
        after the first that it lost would hide a gap."""
        if self.leave is not None:
            return False
        if len(self._queue) < LONGEST_QUEUE:
            self._queue.append((message, channels))
            self._wake.set()
            return True
        if message.seq is not None:
            self.send_away(*TOO_SLOW)
        return False

    def say(self, text: str) -> None:
        """To this one alone, in the same order as all the rest."""
        if len(self._queue) < 2 * LONGEST_QUEUE:
            self._queue.append(text)
            self._wake.set()
        else:
            self.send_away(*TOO_SLOW)

    def send_away(self, code: int, why: str) -> None:
        self.leave = self.leave or (code, why)
        self._wake.set()

    async def wait(self, seconds: float) -> None:
        """Until there is something to do, at most so long."""
        if not self._queue and self.leave is None:
            self._wake.clear()
            timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()

    def taken(self) -> Iterator[tuple[Message, Sequence[str]] | str]:
        while self._queue:
            yield self._queue.popleft()


class Onward(Protocol):
    """Where ephemeral messages go besides the listeners of this process: other replicas, hosted Pusher."""

    def wants(self, tenant: str, channels: Sequence[str]) -> bool: ...

    def take(self, message: Message) -> None: ...


class Hub:
    def __init__(self, *, private: bool = True, largest: int = LARGEST_PAYLOAD) -> None:
        """`private`: how the channels of our own events are called; `largest`: bytes of what an event says."""
        self.private, self.largest = private, largest
        self.stopping = False
        self.onward: list[Onward] = []
        self.changed: Callable[[], None] = lambda: None  # somebody came, or went
        self.delivered: Counter[str] = Counter()  # by transport
        self.dropped: Counter[str] = Counter()  # by reason
        self.listeners: set[Listener] = set()
        self._left = asyncio.Event()
        self._by_key: dict[Key, dict[Listener, None]] = {}

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[Listener]:
        self.listeners.add(listener)
        try:
            yield listener
        finally:
            self.listeners.discard(listener)
            self._left.set()
            for channel in list(listener.channels):
                self.unsubscribe(listener, channel)

    def subscribe(self, listener: Listener, channel: str) -> None:
        listener.channels.add(channel)
        self._by_key.setdefault((listener.tenant, channel), {})[listener] = None
        self.changed()

    def unsubscribe(self, listener: Listener, channel: str) -> None:
        listener.channels.discard(channel)
        key = (listener.tenant, channel)
        if others := self._by_key.get(key):
            others.pop(listener, None)
            if not others:
                del self._by_key[key]
            self.changed()

    def counts(self) -> dict[Key, int]:
        return {key: len(listeners) for key, listeners in self._by_key.items()}

    def connections(self) -> Counter[Transport]:
        return Counter(listener.transport for listener in self.listeners)

    def tell(self, lives: Sequence[EphemeralEvent]) -> None:
        """Ephemeral events, at once; never waits, never raises."""
        for live in lives:
            channels = channels_of(live.payload, self.private)
            if self._heard(live.tenant_id, channels) or self._wanted(live.tenant_id, channels):
                data = fit(live.payload, self.largest).decode()
                self.publish(Message(live.tenant_id, live.event[:LONGEST_NAME], channels, data))

    def tell_durable(self, event: PublishedEvent) -> None:
        """An event of the outbox; each replica reads there for itself, so it is not passed on."""
        channels = channels_of(event.payload, self.private) if is_told_live(event) else []
        if self._heard(event.tenant_id, channels):
            self.deliver(durable(event, channels, self.largest))

    def publish(self, message: Message) -> None:
        """To the listeners here, and onward."""
        self.deliver(message)
        for onward in self.onward:
            if onward.wants(message.tenant, message.channels):
                onward.take(message)

    def deliver(self, message: Message) -> None:
        """To the listeners here, to each of them once."""
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
        return any((tenant, channel) in self._by_key for channel in (*channels, WHOLE_TENANT))

    def _wanted(self, tenant: str, channels: Sequence[str]) -> bool:
        return any(onward.wants(tenant, channels) for onward in self.onward)

    async def drain(self, seconds: float = 0.5) -> None:
        """Send everybody away, to whoever takes over; wait until they have gone, at most so long."""
        self.stopping = True
        for listener in self.listeners:
            listener.send_away(*RECONNECT)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.listeners:
                    self._left.clear()
                    await self._left.wait()


def is_told_live(event: PublishedEvent) -> bool:
    """`transcription.completed` is for whoever looks on, `fiche/transcribed` for programs."""
    return "." in event.event_type and "/" not in event.event_type


def durable(event: PublishedEvent, channels: Sequence[str], largest: int = LARGEST_PAYLOAD) -> Message:
    ids = {
        "event_id": str(event.id),
        "event_key": event.event_key,
        "aggregate": event.aggregate,
        "correlation_id": event.correlation_id,
        "occurred_at": event.occurred_at,
    }
    data = fit(event.payload, largest).decode()
    return Message(event.tenant_id, event.event_type, channels, data, event.seq, ids)
