"""Hosted Pusher: signed batches over real HTTP, to a stand-in and to our own HTTP API."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import urllib.parse
from contextlib import contextmanager
from datetime import UTC, datetime

import pusher
import pytest
from pusher.signature import verify

from ecluse.base.tasks import stopped
from ecluse.engine import EphemeralEvent, Event, write_events
from ecluse.realtime.hosted import Hosted, HostedApp
from ecluse.realtime.hub import Hub
from tests.realtime.clients import closed, raw_socket
from tests.realtime.conftest import app_of, secret_of
from tests.support.api_server import FLOW, add_tenant, new_key, serving
from tests.support.engine_flows import until
from tests.support.realtime_events import publish, tell
from tests.support.waits import wait_for

APP = {"PUSHER_APP_ID": "42", "PUSHER_KEY": "hosted-key", "PUSHER_SECRET": "hosted-secret"}


@contextmanager
def stand_in(status=200, never=False):
    """Takes what is sent: (path, query, body)."""
    taken, hold = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            path, _, query = self.path.partition("?")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append((path, dict(urllib.parse.parse_qsl(query)), body))
            if never:
                hold.wait(30)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", taken
        finally:
            hold.set()
            server.shutdown()
            thread.join()


def told(taken):
    return [one for _, _, body in taken for one in json.loads(body)["batch"]]


@pytest.mark.parametrize(
    ("where", "url"),
    [
        ({"cluster": "eu"}, "https://api-eu.pusher.com"),
        ({"host": "pusher.example:8443"}, "https://pusher.example:8443"),
        ({"cluster": "eu", "host": "http://127.0.0.1:1"}, "http://127.0.0.1:1"),
    ],
)
def test_where_it_is(where, url):
    app = HostedApp("1", "k", "hush", **where)
    assert app.url == url
    assert "hush" not in repr(app)


@pytest.mark.req("TRX-40", "G-81")
def test_events_of_the_tenant_default_go_there_in_signed_batches_in_order_and_nobody_elses(dsn):
    add_tenant(dsn, "rival")
    with stand_in() as (url, taken), serving(dsn, FLOW, **APP, PUSHER_HOST=url) as server:
        for n in range(25):
            tell(server, "transcription.progress", {"fiche_id": "1", "n": n})
            tell(server, "transcription.progress", {"fiche_id": "1", "n": n}, "rival")
        tell(server, "transcription.progress", {"no": "channel"})
        wait_for(lambda: len(told(taken)) >= 25)
        assert [json.loads(one["data"])["n"] for one in told(taken)] == list(range(25))
        assert {(one["name"], one["channel"]) for one in told(taken)} == {("transcription.progress", "private-fiche-1")}
        assert all(len(json.loads(body)["batch"]) <= 10 for _, _, body in taken)
        for path, query, _ in taken:
            assert path == "/apps/42/batch_events"
            signature = query.pop("auth_signature")
            text = "&".join(f"{name}={query[name]}" for name in sorted(query))
            assert verify(APP["PUSHER_SECRET"], f"POST\n{path}\n{text}", signature)


def test_clients_of_that_tenant_are_sent_there_and_get_their_rights_for_there(dsn):
    add_tenant(dsn, "rival")
    with serving(dsn, FLOW) as client:
        key = app_of(client.with_key(new_key(dsn)))["key"]
    with stand_in() as (url, _), serving(dsn, FLOW, **APP, PUSHER_HOST=url, PUSHER_CLUSTER="eu") as client:
        server, rival = client.with_key(new_key(dsn)), client.with_key(new_key(dsn, tenant="rival"))
        told_ = server.get("/api/realtime").json
        assert [told_[name] for name in ("enabled", "app_id", "key", "cluster", "host")] == [
            True,
            "42",
            "hosted-key",
            "eu",
            url,
        ]
        refused = client.with_key(new_key(dsn, "admin")).post("/api/realtime/rotate")
        assert (refused.status, refused.code) == (409, "REALTIME_OFF"), "its secret is made there"
        form, headers = (
            b"socket_id=1.2&channel_name=private-fiche-1",
            {"Content-Type": "application/x-www-form-urlencoded"},
        )
        theirs = pusher.Pusher("42", "hosted-key", "hosted-secret").authenticate("private-fiche-1", "1.2")
        assert server.post("/pusher/auth", raw=form, headers=headers).json == theirs
        assert rival.post("/pusher/auth", raw=form, headers=headers).json["auth"].startswith(app_of(rival)["key"])
        with raw_socket(server, key) as socket:
            assert closed(socket) == 4003


@pytest.mark.req("ENG-70")
@pytest.mark.parametrize("trouble", [{"status": 500}, {"status": 401}, {"never": True}], ids=str)
def test_its_troubles_are_nobody_elses(dsn, trouble):
    with stand_in(**trouble) as (url, taken), serving(dsn, FLOW, **APP, PUSHER_HOST=url) as client:
        for n in range(1_500):
            tell(client, "transcription.progress", {"fiche_id": "1", "n": n})
        wait_for(lambda: taken)
        server = client.with_key(new_key(dsn))
        assert server.post("/api/runs", {"flow": "test"}).status == 201
        hub = client.app.state.realtime.hub
        wait_for(lambda: hub.dropped["hosted refused"] or hub.dropped["hosted full"])
        assert hub.delivered["hosted"] == 0


async def test_after_a_failure_it_goes_on():
    """Whoever runs it begins anew with the same one."""
    with stand_in() as (url, taken):
        hub = Hub()
        hosted = Hosted(HostedApp("1", "k", "s", host=url), hub, lambda: datetime.now(UTC))
        try:
            for n in range(2):
                running = asyncio.create_task(hosted.run())
                hub.emit([EphemeralEvent("default", "x.y", {"fiche_id": "1", "n": n})])
                await until(lambda n=n: hub.delivered["hosted"] == n + 1)
                await stopped([running])
        finally:
            await hosted.close()
        assert [json.loads(one["data"])["n"] for one in told(taken)] == [0, 1]


def test_a_part_of_its_settings_is_as_good_as_none(dsn):
    with serving(dsn, FLOW, PUSHER_KEY="hosted-key", PUSHER_CLUSTER="eu") as client:
        assert client.with_key(new_key(dsn)).get("/api/realtime").json["key"] != "hosted-key"


@pytest.mark.req("ENG-75")
def test_a_dry_run_sends_nothing_there(dsn):
    with stand_in() as (url, taken), serving(dsn, FLOW, **APP, PUSHER_HOST=url, PUSHER_DRY_RUN=True) as server:
        tell(server, "transcription.progress", {"fiche_id": "1"})
        assert server.app.state.realtime.sinks == []
        assert not server.app.state.realtime.hub.onward[1:], "only the relay"
    assert taken == []


@pytest.mark.req("ENG-76")
def test_ephemeral_and_durable_events_reach_a_client_there_by_our_own_http_api(databases, dsn, node):
    """The other side is a server of ours, which must understand what we send to Pusher."""
    with databases.one() as other_dsn, serving(other_dsn, FLOW) as other:
        elsewhere = other.with_key(new_key(other_dsn))
        app = app_of(elsewhere)
        client = node.client(elsewhere, app["key"]).connected().joined("private-fiche-1")
        knobs = {
            "PUSHER_APP_ID": app["app_id"],
            "PUSHER_KEY": app["key"],
            "PUSHER_SECRET": secret_of(elsewhere),
            "PUSHER_HOST": f"http://127.0.0.1:{elsewhere.port}",
        }
        roles = frozenset({"api", "scheduler"})  # one that publishes
        with serving(dsn, FLOW, roles=roles, **knobs) as here:
            tell(here, "transcription.started", {"fiche_id": "1", "text": "ça"})
            client.expect(what="event", event="transcription.started", data={"fiche_id": "1", "text": "ça"})
            events = [
                Event("default", f"k-{n}", name, "fiche:1", {"fiche_id": "1"}, "c")
                for n, name in enumerate(["fiche/transcribed", "transcription.completed"])
            ]

            async def write():
                async with here.app.state.kit.pool.connection() as connection:
                    await write_events(connection, events)

            loop = here.app.state.kit._background[0].get_loop()
            asyncio.run_coroutine_threadsafe(write(), loop).result(30)
            client.expect(what="event", channel="private-fiche-1", event="transcription.completed")
        assert client.saw(event="fiche/transcribed") == []
        publish(other_dsn, "transcription.failed", {"fiche_id": "1"})
        client.expect(event="transcription.failed")
