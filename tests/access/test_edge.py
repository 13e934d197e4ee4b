"""The edge: what a client must send by when, and how many connections clients may hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from websockets.sync.client import connect

from ecluse.access.edge import UNREAD
from tests.support.api_server import FLOW, Client, new_key, serving
from tests.support.metrics import scrape
from tests.support.realtime_events import on_its_loop
from tests.support.waits import wait_for

SOON, LATER = 0.3, 5.0  # the deadline in these tests, and what no test should reach
ANOTHER = "127.0.0.2"  # an address that is not trusted as a proxy
SILENT = b""
HALF_A_HEAD = b"GET /api/me HTTP/1.1\r\nHost: a"
HALF_A_BODY = (
    b"POST /ui/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    b"Content-Length: 100\r\n\r\nkey=ecl_"
)
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def dsn(databases):
    with databases.one() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def strict(dsn) -> Iterator[Client]:
    """A server whose clients have little time."""
    with serving(dsn, FLOW, ECLUSE_REQUEST_DEADLINE_SECONDS=SOON) as client:
        yield client.with_key(new_key(dsn))


@pytest.fixture(scope="module")
def patient(dsn) -> Iterator[Client]:
    """A server whose clients have as much time as by default."""
    with serving(dsn, FLOW) as client:
        yield client


@pytest.fixture(scope="module")
def small(dsn) -> Iterator[Client]:
    """A server with room for eight connections, four of one address."""
    knobs = {"ECLUSE_MAX_CONNECTIONS": 8, "ECLUSE_MAX_CONNECTIONS_PER_ADDRESS": 4}
    with serving(dsn, FLOW, ECLUSE_REQUEST_DEADLINE_SECONDS=1, **knobs) as client:
        yield client.with_key(new_key(dsn))


@contextlib.contextmanager
def connected(client: Client, sends: bytes = SILENT, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", client.port), LATER, (address, 0)) as one:
        one.sendall(sends)
        yield one


def until_closed(one: socket.socket) -> tuple[bytes, float]:
    """What the server sent before it closed the connection, and after how long it did."""
    began, said = time.monotonic(), b""
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(65_536):
            said += part
    return said, time.monotonic() - began


def is_open(one: socket.socket) -> bool:
    one.settimeout(0.05)
    try:
        return one.recv(1, socket.MSG_PEEK) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


@pytest.mark.parametrize("sends", [SILENT, HALF_A_HEAD, b"\r\n"], ids=["nothing", "half a head", "an empty line"])
def test_a_client_that_sends_no_whole_head_is_disconnected(strict, sends):
    with connected(strict, sends) as one:
        said, seconds = until_closed(one)
    assert said == b""
    assert seconds < LATER


@pytest.mark.parametrize("first", [SILENT, WHOLE], ids=["first request", "second request"])
def test_bytes_that_drip_in_do_not_move_the_deadline(strict, first):
    with connected(strict, first) as one:
        began = time.monotonic()
        one.settimeout(SOON / 10)
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\nX-Long: " + 1000 * b"a":
                one.send(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if one.recv(65_536) == b"":
                        break
        assert SOON / 2 < time.monotonic() - began < LATER


def test_half_a_body_is_answered_408_and_is_no_error(strict):
    with capture_logs() as logs, connected(strict, HALF_A_BODY) as one:
        said, seconds = until_closed(one)
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "REQUEST_TIMEOUT"
    assert seconds < LATER
    assert [line for line in logs if line["log_level"] in ("warning", "error")] == []


def test_a_body_that_the_route_does_not_read_has_the_deadline_too(strict):
    with connected(strict, b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n") as one:
        said, seconds = until_closed(one)
    assert said.startswith(b"HTTP/1.1 404 ")
    assert seconds < LATER


def test_an_idle_connection_is_closed_five_seconds_after_its_last_request(patient):
    """docs/reverse-proxy.md says so: a proxy must forget its idle connections before."""
    with connected(patient) as one:
        one.settimeout(10)
        for pause in (0, 1):
            time.sleep(pause)
            one.sendall(WHOLE)
            assert one.recv(65_536).startswith(b"HTTP/1.1 200 ")
        said, seconds = until_closed(one)
    assert said == b""
    assert 4.5 < seconds < 8


def test_a_connection_that_keeps_asking_is_kept(strict):
    with connected(strict) as one:
        until = time.monotonic() + 3 * SOON
        while time.monotonic() < until:
            one.sendall(WHOLE)
            assert one.recv(65_536), "the connection was closed"
            time.sleep(SOON / 4)


def test_a_stream_is_not_cut(strict):
    head = f"GET /api/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {strict.key}\r\n\r\n"
    with connected(strict, head.encode()) as one:
        assert one.recv(65_536).startswith(b"HTTP/1.1 200 ")
        time.sleep(3 * SOON)
        assert is_open(one)


def test_a_websocket_is_not_cut(strict):
    app = strict.get("/api/realtime").json["key"]
    with connect(f"ws://127.0.0.1:{strict.port}/app/{app}?protocol=7") as socket:
        assert "connection_established" in socket.recv(LATER)
        time.sleep(3 * SOON)
        socket.send('{"event": "pusher:ping", "data": {}}')
        assert "pong" in socket.recv(LATER)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET / HTTP/1.1\r\n", 8_000 * b"X: y\r\n"),
        (b"GET / HTTP/1.1\r\nX: ", 60_000 * b"a"),
        (b"GET /", 60_000 * b"a"),
        (
            HALF_A_BODY.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked")[:-8] + b"0\r\n",
            8_000 * b"X: y\r\n",
        ),
    ],
    ids=["headers", "one header", "path", "trailers"],
)
def test_a_head_without_an_end_is_refused_before_its_deadline(patient, begin, more):
    with connected(patient, begin) as one:
        one.settimeout(SOON)
        said = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                one.sendall(more)
                with contextlib.suppress(TimeoutError):
                    said = one.recv(65_536)
                    break
    assert said.startswith(b"HTTP/1.1 431 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "HEAD_TOO_LARGE"


def unread(client: Client, times: int = 20) -> contextlib.AbstractContextManager[socket.socket]:
    """A client that asks for 20 MB without a key, and reads nothing."""
    return connected(client, times * b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")


def test_a_client_that_does_not_read_its_answer_is_disconnected(strict):
    with unread(strict) as one:
        assert one.recv(1)
        wait_for(lambda: strict.app.state.edge.connections == 0)
        said, _ = until_closed(one)
    assert len(said) < 10_000_000


def test_a_client_that_reads_slowly_is_not_disconnected(strict):
    with unread(strict, 8) as one:
        got, until = 0, time.monotonic() + 2 * UNREAD * SOON
        while time.monotonic() < until:
            got += len(one.recv(200_000))
            time.sleep(SOON / 3)
        while got < 8_000_000:
            part = one.recv(65_536)
            assert part
            got += len(part)


def test_at_the_limit_clients_that_do_not_read_make_room_for_others(small):
    edge = small.app.state.edge
    edge.limits, limits = replace(edge.limits, unread=1_000), edge.limits
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            assert stack.enter_context(unread(small)).recv(1), "no request is in progress"

        def makes_room() -> bool:
            with connected(small, WHOLE) as one, contextlib.suppress(ConnectionResetError, TimeoutError):
                return one.recv(64).startswith(b"HTTP/1.1 200 ")
            return False

        wait_for(makes_room)
    edge.limits = limits


@pytest.mark.parametrize("sends", [SILENT, HALF_A_HEAD, HALF_A_BODY], ids=["nothing", "half a head", "half a body"])
def test_at_the_limit_connections_without_a_request_make_room_for_others(small, sends):
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(small, sends)) for _ in range(20)]
        for _ in range(5):
            assert small.get("/api/me").status == 200
        assert sum(map(is_open, silent)) < 8


def test_at_the_limit_of_busy_connections_a_new_one_is_refused_with_a_reason(small):
    with contextlib.ExitStack() as stack:
        head = f"GET /api/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {small.key}\r\n\r\n".encode()
        streams = [stack.enter_context(connected(small, head)) for _ in range(8)]
        assert all(one.recv(65_536).startswith(b"HTTP/1.1 200 ") for one in streams)
        said, _ = until_closed(stack.enter_context(connected(small)))
        assert said.startswith(b"HTTP/1.1 503 ")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "CONNECTION_LIMIT"
        assert all(map(is_open, streams))


def test_one_address_gets_its_share_and_a_trusted_proxy_has_none(small):
    with contextlib.ExitStack() as stack:
        head = f"GET /api/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {small.key}\r\n\r\n".encode()
        for _ in range(4):
            assert stack.enter_context(connected(small, head, ANOTHER)).recv(65_536).startswith(b"HTTP/1.1 200 ")
        said, _ = until_closed(stack.enter_context(connected(small, b"", ANOTHER)))
        assert b"CONNECTION_LIMIT" in said
        assert small.get("/api/me").status == 200


def test_a_flood_is_logged_once_and_once_when_it_is_over(dsn):
    # A flood is over when no connection was turned away for as long as the deadline.
    # No other server of these tests, whose floods may end meanwhile, has this limit.
    knobs = {"ECLUSE_MAX_CONNECTIONS": 9, "ECLUSE_REQUEST_DEADLINE_SECONDS": 5 * SOON}
    with capture_logs() as logs, serving(dsn, FLOW, **knobs) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(connected(server))
            wait_for(lambda: any("reached" in line["event"] and line["limit"] == 9 for line in logs))
        wait_for(lambda: any("again" in line["event"] and line["limit"] == 9 for line in logs))
        turned_away = scrape(server)["ecluse_http_connections_turned_away_total"][()]
    begin, over = [line for line in logs if line["event"].startswith("edge") and line["limit"] == 9]
    assert (begin["log_level"], over["log_level"]) == ("warning", "info")
    assert 1 <= over["turned_away"] <= turned_away


def test_a_connection_is_not_accepted_behind_one_other_per_pass_of_the_loop(strict):
    """Passes take 20 ms here: accepted one per pass, the last of 300 connections would wait for 6 s."""
    slow = True

    def hold() -> None:
        time.sleep(0.02)
        if slow:
            asyncio.get_running_loop().call_soon(hold)

    on_its_loop(strict, hold)
    try:
        with contextlib.ExitStack() as others:
            for _ in range(300):
                others.enter_context(connected(strict))
            began = time.monotonic()
            with connected(strict, WHOLE) as one:
                assert one.recv(64).startswith(b"HTTP/1.1 200")
            assert time.monotonic() - began < 3
    finally:
        slow = False


def test_every_answer_forbids_sniffing_and_names_no_server(strict):
    for path in ("/healthz", "/api/me", "/api/nothing", "/ui/login", "/openapi.json"):
        answer = strict.get(path)
        assert answer.headers.get_all("X-Content-Type-Options") == ["nosniff"], path
        assert answer.headers["Server"] is None
    with connected(strict, b"what\r\n\r\n") as one:
        said, _ = until_closed(one)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"nosniff" in said
    assert b"uvicorn" not in said
