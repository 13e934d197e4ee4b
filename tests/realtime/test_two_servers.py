"""Two servers on one database: an ephemeral event reaches listeners elsewhere, and is not sent where there are none."""

from __future__ import annotations

import json
from contextlib import contextmanager

import psycopg
import pytest

from ecluse.realtime.limits import Limits
from tests.realtime.conftest import app_of
from tests.support.api_server import FLOW, Client, new_key, serving
from tests.support.realtime_events import on_its_loop, publish, tell
from tests.support.waits import wait_for


@contextmanager
def overheard(dsn):
    """The channels of what is notified between replicas; asks for those that have come so far."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN ecluse_live")

        def so_far():
            notices = [json.loads(notice.payload) for notice in connection.notifies(timeout=0.01)]
            return {channel for notice in notices for message in notice["m"] for channel in message["c"]}

        yield so_far


def knows(server: Client, tenant: str, channel: str) -> bool:
    (relay,) = server.app.state.realtime.hub.onward
    return bool(on_its_loop(server, lambda: relay.wants(tenant, [channel])))


def test_an_event_emitted_at_one_replica_reaches_a_listener_at_the_other(live, replica, rival, stream, node, live_dsn):
    client = node.client(replica, app_of(replica)["key"]).connected().joined("private-fiche-501")
    one = stream(replica, "private-fiche-501")
    foreign = stream(Client(replica.port, rival.key, replica.app), "private-fiche-501")
    wait_for(lambda: knows(live, "default", "private-fiche-501"))
    for n in range(50):
        tell(live, "transcription.progress", {"fiche_id": "501", "n": n})
    assert [event["payload"]["n"] for event in one.heard(50)] == list(range(50))
    client.expect(what="event", event="transcription.progress", count=50)
    assert [event["n"] for event in client.events("private-fiche-501", "transcription.progress")] == list(range(50))
    tell(live, "transcription.progress", {"fiche_id": "501", "n": "theirs"}, "rival")
    assert foreign.next()["payload"]["n"] == "theirs"


def test_a_durable_event_comes_once_however_many_replicas_there_are(live, replica, stream, live_dsn):
    here, there = stream(live, "private-fiche-502"), stream(replica, "private-fiche-502")
    seqs = [str(publish(live_dsn, "transcription.progress", {"fiche_id": "502"})) for _ in range(3)]
    for one in (here, there):
        assert [event["id"] for event in one.heard(3)] == seqs


def test_nothing_is_notified_without_a_listener(live, replica, stream, live_dsn):
    one = stream(live, "private-fiche-503")
    other = stream(replica, "private-fiche-504")
    wait_for(lambda: knows(live, "default", "private-fiche-504"))
    wait_for(lambda: not knows(live, "default", "nothing"))  # no listener to the whole tenant is left
    with overheard(live_dsn) as so_far:
        tell(live, "transcription.progress", {"fiche_id": "503"})  # only here
        tell(live, "transcription.progress", {"fiche_id": "505"})  # nowhere
        tell(live, "transcription.progress", {"fiche_id": "504"})
        assert one.next()["payload"] == {"fiche_id": "503"}
        assert other.next()["payload"] == {"fiche_id": "504"}
        assert wait_for(so_far) == {"private-fiche-504"}
    other.close()
    wait_for(lambda: not knows(live, "default", "private-fiche-504"))


def test_who_listens_to_the_whole_tenant_hears_what_happens_elsewhere(live, replica, stream):
    one = stream(replica)
    wait_for(lambda: knows(live, "default", "*"))
    tell(live, "transcription.progress", {"nothing": "with a channel"})
    assert one.next()["payload"] == {"nothing": "with a channel"}


def test_a_client_event_reaches_the_others_at_all_replicas_and_not_its_sender(live, replica, node):
    key = app_of(live)["key"]
    here = node.client(live, key).connected().joined("private-fiche-506")
    there = node.client(replica, key).connected().joined("private-fiche-506")
    wait_for(lambda: knows(live, "default", "private-fiche-506") and knows(replica, "default", "private-fiche-506"))
    here.trigger("private-fiche-506", "client-hello", {"n": 1})
    there.expect(what="event", event="client-hello", data={"n": 1})
    there.trigger("private-fiche-506", "client-hello", {"n": 2})
    here.expect(what="event", event="client-hello", data={"n": 2})
    assert here.events("private-fiche-506", "client-hello") == [{"n": 2}]


@pytest.mark.req("ENG-70", "ENG-73")
def test_what_is_too_large_for_a_notice_arrives_shrunk(live, replica, stream):
    one = stream(replica, "private-fiche-507")
    wait_for(lambda: knows(live, "default", "private-fiche-507"))
    tell(live, "transcription.progress", {"fiche_id": "507", "text": '"' * 4_400})
    payload = one.next()["payload"]
    assert (payload["fiche_id"], payload["truncated"]) == ("507", True)


def test_a_lost_notice_a_dead_replica_and_forgotten_rows_are_healed(dsn, stream):
    often = Limits(look_every=0.1)
    with serving(dsn, FLOW, limits=often) as first, serving(dsn, FLOW, limits=often) as second:
        here, there = (server.with_key(new_key(dsn)) for server in (first, second))
        one = stream(there, "private-fiche-1")
        wait_for(lambda: knows(here, "default", "private-fiche-1"))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("DELETE FROM realtime_replicas")  # as after a crash of the database
            wait_for(lambda: connection.execute("SELECT 1 FROM realtime_interests").fetchone())
            connection.execute(
                "INSERT INTO realtime_replicas VALUES ('dead', clock_timestamp() - interval '30 seconds'),"
                " ('long dead', clock_timestamp() - interval '1 hour'), ('quiet', clock_timestamp())"
            )
            connection.execute(
                "INSERT INTO realtime_interests SELECT r, 'default', 'private-fiche-' || r, 1"
                " FROM unnest(ARRAY['dead', 'long dead', 'quiet']) AS r"
            )
            wait_for(lambda: knows(here, "default", "private-fiche-quiet"))  # no notice was sent about it
            assert not knows(here, "default", "private-fiche-dead")
            wait_for(
                lambda: (
                    not connection.execute("SELECT 1 FROM realtime_replicas WHERE replica_id = 'long dead'").fetchone()
                )
            )
        wait_for(lambda: knows(here, "default", "private-fiche-1"))
        tell(here, "transcription.progress", {"fiche_id": "1"})
        assert one.next()["payload"] == {"fiche_id": "1"}


def test_a_replica_that_leaves_takes_its_interests_along(dsn, stream):
    with serving(dsn, FLOW) as first:
        here = first.with_key(new_key(dsn))
        with serving(dsn, FLOW) as second:
            stream(second.with_key(here.key), "private-fiche-1")
            wait_for(lambda: knows(here, "default", "private-fiche-1"))
        wait_for(lambda: not knows(here, "default", "private-fiche-1"))
        with psycopg.connect(dsn, autocommit=True) as connection:
            assert connection.execute("SELECT count(*) FROM realtime_replicas").fetchone() == (1,)


@pytest.mark.req("ENG-70")
def test_realtime_recovers_when_the_database_closes_all_connections(dsn, stream):
    with serving(dsn, FLOW) as first, serving(dsn, FLOW) as second:
        here, there = (server.with_key(new_key(dsn)) for server in (first, second))
        one = stream(there, "private-fiche-1")
        wait_for(lambda: knows(here, "default", "private-fiche-1"))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        publish(dsn, "transcription.completed", {"fiche_id": "1"})
        assert one.next()["name"] == "transcription.completed"

        def received_again():
            tell(here, "transcription.progress", {"fiche_id": "1"})
            return not one._received.empty()

        wait_for(received_again)
        assert one.next()["name"] == "transcription.progress"
