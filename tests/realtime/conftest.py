"""Real servers in threads, two tenants, and clients of all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.realtime.clients import PusherJs, Stream
from tests.support.api_server import FLOW, Client, add_tenant, new_key, serving
from tests.support.waits import wait_for


def app_of(server: Client) -> dict[str, Any]:
    shown = server.get("/api/realtime").json
    assert shown["enabled"], shown
    return dict(shown)


def secret_of(server: Client, tenant: str = "default") -> str:
    from ecluse.realtime import apps

    realtime = server.app.state.realtime

    async def ask() -> str:
        async with server.app.state.kit.pool.connection() as connection:
            return (await apps.app_of(connection, realtime.vault, tenant)).secret

    loop = server.app.state.kit._background[0].get_loop()
    return asyncio.run_coroutine_threadsafe(ask(), loop).result(30)


@pytest.fixture(scope="module")
def live_dsn(databases) -> Iterator[str]:
    with databases.one() as dsn:
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
