"""Webhooks through the engine, to a receiver on a socket: signed, retried for a day, without delaying other work."""

from __future__ import annotations

import asyncio
import json
import socket
from datetime import UTC, datetime, timedelta

import pytest
from standardwebhooks import Webhook

from ecluse.base.errors import PermanentError
from ecluse.engine import Event, PublishedEvent, Result, Start
from ecluse.notify import endpoints, log
from ecluse.notify.dispatch import Recipient, deliver, dispatch, notify
from ecluse.verify import audit
from tests.support.api_server import add_tenant
from tests.support.engine_flows import flow, run_to_end, stage, until
from tests.support.notify_world import receiving
from tests.support.runs import start_run


async def refused(*_) -> Result:
    raise PermanentError("no", code="NO")


@pytest.mark.req("AUT-127", "G-92")
async def test_the_end_of_a_run_is_delivered_with_a_signature_that_the_receiver_can_verify(start_world, dsn, query):
    async with receiving(200, text="thanks") as receiver:
        world = await start_world(f := flow(stage()))
        number, secret = await world.endpoint(receiver.url, "test/completed")
        run = await run_to_end(world.kit, f, ["a", "b"])
        assert await world.settled() == [("succeeded", None)]
    (got,) = receiver.got
    body = Webhook(secret).verify(got.body, got.headers)
    assert body["type"] == "test/completed"
    assert datetime.fromisoformat(body["timestamp"]) <= datetime.now(UTC)
    assert body["data"]["run_id"] == str(run["id"])
    assert (body["data"]["status"], body["data"]["selected"], body["data"]["successful"]) == ("completed", 2, 2)
    assert got.headers["content-type"] == "application/json"
    ((delivery,),) = query("SELECT id FROM delivery_list WHERE endpoint_id = %s", number)
    async with world.kit.pool.connection() as connection:
        shown = await log.show_delivery(connection, "default", delivery)
    assert (shown["state"], shown["executions"], shown["about_run_id"]) == ("delivered", 1, run["id"])
    assert (shown["error"], shown["error_code"]) == (None, None)
    assert shown["message_id"] == got.headers["webhook-id"]
    assert shown["recipient"] == f"http://127.0.0.1:{receiver.port}/…"
    assert (shown["result"], shown["attempts"], shown["message"]) == ({"status": 200, "answer": "thanks"}, [], body)
    assert query("SELECT target, outcome FROM outcomes WHERE run_id = %s", delivery) == [(str(number), "successful")]
    assert audit(dsn, None).violations == []


@pytest.mark.req("G-89")
async def test_runs_that_ended_with_their_parent_are_delivered_to_no_endpoint(start_world, query):
    """Their events are in the outbox all the same."""
    async with receiving() as receiver:
        world = await start_world()
        await world.endpoint(receiver.url, "transcription/failed")
        await world.tell(*["transcription/failed"] * 3, state="cancelled", end_cause="parent", ended_by="run:1")
        await world.tell("transcription/failed", state="cancelled", end_cause="operator", ended_by="laptop")
        assert await world.settled() == [("succeeded", None)]
    ended_by = [json.loads(one.body)["data"]["ended_by"] for one in receiver.got]
    assert ended_by == ["laptop"]
    assert query("SELECT count(*) FROM events_outbox WHERE event_type = 'transcription/failed'") == [(4,)]


