"""The edge of the server: uvicorn's HTTP protocol with deadlines for what a client sends, and limits on connections.

A client that holds a connection and sends nothing costs a file descriptor, and the database and vendors need
descriptors, too. At the limit, a new connection therefore replaces the one that has waited longest without a complete
request, so that silent and slow connections, however many, cannot keep out a client that sends one. Streams and
WebSockets are requests in progress: neither a deadline nor another connection ends them. A client that takes nothing of
its answer counts as silent, and is disconnected after UNREAD deadlines.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import structlog
from pydantic_core import to_json
from uvicorn.middleware.proxy_headers import _TrustedHosts
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ecluse.access.turns import Turns

log = structlog.get_logger(__name__)
LARGEST_HEAD = 65_536  # bytes, and those that arrived together with the first of them
UNREAD = 6  # deadlines after which a client that takes nothing of its answer is disconnected


@dataclass(frozen=True)
class EdgeLimits:
    """Limits on connections. `seconds`: how long a client may take to send the head of a request, and again its body.
    `proxies`: addresses and networks of reverse proxies, separated by commas, to which `per_address` does not apply.
    `unread`: after how many times `seconds` a client that takes nothing of its answer is disconnected."""

    connections: int
    per_address: int
    seconds: float
    proxies: str
    unread: int = UNREAD


class Edge:
    """Counts the open connections of clients and enforces the limits. A flood is logged when it begins, and when no
    connection was turned away for `seconds`."""

    def __init__(self, limits: EdgeLimits) -> None:
        self.limits = limits
        self.turns = Turns()
        self.turned_away = 0  # connections refused, or closed without a request to make room
        self._proxies = _TrustedHosts(limits.proxies)
        self._open: dict[asyncio.Transport, str | None] = {}
        self._of: Counter[str | None] = Counter()
        self._waiting: dict[Connection, None] = {}  # without a complete request, the longest waiting first
        self._logged = 0  # `turned_away` when the present flood was logged; 0: there is none

    @property
    def connections(self) -> int:
        return len(self._open)

    def admit(self, new: Connection) -> bool:
        """Count a new connection. At a limit, close the connection that has waited longest without a complete request
        (at the limit per address, one of the same address) and count the new one in its place. Return False if there is
        none to close: the new connection must be refused."""
        address = new.client[0] if new.client else None
        if self._of[address] >= self.limits.per_address and address not in self._proxies:
            replaced = next((one for one in self._waiting if self._open[one.transport] == address), None)
        elif len(self._open) >= self.limits.connections:
            replaced = next(iter(self._waiting), None)
        else:
            self._count(new, address)
            return True
        self._note(address)
        if replaced is None:
            return False
        replaced.transport.abort()
        self.left(replaced.transport, replaced)
        self._count(new, address)
        return True

    def client_of(self, client: tuple[str, int] | None, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the address of the client of a request; behind a trusted proxy, the last address in
        X-Forwarded-For."""
        address = client[0] if client else ""
        if address not in self._proxies:
            return address
        named = next((value for name, value in headers if name == b"x-forwarded-for"), b"")
        return named.decode("latin-1").rpartition(",")[2].strip() or address

    def _count(self, new: Connection, address: str | None) -> None:
        self._open[new.transport] = address
        self._of[address] += 1
        self._waiting[new] = None

    def waits(self, one: Connection) -> None:
        """Mark the connection as waiting for a complete request: it may be closed to make room."""
        if one.transport in self._open:
            self._waiting[one] = None

    def works(self, one: Connection) -> None:
        """Mark the connection as having a complete request in progress: it is not closed to make room."""
        self._waiting.pop(one, None)

    def left(self, transport: asyncio.Transport, one: Connection | None = None) -> None:
        """Stop counting a closed connection. A second call for the same connection does nothing."""
        if transport in self._open:
            address = self._open.pop(transport)
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]
        if one is not None:
            self._waiting.pop(one, None)

    def _note(self, address: str | None) -> None:
        self.turned_away += 1
        if not self._logged:
            log.warning(
                "edge: connection limit reached; those without a request are closed, new ones may be refused",
                open=len(self._open),
                limit=self.limits.connections,
                address=address,
                of_address=self._of[address],
                limit_per_address=self.limits.per_address,
            )
            self._logged = before = self.turned_away
            asyncio.get_running_loop().call_later(self.limits.seconds, self._look, before, before)

    def _look(self, first: int, before: int) -> None:
        if self.turned_away > before:
            asyncio.get_running_loop().call_later(self.limits.seconds, self._look, first, self.turned_away)
            return
        self._logged = 0
        turned_away = self.turned_away - first + 1
        log.info(
            "edge: connections are below their limit again", limit=self.limits.connections, turned_away=turned_away
        )


