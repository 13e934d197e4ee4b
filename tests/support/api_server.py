"""A real server in a thread of this process, a client of it, tenants and keys."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.routing import Match

from ecluse.access import keys
from ecluse.access.door import Guarded, refusals
from ecluse.access.error_codes import REFUSALS
from ecluse.app import Server, create_app
from ecluse.bootstrap import Database, load_flows
from ecluse.engine import Flow
from ecluse.flow import Package
from ecluse.realtime.limits import LIMITS, Limits
from ecluse.settings import Settings
from tests.support.engine_flows import flow, stage

FLOW = flow(stage())
SECRET_KEY = base64.b64encode(bytes(range(32))).decode()
SEALING = Settings(ECLUSE_SECRET_KEY=SecretStr(SECRET_KEY))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error, which has the one shape that all errors have."""
        assert self.headers["Content-Type"] == "application/json"
        error = self.json["error"]
        assert list(self.json) == ["error"]
        assert set(error) == {"code", "message", "details", "request_id"}
        assert error["request_id"] == self.headers["X-Request-Id"]
        assert error["message"]
        return str(error["code"])


@dataclass(frozen=True)
class Client:
    port: int
    key: str | None = None
    app: FastAPI | None = None

    def ask(
        self, method: str, path: str, body: Any = None, *, raw: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """`raw` is sent as it is; a `body` as JSON."""
        sent = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        if body is not None or raw is not None:
            sent["Content-Type"] = "application/json"
        sent |= headers or {}
        payload = json.dumps(body).encode() if raw is None and body is not None else raw
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, payload, {k: v for k, v in sent.items() if v is not None})
            answer = connection.getresponse()
            return self._declared(method, path, Answer(answer.status, answer.headers, answer.read()))
        finally:
            connection.close()

    def _declared(self, method: str, path: str, answer: Answer) -> Answer:
        """Check that the OpenAPI document has this error of this route."""
        plain = unquote(urlsplit(path).path)
        scope = {"type": "http", "method": method, "path": plain, "root_path": "", "headers": []}
        routes = self.app.routes if self.app and answer.status >= 400 else []
        route = next((one for one in routes if one.matches(scope)[0] is Match.FULL), None)
        if isinstance(route, Guarded) and answer.headers["Content-Type"] == "application/json":
            code = answer.code
            assert code in refusals(route), (
                f"{method} {route.path} answers {code}, which it does not declare (refuses=)"
            )
            assert answer.status == REFUSALS[code].status
        return answer

    def get(self, path: str, **options: Any) -> Answer:
        return self.ask("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.ask("POST", path, body, **options)

    def with_key(self, key: str | None) -> Client:
        return Client(self.port, key, self.app)


@contextmanager
def serving(
    dsn: str,
    *flows: Flow,
    roles: frozenset[Any] = frozenset({"api"}),
    port: int = 0,
    settings: Settings = SEALING,
    limits: Limits = LIMITS,
    packages: Sequence[Package] = (),
    **knobs: Any,
) -> Iterator[Client]:
    given = Settings(**({"ECLUSE_SECRET_KEY": SECRET_KEY} | knobs)) if knobs else settings
    app = create_app(given, Database(dsn, None), [*load_flows(given), *flows], roles, limits=limits, packages=packages)
    listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
    server = Server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    until = time.monotonic() + 30
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert server.started
    try:
        yield Client(listener.getsockname()[1], app=app)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def add_tenant(dsn: str, tenant: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO tenants (id, name, created_at) VALUES (%s, %s, ecluse_now()) ON CONFLICT DO NOTHING",
            (tenant, tenant),
        )


def add_connections(dsn: str, tenant: str) -> None:
    """Connections that lead nowhere, for what only has to be started; the tenant is made if it is not there."""
    add_tenant(dsn, tenant)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO connections (tenant_id, kind, base_url, created_by, created_at, updated_by, updated_at)"
            " SELECT %s, k, 'https://vendor.example', 'test', now(), 'test', now()"
            " FROM unnest(ARRAY['crm', 'speech', 'llm']) AS k ON CONFLICT DO NOTHING",
            (tenant,),
        )


def new_key(dsn: str, role: str = "operator", tenant: str = "default", expires_in: timedelta | None = None) -> str:
    async def make() -> str:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            return (await keys.create(connection, tenant, role, "a test", expires_in=expires_in))[1]

    return asyncio.run(make())
