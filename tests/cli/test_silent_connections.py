"""A real server with few file descriptors, and more silent connections than it may hold."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import psycopg
import pytest

from tests.support.api_server import new_key
from tests.support.command_line import environment, free_port
from tests.support.waits import wait_for

FLOOD = "edge: connection limit reached"


class Limited:
    """`ecluse serve` with at most `files` open files."""

    def __init__(self, dsn: str, files: int, log: str) -> None:
        self.port = free_port()
        self.log = log
        command = [sys.executable, "-m", "ecluse", "serve", "--port", str(self.port), "--role", "api"]
        with open(log, "w") as said:  # noqa: PTH123
            self.process = subprocess.Popen(
                command,
                env=environment(DATABASE_URL=dsn, ECLUSE_LOG_FORMAT="json"),
                stderr=said,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
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
def limited(dsn: str, files: int, folder) -> Iterator[Limited]:
    server = Limited(dsn, files, str(folder / "log"))
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
    with limited(dsn, files, tmp_path) as server, contextlib.ExitStack() as stack:
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
