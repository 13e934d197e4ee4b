"""What an open page costs by the wire: only what has changed is sent, and that compressed."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
import zlib
from contextlib import ExitStack

import psycopg
import pytest

from ecluse.engine import ROLES, pause_lane
from ecluse.web import live
from ecluse.web.files import FILES
from tests.support.api_server import FLOW, new_key, serving
from tests.support.pages import Reader
from tests.support.waits import wait_for

pytestmark = pytest.mark.long

TEN_MINUTES = 600
PLAYED = 120  # seconds of them that are played: what a rendering sends is the same in every minute
HASTE = 100  # times as often as usual
MOST = 200_000  # bytes


class Wire:
    """A stream, byte by byte as it comes."""

    def __init__(self, reader: Reader, path: str, encoding: str = "gzip") -> None:
        self._socket = socket.create_connection(("127.0.0.1", reader.client.port), timeout=30)
        head = [
            f"GET {path} HTTP/1.1",
            "Host: x",
            f"Accept-Encoding: {encoding}",
            f"Cookie: {reader.headers['Cookie']}",
        ]
        self._socket.sendall("\r\n".join([*head, "", ""]).encode())
        self._socket.setblocking(False)
        self.received = b""

    def read(self) -> int:
        """How many bytes have come so far."""
        while True:
            try:
                more = self._socket.recv(65536)
            except BlockingIOError:
                return len(self.received)
            assert more, "it was cut off"
            self.received += more

    @property
    def text(self) -> str:
        head, _, body = self.received.partition(b"\r\n\r\n")
        assert b"content-encoding: gzip" in head.lower()
        plain = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            plain, body = plain + body[: int(size, 16)], body[int(size, 16) + 2 :]
        return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(plain).decode()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def held(dsn, sandbox):
    """The page of an automation run whose transcriptions wait in a paused lane."""
    knobs = {
        "CRM_BASE_URL": f"{sandbox.url}/crm",
        "CRM_API_KEY": "key",
        "ELEVENLABS_BASE_URL": f"{sandbox.url}/elevenlabs",
        "ELEVENLABS_API_KEY": "key",
        "LLM_BASE_URL": f"{sandbox.url}/llm/v1",
        "LLM_API_KEY": "key",
        "LLM_MODEL": "gpt-4.1",
    }
    key = new_key(dsn)
    with serving(dsn, roles=ROLES, **knobs) as server:
        client = server.with_key(key)
        fiches = [str(9000 + n) for n in range(60)]
        wanted = {"mode": "manual", "fiche_ids": fiches}
        schedule = {"name": "Yesterday's calls", "schedule_type": "MANUAL", "fiche_selection": wanted}
        made = client.post("/api/automation/schedules", {**schedule, "run_audits": False}).json["id"]

        async def pause() -> None:
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                await pause_lane(connection, "elevenlabs", reason="invoice 4711", by="cli:ann")

        asyncio.run(pause())
        run_id = client.post("/api/automation/trigger", {"scheduleId": made}).json["run_id"]
        wait_for(lambda: client.get(f"/api/runs/{run_id}/waiting").json["total"] == 5 * len(fiches))
        yield Reader(client, key), f"/ui/runs/{run_id}"


def test_the_open_page_of_a_held_run_costs_little_in_ten_minutes(held, paced, monkeypatch):
    reader, path = held
    renderings = 0
    render = live.Page.regions

    def counted(self, *given, **named):
        nonlocal renderings
        renderings += 1
        return render(self, *given, **named)

    page = reader.get(path, Accept_Encoding="gzip")
    assert page.headers["Content-Encoding"] == "gzip"
    assert "was paused by an operator: invoice 4711" in gzip.decompress(page.body).decode()
    usual = live.Pace()
    paced(reader.client, **{name: seconds / HASTE for name, seconds in usual._asdict().items()})
    monkeypatch.setattr(live.Page, "regions", counted)
    wire, wanted = Wire(reader, f"{path}/live"), PLAYED / usual.tick
    until = time.monotonic() + 90
    while renderings < wanted and time.monotonic() < until:
        time.sleep(0.1)
        wire.read()
    assert renderings >= wanted
    shown = gzip.decompress(page.body).decode()
    sent, files = wire.read(), sum(len(file.gzipped) for name, file in FILES.items() if f'/{name}"' in shown)
    text = wire.text
    wire.close()
    total = sent * TEN_MINUTES // PLAYED + len(page.body) + files
    print(
        f"page {len(page.body):,} B, scripts and styles {files:,} B, stream {sent:,} B for {renderings} renderings"
        f" ({len(text):,} B before compression): {total:,} B in ten minutes"
    )
    assert text.count('hx-target="#part-waiting"') == 1, "what has not changed is sent once"
    assert total <= MOST


def test_a_stream_is_sent_as_it_is_to_who_does_not_take_it_compressed(reader, pages_dsn):
    run_id = reader.client.with_key(new_key(pages_dsn)).post("/api/runs", {"flow": "test"}).json["run_id"]
    with ExitStack() as stack:
        wire = Wire(reader, f"/ui/runs/{run_id}/live", "identity")
        stack.callback(wire.close)
        wait_for(lambda: wire.read() and b"hx-partial" in wire.received)
        assert b"content-encoding" not in wire.received.lower()
        squeezed = Wire(reader, f"/ui/runs/{run_id}/live", "br, gzip")
        stack.callback(squeezed.close)
        wait_for(lambda: squeezed.read() and b"\r\n\r\n" in squeezed.received)
        wait_for(lambda: squeezed.read() and "</hx-partial>" in squeezed.text)
        assert "part-header" in squeezed.text


def test_answers_are_compressed_for_who_takes_them_so_and_events_are_not(dsn):
    key = new_key(dsn)
    with serving(dsn, FLOW) as server:
        client = server.with_key(key)
        plain = client.get("/openapi.json")
        squeezed = client.get("/openapi.json", headers={"Accept-Encoding": "gzip"})
        assert "Content-Encoding" not in plain.headers
        assert squeezed.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(squeezed.body) == plain.body
        assert len(squeezed.body) < len(plain.body) / 4
        events = socket.create_connection(("127.0.0.1", client.port), timeout=30)
        with events:
            head = ["GET /api/events HTTP/1.1", "Host: x", "Accept-Encoding: gzip", f"Authorization: Bearer {key}"]
            events.sendall("\r\n".join([*head, "", ""]).encode())
            assert b"content-encoding" not in events.recv(65536).lower()
