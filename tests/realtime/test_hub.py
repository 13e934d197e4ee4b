"""The hub and the relay by themselves: slow listeners, order, and what goes between replicas."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from functools import partial

import psycopg
import pytest

from ecluse.db.outage import is_unavailable
from ecluse.engine import EphemeralEvent, PublishedEvent
from ecluse.realtime import apps, pusher_server
from ecluse.realtime import hub as hubs
from ecluse.realtime.apps import App
from ecluse.realtime.hub import Hub, Listener, Message
from ecluse.realtime.limits import Limits
from ecluse.realtime.relay import LARGEST_NOTICE, WRAPPING, in_a_notice


def event(seq, event_type="transcription.completed", **payload):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return PublishedEvent(seq, "t", f"k{seq}", event_type, "fiche:1", "c", "test", at, payload, seq)


def taken(listener):
    return [one[0] for one in listener.taken() if not isinstance(one, str)]


small = partial(Listener, "t", longest=3)


async def test_a_slow_listener_loses_ephemeral_events_and_no_other_listener_does():
    hub = Hub()
    with hub.listening(small("sse")) as slow, hub.listening(small("sse")) as quick:
        for listener in (slow, quick):
            hub.subscribe(listener, "private-fiche-1")
        heard = []
        for n in range(6):
            hub.emit([EphemeralEvent("t", "x.y", {"fiche_id": "1", "n": n})])
            heard += [message.payload["n"] for message in taken(quick)]
        assert heard == list(range(6))
        assert [message.payload["n"] for message in taken(slow)] == [0, 1, 2]
        assert slow.leave is None
        assert (hub.delivered["sse"], hub.dropped["too slow"]) == (9, 3)


async def test_a_listener_that_would_lose_what_is_durable_is_sent_away_to_come_back_for_it():
    hub = Hub()
    with hub.listening(small("websocket")) as slow:
        hub.subscribe(slow, "private-fiche-1")
        for seq in range(1, 6):
            hub.emit_durable(event(seq, fiche_id="1"))
        assert slow.leave is not None
        assert slow.leave[0] == 4100
        assert [message.seq for message in taken(slow)] == [1, 2, 3], "without a gap"


async def test_what_comes_after_what_was_lost_is_not_taken_even_if_there_is_room_again():
    hub = Hub()
    with hub.listening(small("sse")) as slow:
        hub.subscribe(slow, "private-fiche-1")
        for seq in range(1, 5):
            hub.emit_durable(event(seq, fiche_id="1"))
        assert [message.seq for message in taken(slow)] == [1, 2, 3]
        hub.emit_durable(event(5, fiche_id="1"))
        assert taken(slow) == []


async def test_a_socket_that_cannot_be_written_to_is_closed_as_too_slow():

    class Stuck:
        async def send_text(self, _):
            await asyncio.Event().wait()

        async def receive(self):
            await asyncio.Event().wait()

    connection = pusher_server.Connection(Hub(), App("t", "1", "k", "s"), Stuck(), Limits(send_within=0.01))
    assert await asyncio.wait_for(connection.run(), 30) == hubs.TOO_SLOW


async def test_those_who_wait_in_line_for_a_database_that_is_away_do_not_each_wait_for_it():

    class Away:
        asked = 0

        def connection(self):
            self.asked += 1
            raise psycopg.OperationalError("connection refused")

    pool, known = Away(), apps.Apps(None, fresh_seconds=600)
    waiting = [known.with_key(pool, f"{n % 2}") for n in range(20)]
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {str(error) for error in ended} == {"connection refused"}
    assert all(is_unavailable(error) for error in ended)
    assert pool.asked == 1


async def test_after_leaving_nothing_of_a_listener_is_left():
    hub = Hub()
    with hub.listening(Listener("t", "sse")) as one:
        hub.subscribe(one, "a")
        hub.subscribe(one, "b")
        hub.unsubscribe(one, "b")
        hub.unsubscribe(one, "never")
        assert hub.counts() == {("t", "a"): 1}
        assert hub.connections() == {"sse": 1}
    assert hub.counts() == {}
    assert not hub.listeners


@pytest.mark.req("ENG-70")
async def test_emitting_never_raises_whatever_the_event():
    hub = Hub()
    circle: dict[str, object] = {"fiche_id": "1"}
    circle["self"] = circle
    with hub.listening(Listener("t", "sse")) as one:
        hub.subscribe(one, "private-fiche-1")
        hub.emit(
            [
                EphemeralEvent("t", "a" * 5_000, circle),
                EphemeralEvent("t", "b.c", {"fiche_id": "1", "text": "\ud800", "o": object()}),
            ]
        )
        assert [message.payload["fiche_id"] for message in taken(one)] == ["1", "1"]


async def test_an_event_without_a_listener_is_not_even_encoded():
    class Counting(dict):
        read = 0

        def items(self):
            Counting.read += 1
            return super().items()

    hub = Hub()
    hub.emit([EphemeralEvent("t", "x.y", Counting(fiche_id="1", text="x" * 20_000))])
    assert (Counting.read, sum(hub.delivered.values())) == (0, 0)


@pytest.mark.req("ENG-73")
@pytest.mark.parametrize("text", ["x", '"', "\\", "é", "\x01", "\U0001f600"])
def test_what_goes_between_replicas_fits_into_a_notice(text):
    payload = {"fiche_id": "1", "status": "running", "text": text * 8_900}
    data = json.dumps(payload, ensure_ascii=False)
    channels = [f"private-fiche-{'x' * 180}{n}" for n in range(10)]
    piece = in_a_notice(Message("t" * 100, "e" * 200, channels, data), channels)
    assert len(piece.encode()) + WRAPPING <= LARGEST_NOTICE
    shortened = json.loads(json.loads(piece)["d"])
    assert (shortened["fiche_id"], shortened["status"], shortened["truncated"]) == ("1", "running", True)


async def test_drained_is_when_all_have_gone_or_time_is_up():
    hub = Hub()

    async def polite():
        with hub.listening(Listener("t", "sse")) as one:
            while one.leave is None:
                await one.wait(30)

    going = [asyncio.create_task(polite()) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(hub.listeners) == 3
    await hub.drain(30)
    assert hub.stopping
    assert not hub.listeners
    await asyncio.gather(*going)
    with hub.listening(Listener("t", "sse")):
        await hub.drain(0.01)


def test_apps_made_at_the_same_time_are_one(dsn):
    from ecluse.access.secrets import Secrets
    from ecluse.realtime.apps import app_of

    async def make():
        vault = Secrets(bytes(32))

        async def one():
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                return await app_of(connection, vault, "default")

        return await asyncio.gather(*[one() for _ in range(5)])

    found = asyncio.run(make())
    assert len({(app.app_id, app.key, app.secret) for app in found}) == 1
    assert found[0].app_id.isdecimal()
    assert found[0].secret not in repr(found[0]).replace(found[0].key, "")