class Part(Enum):
    """The part of a request that the client is to send next."""

    HEAD = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """One HTTP connection of a client, until it is closed or becomes a WebSocket."""

    def __init__(self, edge: Edge, **given: Any) -> None:
        super().__init__(**given)
        self._edge = edge
        self._expected: Part | None = Part.HEAD
        self._deadline: asyncio.TimerHandle | None = None
        self._without_end = 0  # bytes since the last part of a request was complete
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._edge.admit(self):
            self._start_deadline()
        else:
            self._refuse(503, "CONNECTION_LIMIT", "The server has as many connections as it may have; try again.")
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_unread()
        self._edge.left(self.transport, self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None and self._expected is None:
            self._expected = Part.HEAD  # bytes that begin no request, such as empty lines, have the deadline, too
        self._without_end += len(data)
        super().data_received(data)
        if self._expected is None or self.transport.is_closing():
            return
        if self._without_end > LARGEST_HEAD:  # the parser keeps headers, and trailers, until they are complete
            self._disconnect(431, "HEAD_TOO_LARGE", f"A head, or trailers, of more than {LARGEST_HEAD} bytes.")
        elif self._deadline is None:
            self._start_deadline()

    def on_message_begin(self) -> None:
        self._expected, self._without_end = Part.HEAD, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        self._expected, self._without_end = Part.BODY, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._without_end = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_deadline()
        self._expected = None
        self._edge.works(self)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        client = self._edge.client_of(self.client, self.headers)
        self._edge.turns.put(client, partial(super()._start_asgi_task, cycle, app))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._edge.waits(self)
        elif self.transport.is_closing():
            self._watch_unread()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_unread()  # the transport sends what is left before it closes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()
        if self.cycle is not None and not self.cycle.response_complete:
            self._edge.works(self)

    def handle_websocket_upgrade(self) -> None:
        self._stop_deadline()
        self._stop_unread()
        self._expected = None
        self._edge.works(self)
        super().handle_websocket_upgrade()

    def _start_deadline(self) -> None:
        # In the turn of its client: otherwise a thousand connections opened together would be closed in one pass.
        end = partial(self._edge.turns.put, self.client[0] if self.client else "", self._end)
        self._deadline = self.loop.call_later(self._edge.limits.seconds, end)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        if self._deadline is None:  # the deadline was stopped while this call waited for its turn
            return
        if self.flow.read_paused:  # the server has paused reading: the client is not late
            self._start_deadline()
            return
        if self._expected is Part.BODY:
            self._disconnect(408, "REQUEST_TIMEOUT", f"The body was not sent within {self._edge.limits.seconds:g} s.")
        else:
            self._close()

    def _disconnect(self, status: int, code: str, message: str) -> None:
        """Close the connection, with this answer unless another one has begun or is due before it."""
        if self._expected is Part.BODY and not self.pipeline and not self.cycle.response_started:
            self.cycle.disconnected = True  # the route, which waits for the body, learns that the client is gone
            self.cycle.message_event.set()
            self._refuse(status, code, message)
        elif self._expected is Part.HEAD and (self.cycle is None or self.cycle.response_complete):
            self._refuse(status, code, message)
        self._close()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._watch_unread()

    def _close(self) -> None:
        self.transport.close()
        self._watch_unread()  # the transport sends what is left before it closes

    def _watch_unread(self) -> None:
        if self._unread is None and (left := self.transport.get_write_buffer_size()):
            self._unread = self.loop.call_later(self._edge.limits.seconds, self._look_unread, left, 1)

    def _look_unread(self, before: int, looks: int) -> None:
        """Disconnect the client if it has taken nothing of its answer at `unread` looks in a row; from the first one
        on, the connection may be closed to make room."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            looks = 0
            if self.cycle is not None and not self.cycle.response_complete:
                self._edge.works(self)
        elif looks >= self._edge.limits.unread:
            self.transport.abort()
            return
        else:
            self._edge.waits(self)
        self._unread = self.loop.call_later(self._edge.limits.seconds, self._look_unread, left, looks + 1)

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _refuse(self, status: int, code: str, message: str) -> None:
        error = {"code": code, "message": message, "details": None, "request_id": uuid.uuid4().hex}
        body = to_json({"error": error})
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