@pytest.mark.req("G-92", "ENG-88")
async def test_a_receiver_that_is_down_gets_the_message_later_under_the_same_id(start_world, query, capsys):
    async with receiving(500, 404, 302, 204, text="not now") as receiver:
        world = await start_world()
        _, secret = await world.endpoint(f"{receiver.url}?token=hunter2hunter2")
        await world.tell("thing.done")
        for executions in (1, 2, 3):
            await world.next_try(executions)
        assert await world.settled() == [("succeeded", None)]
    assert len(receiver.got) == 4
    assert len(set(receiver.ids)) == 1
    assert len({one.body for one in receiver.got}) == 1
    stamps = [int(one.headers["webhook-timestamp"]) for one in receiver.got]
    assert stamps == sorted(set(stamps))
    tries = query("SELECT error_code, error FROM attempts ORDER BY id")
    assert [code for code, _ in tries] == ["VENDOR_ERROR_500", "NOT_FOUND", "VENDOR_REDIRECT"]
    assert all("not now" in error for _, error in tries)
    shown = str(query("SELECT i::text FROM items i UNION SELECT a::text FROM attempts a")) + capsys.readouterr().out
    assert "notifications/webhook" in shown
    assert "hunter2" not in shown
    assert secret not in shown


@pytest.mark.req("AUT-127", "ENG-70")
async def test_a_receiver_that_never_takes_it_changes_nothing_about_the_run(start_world, query):
    async with receiving(503) as receiver:
        world = await start_world(f := flow(stage()))
        await world.endpoint(receiver.url, "test/completed")
        run = await run_to_end(world.kit, f, ["a"])
        before = query("SELECT * FROM runs WHERE id = %s", run["id"])
        for executions in range(1, 10):
            await world.next_try(executions)
        assert await world.settled() == [("failed", "VENDOR_ERROR_503")]
    assert run["status"] == "completed"
    assert query("SELECT * FROM runs WHERE id = %s", run["id"]) == before
    assert len(receiver.got) == 10
    assert query("SELECT count(*) FROM attempts") == [(10,)]


async def test_a_receiver_with_a_retry_after_is_waited_for_and_holds_up_no_other(start_world, query):
    async with receiving(429, headers={"Retry-After": "600"}) as busy, receiving() as other:
        world = await start_world()
        await world.endpoint(busy.url)
        await world.tell("one.first")
        await world.tried(1)
        await world.endpoint(other.url, "two.*")
        await world.tell("two.second")
        await until(lambda: len(other.got) == 1)
        waits = "SELECT due_at - ecluse_now() > interval '9 minutes' FROM items WHERE status = 'open'"
        assert (True,) in query(waits)
        assert query("SELECT held_until FROM lanes WHERE name = 'webhooks'") == [(None,)]


async def test_a_receiver_that_is_gone_for_good_is_switched_off(start_world, query):
    async with receiving(410) as receiver:
        world = await start_world()
        number, _ = await world.endpoint(receiver.url)
        await world.tell("thing.done")
        assert await world.settled() == [("failed", "GONE")]
        ((active, why),) = query("SELECT is_active, disabled_reason FROM notification_endpoints")
        assert not active
        assert "410 Gone" in why
        await world.tell("thing.done", again=True)
        await until(lambda: query("SELECT count(*) FROM events_outbox WHERE published_seq IS NULL") == [(0,)])
    assert len(receiver.got) == 1
    async with world.kit.pool.connection() as connection:
        row = await endpoints.update(connection, "default", number, {"is_active": True})
    assert row["disabled_reason"] is None


async def test_what_waits_for_an_endpoint_that_is_switched_off_is_not_sent(start_world, query):
    async with receiving(429, 204, headers={"Retry-After": "600"}) as receiver:  # time enough to switch it off
        world = await start_world()
        await world.endpoint(receiver.url)
        await world.tell("thing.done")
        await world.tried(1)
        query("UPDATE notification_endpoints SET is_active = false")
        await world.later(timedelta(minutes=20))
        assert await world.settled() == [("failed", "ENDPOINT_OFF")]
    assert len(receiver.got) == 1


async def test_a_name_that_leads_inside_when_it_is_called_is_not_followed(start_world, monkeypatch, query):
    """Whatever it led to when the endpoint was made: what counts is the address that the connection would go to."""
    asked = []

    def rebound(host, port, *rest, **named):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", port))]

    world = await start_world(allowed_networks=())
    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    await world.endpoint("http://hooks.example.com/")
    await world.tell("thing.done")
    assert await world.settled() == [("failed", "FORBIDDEN_URL")]
    assert asked == ["hooks.example.com"]
    ((error,),) = query("SELECT error FROM items")
    assert "address that must not be called" in error


