"""`GET /api/events`: live, and what was missed."""

from __future__ import annotations

import asyncio
import re
import socket

import psycopg
import pytest
from fastapi import Request

from ecluse.access.keys import Caller
from ecluse.api import events
from ecluse.realtime.channels import Subject
from ecluse.realtime.hub import RECONNECT
from ecluse.realtime.limits import Limits
from tests.support.api_server import FLOW, new_key, serving
from tests.support.realtime_events import on_its_loop, publish, tell
from tests.support.waits import wait_for

WATCHFUL = Limits(keep_alive=0.05)


@pytest.mark.req("ENG-71")
def test_a_stream_of_a_channel_has_its_events_each_once_with_their_ids(live, live_dsn, stream):
    one = stream(live, "private-fiche-401")
    assert one.headers["Content-Type"].startswith("text/event-stream")
    tell(live, "transcription.progress", {"fiche_id": "401", "run_id": "9", "processed": 1})
    live_one = one.next()
    assert (live_one["id"], live_one["name"]) == (None, "transcription.progress")
    assert live_one["payload"] == {"fiche_id": "401", "run_id": "9", "processed": 1}
    assert live_one["channels"] == ["private-fiche-401", "private-run-9"]

    publish(live_dsn, "transcription.completed", {"fiche_id": "999"})
    publish(live_dsn, "fiche/transcribed", {"fiche_id": "401"})
    seq = publish(live_dsn, "transcription.completed", {"fiche_id": "401"})
    durable = one.next()
    assert (durable["id"], durable["name"]) == (str(seq), "transcription.completed")
    assert durable["event_key"].startswith("transcription.completed-")
    assert (durable["aggregate"], durable["correlation_id"]) == ("fiche:1", "test")
    assert durable["event_id"].isdecimal()


def test_who_listens_to_several_channels_of_an_event_gets_it_once(live, stream):
    run_id = live.post("/api/runs", {"flow": "test", "key": "several"}).json["run_id"]
    one = stream(live, "private-fiche-402", f"private-run-{run_id}")
    tell(live, "transcription.progress", {"fiche_id": "402", "run_id": run_id, "n": 1})
    tell(live, "transcription.progress", {"fiche_id": "402", "run_id": run_id, "n": 2})
    assert [event["payload"]["n"] for event in one.heard(2)] == [1, 2]


@pytest.mark.req("G-81")
def test_a_stream_of_the_tenant_has_everything_of_it_and_nothing_of_another(live, rival, live_dsn, stream):
    ours, theirs = stream(live), stream(rival)
    for tenant in ("default", "rival"):
        publish(live_dsn, "fiche/transcribed", {"fiche_id": "403", "whose": tenant}, tenant)
        tell(live, "transcription.progress", {"whose": tenant}, tenant)
        publish(live_dsn, "test/completed", {"whose": tenant}, tenant)
    for one, tenant in ((ours, "default"), (theirs, "rival")):
        heard = one.heard(3)
        assert {event["name"] for event in heard} == {"fiche/transcribed", "transcription.progress", "test/completed"}
        assert {event["payload"]["whose"] for event in heard} == {tenant}


@pytest.fixture
def paged(live_dsn):
    """A server that reads missed events by pages of three."""
    with serving(live_dsn, FLOW, limits=Limits(page=3)) as client:
        yield client.with_key(new_key(live_dsn))


def test_a_client_that_comes_back_gets_what_it_missed_once_and_in_order(paged, live_dsn, stream):
    one = stream(paged, "private-fiche-404")
    publish(live_dsn, "transcription.progress", {"fiche_id": "404", "n": 0})
    assert one.next()["payload"]["n"] == 0
    one.close()
    for n in range(1, 11):
        publish(live_dsn, "transcription.progress", {"fiche_id": "404", "n": n})
        publish(live_dsn, "transcription.progress", {"fiche_id": "405", "n": -n})
    again = stream(paged, "private-fiche-404", last=one.last_id)
    assert [event["payload"]["n"] for event in again.heard(10)] == list(range(1, 11))
    publish(live_dsn, "transcription.progress", {"fiche_id": "404", "n": 11})
    tell(paged, "transcription.progress", {"fiche_id": "404", "n": 12})
    assert sorted(event["payload"]["n"] for event in again.heard(2)) == [11, 12]


