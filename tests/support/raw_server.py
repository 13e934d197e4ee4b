"""A server that sends exactly the bytes a test wants, for what no well-behaved server does, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from ecluse.vendors.http import VendorHttp

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


class Answer(BaseModel):
    ok: bool


class RawServer:
    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.requests: list[str] = []
        self.over = asyncio.Event()

    async def request(self, reader: asyncio.StreamReader) -> str:
        """The head of the next request, which is counted; its body is left where it is."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        return head


Script = Callable[[RawServer, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(script: Script) -> AsyncIterator[RawServer]:
    """Runs the script once per connection, which ends with it; a script that hangs waits for `over`."""
    server, writers, scripts = RawServer(), set[asyncio.StreamWriter](), set[asyncio.Task[None]]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        scripts.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await script(server, reader, writer)
        writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        server.over.set()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*scripts)


@contextlib.asynccontextmanager
async def client_of(port: int, scheme: str = "http", **options: Any) -> AsyncIterator[VendorHttp]:
    http = VendorHttp("raw", f"{scheme}://127.0.0.1:{port}", **{"deadline": 0.3, "now": lambda: NOW, **options})
    try:
        yield http
    finally:
        await http.close()


def response(body: bytes = b'{"ok":true}', *, status: int = 200, headers: dict[str, str] | None = None) -> bytes:
    fields = {"Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Whatever\r\n{head}\r\n".encode() + body


def answers(*responses: bytes) -> Script:
    """Answers the requests of each connection one by one, then closes it."""

    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for raw in responses:
            await server.request(reader)
            writer.write(raw)
            await writer.drain()

    return script
