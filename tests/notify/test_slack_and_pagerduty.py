"""Messages to Slack and events to PagerDuty through the engine: the format that each accepts, retries as of webhooks,
and incidents that are never triggered after they were resolved."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from ecluse.notify import posts
from tests.support.engine_flows import until
from tests.support.notify_world import receiving

KEY = "0123456789abcdef0123456789abcdef"
ALERT = {"summary": "Shop <b>: 120 & more", "severity": "critical", "dedup_key": "alert-1", "value": 120}
RAISED, CLEARED = "pricing.alert.critical.raised", "pricing.alert.critical.cleared"


async def test_slack_accepts_the_message_and_nothing_in_it_is_a_link_or_a_mention(start_world, sandbox, query):
    world = await start_world()
    await world.endpoint(f"{sandbox.url}/slack/services/T0/B0/hunter2", kind="slack")
    await world.tell(RAISED, **{**ALERT, "note": "<!channel> see <https://evil.example|here>", "api_token": "hunter3"})
    assert await world.settled() == [("succeeded", None)]
    (effect,) = sandbox.ledger("slack", "effect")
    assert effect["value"].startswith(f"*{RAISED}*: Shop &lt;b&gt;: 120 &amp; more\n")
    assert not {"<", ">"} & set(effect["value"])
    assert "alert-1" not in effect["value"]
    assert "hunter3" not in effect["value"]
    assert query("SELECT recipient, kind FROM deliveries") == [(f"{sandbox.url}/…", "slack")]
    assert query("SELECT result FROM items") == [({"status": 200, "answer": "ok"},)]


async def test_a_slack_channel_that_is_archived_switches_its_endpoint_off(start_world, sandbox, query):
    world = await start_world()
    await world.endpoint(f"{sandbox.url}/slack/services/T0/B0/archived", kind="slack")
    await world.tell(RAISED, **ALERT)
    assert await world.settled() == [("failed", "GONE")]
    assert query("SELECT is_active FROM notification_endpoints") == [(False,)]


@pytest.mark.req("PRC-68", "PRC-70")
async def test_pagerduty_opens_one_incident_per_dedup_key_and_resolves_it(start_world, sandbox):
    sandbox.set_faults([{"vendor": "pagerduty", "kind": "applied_then_error", "times": 1}])
    world = await start_world()
    await world.endpoint(f"{sandbox.url}/pagerduty/v2/enqueue", kind="pagerduty", secret=KEY)
    await world.tell(RAISED, **ALERT)
    await world.next_try(1)
    assert await world.settled() == [("succeeded", None)]
    await world.tell(CLEARED, **ALERT)
    await world.settled(2)
    await world.tell("hello/failed", run_id="7")
    assert await world.settled(3) == [("succeeded", None)] * 3
    incidents = [(one["ref"], one["value"]) for one in sandbox.ledger("pagerduty", "effect")]
    assert incidents[:2] == [("alert-1", "critical"), ("alert-1", "resolved")]
    assert [value for _, value in incidents[2:]] == ["error"]


async def test_the_routing_key_is_sent_and_stored_nowhere_in_clear(start_world, query, capsys):
    async with receiving(503, 202) as receiver:
        world = await start_world()
        await world.endpoint(receiver.url, kind="pagerduty", secret=KEY)
        await world.tell(RAISED, **ALERT)
        await world.next_try(1)
        await world.settled()
    first, second = (json.loads(one.body) for one in receiver.got)
    assert first == second
    assert (first["routing_key"], first["event_action"], first["dedup_key"]) == (KEY, "trigger", "alert-1")
    assert first["payload"]["source"] == "ecluse/default"
    assert "webhook-signature" not in receiver.got[0].headers
    shown = (
        str(
            query(
                "SELECT i::text FROM items i UNION SELECT a::text FROM attempts a UNION SELECT d::text"
                " FROM deliveries d"
            )
        )
        + capsys.readouterr().out
    )
    assert KEY not in shown


async def test_an_incident_is_not_triggered_after_it_was_resolved(start_world, query):
    async with receiving(503, 202) as receiver:
        world = await start_world()
        await world.endpoint(receiver.url, kind="pagerduty", secret=KEY)
        await world.tell(RAISED, **ALERT)
        await world.tried(1)
        await world.tell(CLEARED, **ALERT)
        await until(lambda: len(receiver.got) == 2)
        await world.later(timedelta(minutes=1))
        assert await world.settled(2) == [("succeeded", None)] * 2
    assert [json.loads(one.body)["event_action"] for one in receiver.got] == ["trigger", "resolve"]
    ((result,),) = query("SELECT i.result FROM items i JOIN deliveries d USING (run_id) WHERE event_type = %s", RAISED)
    assert set(result) == {"not_sent"}


async def test_a_resolve_waits_for_a_trigger_that_is_in_flight(start_world, query):
    async with receiving(-1) as receiver:
        world = await start_world(webhook_timeout=60.0)
        await world.endpoint(receiver.url, kind="pagerduty", secret=KEY)
        await world.tell(RAISED, **ALERT)
        await until(lambda: len(receiver.got) == 1)
        await world.tell(CLEARED, **ALERT)
        await until(lambda: query("SELECT 1 FROM items WHERE postponed_why LIKE '%%earlier event%%'"))
        assert [json.loads(one.body)["event_action"] for one in receiver.got] == ["trigger"]


def test_a_long_text_stays_within_what_pagerduty_accepts():
    message = {"type": RAISED, "timestamp": "2026-01-01T00:00:00+00:00", "data": {**ALERT, "summary": "x" * 5000}}
    event = posts.pagerduty(message, routing_key=KEY, source="ecluse/default", dedup_key="alert-1")
    assert len(event["payload"]["summary"]) <= 1024
    assert len(posts.slack(message)["text"]) <= 3000