def test_a_stream_that_ends_while_it_catches_up_leaves_no_gap_behind(paged, live_dsn):
    """A slow reader: while it takes a page, more is published, still more arrives live, and the server stops."""
    loop = paged.app.state.kit._background[0].get_loop()
    hub = paged.app.state.realtime.hub
    caller = Caller(1, "default", "operator", "ALL", (), None, disabled=False)
    request = Request({"type": "http", "app": paged.app, "headers": [], "state": {"caller": caller}})

    def published(count):
        return [publish(live_dsn, "transcription.progress", {"fiche_id": "408"}) for _ in range(count)]

    def read():
        async def next_one():
            return await anext(chunks, None)

        return asyncio.run_coroutine_threadsafe(next_one(), loop).result(30)

    def ids(page):
        return [int(number) for number in re.findall(rb"^id: (\d+)$", page, re.MULTILINE)]

    seqs = published(2)
    stream = events._Stream(request, [Subject("fiche", "408")], seqs[0])
    chunks = stream.run()
    assert read().startswith(b"retry")
    heard = ids(read())
    seqs += published(7)
    heard += ids(read())
    (listener,) = on_its_loop(paged, lambda: [one for one in hub.listeners if "private-fiche-408" in one.channels])
    seqs += published(1)
    wait_for(lambda: on_its_loop(paged, lambda: len(listener._queue)))
    on_its_loop(paged, lambda: listener.disconnect(*RECONNECT))
    while page := read():
        heard += ids(page)
    assert heard == seqs[1 : 1 + len(heard)]
    assert len(heard) == 4


def test_a_client_that_never_reads_is_let_go(dsn):
    with serving(dsn, FLOW, limits=Limits(send_within=0.2)) as client, socket.socket() as deaf:
        server = client.with_key(new_key(dsn))
        hub = server.app.state.realtime.hub
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(f"GET /api/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n".encode())
        wait_for(lambda: on_its_loop(server, hub.counts))

        def gone():
            for _ in range(100):
                tell(server, "transcription.progress", {"text": "x" * 8_000})
            return not on_its_loop(server, lambda: hub.listeners)

        wait_for(gone)


def test_a_client_that_was_cut_off_before_the_first_event_gets_it_when_it_comes_back(live, live_dsn, stream):
    one = stream(live, "private-fiche-406")
    one.close()
    assert one.last_id is not None
    publish(live_dsn, "transcription.completed", {"fiche_id": "406"})
    assert stream(live, "private-fiche-406", last=one.last_id).next()["payload"] == {"fiche_id": "406"}


def test_it_goes_on_at_another_replica(live, replica, live_dsn, stream):
    one = stream(live, "private-fiche-407")
    seq = publish(live_dsn, "transcription.started", {"fiche_id": "407"})
    assert one.next()["id"] == str(seq)
    one.close()
    publish(live_dsn, "transcription.completed", {"fiche_id": "407"})
    assert stream(replica, "private-fiche-407", last=one.last_id).next()["name"] == "transcription.completed"


@pytest.mark.parametrize("last", ["x", "-1", "9" * 25, "1.5"])
def test_an_id_that_no_event_has_is_refused(live, stream, last):
    refused = stream(live, last=last)
    assert (refused.status, refused.error["code"]) == (422, "INVALID_INPUT")


@pytest.mark.req("ENG-72")
def test_with_public_channels_the_right_is_asked_for_all_the_same(dsn, stream):
    with serving(dsn, FLOW, PUSHER_USE_PRIVATE_CHANNELS=False) as client:
        server = client.with_key(new_key(dsn))
        for name in ("fiche-7", "private-fiche-7"):
            one = stream(server, name)
            tell(server, "transcription.progress", {"fiche_id": "7"})
            assert one.next()["channels"] == ["fiche-7"]
            one.close()
        assert stream(server, "run-7").status == 403


@pytest.mark.parametrize("lost", ["revoked_at", "expires_at"])
def test_a_key_that_is_revoked_or_expires_loses_its_stream(dsn, stream, lost):
    with serving(dsn, FLOW, limits=WATCHFUL) as client:
        one = stream(client.with_key(new_key(dsn)))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"UPDATE api_keys SET {lost} = ecluse_now()")  # noqa: S608
        wait_for(lambda: one.ended)


@pytest.mark.req("ENG-78")
@pytest.mark.parametrize("channels", [(), ("private-fiche-1",), ("private-job-1",)], ids=str)
def test_a_key_that_is_narrowed_loses_the_streams_that_it_may_not_have_any_more(dsn, stream, channels):
    with serving(dsn, FLOW, limits=WATCHFUL) as client:
        one = stream(client.with_key(new_key(dsn)), *channels)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("UPDATE api_keys SET scope = 'SELF', crm_user_id = '7'")
        wait_for(lambda: one.ended)


def test_where_to_go_on_is_in_the_document(live):
    operation = live.get("/openapi.json").json["paths"]["/api/events"]["get"]
    assert ("Last-Event-ID", "header") in {(one["name"], one["in"]) for one in operation["parameters"]}


def test_a_dry_run_leaves_what_is_read_by_http_alone(dsn, stream):
    with serving(dsn, FLOW, PUSHER_DRY_RUN=True) as client:
        server = client.with_key(new_key(dsn))
        one = stream(server)
        publish(dsn, "transcription.completed", {"fiche_id": "1"})
        assert one.next()["name"] == "transcription.completed"
