"""``python -m bench.outbox``: eight tasks write events in short transactions, which are published to an external
receiver while the publisher is killed repeatedly and another takes over. Prints how many events were lost, out of order
or received twice, and the latency from commit to receiver. Goals: nothing lost, nothing out of order; p99 outside the
kills at most 500 ms, maximum at most 2 s."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from bench.server import server
from ecluse.base import logging
from ecluse.db.connect import normalise, pool
from ecluse.db.listen import listen
from ecluse.engine import Event, PublishedEvent, write_events
from ecluse.engine.outbox.events import OUTBOX_CHANNEL
from ecluse.engine.outbox.publisher import Publisher
from ecluse.migrations.runner import upgrade

WRITERS = 8
AGGREGATES = 200
STANDING_BY = 3  # publishers
# A death, its detection and the successor's first batch: events written in this time count as affected by the kill.
KILL_SECONDS = 1.0
# The holder of the lock, and the number of publishers (each has two connections).
HOLDER = """
SELECT max(a.application_name) FILTER (WHERE l.pid IS NOT NULL), count(DISTINCT a.application_name)
FROM pg_stat_activity a LEFT JOIN pg_locks l ON l.pid = a.pid AND l.locktype = 'advisory' AND l.granted
WHERE a.datname = current_database() AND a.application_name LIKE 'publisher %'
"""


class Receiver:
    """Receives lines of event keys over a socket and records when each key first arrived."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.order: list[str] = []
        self.doubled = 0

    async def serve(self, reads: asyncio.StreamReader, writes: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # a publisher killed in the middle
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
    await asyncio.gather(publisher.run(), listen(own, {OUTBOX_CHANNEL: lambda _: publisher.wake.set()}))


class Work:
    """Progress of the benchmark: one stretch of events more than there are kills. In the middle of a stretch the
    writers wait until enough publishers stand by (the start of a process is not measured); then, while they write, the
    publisher that holds the lock is killed."""

    def __init__(self, events: int, kills: int, seconds: float) -> None:
        self.events = events
        self.kills = kills
        self.stretch = events / (kills + 1)
        self.pause = WRITERS * seconds / self.stretch
        self.committed: dict[str, float] = {}
        self.killed: list[float] = []
        self.ready = asyncio.Event()  # all publishers are up, and one holds the lock
        self.armed = False  # about to kill
        self.done = False

    @property
    def half_way(self) -> bool:
        return len(self.committed) >= self.stretch * (len(self.killed) + 0.5)

    @property
    def may_write(self) -> bool:
        return self.armed or not self.half_way or len(self.killed) == self.kills


async def write(dsn: str, work: Work) -> None:
    chance = random.Random(1)  # noqa: S311 - repeatable, not secret
    left = iter(range(work.events))
    async with pool(dsn, size=WRITERS) as connections:

        async def writer() -> None:
            for n in left:
                while not work.may_write:  # noqa: ASYNC110 - polls: the killer does not know the waiting writers
                    await asyncio.sleep(0.05)
                key = f"a{chance.randrange(AGGREGATES)}/{n}"
                async with connections.connection() as connection, connection.transaction():
                    await write_events(connection, [Event("t", key, "thing/happened", key.split("/")[0], {}, key)])
                    await asyncio.sleep(chance.uniform(0, 0.004))
                work.committed[key] = time.time()
                await asyncio.sleep(chance.uniform(0, 2 * work.pause))

        await asyncio.gather(*(writer() for _ in range(WRITERS)))


async def kill_now_and_then(dsn: str, socket: str, work: Work) -> None:
    living, serial = dict[str, asyncio.subprocess.Process](), count(1)
    chance = random.Random(2)  # noqa: S311 - repeatable, not secret
    command = [sys.executable, "-m", "bench.outbox", "--dsn", dsn, "--socket", socket, "--publish"]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while not work.done:
            while len(living) < STANDING_BY:
                name = str(next(serial))
                living[name] = await asyncio.create_subprocess_exec(*command, name)
            holder, publishers = await (await connection.execute(HOLDER)).fetchone() or (None, 0)
            if holder is not None and publishers == STANDING_BY:
                work.ready.set()
            if work.armed and holder is not None:
                victim = living.pop(holder.split()[1])
                victim.send_signal(signal.SIGKILL)
                work.killed.append(time.time())
                work.armed = False
                await victim.wait()
            elif work.half_way and publishers == STANDING_BY and len(work.killed) < work.kills:
                work.armed = True
                await asyncio.sleep(chance.uniform(0.2, 1.2))
            else:
                await asyncio.sleep(0.1)
    for process in living.values():
        process.kill()
        await process.wait()


async def measure(dsn: str, work: Work) -> None:
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "receiver")
        async with await asyncio.start_unix_server(receiver.serve, socket, limit=2**20):
            killing = asyncio.create_task(kill_now_and_then(dsn, socket, work))
            await work.ready.wait()
            await write(dsn, work)
            deadline = time.monotonic() + 30
            while len(receiver.first) < work.events and time.monotonic() < deadline:  # noqa: ASYNC110 - polls
                await asyncio.sleep(0.1)
            work.done = True
            await killing
    events, committed, killed = work.events, work.committed, work.killed
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        cursor = await connection.execute(
            "SELECT aggregate, array_agg(event_key ORDER BY id) FROM events_outbox GROUP BY 1"
        )
        in_order: dict[str, list[str]] = dict(await cursor.fetchall())
    places = {key: place for place, key in enumerate(receiver.order)}
    late = 0
    for keys in in_order.values():
        had = [places[key] for key in keys if key in places]
        late += sum(after < before for before, after in pairwise(had))
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
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills, at least")
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
        asyncio.run(measure(dsn, Work(options.events, options.kills, options.every)))


if __name__ == "__main__":
    main()
