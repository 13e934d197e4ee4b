"""``python -m bench.realtime``: 500 subscribers of two tenants, half by socket and half by stream, at two replicas;
ephemeral and durable events are emitted at one of them. Prints the latency from the call that emitted an event (for a
durable one, from its commit) to a subscriber, and the events that reached the wrong tenant. Goals: p99 at most 500 ms,
no leak."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psycopg

from bench.harness import ROOT, fresh_database
from bench.server import server
from ecluse.access import keys, tenants
from ecluse.access.secrets import Secrets
from ecluse.db.connect import Connection, normalise
from ecluse.engine import Event, write_events
from ecluse.migrations.runner import upgrade
from ecluse.realtime.apps import App, app_of
from ecluse.realtime.pusher_signatures import channel_auth, signed_query

TENANTS = ("north", "south")
FICHES = 20
SECRET_KEY = bytes(range(32))


@dataclass
class Tally:
    seconds: dict[str, list[float]] = field(default_factory=dict)
    expected: int = 0
    leaks: int = 0
    connected: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    def got(self, kind: str, tenant: str, payload: dict[str, Any]) -> None:
        now = time.time()
        self.leaks += payload["whose"] != tenant
        self.seconds.setdefault(f"{payload['kind']} by {kind}", []).append(now - payload["at"])

    @property
    def received(self) -> int:
        return sum(len(values) for values in self.seconds.values())


@contextlib.asynccontextmanager
async def replica(dsn: str) -> AsyncIterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {
        **os.environ,
        "DATABASE_URL": dsn,
        "ECLUSE_DATA_DIR": os.devnull,  # the machine's own keeps its operator's key
        "ECLUSE_LOG_LEVEL": "WARNING",
        "PYTHONPATH": str(ROOT),
        "ECLUSE_SECRET_KEY": base64.b64encode(SECRET_KEY).decode(),
    }
    command = [sys.executable, "-m", "ecluse", "serve", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/readyz") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def by_socket(session: aiohttp.ClientSession, url: str, app: App, fiche: str, tally: Tally) -> None:
    channel = f"private-fiche-{fiche}"
    async with session.ws_connect(f"{url}/app/{app.key}?protocol=7") as wire:
        async for message in wire:
            frame = json.loads(message.data)
            data = json.loads(frame["data"]) if isinstance(frame["data"], str) else frame["data"]
            match frame["event"]:
                case "pusher:connection_established":
                    auth = channel_auth(app.key, app.secret, data["socket_id"], channel)
                    await wire.send_json({"event": "pusher:subscribe", "data": {"channel": channel, "auth": auth}})
                case "pusher_internal:subscription_succeeded":
                    tally.connected += 1
                case "transcription.progress" | "transcription.completed":
                    tally.got("socket", app.tenant, data)
        tally.lost["sockets"] += 1


async def by_stream(session: aiohttp.ClientSession, url: str, tenant: str, key: str, fiche: str, tally: Tally) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with session.get(f"{url}/api/events?channel=private-fiche-{fiche}", headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"retry"):
                tally.connected += 1
            elif line.startswith(b"data: "):
                tally.got("stream", tenant, json.loads(line[6:])["payload"])
    tally.lost["streams"] += 1


async def trigger(session: aiohttp.ClientSession, url: str, app: App, payload: dict[str, Any]) -> None:
    """Send an ephemeral event, which enters the hub in the same way as the events of a run."""
    path = f"/apps/{app.app_id}/events"
    channel = f"private-fiche-{payload['fiche_id']}"
    body = json.dumps({"name": "transcription.progress", "channel": channel, "data": json.dumps(payload)}).encode()
    query = signed_query(app.key, app.secret, "POST", path, body, time.time())
    async with session.post(url + path, params=query, data=body) as answer:
        answer.raise_for_status()


async def prepare(dsn: str) -> tuple[dict[str, App], dict[str, str]]:
    vault, apps, bearers = Secrets(SECRET_KEY), {}, {}
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for tenant in TENANTS:
            await tenants.create(connection, tenant)
            apps[tenant] = await app_of(connection, vault, tenant)
            bearers[tenant] = (await keys.create(connection, tenant, "viewer", "bench"))[1]
    return apps, bearers


async def tell_all(
    connection: Connection, session: aiohttp.ClientSession, url: str, apps: dict[str, App], events: int, rate: float
) -> None:
    """Emit events at a steady rate, ephemeral and durable in turn, for each tenant in turn."""
    began, under_way = time.perf_counter(), set()
    for n in range(events):
        if (wait := began + n / rate - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tenant, fiche = TENANTS[n % 2], str(n // 4 % FICHES)
        payload = {"fiche_id": fiche, "whose": tenant, "n": n, "at": time.time()}
        if n // 2 % 2:
            payload["kind"] = "durable"
            event = Event(tenant, f"bench-{n}", "transcription.completed", f"fiche:{fiche}", payload, "bench")
            await write_events(connection, [event])
        else:
            payload["kind"] = "ephemeral"
            task = asyncio.create_task(trigger(session, url, apps[tenant], payload))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)


async def until(condition: Callable[[], bool], seconds: float) -> None:
    patience = time.monotonic() + seconds
    while not condition() and time.monotonic() < patience:  # noqa: ASYNC110 - polls: hundreds of tasks make it true
        await asyncio.sleep(0.05)


async def measure(dsn: str, clients: int, events: int, rate: float) -> Tally:
    apps, bearers = await prepare(dsn)
    tally = Tally()
    async with (
        replica(dsn) as one,
        replica(dsn) as other,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()) as session,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
    ):
        listening = []
        for n in range(clients):
            tenant, fiche, url = TENANTS[n % 2], str(n // 8 % FICHES), (one, other)[n // 4 % 2]
            if n // 2 % 2:
                listening.append(asyncio.create_task(by_socket(session, url, apps[tenant], fiche, tally)))
            else:
                listening.append(asyncio.create_task(by_stream(session, url, tenant, bearers[tenant], fiche, tally)))
        per_key = Counter((TENANTS[n % 2], str(n // 8 % FICHES)) for n in range(clients))
        await until(lambda: tally.connected >= clients, 60)
        await asyncio.sleep(1)  # until the replicas know each other's subscriptions
        tally.expected = sum(per_key[TENANTS[n % 2], str(n // 4 % FICHES)] for n in range(events))
        await tell_all(connection, session, one, apps, events, rate)
        await until(lambda: tally.received >= tally.expected, 10)
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
    return tally


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--events", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=100, help="events a second")
    parser.add_argument("--dsn")
    given = parser.parse_args()
    with server(given.dsn, None) as (dsn, _), fresh_database(dsn) as fresh:
        database = normalise(fresh)
        upgrade(database)
        tally = asyncio.run(measure(database, given.clients, given.events, given.rate))
    everything = [value for values in tally.seconds.values() for value in values]
    for kind, values in sorted(tally.seconds.items()):
        print(f"{kind:<22} {len(values):>8}  p50 {quantile(values, 0.5):6.1f} ms  p99 {quantile(values, 0.99):6.1f} ms")
    p99 = quantile(everything, 0.99)
    print(f"{'all':<22} {len(everything):>8}  p50 {quantile(everything, 0.5):6.1f} ms  p99 {p99:6.1f} ms")
    print(f"expected {tally.expected}, leaks {tally.leaks}, disconnected {dict(tally.lost)}")
    return 0 if p99 <= 500 and tally.leaks == 0 and len(everything) == tally.expected else 1


if __name__ == "__main__":
    sys.exit(main())
