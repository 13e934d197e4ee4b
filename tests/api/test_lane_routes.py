"""Lanes over HTTP: what is asked for here holds in workers that run, at once, and after they start again."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

from ecluse.api.lanes import LANES, LanePreview, LaneRow, ResumedLane
from ecluse.engine import Done, Lane
from tests.support.api_server import add_tenant, new_key, serving
from tests.support.engine_flows import flow, keys, stage
from tests.support.waits import wait_for

WORKING = frozenset({"api", "worker"})
WAITING = """
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)
SELECT %s, 1, 'test', 'work', n::text, n::text, (SELECT id FROM lanes WHERE name = 'crm'), ecluse_now()
FROM generate_series(1, %s) n
"""


EVERY_LANE = "SELECT to_jsonb(l) FROM lanes l ORDER BY id"


class Vendor:
    """Counts its calls, and how many are under way at once."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.calls: list[float] = []
        self.now = self.most = 0
        self.seconds = seconds

    async def __call__(self, *_):
        self.calls.append(time.monotonic())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return Done()


def begin(client, count, first=0):
    given = {"flow": "test", "input": {"targets": keys(first + count)[first:]}}
    return client.post("/api/runs", given).json["run_id"]


def ended(client, run_id):
    return wait_for(lambda: client.get(f"/api/runs/{run_id}").json["ended_at"])


@pytest.fixture
def admin(api, dsn):
    """With a second tenant, and a lane."""
    add_tenant(dsn, "rival")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO lanes (name) VALUES ('crm')")
    return api.with_key(new_key(dsn, "admin"))


def lane_of(client, name="crm"):
    return LaneRow.model_validate(client.get(f"/api/lanes/{name}").json)


def test_a_paused_lane_holds_a_running_worker_until_it_is_resumed(dsn):
    vendor = Vendor()
    with serving(dsn, flow(stage(vendor, lane=Lane("vendor")), "test"), roles=WORKING) as client:
        client = client.with_key(new_key(dsn))
        assert client.post("/api/lanes/vendor/pause", {"reason": "invoice"}).status == 200
        run_id = begin(client, 5)
        preview = wait_for(lambda: client.get("/api/lanes/vendor/pause").json["stages"])
        (found,) = LanePreview.model_validate(client.get("/api/lanes/vendor/pause").json).stages
        assert (found.run_id, found.stage, found.waiting) == (run_id, preview[0]["stage"], 5)
        time.sleep(0.5)
        assert vendor.calls == []
        lane = lane_of(client, "vendor")
        assert (lane.waiting, lane.paused_reason, lane.paused_by) == (5, "invoice", "a test")
        resumed = ResumedLane.model_validate(client.post("/api/lanes/vendor/resume", {"reason": "paid"}).json)
        assert (resumed.resumed, resumed.moved) == (True, [])
        ended(client, run_id)
        again = client.post("/api/lanes/vendor/resume", {"reason": "paid"}).json
        note = "The lane was not paused: its calls start."
        assert again == {"name": "vendor", "resumed": False, "note": note, "moved": []}
    assert len(vendor.calls) == 5


def test_a_stopped_clock_is_given_back(dsn):
    with serving(dsn, flow(stage(Vendor(), lane=Lane("vendor")), "test"), roles=WORKING) as client:
        client = client.with_key(new_key(dsn))
        paused = client.post("/api/lanes/vendor/pause", {"reason": "invoice", "stop_clock": True})
        assert paused.json["clock_stopped_at"]
        run_id = begin(client, 2)
        wait_for(lambda: client.get("/api/lanes/vendor/resume").json["stages"])
        (moved,) = client.post("/api/lanes/vendor/resume", {"reason": "paid"}).json["moved"]
        assert (moved["run_id"], moved["by_seconds"] > 0) == (run_id, True)
        ended(client, run_id)


def test_a_changed_cap_holds_for_the_next_calls_after_a_restart_and_until_it_is_cleared(dsn, one):
    vendor = Vendor()
    f = flow(stage(vendor, lane=Lane("vendor")), "test")
    with serving(dsn, f, roles=WORKING) as client:
        client = client.with_key(new_key(dsn))
        ended(client, begin(client, 20))
        assert vendor.most > 2, "without a cap they go together"
        changed = client.ask("PATCH", "/api/lanes/vendor", {"max_in_flight": 2, "reason": "asked by the vendor"})
        assert (changed.status, changed.json["max_in_flight"], changed.json["overrides"]) == (
            200,
            2,
            {"max_in_flight": 2},
        )
        time.sleep(0.3)  # the worker hears of it
        vendor.most = 0
        ended(client, begin(client, 20))
        assert vendor.most == 2
        assert one("SELECT action, subject, reason FROM audit_trail WHERE action <> 'run.start'") == (
            "lane.cap",
            "lane:vendor",
            "asked by the vendor",
        )
    with serving(dsn, f, roles=WORKING) as client:
        client = client.with_key(new_key(dsn))
        vendor.most = 0
        ended(client, begin(client, 20))
        assert vendor.most == 2, "the stored cap beats the declaration of a worker that starts"
        cleared = client.ask("PATCH", "/api/lanes/vendor", {"max_in_flight": None})
        assert (cleared.json["max_in_flight"], cleared.json["overrides"]) == (None, {})
        time.sleep(0.3)
        vendor.most = 0
        ended(client, begin(client, 20))
        assert vendor.most > 2


