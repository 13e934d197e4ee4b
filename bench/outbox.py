"""``python -m bench.outbox``: events written by eight tasks in short transactions, told to a receiver outside, while the
publisher is killed again and again and another takes over. Prints what was lost, out of order or doubled, and how long
an event took from its commit until the receiver had it. Goals: nothing lost, nothing out of order; outside the kills
p99 at most 500 ms, the longest of all at most 2 s."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from bench.server import server
from ecluse.base import logging
from ecluse.db.connect import normalise, pool
from ecluse.db.listen import listen
from ecluse.engine import Event, PublishedEvent, write_events
from ecluse.engine.outbox import OUTBOX_CHANNEL
from ecluse.engine.publisher import Publisher
from ecluse.migrations.runner import upgrade

WRITERS = 8
AGGREGATES = 200
STANDING_BY = 3  # publishers
# A death, its discovery and the successor's first batch: an event written in this time is one of the kill's.
KILL_SECONDS = 1.0
HOLDER = """
SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE a.datname = current_database() AND l.locktype = 'advisory' AND l.granted AND a.application_name LIKE 'publisher %'
"""


class Receiver:
    """Takes lines over a socket, `key` each, and remembers when it first had them."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.order: list[str] = []
        self.doubled = 0

    async def serve(self, reads: asyncio.StreamReader, writes: asyncio.StreamWriter) -> None:
        while line := await reads.readline():
            now = time.time()
            for key in line.decode().split():
                if key in self.first:
                    self.doubled += 1
                else:
                    self.first[key] = now
                    self.order.append(key)
            writes.write(b"\n")


async def publish(dsn: str, name: str, socket: str) -> None:
    reads, writes = await asyncio.open_unix_connection(socket)

    async def send(events: Sequence[PublishedEvent]) -> None:
        writes.write(" ".join(event.event_key for event in events).encode() + b"\n")
        await reads.readline()

    own = make_conninfo(dsn, application_name=f"publisher {name}")
    publisher = Publisher(own, [send])
    await asyncio.gather(publisher.run(), listen(own, {OUTBOX_CHANNEL: lambda _: publisher.hint.set()}))


async def write(dsn: str, events: int, seconds: float) -> dict[str, float]:
    """When each was committed. Events of an aggregate are numbered as they are written under its lock."""
    committed: dict[str, float] = {}
    chance = random.Random(1)  # noqa: S311 - repeatable, not secret
    left, began = iter(range(events)), time.monotonic()
    async with pool(dsn, size=WRITERS) as connections:

        async def writer(name: int) -> None:
            for n in left:
                key = f"a{chance.randrange(AGGREGATES)}/{name}-{n}"
                async with connections.connection() as connection, connection.transaction():
                    await write_events(connection, [Event("t", key, "thing/happened", key.split("/")[0], {}, key)])
                    await asyncio.sleep(chance.uniform(0, 0.004))
                committed[key] = time.time()
                # Spread over the time that the kills take.
                await asyncio.sleep(max(0.0, began + seconds * n / events - time.monotonic()))

        await asyncio.gather(*map(writer, range(WRITERS)))
    return committed


async def kill_now_and_then(dsn: str, socket: str, kills: int, every: float) -> list[float]:
    killed, serial = list[float](), count(1)
    living: dict[str, asyncio.subprocess.Process] = {}

    async def start() -> None:
        name = str(next(serial))
        living[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.outbox", "--publish", name, "--dsn", dsn, "--socket", socket
        )

    for _ in range(STANDING_BY):
        await start()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        try:
            while len(killed) < kills:
                await asyncio.sleep(every)
                row = await (await connection.execute(HOLDER)).fetchone()
                if row is not None and (victim := living.pop(row[0].split()[1], None)) is not None:
                    os.kill(victim.pid, signal.SIGKILL)
                    killed.append(time.time())
                    await victim.wait()
                    await start()
            while True:  # until the receiver has everything
                await asyncio.sleep(1)
        except asyncio.CancelledError:
            for process in living.values():
                process.kill()
                await process.wait()
    return killed


async def measure(dsn: str, events: int, kills: int, every: float) -> None:
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "receiver")
        async with await asyncio.start_unix_server(receiver.serve, socket, limit=2**20):
            killing = asyncio.create_task(kill_now_and_then(dsn, socket, kills, every))
            await asyncio.sleep(3)
            committed = await write(dsn, events, kills * every)
            deadline = time.monotonic() + 30
            while len(receiver.first) < events and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            killing.cancel()
            killed = await killing
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        cursor = await connection.execute(
            "SELECT aggregate, array_agg(event_key ORDER BY id) FROM events_outbox GROUP BY 1"
        )
        in_order = dict(await cursor.fetchall())
    places = {key: place for place, key in enumerate(receiver.order)}
    late = 0
    for keys in in_order.values():
        had = [places[key] for key in keys if key in places]
        late += sum(after < before for before, after in zip(had, had[1:], strict=False))
    took = {key: receiver.first[key] - at for key, at in committed.items() if key in receiver.first}
    calm = sorted(
        seconds
        for key, seconds in took.items()
        if not any(at - KILL_SECONDS < committed[key] < at + 2 * KILL_SECONDS for at in killed)
    )
    print(f"{events} events, {WRITERS} writers, {AGGREGATES} aggregates, {len(killed)} kills of the publisher")
    print(f"lost {events - len(receiver.first)}, out of order {late}, doubled {receiver.doubled}")
    if len(calm) > 1:
        cuts = [seconds * 1000 for seconds in statistics.quantiles(calm, n=100)]
        print(f"outside the kills ({len(calm)} events): p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms")
    print(f"the longest of all {max(took.values()) * 1000:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.outbox", description=__doc__)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills")
    parser.add_argument("--publish", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--dsn", help="an empty database; without it, an embedded one")
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.configure("ERROR")
    if options.publish:
        asyncio.run(publish(options.dsn, options.publish, options.socket))
        return
    with server(options.dsn, None) as (address, _):
        dsn = normalise(address)
        upgrade(dsn)
        asyncio.run(measure(dsn, options.events, options.kills, options.every))


if __name__ == "__main__":
    main()
