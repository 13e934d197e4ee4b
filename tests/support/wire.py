"""A bad wire to PostgreSQL: a proxy that lets a request through and now and then loses the answer, both ways closed.

The server has executed the statement, and its client does not get the answer: the worst moment at which a connection
can break. Or the proxy swallows: connections stay open, and nothing arrives any more, either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

from psycopg.conninfo import make_conninfo

from ecluse.db.postgres_user import SOCKET

READY_FOR_QUERY = ord("Z")
HEADER = 5  # a type, and a length that counts itself
LOST_WITHIN_SECONDS = 1.0


class Answers:
    """Reads along what the server says; knows when it has said all of an answer."""

    def __init__(self) -> None:
        self._rest = b""
        self.states: list[str] = []  # after each answer: I outside a transaction, T inside, E inside a failed one

    def feed(self, data: bytes) -> bool:
        """True if the end of an answer was in it."""
        rest, ended = self._rest + data, False
        while len(rest) >= HEADER and len(rest) >= (size := 1 + int.from_bytes(rest[1:HEADER])):
            if rest[0] == READY_FOR_QUERY:
                self.states.append(chr(rest[HEADER]))
                ended = True
            rest = rest[size:]
        self._rest = rest
        return ended


class BadWire:
    def __init__(self, server: Path | tuple[str, int], folder: Path, *, one_in: int, seed: int) -> None:
        self._server = server
        self._folder = folder
        self._one_in = one_in
        self._chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._connections: set[asyncio.Task[None]] = set()
        self.losing = False
        self.cut = 0  # answers lost
        self.swallowed = 0  # times; each time, of all connections open then
        self.commits_cut = 0  # among them: the answer to the end of a transaction of several statements

    def dsn(self, dsn: str) -> str:
        return make_conninfo(dsn, host=str(self._folder), port=5432)

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        listener = await asyncio.start_unix_server(self._accept, self._folder / SOCKET)
        async with listener:
            ready.set()
            await stop.wait()
            listener.close()
            await asyncio.sleep(0.05)  # in which the last one to be accepted is
            for task in (tasks := list(self._connections)):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # one that had no server yet ends as cancelled

    async def _accept(self, client_reads: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if isinstance(self._server, Path):
                server_reads, server = await asyncio.open_unix_connection(self._server)
            else:
                server_reads, server = await asyncio.open_connection(*self._server)
        except OSError:
            client.transport.abort()
            await asyncio.sleep(0)
            self._connections.discard(task)
            return
        # Whichever side ends first ends both.
        asked, born = asyncio.Event(), self.swallowed
        pumps = [
            asyncio.create_task(self._requests(client_reads, server, asked, born)),
            asyncio.create_task(self._answers(server_reads, client, asked, born)),
        ]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for side in (client, server):
            side.transport.abort()
        await asyncio.sleep(0)  # in which they are closed
        self._connections.discard(task)

    async def _requests(
        self, reads: asyncio.StreamReader, server: asyncio.StreamWriter, asked: asyncio.Event, born: int
    ) -> None:
        while data := await reads.read(65536):
            if born < self.swallowed:
                continue
            asked.set()
            server.write(data)
            await server.drain()

    async def _answers(
        self, reads: asyncio.StreamReader, client: asyncio.StreamWriter, asked: asyncio.Event, born: int
    ) -> None:
        answers = Answers()
        while data := await reads.read(65536):
            if born < self.swallowed:
                continue
            # The first answer is the welcome; one without a request is a notification.
            if self.losing and answers.states and asked.is_set() and self._chance.randrange(self._one_in) == 0:
                await self._lose(reads, answers, data)
                return
            if answers.feed(data):
                asked.clear()
            client.write(data)
            await client.drain()

    async def _lose(self, reads: asyncio.StreamReader, answers: Answers, data: bytes) -> None:
        """Not before the server is done with it; unless it waits for more itself."""
        before = answers.states[-1]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOST_WITHIN_SECONDS):
                while not answers.feed(data) and (data := await reads.read(65536)):
                    pass
        self.cut += 1
        self.commits_cut += before == "T" and answers.states[-1] == "I"


@contextlib.contextmanager
def bad_wire(server: Path | tuple[str, int], folder: Path, *, one_in: int, seed: int = 1) -> Iterator[BadWire]:
    """Loses nothing until `losing` is set."""
    folder.mkdir(mode=0o700)
    wire = BadWire(server, folder, one_in=one_in, seed=seed)
    ready, loops = threading.Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

    async def run() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        await wire.serve(ready, stop)

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="bad wire", daemon=True)
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("the proxy does not listen")
    try:
        yield wire
    finally:
        ((loop, stop),) = loops
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
