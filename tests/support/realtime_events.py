"""Events sent as the publisher and as runs send them, to a server of `api_server`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from ecluse.engine import EphemeralEvent
from tests.support.api_server import Client

PUBLISH = """
WITH published AS (
    INSERT INTO events_outbox (tenant_id, event_key, event_type, aggregate, correlation_id, producer, payload,
        occurred_at, published_seq, published_at)
    SELECT %s, %s || '-' || gen_random_uuid(), %s, 'fiche:1', 'test', 'test', %s::jsonb,
        ecluse_now(), nextval('events_published'), ecluse_now() RETURNING published_seq)
SELECT pg_notify('ecluse_events', published_seq::text), published_seq FROM published
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