def test_a_changed_rate_holds_for_the_next_calls_and_a_declared_one_comes_back(dsn):
    vendor = Vendor(0)
    with serving(dsn, flow(stage(vendor, lane=Lane("vendor", per_second=500)), "test"), roles=WORKING) as client:
        client = client.with_key(new_key(dsn))
        assert client.ask("PATCH", "/api/lanes/vendor", {"per_second": 10, "burst": 3}).json["burst"] == 3
        time.sleep(0.3)
        ended(client, begin(client, 10))
        assert vendor.calls[-1] - vendor.calls[0] >= 0.6, "ten calls, three of them at once, ten a second"
        assert client.ask("PATCH", "/api/lanes/vendor", {"per_second": None, "burst": None}).json["per_second"] == 500


def test_a_tenant_sees_its_own_work_and_of_others_only_that_they_share_the_lane(admin, dsn, query):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(WAITING, ("default", 3))
        query("UPDATE items SET run_id = 2")
        connection.execute(WAITING, ("rival", 2))
        query(
            "UPDATE lanes SET paused_at = now(), paused_by = 'ann', paused_reason = 'invoice', trips = 1,"
            " failing_since = now(), last_failure = 'fiche 7 of acme', held_until = now() + interval '1 hour',"
            " held_reason = 'fiche 7 of acme' WHERE name = 'crm'"
        )
    rival = admin.with_key(new_key(dsn, "viewer", "rival"))
    assert rival.get("/api/lanes").status == 200
    theirs, ours = lane_of(rival), lane_of(admin)
    assert (theirs.waiting, theirs.shared, ours.waiting, ours.shared) == (2, True, 3, True)
    assert (theirs.paused_reason, theirs.paused_by, theirs.last_failure, theirs.held_reason) == (
        "invoice",
        None,
        None,
        None,
    )
    assert (ours.paused_by, ours.last_failure) == ("ann", "fiche 7 of acme")
    assert None not in (theirs.held_until, theirs.down_since)
    assert theirs.state == "paused"
    query("UPDATE lanes SET paused_at = NULL, paused_by = NULL, paused_reason = NULL")
    assert lane_of(rival).state == "down"
    assert (
        "its vendor is down, and is tried again at" in admin.post("/api/lanes/crm/resume", {"reason": "x"}).json["note"]
    )
    query("DELETE FROM items WHERE tenant_id = 'rival'")
    assert (lane_of(admin).shared, lane_of(rival).shared, lane_of(rival).waiting) == (False, True, 0)
    page = LANES.page.model_validate(admin.get("/api/lanes?limit=1").json)
    assert len(page.lanes) == 1


