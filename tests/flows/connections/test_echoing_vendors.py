"""A vendor that repeats the request in its answer, as a debug page or a gateway does: its key is in nothing that is
stored, logged or shown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from tests.support.api_server import Client, new_key, serving
from tests.support.audit_world import STEPS
from tests.support.session import Session
from tests.support.vendor_clients import PLACES, SECRETS, connect

CANARY = "canary-4d1f0b7a96"
TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' AND table_type = 'BASE TABLE'"


class Echo(BaseHTTPRequestHandler):
    """Refuses each request, and repeats its headers and its body."""

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = f"{self.requestline}\n{self.headers}".encode() + body
        self.send_response(400)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
        self.server.heard.append(str(self.headers))  # type: ignore[attr-defined]

    do_GET = do_POST = answer  # noqa: N815 - as the base class names them

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def echo() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.heard = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def echo_dsn(databases) -> Iterator[str]:
    with databases.one() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def echo_api(echo_dsn) -> Iterator[Client]:
    knobs = {"ECLUSE_ALLOWED_NETWORKS": "127.0.0.0/8", "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": 6000}
    roles = frozenset({"api", "worker", "scheduler"})
    with serving(echo_dsn, roles=roles, **knobs, WORKFLOW_LOG_DB_ENABLED=True) as client:
        yield client


def tenant_of(dsn: str, sandbox: Any, echo: ThreadingHTTPServer, kind: Any) -> str:
    """A tenant whose vendor of this kind echoes; the others are the sandbox's."""
    name, url = f"echo-{kind}", f"http://127.0.0.1:{echo.server_port}"

    async def make() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connect(connection, sandbox, name, per_minute=6000)
            await connection.execute(
                "UPDATE connections SET base_url = %s WHERE tenant_id = %s AND kind = %s", (url, name, kind)
            )
            await SECRETS.put(connection, name, f"connection:{kind}", CANARY)

    asyncio.run(make())
    return name


def run_of(client: Client, kind: str) -> str:
    """Start what comes to the vendor of this kind, and wait for its end; return the run."""
    run = client.post("/api/transcriptions/1000").json["run_id"]
    ended(client, run)
    if kind == "llm":
        config = client.post("/api/audit-configs", {"name": "Compliance", "steps": STEPS}).json["id"]
        run = client.post("/api/audits", {"fiche_id": "1000", "audit_config_id": config}).json["run_id"]
        ended(client, run)
    return str(run)


def ended(client: Client, run: str) -> None:
    until = time.monotonic() + 30
    while client.get(f"/api/runs/{run}").json["ended_at"] is None:
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def watched(dsn: str) -> Iterator[list[Any]]:
    """All that the tables hold at the end."""
    session, rows = Session(dsn), list[Any]()
    yield rows
    for (table,) in session.ask(TABLES):
        rows += session.ask(f"SELECT to_jsonb(t)::text FROM {table} t")  # noqa: S608 - a name from the catalogue
    session.close()


@pytest.mark.parametrize("kind", PLACES)
def test_the_key_is_in_nothing_that_is_stored_or_shown(echo_api, echo_dsn, sandbox, echo, kind):
    tenant = tenant_of(echo_dsn, sandbox, echo, kind)
    viewer, operator = (echo_api.with_key(new_key(echo_dsn, role, tenant)) for role in ("viewer", "operator"))
    with capture_logs() as lines, watched(echo_dsn) as rows:
        run = run_of(operator, kind)
        of_run = f"/api/runs/{run}"
        paths = [of_run, f"{of_run}/items", f"{of_run}/log", f"{of_run}/targets", f"{of_run}/outcomes.csv"]
        paths += [f"/ui/runs/{run}", "/api/transcriptions/1000/status", "/api/transcriptions/1000/logs", "/api/audits"]
        paths += ["/api/lanes", "/api/connections", "/ui/connections"]
        page = {"Cookie": f"ecluse_key={viewer.key}"}
        shown = {path: viewer.get(path, headers=page if path.startswith("/ui") else None) for path in paths}
        test = operator.post(f"/api/connections/{kind}/test")
    assert any(CANARY in heard for heard in echo.heard)  # type: ignore[attr-defined]
    assert [path for path, answer in shown.items() if answer.status != 200 and "transcriptions" not in path] == []
    assert "400" in shown[f"{of_run}/items"].body.decode()  # the vendor's words are there
    for path, answer in shown.items():
        assert CANARY not in answer.body.decode(), path
    assert CANARY not in test.body.decode()
    assert CANARY not in str(lines)
    assert [row for row in rows if CANARY in str(row)] == []
