"""Answers that take long: a key that is revoked, expired or narrowed, or whose tenant is disabled, does not get the
rest of an export, and the stream of an administrator ends with the tenant that it is of."""

from __future__ import annotations

import socket
import time

import psycopg
import pytest

from ecluse.access.keys import FRESH_SECONDS
from ecluse.realtime.limits import Limits
from tests.support.api_server import FLOW, add_tenant, new_key, serving

ROWS = 60_000
WATCHFUL = Limits(keep_alive=0.3)
TRAIL = """
INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason)
SELECT 'default', ecluse_now(), 'cli:ann', 'x.y', 'run:' || n, repeat('because ', 30) FROM generate_series(1, %s) AS n
"""
OUTCOMES = "INSERT INTO outcomes (run_id, target) SELECT %s, repeat('t', 200) || n FROM generate_series(1, %s) AS n"
LOST = {
    "revoked": "UPDATE api_keys SET revoked_at = ecluse_now() WHERE role = 'admin'",
    "expired": "UPDATE api_keys SET expires_at = ecluse_now() WHERE role = 'admin'",
    "narrowed": "UPDATE api_keys SET scope = 'SELF', crm_user_id = '7' WHERE role = 'admin'",
    "disabled": "UPDATE tenants SET disabled_at = ecluse_now() WHERE id = 'default'",
    "kept": "SELECT 1",
}


@pytest.fixture
def slowly(dsn):
    """Begin to read a path slowly, execute a statement, and read the rest: all that came, as bytes."""
    with serving(dsn, FLOW) as client, psycopg.connect(dsn, autocommit=True) as connection:
        client = client.with_key(new_key(dsn, "admin"))
        run = client.post("/api/runs", {"flow": "test"}).json["run_id"]
        connection.execute(TRAIL, (ROWS,))
        connection.execute(OUTCOMES, (run, ROWS))

        def read(path: str, statement: str) -> bytes:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.settimeout(60)
                sock.connect(("127.0.0.1", client.port))
                head = f"GET {path.format(run=run)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n\r\n"
                sock.sendall(head.encode())
                got = [sock.recv(4096)]
                connection.execute(statement)
                time.sleep(FRESH_SECONDS + 0.2)
                while not got[-1].endswith(b"0\r\n\r\n") and (more := sock.recv(1_000_000)):
                    got.append(more)
            return b"".join(got)

        yield read


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("path", ["/api/audit-trail/export", "/api/runs/{run}/outcomes.csv"])
def test_an_export_ends_when_its_key_may_not_read_it_any_more(slowly, path, lost):
    got = slowly(path, LOST[lost])
    assert got.startswith(b"HTTP/1.1 200")
    assert got.endswith(b"0\r\n\r\n") is (lost == "kept")
    assert (got.count(b"\n") > ROWS) is (lost == "kept")


def test_the_stream_of_an_administrator_of_another_tenant_goes_on_and_ends_with_the_right_to_act_for_it(dsn):
    add_tenant(dsn, "acme")
    with serving(dsn, FLOW, limits=WATCHFUL) as client, psycopg.connect(dsn, autocommit=True) as connection:
        run = client.with_key(new_key(dsn, "operator", "acme")).post("/api/runs", {"flow": "test"}).json["run_id"]
        for path in (f"/api/events?channel=private-run-{run}", "/api/events"):
            with socket.socket() as sock:
                sock.connect(("127.0.0.1", client.port))
                admin = new_key(dsn, "admin")
                key = f"Authorization: Bearer {admin}\r\nEcluse-Tenant: acme\r\n"
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key}\r\n".encode())
                sock.settimeout(20)
                got = sock.recv(4096)
                assert got.startswith(b"HTTP/1.1 200")
                while got.count(b": still here") < 3:
                    more = sock.recv(4096)
                    assert more, f"{path} ended"
                    assert b"0\r\n\r\n" not in more, f"{path} ended"
                    got += more
                connection.execute("UPDATE api_keys SET role = 'operator' WHERE hint = %s", (admin[:8],))
                until = time.monotonic() + 5
                while (more := sock.recv(4096)) and b"0\r\n\r\n" not in more:
                    assert time.monotonic() < until, f"{path} goes on"