@pytest.mark.req("G-43")
async def test_an_event_that_is_offered_twice_is_delivered_once(start_world, query):
    async with receiving() as receiver:
        world = await start_world()
        await world.endpoint(receiver.url, "thing.*", "thing.done", "*")
        event = PublishedEvent(1, "default", "e1", "thing.done", "thing:1", "c", "ecluse", datetime.now(UTC), {}, None)
        await asyncio.gather(*(dispatch(world.kit.pool, [event]) for _ in range(3)))
        await dispatch(world.kit.pool, [event, event])
        assert await world.settled() == [("succeeded", None)]
    assert len(receiver.got) == 1
    assert query("SELECT event_key FROM runs") == [("notify-1-e1",)]


@pytest.mark.req("AUT-127", "G-43")
async def test_a_flow_may_notify_recipients_directly_once_each(start_world):
    async with receiving() as one, receiving() as two:
        world = await start_world()
        about = Event("default", "run-7-end", "test/completed", "run:7", {"run_id": "7"}, correlation_id="c")
        recipients = [Recipient("webhook", one.url), Recipient("webhook", two.url)]
        for _ in range(2):
            async with world.kit.pool.connection() as connection, connection.transaction():
                await notify(connection, recipients, about)
        await world.settled(2)
    assert [len(one.got), len(two.got)] == [1, 1]
    assert one.ids == two.ids
    assert json.loads(one.got[0].body)["data"] == {"run_id": "7"}
    assert "webhook-signature" not in one.got[0].headers


@pytest.mark.req("G-43")
async def test_a_delivery_to_a_direct_recipient_is_tried_three_times(start_world, query):
    async with receiving(500) as receiver:
        world = await start_world()
        about = Event("default", "run-7-end", "test/completed", "run:7", {"run_id": "7"}, correlation_id="c")
        async with world.kit.pool.connection() as connection, connection.transaction():
            await notify(connection, [Recipient("webhook", receiver.url)], about)
        for tried in (1, 2):
            await until(lambda tried=tried: query("SELECT executions FROM items WHERE claim_id IS NULL") == [(tried,)])
            query("UPDATE items SET due_at = ecluse_now()")
            query("SELECT pg_notify('ecluse_work', '')")
        assert await world.settled() == [("failed", "VENDOR_ERROR_500")]
        assert len(receiver.got) == 3


async def test_receivers_that_hang_do_not_keep_others_waiting(start_world):
    async with receiving(-1) as dead, receiving() as alive:
        world = await start_world(webhook_timeout=60.0)
        await world.endpoint(dead.url, "dead.*")
        await world.endpoint(alive.url, "alive.*")
        await world.tell(*(f"dead.{n}" for n in range(30)), *(f"alive.{n}" for n in range(10)))
        await until(lambda: len(alive.got) == 10 and len(dead.got) == 4)
        states = [state for state, _ in await world.settled(10)]
        assert (states.count("succeeded"), states.count("running")) == (10, 30)
        assert len(dead.got) == 4


async def test_events_of_deliveries_and_of_other_tenants_are_not_delivered(start_world, dsn, query):
    add_tenant(dsn, "rival")
    async with receiving() as mine, receiving() as theirs:
        world = await start_world(f := flow(stage(refused)))
        await world.endpoint(mine.url, "*")
        await world.endpoint(theirs.url, "*", tenant="rival")
        await run_to_end(world.kit, f, ["a"])
        await until(lambda: len(mine.got) >= 3)
        await world.settled(3)
        await world.tell("thing.done", tenant="rival")
        await until(lambda: len(theirs.got) == 1)
        await world.settled(4)
        unpublished = "SELECT count(*) FROM events_outbox WHERE published_seq IS NULL"
        await until(lambda: query(unpublished) == [(0,)])
    kinds = [json.loads(one.body)["type"] for one in mine.got]
    assert sorted(kinds) == ["test/completed", "test/selected", "test/started"]
    assert len(query("SELECT 1 FROM deliveries WHERE tenant_id = 'rival'")) == len(theirs.got) == 1
    assert query("SELECT count(*) FROM events_outbox WHERE event_type LIKE 'notifications/%%'") > [(0,)]


