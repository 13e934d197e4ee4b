"""The protocol frame by frame: what pusher-js does not show, and what no pusher-js would send."""

from __future__ import annotations

import json
from contextlib import ExitStack, asynccontextmanager

import psycopg
import pytest
from websockets.exceptions import InvalidStatus

from ecluse.access.keys import FRESH_SECONDS
from ecluse.realtime.apps import Apps
from ecluse.realtime.pusher_server import Limits
from ecluse.web.live import Pace
from tests.realtime.clients import closed, hear, raw_socket, say
from tests.realtime.conftest import app_of
from tests.support.api_server import FLOW, new_key, serving
from tests.support.realtime_events import on_its_loop, tell
from tests.support.waits import wait_for


def greeted(socket):
    hello = hear(socket)
    assert hello["event"] == "pusher:connection_established"
    assert hello["data"]["activity_timeout"] > 0
    return hello["data"]["socket_id"]


def authorised(server, socket_id, channel):
    form = f"socket_id={socket_id}&channel_name={channel}".encode()
    answer = server.post("/pusher/auth", raw=form, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status == 200, answer.body
    return answer.json["auth"]


def join(server, socket, socket_id, channel):
    say(socket, "pusher:subscribe", data={"channel": channel, "auth": authorised(server, socket_id, channel)})
    assert hear(socket) == {"event": "pusher_internal:subscription_succeeded", "channel": channel, "data": {}}


@pytest.fixture
def limited(live):
    """The server with these limits instead."""

    def put(**limits):
        live.app.state.realtime.pusher.limits = Limits(**limits)

    yield put
    put()


@pytest.mark.parametrize(
    ("query", "code"),
    [("", 4008), ("protocol=4", 4007), ("protocol=8", 4007), ("protocol=seven", 4007)],
)
def test_a_protocol_that_is_not_spoken_here_is_refused(live, query, code):
    with raw_socket(live, app_of(live)["key"], query) as socket:
        assert hear(socket)["data"]["code"] == code
        assert closed(socket) == code


def test_data_is_text_within_json_and_a_ping_is_answered(live):
    with raw_socket(live, app_of(live)["key"]) as socket:
        assert isinstance(json.loads(socket.recv(timeout=30))["data"], str)
        say(socket, "pusher:ping", data={})
        assert hear(socket) == {"event": "pusher:pong", "data": {}}


@pytest.mark.parametrize("key", ["0123456789abcdef0123", "x" * 20, "%ff"])
def test_a_key_that_no_app_has_is_refused(live, key):
    with raw_socket(live, key) as socket:
        assert closed(socket) == 4001


def test_a_key_that_cannot_be_one_opens_no_socket(live):
    with pytest.raises(InvalidStatus) as refused, raw_socket(live, "%00"):
        pass
    assert refused.value.response.status_code == 403


@pytest.mark.req("ENG-78")
def test_a_signature_is_good_for_its_own_socket_only(live, rival):
    key, channel = app_of(live)["key"], "private-fiche-201"
    with raw_socket(live, key) as one, raw_socket(live, key) as other, raw_socket(live, app_of(rival)["key"]) as theirs:
        one_id, other_id, their_id = greeted(one), greeted(other), greeted(theirs)
        auth = authorised(live, one_id, channel)
        for socket, given in (
            (other, auth),
            (other, authorised(rival, other_id, channel)),
            (theirs, authorised(live, their_id, channel)),
            (one, auth.replace(channel[-1], "9")),
            (one, authorised(live, one_id, "private-fiche-202")),
            (one, ""),
            (one, None),
            (one, 7),
        ):
            say(socket, "pusher:subscribe", data={"channel": channel, "auth": given})
            refused = hear(socket)
            assert (refused["event"], refused["channel"]) == ("pusher:subscription_error", channel), given
            assert refused["data"]["type"] == "AuthError"
        join(live, one, one_id, channel)


@pytest.mark.parametrize("channel", ["presence-room", "private-encrypted-x", "a b", "", "x" * 201, "*", "made-up"])
def test_channels_of_other_kinds_and_names_are_refused(live, channel):
    with raw_socket(live, app_of(live)["key"]) as socket:
        greeted(socket)
        say(socket, "pusher:subscribe", data={"channel": channel, "auth": ""})
        assert hear(socket)["data"]["type"] == "InvalidChannel"


@pytest.mark.parametrize(
    "sent",
    ["nonsense", "[]", "7", '{"event": 7}', '{"event": "pusher:subscribe"}', '{"event": "x"}', "{" * 5_000, b"x"],
)
def test_what_is_not_understood_is_said_and_the_socket_stays(live, sent):
    with raw_socket(live, app_of(live)["key"]) as socket:
        greeted(socket)
        socket.send(sent)
        assert hear(socket)["event"] == "pusher:error"
        say(socket, "pusher:ping", data={})
        assert hear(socket)["event"] == "pusher:pong"


def test_client_events_need_a_private_channel_that_the_socket_is_in_and_have_a_limit(live, limited):
    limited(client_events=2)
    key = app_of(live)["key"]
    with raw_socket(live, key) as sender, raw_socket(live, key) as receiver:
        mine, theirs = greeted(sender), greeted(receiver)
        say(sender, "pusher:subscribe", data={"channel": "fiche-203", "auth": ""})
        hear(sender)
        join(live, receiver, theirs, "private-fiche-203")
        for channel in ("private-fiche-203", "fiche-203"):
            say(sender, "client-x", channel=channel, data={})
            assert hear(sender)["data"]["code"] == 4301
        join(live, sender, mine, "private-fiche-203")
        for n in range(8):
            say(sender, "client-x", channel="private-fiche-203", data={"n": n})
        assert hear(receiver)["data"] == {"n": 0}
        assert hear(sender)["data"]["code"] == 4301


def test_a_socket_has_so_many_channels_and_a_tenant_so_many_sockets(live, limited, rival, stream):
    hub, pusher = live.app.state.realtime.hub, live.app.state.realtime.pusher
    wait_for(lambda: not on_its_loop(live, lambda: hub.listeners))  # those of other tests have gone
    limited(subscriptions=2, sockets=1)
    key = app_of(live)["key"]
    with raw_socket(live, key) as socket:
        greeted(socket)
        for channel in ("fiche-1", "fiche-2"):
            say(socket, "pusher:subscribe", data={"channel": channel, "auth": ""})
            assert hear(socket)["event"] == "pusher_internal:subscription_succeeded"
        say(socket, "pusher:subscribe", data={"channel": "fiche-3", "auth": ""})
        assert hear(socket)["data"]["type"] == "LimitReached"
        say(socket, "pusher:subscribe", data={"channel": "fiche-2", "auth": ""})
        assert hear(socket)["event"] == "pusher:error"
        with raw_socket(live, key) as second:
            assert closed(second) == 4004
        assert stream(live).status == 200, "sockets take no place of a stream"
        with raw_socket(live, app_of(rival)["key"]) as theirs:
            greeted(theirs)
    wait_for(lambda: not on_its_loop(live, lambda: pusher.full("default")))


def test_a_message_that_is_too_large_ends_the_connection(live, limited):
    limited(message_bytes=100)
    with raw_socket(live, app_of(live)["key"]) as socket:
        greeted(socket)
        say(socket, "client-x", channel="private-x", data="x" * 200)
        assert closed(socket) == 1009
    with raw_socket(live, app_of(live)["key"]) as socket:
        greeted(socket)
        socket.send("x" * 100_000)
        assert closed(socket) == 1009


def test_a_silent_client_is_asked_whether_it_is_still_there_and_stays_if_it_is(live, limited):
    limited(activity_timeout=1)
    with raw_socket(live, app_of(live)["key"]) as socket:
        assert hear(socket)["data"]["activity_timeout"] == 1
        for _ in range(2):
            assert hear(socket) == {"event": "pusher:ping", "data": {}}
            say(socket, "pusher:pong", data={})


def test_a_silent_client_that_does_not_answer_is_let_go(live, limited):
    limited(activity_timeout=1, pong_within=1)
    with raw_socket(live, app_of(live)["key"]) as socket:
        assert closed(socket) == 4201


def test_a_tenant_that_is_disabled_loses_its_sockets_and_gets_no_new_ones(dsn):
    with ExitStack() as stack:
        server = stack.enter_context(serving(dsn, FLOW, limits=Limits(shut_every=0.05))).with_key(new_key(dsn))
        key = app_of(server)["key"]
        socket = stack.enter_context(raw_socket(server, key))
        greeted(socket)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("UPDATE tenants SET disabled_at = ecluse_now()")
        assert closed(socket) == 4003
        with raw_socket(server, key) as again:
            assert closed(again) == 4003


LESS = {
    "revoked": "revoked_at = ecluse_now()",
    "expired": "expires_at = ecluse_now()",
    "narrowed": "scope = 'GROUP', groupes = '{north}'",
}


@pytest.mark.req("ENG-78")
def test_a_socket_ends_when_the_key_that_authorised_it_is_revoked_expires_or_is_narrowed(dsn):
    with ExitStack() as stack:
        server = stack.enter_context(serving(dsn, FLOW, limits=Limits(shut_every=0.05)))
        kept = server.with_key(new_key(dsn))
        app, channel = app_of(kept)["key"], "private-fiche-7"
        stays = stack.enter_context(raw_socket(server, app))
        join(kept, stays, greeted(stays), channel)
        for statement in LESS.values():
            theirs = server.with_key(new_key(dsn))
            socket = stack.enter_context(raw_socket(server, app))
            join(theirs, socket, greeted(socket), channel)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(f"UPDATE api_keys SET {statement} WHERE hint = %s", (theirs.key[:8],))  # noqa: S608
            assert closed(socket) == 4009, statement
        tell(kept, "transcription.progress", {"fiche_id": "7"})
        assert hear(stays)["event"] == "transcription.progress"


def test_all_that_listens_looks_at_its_key_every_ten_seconds():
    assert max(Limits().keep_alive, Limits().shut_every, Pace().quiet) + FRESH_SECONDS < 15


async def test_an_app_key_that_is_unknown_is_looked_up_once_a_second(dsn):
    lookups = 0

    class Counting:
        @asynccontextmanager
        async def connection(self):
            nonlocal lookups
            lookups += 1
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                yield connection

    known = Apps(vault=None, fresh_seconds=60)
    assert [await known.with_key(Counting(), "0" * 20) for _ in range(5)] == [None] * 5
    assert lookups == 1


@pytest.mark.req("ENG-70", "ENG-75", "TRX-40")
@pytest.mark.parametrize("knobs", [{"PUSHER_DRY_RUN": True}, {"ECLUSE_SECRET_KEY": None}], ids=str)
def test_where_realtime_is_off_the_api_says_why_and_nothing_fails(dsn, knobs):
    with serving(dsn, FLOW) as client:
        app = app_of(client.with_key(new_key(dsn)))
    if "PUSHER_DRY_RUN" not in knobs:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("DELETE FROM secrets")  # or a server without a key would refuse to start
    with serving(dsn, FLOW, **knobs) as client:
        server = client.with_key(new_key(dsn))
        shown = server.get("/api/realtime").json
        assert (shown["enabled"], shown["key"]) == (False, None)
        assert next(iter(knobs)) in shown["why_not"]
        assert ("/api/events" in shown["why_not"]) == ("PUSHER_DRY_RUN" in knobs), "of streams, which go on"
        form = b"socket_id=1.2&channel_name=private-fiche-1"
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        refused = server.post("/pusher/auth", raw=form, headers=headers)
        assert (refused.status, refused.code) == (409, "REALTIME_OFF")
        with raw_socket(server, app["key"]) as socket:
            assert closed(socket) == 4003
        tell(server, "transcription.progress", {"fiche_id": "1"})
        assert server.post("/api/runs", {"flow": "test"}).status == 201
