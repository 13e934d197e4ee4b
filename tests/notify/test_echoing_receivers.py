"""A receiver of webhooks or mails that repeats what it was sent: the secret URL, the routing key, the password and the
signing secret are in nothing that is stored or logged."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.engine_flows import until
from tests.support.notify_world import SENDER, Smtp
from tests.support.raw_server import RawServer, raw_server, response

SECRET = "0123456789abcdef0123456789canary"  # noqa: S105
PATH = f"/services/T0/B0/{SECRET}"
EVERYTHING = (
    "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' AND table_type = 'BASE TABLE'"
)
ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": bytes,
    "base64": base64.b64encode,
}


@asynccontextmanager
async def echoing(status: int, encode: Callable[[bytes], bytes]) -> AsyncIterator[RawServer]:
    """A receiver that says the last parts of the path and the secret of the body, which come within an excerpt."""

    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await server.request(reader)
        size = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
        body = await reader.readexactly(size)
        server.requests.append(body.decode())
        said = head.split()[1].encode() + b" " + head.split("/")[4].split()[0].encode()
        at = body.find(b"routing_key")
        said += body[at : at + 60] if at >= 0 else b""
        writer.write(response(encode(said), status=status, headers={"X-Echo": PATH}))
        await writer.drain()

    async with raw_server(script) as server:
        yield server


def stored(query: Callable[..., list[Any]]) -> str:
    return str([query(f"SELECT to_jsonb(t)::text FROM {table} t") for (table,) in query(EVERYTHING)])  # noqa: S608


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as found:
        yield found


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("status", [200, 410, 500])
@pytest.mark.parametrize("kind", ["webhook", "slack", "pagerduty"])
async def test_a_receiver_that_echoes_its_url_and_its_key(start_world, query, lines, kind, status, encoding):
    async with echoing(status, ENCODINGS[encoding]) as receiver:
        world = await start_world()
        await world.endpoint(f"http://127.0.0.1:{receiver.port}{PATH}", kind=kind, secret=SECRET)
        await world.tell("thing.happened", summary="Hello")
        await until(
            lambda: query(
                "SELECT 1 FROM items WHERE flow = 'notifications' AND (error, result) IS DISTINCT FROM (NULL, NULL)"
            )
        )
    assert SECRET in receiver.requests[0]
    assert kind != "pagerduty" or SECRET in receiver.requests[1]
    shown = stored(query) + str(lines)
    assert SECRET not in shown
    assert "***" in shown
    assert not [where for where in range(3) if _in_base64(SECRET, where) in shown]


def _in_base64(secret: str, before: int) -> str:
    """What base64 makes of the middle of a text after so many bytes."""
    return base64.b64encode(bytes(before) + secret.encode()).decode()[4:-4]


async def test_a_mail_server_that_echoes_the_log_in(start_world, query, lines):
    said: list[bytes] = []

    async def script(_: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.com\r\n")
        while line := (await reader.readline()).strip():
            said.append(line)
            if line.upper().startswith(b"EHLO"):
                writer.write(b"250-mail.example.com\r\n250 AUTH PLAIN LOGIN\r\n")
            else:
                writer.write(b"535 refused: " + line + b" with " + SECRET.encode() + b"\r\n")
            await writer.drain()

    async with raw_server(script) as server:
        smtp = Smtp("127.0.0.1", server.port, SENDER, username="ann", password=SECRET, starttls=False, timeout=20.0)
        world = await start_world(smtp=smtp)
        await world.mail_endpoint("bob@example.com")
        await world.tell("thing.happened")
        await until(lambda: query("SELECT 1 FROM items WHERE error IS NOT NULL"))
    assert any(_in_base64(SECRET, len("\0ann\0") % 3).encode() in line for line in said)
    shown = stored(query) + str(lines)
    assert "535" in shown
    assert SECRET not in shown
    assert not [where for where in range(3) if _in_base64(SECRET, where) in shown]
