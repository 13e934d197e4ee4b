"""A client that hangs up during a stream is no error, and leaves nothing behind."""

from __future__ import annotations

import socket

import pytest
from structlog.testing import capture_logs

from tests.support.metrics import scrape
from tests.support.waits import wait_for


@pytest.mark.parametrize("path", ["/api/events", "/ui/runs/1/live", "/ui/runs/live"])
def test_a_client_that_hangs_up_during_a_stream_is_no_error(api, path):
    api.post("/api/runs", {"flow": "test"})
    key = f"Authorization: Bearer {api.key}\r\nCookie: ecluse_key={api.key}"
    with capture_logs() as logs:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", api.port)) as one:
                one.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n{key}\r\n\r\n".encode())
                assert one.recv(1_000).startswith(b"HTTP/1.1 200")
            api.post("/api/runs", {"flow": "test"})
        wait_for(lambda: scrape(api)["ecluse_http_connections"][()] <= 2)
    assert [line for line in logs if line["log_level"] in ("warning", "error")] == []
