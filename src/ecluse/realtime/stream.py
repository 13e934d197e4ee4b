"""Streaming response of server-sent events. The connection of a client that does not read is closed; otherwise it would
stay open forever."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

log = structlog.get_logger(__name__)
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _compressed(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Compress the chunks with gzip, flushed after each. Earlier chunks serve as the dictionary, so repeated content
    costs next to nothing."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS, memLevel=6)
    async with aclosing(chunks):
        async for chunk in chunks:
            yield packer.compress(chunk) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()


class EventStream(StreamingResponse):
    """A response that sends `chunks`, which are server-sent events, as they come. `send_within`: seconds within which
    the client must take a chunk; `squeeze`: compress with gzip (the caller has checked that the client accepts it);
    `closed` is called when the response ends."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        send_within: float,
        *,
        squeeze: bool = False,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        encoded = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"} if squeeze else {}
        chunks = _compressed(chunks) if squeeze else chunks
        super().__init__(chunks, media_type="text/event-stream", headers=HEADERS | encoded)
        self._chunks, self._send_within, self._closed = chunks, send_within, closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_within):
                await send(message)

        async with aclosing(self._chunks):
            try:
                await super().stream_response(in_time)
            except TimeoutError:
                log.warning("realtime: event stream closed, its client does not read")
