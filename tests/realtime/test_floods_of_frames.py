"""Sockets that send many small frames, and sockets that do not read: what others notice of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.realtime.conftest import app_of
from tests.support.api_server import Client
from tests.support.loop_probe import probing
from tests.support.realtime_events import on_its_loop
from tests.support.socket_frames import PING, TEXT, frame, upgrade
from tests.support.waits import PATIENCE, wait_for


@contextlib.contextmanager
def opened(server: Client) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as one:
        one.sendall(upgrade(f"/app/{app_of(server)['key']}?protocol=7"))
        assert one.recv(1_000).startswith(b"HTTP/1.1 101 ")
        yield one


@pytest.mark.alone
def test_many_small_frames_do_not_hold_the_loop(live):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(opened(live)) for _ in range(10)]
        with probing(live) as held:
            for one in sockets:
                one.setblocking(False)
                with contextlib.suppress(OSError):
                    one.send(frame(TEXT) * 40_000)
            time.sleep(2)
    print(f"the loop was held for {held.longest * 1000:.0f} ms")
    assert held.longest < 0.2


def test_frames_that_arrive_together_are_all_read_in_their_order(live):
    names = [f"c{n}" for n in range(20)]
    with opened(live) as one:
        said = b'{"event": "pusher:subscribe", "data": {"channel": "%b"}}'
        one.sendall(b"".join(frame(TEXT, said % name.encode()) for name in names))
        got = b""
        while b'"c19"' not in got:
            got += one.recv(65_536)
    found = [got.find(b'"%b"' % name.encode()) for name in names]
    assert -1 not in found
    assert found == sorted(found)


def test_nothing_is_read_from_a_socket_that_does_not_read(live, capfd):
    pings, sent = frame(PING, b"x" * 125) * 500, 0
    with opened(live) as one:
        one.settimeout(1)
        with contextlib.suppress(TimeoutError):
            while sent < 40_000_000:
                sent += one.send(pings)
        assert sent < 40_000_000, "the server reads on"
    hub = live.app.state.realtime.hub
    wait_for(lambda: not on_its_loop(live, lambda: hub.listeners))
    assert "Traceback" not in "".join(capfd.readouterr())