async def test_an_endpoint_gets_the_events_that_match_its_patterns(start_world, query):
    wanted = {
        ("*",): {"a.b", "a.c", "ab.c", "a/b"},
        ("a.*",): {"a.b", "a.c"},
        ("a.b", "a/*"): {"a.b", "a/b"},
        ("a.b.c", "a"): set(),
    }
    async with receiving() as receiver:
        world = await start_world()
        delivered = {}
        for patterns in wanted:
            number, _ = await world.endpoint(f"{receiver.url}/{len(delivered)}", *patterns)
            delivered[number] = set()
        await world.tell("a.b", "a.c", "ab.c", "a/b")
        await world.settled(8)
        assert query("SELECT count(*) FROM events_outbox WHERE published_seq IS NULL AND tries > 0") == [(0,)]
    for number, kind in query("SELECT endpoint_id, event_type FROM deliveries"):
        delivered[number].add(kind)
    assert list(delivered.values()) == list(wanted.values())
    assert len(receiver.got) == 8


@pytest.mark.req("ENG-70")
async def test_an_event_that_cannot_be_stored_is_dropped_alone_and_blocks_no_other(start_world):
    async with receiving() as receiver:
        world = await start_world()
        await world.endpoint(receiver.url)
        event = PublishedEvent(1, "default", "e1", "bad.thing", "thing:1", "c", "ecluse", datetime.now(UTC), {}, None)
        bad = PublishedEvent(**{**vars(event), "payload": {"text": "\x00"}})
        good = PublishedEvent(**{**vars(event), "event_key": "e2", "event_type": "good.thing"})
        with pytest.raises(Exception, match="u0000"):  # so that the publisher offers them one by one
            await dispatch(world.kit.pool, [bad, good])
        await dispatch(world.kit.pool, [bad])
        await dispatch(world.kit.pool, [good])
        await world.settled()
    assert [json.loads(one.body)["type"] for one in receiver.got] == ["good.thing"]


async def test_for_a_day_after_a_new_secret_the_old_one_signs_too(start_world):
    async with receiving() as receiver:
        world = await start_world()
        number, old = await world.endpoint(receiver.url)
        async with world.kit.pool.connection() as connection:
            await world.secrets.put(connection, "default", endpoints.old_secret_name(number), old)
            await world.secrets.put(connection, "default", endpoints.secret_name(number), "whsec_" + "bmV3" * 10)
            await endpoints.update(connection, "default", number, {})
        await world.tell("thing.done")
        await world.settled(1)
        (first,) = receiver.got
        for secret in (old, "whsec_" + "bmV3" * 10):
            Webhook(secret).verify(first.body, first.headers)
        await world.later(timedelta(hours=25))
        await world.tell("thing.done", again=True)
        await world.settled(2)
    assert receiver.got[1].headers["webhook-signature"].count("v1,") == 1


async def test_a_run_without_a_delivery_fails_with_that_reason(start_world):
    world = await start_world()
    await start_run(world.kit, Start(world.kit.by_name["notifications"], "x", input={"kind": "webhook", "to": "1"}))
    row = await until(
        lambda: world.query(
            "SELECT state, o.error_code FROM runs JOIN outcomes o ON o.run_id = id WHERE ended_at IS NOT NULL"
        )
    )
    assert row == [("failed", "NO_DELIVERY")]
    async with world.kit.pool.connection() as connection:
        assert await deliver(connection, []) == []
