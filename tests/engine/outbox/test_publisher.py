"""Whatever happens to a publisher (killed, frozen, cut off, its sink failing), everything is told, in order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ecluse.db import listen as listening
from ecluse.engine import Event, PublishedEvent, write_events
from ecluse.engine.outbox.events import OUTBOX_CHANNEL
from ecluse.engine.outbox.publisher import EVENTS_CHANNEL, Publisher
from tests.support.engine_flows import until
from tests.support.servers import address
from tests.support.wire import bad_wire

# Of those who hold the lock, or would like to.
PUBLISHERS = """
SELECT a.application_name, a.pid, EXISTS (
    SELECT 1 FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.granted) AS holds
FROM pg_stat_activity a WHERE a.datname = current_database() AND a.query NOT LIKE 'LISTEN%%'
"""
HOLDER = f"SELECT application_name, pid FROM ({PUBLISHERS}) p WHERE holds"  # noqa: S608
ALL_TOLD = "SELECT 1 WHERE NOT EXISTS (SELECT FROM events_outbox WHERE published_seq IS NULL)"
PATIENCE = 40


@pytest.fixture
def write(dsn: str) -> Callable[..., Awaitable[None]]:
    """So many events of each of these aggregates, in turn, each batch in a transaction."""
    written: dict[str, int] = defaultdict(int)

    async def write(count: int, *aggregates: str) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            events = []
            for _ in range(count):
                for aggregate in aggregates:
                    written[aggregate] += 1
                    key = f"{aggregate}-{written[aggregate]}"
                    events.append(Event("t", key, "thing/happened", aggregate, {}, "request-1"))
            await write_events(connection, events)

    return write


@pytest.fixture
def children(dsn: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *options: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "tests.engine.outbox.publisher_child",
            dsn,
            name,
            str(tmp_path / "told"),
            *options,
        ]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def told(tmp_path: Path) -> Callable[[], list[list[str]]]:
    """Who, of which aggregate, its id, its key."""
    file = tmp_path / "told"
    return lambda: [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def publishing(dsn: str, *sinks: Any) -> Iterator[Publisher]:
    publisher = Publisher(dsn, sinks)
    task = asyncio.create_task(publisher.run())
    yield publisher
    assert not task.done()
    task.cancel()


def check_told(lines: list[list[str]], aggregates: dict[str, int]) -> None:
    """Everything at least once, and of each aggregate the first times in order."""
    first: dict[str, list[str]] = defaultdict(list)
    for _, aggregate, _, key in lines:
        if key not in first[aggregate]:
            first[aggregate].append(key)
    assert first == {name: [f"{name}-{n}" for n in range(1, count + 1)] for name, count in aggregates.items()}


@pytest.mark.req("ENG-62")
async def test_when_the_publisher_is_killed_another_goes_on(children, write, told, query):
    living = {name: children(name) for name in ("one", "two")}
    count = 0
    for successor in ("three", "four", "five"):
        holder = (await until(lambda: [name for name, _ in query(HOLDER) if name in living], PATIENCE))[0]
        for _ in range(3):
            await write(20, "a", "b", "c")
            count += 20
        await until(lambda: len(told()) > 0, PATIENCE)
        living.pop(holder).kill()
        living[successor] = children(successor)
    await write(20, "a", "b", "c")
    await until(lambda: query(ALL_TOLD), PATIENCE)
    check_told(told(), dict.fromkeys("abc", count + 20))


@pytest.mark.req("ENG-62")
async def test_one_that_was_frozen_loses_its_turn_and_marks_nothing_when_it_wakes(children, write, told, query):
    frozen = children("frozen", "--freeze")
    await until(lambda: query(HOLDER), PATIENCE)
    await write(5, "a", "b")
    await until(lambda: len(told()) == 10, PATIENCE)  # told, not marked
    assert os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)  # noqa: ASYNC222 - it stops itself
    assert not query(ALL_TOLD)
    children("other")
    await until(lambda: query(ALL_TOLD), PATIENCE)
    marks = "SELECT id, published_seq FROM events_outbox ORDER BY id"
    marked = query(marks)
    frozen.send_signal(signal.SIGCONT)
    await until(lambda: query(f"SELECT 1 FROM ({PUBLISHERS}) p WHERE application_name = 'frozen'"), PATIENCE)  # noqa: S608
    await write(5, "a", "b")
    await until(lambda: query(ALL_TOLD), PATIENCE)
    assert query(marks)[:10] == marked
    assert {name for name, *_ in told()[10:]} == {"other"}
    check_told(told(), {"a": 10, "b": 10})


async def test_a_publisher_whose_session_is_ended_begins_another(dsn, write, query):
    told: list[str] = []

    async def sink(events: Sequence[PublishedEvent]) -> None:
        told.extend(event.event_key for event in events)

    with publishing(dsn, sink):
        for _ in range(2):
            ((_, pid),) = await until(lambda: query(HOLDER), PATIENCE)
            query("SELECT pg_terminate_backend(%s, 5000)", pid)
            await write(1, "a")
            await until(lambda: query(ALL_TOLD), PATIENCE)
    assert sorted(set(told)) == ["a-1", "a-2"]


async def test_a_hint_that_is_swallowed_costs_a_moment_and_the_listener_comes_back(dsn, write, query, tmp_path):
    heard: list[str] = []
    with bad_wire(address(dsn), tmp_path / "w", one_in=1) as wire, publishing(dsn):
        listener = asyncio.create_task(
            listening.listen(wire.dsn(dsn), {OUTBOX_CHANNEL: heard.append}, probe_every=0.3, answer_within=0.3)
        )
        await until(lambda: heard, PATIENCE)
        wire.swallowed += 1
        await write(1, "a")
        await until(lambda: query(ALL_TOLD), PATIENCE)
        await until(lambda: len(heard) == 2, PATIENCE)  # connected again
        await write(1, "a")
        await until(lambda: len(heard) == 3, PATIENCE)
        listener.cancel()


async def test_a_publisher_that_is_cut_off_loses_the_lock_and_comes_back(dsn, write, query, tmp_path):
    with bad_wire(address(dsn), tmp_path / "w", one_in=1) as wire, publishing(wire.dsn(dsn)):
        ((_, first),) = await until(lambda: query(HOLDER), PATIENCE)
        wire.swallowed += 1
        await until(lambda: (holders := query(HOLDER)) and holders[0][1] != first, PATIENCE)
        await write(1, "a")
        await until(lambda: query(ALL_TOLD), PATIENCE)


@pytest.mark.req("ENG-62")
async def test_what_a_sink_does_not_take_holds_up_its_own_aggregate_only(dsn, write, query, one):
    told: list[str] = []
    broken = True

    async def sink(events: Sequence[PublishedEvent]) -> None:
        if broken and any(event.event_key == "a-2" for event in events):
            raise ConnectionError("the other side is down")
        told.extend(event.event_key for event in events)

    await write(3, "a", "b")
    with publishing(dsn, sink):
        await until(lambda: query("SELECT 1 FROM events_outbox WHERE tries > 0"), PATIENCE)
        await write(1, "a", "b")
        unpublished = "SELECT array_agg(event_key ORDER BY id) FROM events_outbox WHERE published_seq IS NULL"
        await until(lambda: one(unpublished) == ["a-2", "a-3", "a-4"], PATIENCE)
        assert sorted(set(told)) == ["a-1", "b-1", "b-2", "b-3", "b-4"]
        assert one("SELECT error, try_at > occurred_at FROM events_outbox WHERE event_key = 'a-2'") == (
            "ConnectionError: the other side is down",
            True,
        )
        await until(lambda: query("SELECT 1 FROM events_outbox WHERE tries > 1 AND try_at > ecluse_now()"), PATIENCE)
        broken = False
        query("UPDATE clock_offset SET \"offset\" = '5 minutes'")
        await until(lambda: query(ALL_TOLD), PATIENCE)
    assert told[-3:] == ["a-2", "a-3", "a-4"]


async def test_a_slow_sink_keeps_its_turn(dsn, write, query):
    """Slower than a session may be silent: it is told once."""
    times: list[float] = []

    async def sink(events: Sequence[PublishedEvent]) -> None:
        times.append(time.monotonic())
        await asyncio.sleep(3.5)

    await write(1, "a")
    with publishing(dsn, sink), publishing(dsn, sink):
        await until(lambda: query(ALL_TOLD), PATIENCE)
    assert len(times) == 1


async def test_whoever_follows_hears_of_the_last_place(dsn, write, one):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(f"LISTEN {EVENTS_CHANNEL}")
        with publishing(dsn):
            await write(3, "a")
            heard = [notice.payload async for notice in connection.notifies(timeout=PATIENCE, stop_after=1)]
    assert heard == [str(one("SELECT max(published_seq) FROM events_outbox"))]
