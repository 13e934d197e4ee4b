"""`GET /api/events`: realtime events as a stream of server-sent events. The id of a durable event is its position in
the outbox: a client that reconnects with `Last-Event-ID` first gets the events published meanwhile. An ephemeral event
has no id and is not sent again."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from fastapi import Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from ecluse.access import door
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import Refused
from ecluse.access.keys import Caller
from ecluse.access.wire import LARGEST_ID, reads_of
from ecluse.api.realtime import EVENTS_PATH, has_right, realtime_of, require_right
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.engine import PublishedEvent, read_published
from ecluse.realtime.channels import WHOLE_TENANT, Subject, channel_name, channels_of, subject_of
from ecluse.realtime.hub import UNAUTHORISED, Listener, durable, is_realtime
from ecluse.realtime.stream import EventStream
from ecluse.realtime.tail import Tail

routes = door.routes("realtime")
MOST_CHANNELS = 50


@routes.get(
    EVENTS_PATH,
    openapi_extra=needs("me.read", narrowed=True, refuses=("STOPPING", "TOO_MANY_CONNECTIONS")),
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "Events, until either side closes the connection"}
    },
)
async def stream_events(
    request: Request,
    channel: Annotated[list[str], Query(max_length=MOST_CHANNELS, examples=[["private-fiche-171234"]])] = [],  # noqa: B006
    last_event_id: Annotated[
        str,
        Header(
            alias="Last-Event-ID",
            description="The id of the last event that the client has received.",
            examples=["171234"],
        ),
    ] = "",
) -> Response:
    """Stream the events of the given channels; without channels, all events of the tenant (needs `runs.read` and scope
    ALL)."""
    realtime, caller = realtime_of(request), caller_of(request)
    last = _place(last_event_id)
    subjects = []
    for name in channel:
        subject = subject_of(name)
        await require_right(request, subject, name)
        assert subject is not None  # noqa: S101 - or it would have been refused
        subjects.append(subject)
    if not channel and not _may_hear_all(caller):
        raise Refused(403, "FORBIDDEN", "This key may not listen to everything of its tenant: name the channels.")
    if realtime.hub.stopping:
        raise Refused(503, "STOPPING", "This server is stopping: connect again.", {"Retry-After": "1"})
    closed = request.app.state.limits.open(caller, "streams")
    return EventStream(_Stream(request, subjects, last).run(), realtime.limits.send_within, closed=closed)


def _may_hear_all(caller: Caller) -> bool:
    return caller.may("runs.read") and caller.scope == "ALL"


def _place(given: str) -> int | None:
    if not given:
        return None
    if given.isascii() and given.isdecimal() and len(given) < 20 and int(given) <= LARGEST_ID:
        return int(given)
    raise InvalidInput("Last-Event-ID: must be the id of an event received here, or left out")


class _Stream:
    def __init__(self, request: Request, subjects: Sequence[Subject], last: int | None) -> None:
        """Prepare a stream of the events of `subjects`; without subjects, of all events of the tenant. `last` is the
        position of the last event that the client has received."""
        self._request, self._subjects = request, subjects
        realtime = realtime_of(request)
        self._hub, self._tail, self._limits = realtime.hub, realtime.tail, realtime.limits
        names = {channel_name(subject, self._hub.private) for subject in subjects}
        self._channels = frozenset(names or {WHOLE_TENANT})
        self._listener = Listener(caller_of(request).tenant, "sse")
        self._sent = last  # `seq` of the last durable event sent
        self._checked_at = time.monotonic()  # the caller's key

    async def run(self) -> AsyncGenerator[bytes]:
        assert isinstance(self._tail, Tail)  # noqa: S101 - there is one where requests are answered
        with self._hub.listening(self._listener) as listener:
            yield b"retry: 1000\n\n"
            if self._sent is not None:
                async for missed in self._missed():
                    yield missed
            for channel in self._channels:
                self._hub.subscribe(listener, channel)
            if self._sent is None:
                self._sent = self._tail.at
                yield b"id: %d\n\n" % self._sent  # for a client that loses its connection before the first event
            async for missed in self._missed():  # published while the pages above were read
                yield missed
            if listener.leave is not None:  # unread events precede the queued ones: a new stream resumes there
                return
            async for live in self._live():
                yield live

    async def _missed(self) -> AsyncGenerator[bytes]:
        """Yield the durable events after the last one sent, page by page, until there are no more or the stream is to
        end."""
        reads, tenant, full = reads_of(self._request), self._listener.tenant, self._limits.page
        page = full
        while page == full and self._listener.leave is None:
            if not await self._still_welcome():
                return
            after = self._sent or 0
            events = await reads(lambda c, after=after: read_published(c, after, tenant, full))  # type: ignore[misc]
            page = len(events)
            if events:
                self._sent = events[-1].seq
            if told := b"".join(self._told(event) for event in events):
                yield told

    def _told(self, event: PublishedEvent) -> bytes:
        channels = channels_of(event.payload, self._hub.private) if is_realtime(event) else []
        if WHOLE_TENANT in self._channels or not self._channels.isdisjoint(channels):
            return durable(event, channels, self._hub.largest).text
        return b""

    async def _live(self) -> AsyncGenerator[bytes]:
        while True:
            if told := b"".join(self._not_sent()):
                yield told
            if self._listener.leave is not None:
                return
            await self._listener.wait(max(0.0, self._check_at - time.monotonic()))
            if time.monotonic() >= self._check_at:
                if not await self._still_welcome():
                    return
                yield b": still here\n\n"

    @property
    def _check_at(self) -> float:
        return self._checked_at + self._limits.keep_alive

    def _not_sent(self) -> list[bytes]:
        told = []
        for one in self._listener.taken():
            if not isinstance(one, str):
                message, _ = one
                if message.seq is None or message.seq > (self._sent or 0):
                    self._sent = message.seq or self._sent
                    told.append(message.text)
        return told

    async def _still_welcome(self) -> bool:
        """Return True if the stream may go on. Once in `keep_alive` seconds the key of its caller is checked; if the
        key may not listen any more, the stream is ended."""
        if time.monotonic() < self._check_at:
            return True
        self._checked_at = time.monotonic()
        if not await self._may_listen():
            self._listener.disconnect(*UNAUTHORISED)
        return self._listener.leave is None

    async def _may_listen(self) -> bool:
        try:
            caller = await door.admit_again(self._request, "me.read", narrowed=True)
        except (Refused, NotFound):
            return False
        if not self._subjects:
            return _may_hear_all(caller)
        return await reads_of(self._request)(lambda c: has_right(c, caller, self._subjects))