CHANGES = [
    ("POST", "/api/lanes/crm/pause", {"reason": "x"}),
    ("POST", "/api/lanes/crm/resume", {"reason": "x"}),
    ("PATCH", "/api/lanes/crm", {"max_in_flight": 1}),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
def test_what_all_tenants_share_is_changed_by_an_admin_of_the_first_only(admin, api, dsn, query, method, path, body):
    before = query(EVERY_LANE)
    for key in (api.key, new_key(dsn, "admin", "rival"), new_key(dsn, "viewer")):
        answer = admin.with_key(key).ask(method, path, body)
        assert (answer.status, answer.code) == (403, "FORBIDDEN")
    assert "admin key of the tenant default" in api.ask(method, path, body).json["error"]["message"]
    acting = admin.ask(method, path, body, headers={"Ecluse-Tenant": "rival"})
    assert acting.status == 403, "not on behalf of a tenant"
    assert query(EVERY_LANE) == before
    assert query("SELECT 1 FROM audit_trail WHERE times IS NULL") == []
    assert admin.ask(method, path, body).status == 200
    query("DELETE FROM api_keys WHERE tenant_id = 'rival'")
    query("DELETE FROM tenants WHERE id = 'rival'")
    assert api.ask(method, path, body).status == 200, "with one tenant, its operators may"


OWN = "/api/lanes/crm/rival-key"
OWN_CHANGES = [
    ("POST", f"{OWN}/pause", {"reason": "x"}),
    ("POST", f"{OWN}/resume", {"reason": "x"}),
    ("PATCH", OWN, {"max_in_flight": 1}),
]


def test_a_lane_of_a_tenant_is_listed_for_and_changed_by_that_tenant_alone(admin, api, dsn, query):
    query(
        "INSERT INTO lanes (name, tenant_id, held_until, held_reason) VALUES"
        " ('crm/rival-key', 'rival', now() + interval '1 hour', 'Retry-After: 429')"
    )
    owner, viewer = (admin.with_key(new_key(dsn, role, "rival")) for role in ("operator", "viewer"))
    assert [(one["name"], one["owner"]) for one in owner.get("/api/lanes").json["lanes"]] == [
        ("crm", None),
        ("crm/rival-key", "rival"),
    ]
    assert lane_of(viewer, "crm/rival-key").held_reason == "Retry-After: 429"
    assert [one["name"] for one in admin.get("/api/lanes").json["lanes"]] == ["crm"]
    before = query(EVERY_LANE)
    for method, path, body in [("GET", OWN, None), ("GET", f"{OWN}/pause", None), *OWN_CHANGES]:
        for client in (admin, api):
            answer = client.ask(method, path, body)
            assert (answer.status, answer.code) == (404, "NOT_FOUND"), (method, path)
    assert query(EVERY_LANE) == before
    for method, path, body in OWN_CHANGES:
        assert viewer.ask(method, path, body).status == 403
        assert owner.ask(method, path, body).status == 200, (method, path)
        quoted = path.replace("crm/rival", "crm%2Frival")
        assert owner.ask(method, quoted, body).status == 200, "as the command line writes it"
    assert owner.get(f"{OWN}/pause").json["name"] == "crm/rival-key"
    assert owner.ask("POST", "/api/lanes/crm/pause", {"reason": "x"}).status == 403


def test_the_lanes_of_the_environment_are_those_of_the_first_tenant(dsn):
    add_tenant(dsn, "rival")
    with serving(dsn, roles=WORKING) as client:
        rival, ours = client.with_key(new_key(dsn, "admin", "rival")), client.with_key(new_key(dsn))
        theirs = {one["name"] for one in rival.get("/api/lanes?limit=200").json["lanes"]}
        assert not theirs & {"crm", "crm-sales", "crm-transcription", "elevenlabs", "llm"}
        assert rival.get("/api/lanes/crm").code == rival.post("/api/lanes/crm/pause", {"reason": "x"}).code
        assert lane_of(ours).owner == "default"
        assert ours.post("/api/lanes/crm/pause", {"reason": "x"}).status == 200


BAD = [
    ("GET", "/api/lanes/nothing", None, 404),
    ("GET", "/api/lanes/%00", None, 404),
    ("GET", "/api/lanes/nothing/pause", None, 404),
    ("GET", "/api/lanes?colour=red", None, 422),
    ("POST", "/api/lanes/nothing/pause", {"reason": "x"}, 404),
    ("POST", "/api/lanes/%00/resume", {"reason": "x"}, 404),
    ("POST", "/api/lanes/crm/pause", {}, 422),
    ("POST", "/api/lanes/crm/pause", {"reason": ""}, 422),
    ("POST", "/api/lanes/crm/pause", {"reason": "x", "clock": True}, 422),
    ("PATCH", "/api/lanes/nothing", {"burst": 1}, 404),
    ("PATCH", "/api/lanes/crm", {"max_in_flight": 0}, 422),
    ("PATCH", "/api/lanes/crm", {"max_in_flight": "3"}, 422),
    ("PATCH", "/api/lanes/crm", {"per_second": 1e-9}, 422),
    ("PATCH", "/api/lanes/crm", {"per_second": -1}, 422),
    ("PATCH", "/api/lanes/crm", {"colour": 1}, 422),
]


def test_bad_input_is_refused_and_changes_nothing(admin, query):
    before = query(EVERY_LANE)
    for method, path, body, status in BAD:
        answer = admin.ask(method, path, body)
        wanted = (status, {404: "NOT_FOUND", 422: "INVALID_INPUT"}[status])
        assert (answer.status, answer.code) == wanted, (method, path, body)
    assert query(EVERY_LANE) == before
    assert query("SELECT 1 FROM audit_trail") == []


def test_a_change_of_nothing_is_not_recorded(admin, query):
    assert admin.ask("PATCH", "/api/lanes/crm", {}).status == 200
    assert query("SELECT 1 FROM audit_trail") == []
