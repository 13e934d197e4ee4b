"""WebSockets at the edge: whose turn they take, what is read for the app, and handshakes that are refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from ecluse.access.edge import Connection, Edge, EdgeLimits
from ecluse.access.sockets import Socket
from tests.support.socket_frames import CLOSE, PING, TEXT, frame, upgrade

LATER = 5.0  # seconds, which no test should reach; less than uvicorn waits for a close frame
AT_ONCE = 85  # empty frames that the server reads in one turn

App = Callable[..., Coroutine[Any, Any, None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """An app behind the edge, on the loop of the test; 127.0.0.1 is a trusted proxy."""

    def __init__(self, app: App) -> None:
        edge = Edge(EdgeLimits(connections=100, per_address=100, seconds=LATER, proxies="127.0.0.1"))
        self.config = uvicorn.Config(app, ws=partial(Socket, edge), log_config=None, lifespan="off")  # type: ignore[arg-type]
        self.config.load()
        self.state, self.port, self._edge = ServerState(), 0, edge
        self.clients: list[asyncio.StreamWriter] = []

    def connection(self) -> Connection:
        return Connection(self._edge, config=self.config, server_state=self.state, app_state={})

    async def ask(self, headers: str = "") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        writer.write(upgrade(headers=headers))
        return reader, writer

    async def opened(self, headers: str = "") -> Streams:
        reader, writer = await self.ask(headers)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        return reader, writer


@contextlib.asynccontextmanager
async def served(app: App) -> AsyncIterator[Server]:
    server = Server(app)
    listening = await asyncio.get_running_loop().create_server(server.connection, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for one in server.clients:
            one.transport.abort()
        for task in (tasks := list(server.state.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while server.state.connections:
            await asyncio.sleep(0)


async def test_behind_a_trusted_proxy_sockets_take_turns_by_the_client_that_it_names() -> None:
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            told.append(message["text"])

    async with served(app) as server:
        busy = [await server.opened("X-Forwarded-For: 198.51.100.7\r\n") for _ in range(40)]
        _, other = await server.opened("X-Forwarded-For: 198.51.100.8\r\n")
        for _, writer in busy:
            writer.write(frame(TEXT, b"busy"))
        other.write(frame(TEXT, b"other"))
        async with asyncio.timeout(LATER):
            while len(told) <= len(busy):
                await asyncio.sleep(0)
    assert told.index("other") < 10


@pytest.mark.parametrize(
    ("headers", "status"),
    [("X: y\r\n" * 124, 431), (f"X: {9_000 * 'y'}\r\n", 431), ("Content-Length: 1\r\n", 400)],
    ids=["129 headers", "a long header", "a body"],
)
async def test_a_handshake_that_cannot_be_read_is_answered_and_closed(headers: str, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the handshake was accepted")

    async with served(app) as server:
        reader, _ = await server.ask(headers)
        async with asyncio.timeout(LATER):
            said = await reader.read()
    assert said.startswith(b"HTTP/1.1 %d " % status)
    assert not server.state.connections


async def test_messages_that_the_app_does_not_take_are_left_unread() -> None:
    taken, go_on = 0, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal taken
        await receive()
        await send({"type": "websocket.accept"})
        await go_on.wait()
        while (await receive())["type"] == "websocket.receive":
            taken += 1

    async with served(app) as server:
        _, writer = await server.opened()
        (socket,) = (one for one in server.state.connections if isinstance(one, Socket))
        writer.write(frame(TEXT) * 10_000)
        async with asyncio.timeout(LATER):
            while socket.queue.empty():
                await asyncio.sleep(0)
            for _ in range(1_000):  # passes of the loop
                await asyncio.sleep(0)
            assert socket.queue.qsize() <= AT_ONCE + 1
            go_on.set()
            while taken < 10_000:
                await asyncio.sleep(0)


async def test_a_close_frame_behind_unread_messages_ends_the_connection_that_the_app_closes() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await send({"type": "websocket.close"})

    async with served(app) as server:
        reader, writer = await server.opened()
        writer.write(frame(TEXT) * 10_000 + frame(CLOSE, b"\x03\xe8"))
        async with asyncio.timeout(LATER):
            assert (await reader.read())[:1] == bytes([CLOSE])


async def test_a_message_that_is_no_text_before_a_close_frame_closes_the_connection_and_stops_no_other() -> None:
    taken: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            taken.append(message["text"])

    async with served(app) as server:
        others = [await server.opened() for _ in range(AT_ONCE)]
        reader, writer = await server.opened()
        # Enough that the last part is read in a later pass of the loop, where other sockets wait behind it.
        writer.write(frame(PING, b"x" * 125) * 25 + frame(TEXT, b"\xff") + frame(CLOSE, b"\x03\xe8"))
        for _, other in others:
            other.write(frame(TEXT, b"other"))
        async with asyncio.timeout(LATER):
            await reader.read()
            while len(taken) < len(others):
                await asyncio.sleep(0)
