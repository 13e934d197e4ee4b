"""Real servers in threads, two tenants, and clients of all kinds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from ecluse.engine import EphemeralEvent
from tests.api.conftest import FLOW, Client, add_tenant, new_key, serving
from tests.conftest import new_database
from tests.realtime.clients import PusherJs, Stream, wait_for

PUBLISH = """
WITH told AS (
    INSERT INTO events_outbox (tenant_id, event_key, event_type, aggregate, correlation_id, producer, payload,
        occurred_at, published_seq, published_at)
    SELECT %s, %s || '-' || gen_random_uuid(), %s, 'fiche:1', 'test', 'test', %s::jsonb,
        ecluse_now(), nextval('events_published'), ecluse_now() RETURNING published_seq)
SELECT pg_notify('ecluse_events', published_seq::text), published_seq FROM told
"""


def tell(server: Client, event: str, payload: Mapping[str, Any], tenant: str = "default") -> None:
    """As a run on this server does it: from the server's own loop."""
    on_its_loop(server, lambda: server.app.state.realtime.hub.emit([EphemeralEvent(tenant, event, payload)]))


def on_its_loop(server: Client, call: Callable[[], Any]) -> Any:
    async def asked() -> Any:
        return call()

    loop = server.app.state.kit._background[0].get_loop()
    return asyncio.run_coroutine_threadsafe(asked(), loop).result(30)


def publish(dsn: str, event: str, payload: Mapping[str, Any], tenant: str = "default") -> int:
    """As the publisher marks an event of the outbox."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(PUBLISH, (tenant, event, event, json.dumps(payload))).fetchone()
    assert row is not None
    return int(row[1])


def app_of(server: Client) -> dict[str, Any]:
    told = server.get("/api/realtime").json
    assert told["enabled"], told
    return dict(told)


def secret_of(server: Client, tenant: str = "default") -> str:
    from ecluse.realtime import apps

    realtime = server.app.state.realtime

    async def ask() -> str:
        async with server.app.state.kit.pool.connection() as connection:
            return (await apps.app_of(connection, realtime.vault, tenant)).secret

    loop = server.app.state.kit._background[0].get_loop()
    return asyncio.run_coroutine_threadsafe(ask(), loop).result(30)


@pytest.fixture(scope="module")
def live_dsn(server, template) -> Iterator[str]:
    with new_database(server, template) as dsn:
        add_tenant(dsn, "rival")
        yield dsn


@pytest.fixture(scope="module")
def live(live_dsn) -> Iterator[Client]:
    """One server for a whole file, with an operator's key of tenant `default`."""
    with serving(live_dsn, FLOW) as client:
        yield client.with_key(new_key(live_dsn))


@pytest.fixture(scope="module")
def rival(live, live_dsn) -> Client:
    """The same server, with a key of another tenant."""
    return live.with_key(new_key(live_dsn, tenant="rival"))


@pytest.fixture(scope="module")
def replica(live, live_dsn) -> Iterator[Client]:
    """Another server on the same database."""
    with serving(live_dsn, FLOW) as client:
        yield client.with_key(live.key)


@pytest.fixture(scope="session")
def node_process() -> Iterator[PusherJs]:
    process = PusherJs()
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def node(node_process) -> Iterator[PusherJs]:
    """Its clients are a test's own: one that is left alone would knock for ever at a server that has gone."""
    try:
        yield node_process
    finally:
        node_process.disconnect()


@pytest.fixture
def stream() -> Iterator[Callable[..., Stream]]:
    with ExitStack() as open_ones:

        def start(server: Client, *channels: str, last: str | None = None) -> Stream:
            one = Stream(server, *channels, last=last)
            open_ones.callback(one.close)
            if one.status == 200 and last is None:
                wait_for(lambda: one.last_id is not None)
            return one

        yield start
