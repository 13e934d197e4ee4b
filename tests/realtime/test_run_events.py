"""Through the real engine: the events of a run while it works, and a run without subscribers."""

from __future__ import annotations

import pytest

from ecluse.engine import ROLES, Done, EphemeralEvent
from tests.realtime.conftest import app_of
from tests.support.api_server import new_key, serving
from tests.support.engine_flows import flow, stage
from tests.support.waits import wait_for

STARTED, FINISHED = "transcription.recording_started", "transcription.recording_completed"


async def work(context, item):
    context.emit(
        [EphemeralEvent(item.tenant_id, STARTED, {"fiche_id": "7", "run_id": str(item.run_id), "call_id": item.key})]
    )
    return Done({"length": len(item.key)})


async def news(_, finished):
    return [
        EphemeralEvent(
            one.item.tenant_id, FINISHED, {"fiche_id": "7", "run_id": str(one.item.run_id), "call_id": one.item.key}
        )
        for one in finished
    ]


FLOW = flow(stage(work, news=news))


def run_to_end(server):
    run_id = server.post("/api/runs", {"flow": "test", "input": {"targets": ["a", "b", "c"]}}).json["run_id"]
    wait_for(lambda: server.get(f"/api/runs/{run_id}").json["ended_at"])
    assert server.get(f"/api/runs/{run_id}").json["status"] == "completed"
    return run_id


@pytest.mark.req("ENG-71", "ENG-76", "TRX-85", "G-93")
def test_the_events_of_a_run_reach_subscribers_and_streams(dsn, node, stream):
    with serving(dsn, FLOW, roles=ROLES) as client:
        server = client.with_key(new_key(dsn))
        js = node.client(server, app_of(server)["key"]).connected().joined("private-fiche-7")
        everything = stream(server)
        run_id = run_to_end(server)
        heard = everything.heard(9)
        names = [event["name"] for event in heard]
        assert names.count(STARTED) == names.count(FINISHED) == 3
        durable = [event for event in heard if event["id"] is not None]
        assert [event["name"] for event in durable] == ["test/started", "test/selected", "test/completed"]
        assert {event["payload"]["run_id"] for event in heard} == {run_id}
        js.expect(what="event", event=FINISHED, count=3)
        assert sorted(event["call_id"] for event in js.events("private-fiche-7", FINISHED)) == ["a", "b", "c"]
        assert sorted(event["call_id"] for event in js.events("private-fiche-7", STARTED)) == ["a", "b", "c"]
        assert js.saw(event="test/completed") == [], "that one is for programs"


@pytest.mark.req("ENG-70", "ENG-75")
@pytest.mark.parametrize(
    "knobs",
    [{"PUSHER_DRY_RUN": True}, {"ECLUSE_SECRET_KEY": None}, {"PUSHER_KEY": "alone"}],
    ids=lambda knobs: next(iter(knobs)),
)
def test_runs_complete_and_can_be_followed_by_http_while_realtime_is_off(dsn, knobs):
    with serving(dsn, FLOW, roles=ROLES, **knobs) as client:
        run_to_end(client.with_key(new_key(dsn)))


@pytest.mark.req("ENG-70")
def test_a_run_does_not_feel_that_realtime_has_lost_its_tables(dsn, query):
    query("DROP TABLE realtime_interests, realtime_replicas")
    with serving(dsn, FLOW, roles=ROLES) as client:
        run_to_end(client.with_key(new_key(dsn)))
