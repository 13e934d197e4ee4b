"""An answer without an end: server-sent events. A client that does not read is not waited for, or it would hold its
place for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

log = structlog.get_logger(__name__)
SEND_SECONDS = 30.0
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    def __init__(self, told: AsyncGenerator[bytes]) -> None:
        super().__init__(told, media_type="text/event-stream", headers=HEADERS)
        self._told = told

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        async with aclosing(self._told):
            try:
                await super().stream_response(in_time)
            except TimeoutError:
                log.warning("a stream was cut off: its client does not read")
