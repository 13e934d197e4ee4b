"""An unmodified pusher-js 8.6.0 against our server."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack

import pusher
import pytest

from tests.realtime.clients import SCRIPT
from tests.realtime.conftest import app_of, secret_of
from tests.support.api_server import FLOW, new_key, serving
from tests.support.realtime_events import on_its_loop, publish, tell
from tests.support.waits import wait_for

VENDORED = SCRIPT.parent / "vendored" / "pusher-js-8.6.0"


def test_the_client_is_the_one_that_was_published():
    for line in (VENDORED / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == digest
    assert "Pusher JavaScript Library v8.6.0" in (VENDORED / "pusher.js").read_text()


NAMES = [
    f"transcription.{what}"
    for what in (
        "status_check",
        "started",
        "recording_started",
        "recording_completed",
        "recording_failed",
        "progress",
        "completed",
        "failed",
    )
]


@pytest.mark.req("ENG-76", "TRX-84")
def test_every_name_arrives_as_it_is_and_in_order(node, live):
    client = node.client(live, app_of(live)["key"]).connected().joined("private-fiche-100")
    for name in NAMES:
        tell(live, name, {"fiche_id": "100"})
    client.expect(event=NAMES[-1])
    seen = [one["event"] for one in client.saw(what="event", channel="private-fiche-100")]
    assert seen == ["pusher:subscription_succeeded", *NAMES]


@pytest.mark.req("ENG-71", "ENG-76", "TRX-85")
def test_ephemeral_and_durable_events_reach_the_fiches_channel_under_their_own_names(node, live, live_dsn):
    client = node.client(live, app_of(live)["key"]).connected().joined("private-fiche-101")
    payload = {"fiche_id": "101", "run_id": "5", "call_id": "c-1", "text": "déjà vu ✓ 漢字 \U0001f600"}
    tell(live, "transcription.recording_completed", payload)
    client.expect(what="event", channel="private-fiche-101", event="transcription.recording_completed", data=payload)
    publish(live_dsn, "transcription.completed", {"fiche_id": "101", "processed": 3})
    client.expect(what="event", event="transcription.completed", data={"fiche_id": "101", "processed": 3})
    assert len(client.events("private-fiche-101", "transcription.completed")) == 1


def test_events_for_programs_are_not_for_channels(node, live, live_dsn):
    client = node.client(live, app_of(live)["key"]).connected().joined("private-fiche-102")
    publish(live_dsn, "fiche/transcribed", {"fiche_id": "102"})
    publish(live_dsn, "transcription.completed", {"fiche_id": "102"})
    client.expect(what="event", event="transcription.completed")
    assert client.saw(event="fiche/transcribed") == []


def test_a_wrong_key_is_refused_and_the_client_does_not_come_back(node, live):
    client = node.client(live, "0123456789abcdef0123")
    (error,) = client.expect(what="error")
    assert error["error"]["error"]["data"]["code"] == 4001, error
    client.expect(what="state", state="disconnected")
    states = [one["state"] for one in client.saw(what="state")]
    assert "connected" not in states
    assert states[-1] == "disconnected"


@pytest.mark.req("ENG-78")
def test_a_channel_that_the_key_may_not_read_is_refused(node, live, live_dsn, rival):
    run_id = live.post("/api/runs", {"flow": "test", "key": "theirs"}).json["run_id"]
    theirs = node.client(rival, app_of(rival)["key"]).connected()
    theirs.subscribe(f"private-run-{run_id}")
    (refused,) = theirs.expect(what="event", event="pusher:subscription_error")
    assert (refused["data"]["type"], refused["data"]["status"]) == ("AuthError", 403)
    node.client(live, app_of(live)["key"]).connected().joined(f"private-run-{run_id}")

    stranger = node.client(live, app_of(live)["key"], bearer="ecl_unknown").connected()
    stranger.subscribe("private-fiche-1")
    (refused,) = stranger.expect(what="event", event="pusher:subscription_error")
    assert refused["data"]["status"] == 401


@pytest.mark.req("G-81", "ENG-78")
def test_tenants_that_use_the_same_fiche_id_do_not_hear_each_other(node, live, rival, live_dsn):
    ours = node.client(live, app_of(live)["key"]).connected().joined("private-fiche-103")
    theirs = node.client(rival, app_of(rival)["key"]).connected().joined("private-fiche-103")
    for tenant in ("default", "rival"):
        tell(live, "transcription.progress", {"fiche_id": "103", "whose": tenant}, tenant)
        publish(live_dsn, "transcription.completed", {"fiche_id": "103", "whose": tenant}, tenant)
        tell(live, "transcription.last", {"fiche_id": "103", "whose": tenant}, tenant)
    publish(live_dsn, "transcription.end", {"fiche_id": "103"}, "default")
    publish(live_dsn, "transcription.end", {"fiche_id": "103"}, "rival")
    for client, tenant in ((ours, "default"), (theirs, "rival")):
        client.expect(event="transcription.end")
        for event in ("transcription.progress", "transcription.completed", "transcription.last"):
            assert client.events("private-fiche-103", event) == [{"fiche_id": "103", "whose": tenant}]


@pytest.mark.req("ENG-73")
def test_what_is_larger_than_the_limit_is_shrunk_on_the_wire(node, live):
    client = node.client(live, app_of(live)["key"]).connected().joined("private-fiche-104")
    tell(live, "transcription.progress", {"fiche_id": "104", "run_id": "8", "status": "running", "text": "é" * 50_000})
    (event,) = client.expect(what="event", event="transcription.progress")
    data = event["data"]
    assert (data["fiche_id"], data["run_id"], data["status"], data["truncated"]) == ("104", "8", "running", True)
    assert len(json.dumps(data, ensure_ascii=False).encode()) < 9_100


def test_a_python_publisher_reaches_a_javascript_client(node, live):
    app = app_of(live)
    client = node.client(live, app["key"]).connected().joined("private-fiche-105")
    publisher = pusher.Pusher(
        app_id=app["app_id"],
        key=app["key"],
        secret=secret_of(live),
        ssl=False,
        host="127.0.0.1",
        port=live.port,
        timeout=30,
    )
    assert publisher.trigger(["private-fiche-105", "private-fiche-106"], "note.added", {"text": "ça marche"}) == {}
    client.expect(what="event", channel="private-fiche-105", event="note.added", data={"text": "ça marche"})
    batch = [{"channel": "private-fiche-105", "name": f"batch.{n}", "data": {"n": n}} for n in range(10)]
    assert publisher.trigger_batch(batch) == {}
    client.expect(what="event", event="batch.9", data={"n": 9})

    socket_id = client.saw(what="state", state="connected")[0]["socket_id"]
    publisher.trigger("private-fiche-105", "not.to.me", {}, socket_id)
    publisher.trigger("private-fiche-105", "to.me", {})
    client.expect(event="to.me")
    assert client.saw(event="not.to.me") == []

    wait_for(lambda: "private-fiche-105" in publisher.channels_info("private-fiche-10")["channels"])
    info = wait_for(lambda: publisher.channel_info("private-fiche-105", ["subscription_count"]))
    assert info == {"occupied": True, "subscription_count": 1}
    assert publisher.channel_info("private-fiche-unknown") == {"occupied": False}
    with pytest.raises(pusher.errors.PusherBadRequest):
        publisher.users_info("presence-fiche-105")
    where = {"host": "127.0.0.1", "port": live.port, "ssl": False, "timeout": 30}
    wrong = pusher.Pusher(app["app_id"], app["key"], "wrong", **where)
    with pytest.raises(pusher.errors.PusherBadAuth):
        wrong.trigger("private-fiche-105", "forged", {})


def test_client_events_reach_the_others_and_not_the_sender(node, live):
    key = app_of(live)["key"]
    one, other = (node.client(live, key).connected().joined("private-fiche-107") for _ in range(2))
    one.trigger("private-fiche-107", "client-typing", {"who": "me"})
    other.expect(what="event", channel="private-fiche-107", event="client-typing", data={"who": "me"})
    other.trigger("private-fiche-107", "client-seen", {})
    one.expect(what="event", event="client-seen")
    assert one.saw(event="client-typing") == []


def test_after_leaving_a_channel_nothing_more_comes(node, live):
    client = node.client(live, app_of(live)["key"]).connected().joined("private-fiche-108").joined("private-fiche-109")
    node.do(do="unsubscribe", client=client.name, channel="private-fiche-108")
    hub = live.app.state.realtime.hub
    wait_for(lambda: ("default", "private-fiche-108") not in on_its_loop(live, hub.counts))
    tell(live, "transcription.progress", {"fiche_id": "108"})
    tell(live, "transcription.progress", {"fiche_id": "109"})
    client.expect(what="event", channel="private-fiche-109", event="transcription.progress")
    assert client.events("private-fiche-108", "transcription.progress") == []


def test_a_server_that_stops_sends_its_clients_away_at_once_and_they_come_back(node, dsn):
    with ExitStack() as going, ExitStack() as staying:
        first = going.enter_context(serving(dsn, FLOW)).with_key(new_key(dsn))
        client = node.client(first, app_of(first)["key"]).connected().joined("private-fiche-1")
        second = staying.enter_context(serving(dsn, FLOW, port=first.port))  # takes the same port over
        going.close()
        client.expect(what="state", state="connected", count=2)
        client.expect(what="event", channel="private-fiche-1", event="pusher:subscription_succeeded", count=2)
        tell(second, "transcription.progress", {"fiche_id": "1"})
        client.expect(what="event", channel="private-fiche-1", event="transcription.progress")


@pytest.mark.req("ENG-72", "TRX-85", "TRX-40")
def test_with_public_channels_the_names_have_no_prefix_and_need_no_authorisation(node, dsn):
    with serving(dsn, FLOW, PUSHER_USE_PRIVATE_CHANNELS=False) as client:
        server = client.with_key(new_key(dsn))
        app = app_of(server)
        assert app["private_channels"] is False
        socket = node.client(server, app["key"], bearer="unknown").connected().joined("fiche-7")
        tell(server, "transcription.progress", {"fiche_id": "7"})
        socket.expect(what="event", channel="fiche-7", event="transcription.progress", data={"fiche_id": "7"})
