"""WebSockets at the edge of the server: uvicorn's protocol, counted with the other connections of clients, and read so
that no client can hold the event loop or fill the memory."""

from __future__ import annotations

from collections import deque
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from ecluse.access.edge import Edge

PART = 512  # bytes that are read in one turn
BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Socket(WebSocketsSansIOProtocol):
    """A connection that became a WebSocket. It counts against the limits until it is closed. What it sends is read in
    parts, in the turns of its client: 256 kB of empty frames would hold the loop for half a second. Nothing is read
    from a client that does not read: uvicorn answers its pings, and the answers would fill the memory. Nor is anything
    read while the app has not taken the messages of the part before."""

    def __init__(self, edge: Edge, **given: Any) -> None:
        super().__init__(**given)
        self._edge = edge
        self._parts: deque[bytes] = deque()  # received, but not read yet
        self._due = False  # it waits for its turn

    def data_received(self, data: bytes) -> None:
        self._parts.extend(data[n : n + PART] for n in range(0, len(data), PART))
        self._read_on()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_on()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        self._read_on()  # the base class may have resumed reading
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            self._read_on()  # the client's close frame may be among the parts

    def _read_on(self) -> None:
        if self.transport.is_closing():
            self._parts.clear()
        elif self._parts:
            self.transport.pause_reading()
            if not self._due and self.writable.is_set() and not self.read_paused:
                self._due = True
                # Before the handshake the client behind a proxy is not known.
                headers = self.scope["headers"] if self.handshake_initiated else []
                self._edge.turns.put(self._edge.client_of(self.client, headers), self._read_part)
        elif not self.read_paused:
            self.transport.resume_reading()

    def _read_part(self) -> None:
        self._due = False
        if self._parts and not self.transport.is_closing():
            try:
                super().data_received(self._parts.popleft())
            except InvalidState:  # uvicorn refuses a text that is not UTF-8 although a close frame is behind it
                self.transport.abort()
            if self.conn.handshake_exc is not None and not self.transport.is_closing():
                # uvicorn leaves such a connection open, and sends nothing; of some errors there is no answer.
                self.transport.write(b"".join(self.conn.data_to_send()) or BAD_REQUEST)
                self.transport.close()
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.left(self.transport)
        super().connection_lost(exc)
