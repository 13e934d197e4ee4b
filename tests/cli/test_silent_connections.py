"""A real server with few file descriptors, and more silent connections than it may hold."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest

from tests.support.api_server import SECRET_KEY, Client, new_key
from tests.support.command_line import environment, free_port
from tests.support.waits import wait_for

FLOOD = "edge: connection limit reached"


class Limited:
    """`ecluse serve` with at most `files` open files; `soft`: with a lower soft limit when it starts."""

    def __init__(
        self, dsn: str, files: int, log: str, roles: Sequence[str], *, soft: int | None = None, **knobs: str
    ) -> None:
        self.port = free_port()
        self.log = log
        command = [sys.executable, "-m", "ecluse", "serve", "--port", str(self.port)]
        command += [part for role in roles for part in ("--role", role)]
        with open(log, "w") as said:  # noqa: PTH123
            self.process = subprocess.Popen(
                command,
                env=environment(DATABASE_URL=dsn, ECLUSE_LOG_FORMAT="json", **knobs),
                stderr=said,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft or files, files)),
            )

    def get(self, path: str, key: str = "") -> tuple[int, float]:
        began = time.monotonic()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            answer.read()
            return answer.status, time.monotonic() - began

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/readyz")[0] == 200
        return False

    def lines(self, word: str) -> list[dict]:
        with open(self.log) as said:  # noqa: PTH123
            return [json.loads(line) for line in said if word in line]


@contextlib.contextmanager
def limited(dsn: str, files: int, folder, *roles: str, soft: int | None = None, **knobs: str) -> Iterator[Limited]:
    server = Limited(dsn, files, str(folder / "log"), roles, soft=soft, **knobs)
    try:
        wait_for(server.is_ready)
        yield server
    finally:
        server.process.terminate()
        assert server.process.wait(20) == 0


def hold(port: int, count: int, stack: contextlib.ExitStack) -> selectors.BaseSelector:
    """Open silent connections; the selector knows when one is closed."""
    held = stack.enter_context(selectors.DefaultSelector())
    for _ in range(count):
        held.register(stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)), selectors.EVENT_READ)
    return held


def reopen(held: selectors.BaseSelector, port: int, stack: contextlib.ExitStack) -> None:
    """Open a silent connection for each that the server has closed."""
    for closed, _ in held.select(0):
        held.unregister(closed.fileobj)
        closed.fileobj.close()
        held.register(stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)), selectors.EVENT_READ)


@pytest.mark.parametrize(
    ("files", "silent", "seconds"), [(256, 400, 2), pytest.param(1024, 1100, 30, marks=pytest.mark.slow)]
)
@pytest.mark.alone
def test_silent_connections_do_not_stop_another_client(dsn, tmp_path, files, silent, seconds):
    key = new_key(dsn)
    with limited(dsn, files, tmp_path, "api") as server, contextlib.ExitStack() as stack:
        held = hold(server.port, silent, stack)
        took, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            status, one = server.get("/api/me", key)
            assert status == 200
            took.append(one)
            reopen(held, server.port, stack)
            time.sleep(0.01)
        slowest = statistics.quantiles(took, n=100)[98]
        print(f"{silent} silent connections at ulimit -n {files}: {len(took)} requests, p99 {slowest * 1000:.0f} ms")
        assert slowest <= 0.25
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT count(*) FROM api_keys WHERE last_used_at IS NOT NULL").fetchone() == (1,)
        (flood,) = server.lines(FLOOD)
        assert flood["level"] == "warning"
        assert server.lines("out of system resource") == []


def test_a_server_raises_its_soft_limit_of_descriptors_to_the_hard_one(dsn, tmp_path):
    with limited(dsn, 2048, tmp_path, "api", soft=256) as server:
        text = Path(f"/proc/{server.process.pid}/limits").read_text()
    assert re.search(r"^Max open files +2048 +2048 ", text, re.MULTILINE), text


@contextlib.contextmanager
def slow_receiver(calls: int) -> Iterator[int]:
    """Run a receiver of webhooks that answers once it has so many calls at the same time; yield its port."""
    together = threading.Barrier(calls)

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(20)
            self.send_response(500 if together.broken else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.alone
def test_silent_connections_leave_descriptors_for_calls_that_the_server_makes(dsn, tmp_path):
    """All roles in one process: each of the ten deliveries at once needs a descriptor, and a connection of the database
    besides."""
    knobs = {"ECLUSE_SECRET_KEY": SECRET_KEY, "ECLUSE_ALLOWED_NETWORKS": "127.0.0.0/8"}
    calls, delivered = 10, "SELECT count(*) FROM delivery_list WHERE state = 'delivered'"
    with (
        slow_receiver(calls) as port,
        limited(dsn, 256, tmp_path, **knobs) as server,
        contextlib.ExitStack() as stack,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        client = Client(server.port, new_key(dsn, "admin"))
        hook = {"kind": "webhook", "url": f"http://127.0.0.1:{port}/", "events": ["*"]}
        made = [client.post("/api/notifications/endpoints", hook).json["id"] for _ in range(calls)]
        held = hold(server.port, 400, stack)
        for one in made:
            assert client.post(f"/api/notifications/endpoints/{one}/test", {}).status < 300
        until = time.monotonic() + 20
        while connection.execute(delivered).fetchone() != (calls,):
            assert time.monotonic() < until, connection.execute("SELECT state, error FROM delivery_list").fetchall()
            reopen(held, server.port, stack)
            time.sleep(0.05)
