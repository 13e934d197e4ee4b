"""Vendors of tenants are apart: none is called with the server's keys, and one tenant's throttling holds no other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import psycopg
import pytest

from ecluse.base.errors import Conflict
from ecluse.bootstrap import keep_days
from ecluse.doctor.database import check_database
from ecluse.settings import Settings
from tests.support.api_server import add_tenant, new_key, serving
from tests.support.automation_scenes import ONLY_DETAILS
from tests.support.runs import start_run
from tests.support.transcription_world import World
from tests.support.vendor_clients import SECRETS, connect

MANUAL = {"schedule_type": "MANUAL", "fiche_selection": {"mode": "manual", "fiche_ids": ["9010"]}}


def test_an_operator_of_another_tenant_reads_nothing_through_the_server_s_keys(dsn, sandbox):
    add_tenant(dsn, "beta")
    keys = dict.fromkeys(("CRM_API_KEY", "ELEVENLABS_API_KEY", "LLM_API_KEY"), "of-the-server")
    urls = {"CRM_BASE_URL": f"{sandbox.url}/crm", "ELEVENLABS_BASE_URL": f"{sandbox.url}/elevenlabs"}
    roles = frozenset({"api", "worker", "scheduler"})
    with serving(dsn, roles=roles, **keys, **urls, LLM_MODEL="m", ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8") as client:
        beta = client.with_key(new_key(dsn, tenant="beta"))
        made = beta.post("/api/automation/schedules", {"name": "off", **MANUAL, "is_active": False})
        assert made.status == 201, "what is off may wait for its connections"
        off = made.json["id"]
        refused = [
            beta.post("/api/transcriptions/9010"),
            beta.post("/api/transcriptions/batch", {"fiche_ids": ["9010"]}),
            beta.post("/api/runs", {"flow": "transcription", "input": {"fiche_id": "9010"}}),
            beta.post("/api/automation/schedules", {"name": "nightly", **MANUAL}),
            beta.post(f"/api/schedules/{off}/enable"),
            beta.ask("PATCH", f"/api/schedules/{off}", {"enabled": True}),
            beta.ask("PATCH", f"/api/automation/schedules/{off}", {"is_active": True}),
        ]
        for answer in refused:
            assert (answer.status, answer.code) == (409, "NO_CONNECTION")
            assert "ecluse connections create KIND --tenant beta" in answer.json["error"]["message"]
        assert beta.get(f"/api/schedules/{off}").json["enabled"] is False
        assert beta.ask("PATCH", f"/api/schedules/{off}", {"name": "still off"}).status == 200
        assert beta.get("/api/fiches/9010").code == "NOT_FOUND"
        assert beta.get("/api/runs").json["runs"] == []
        mine = client.with_key(new_key(dsn))
        run = mine.post("/api/transcriptions/9100").json["run_id"]
        until = time.monotonic() + 30
        while (row := mine.get(f"/api/runs/{run}").json)["ended_at"] is None and time.monotonic() < until:
            time.sleep(0.05)
        assert row["status"] == "completed"
    assert [one["ref"] for one in sandbox.ledger(kind="call")] == ["9100"]


async def test_a_scheduled_run_without_a_connection_fails_with_that_code(automate, connection, sandbox, query):
    world = await automate()
    beta = replace(world, tenant="beta")
    await connect(connection, sandbox, "beta", ["crm"])
    schedule = await beta.schedule("9010", **ONLY_DETAILS)
    await connection.execute("DELETE FROM connections")
    with pytest.raises(Conflict, match="no connection to the CRM"):
        await beta.trigger(schedule)
    fired = await start_run(world.kit, beta.fired(schedule, world.kit.clock.now()))
    run = await beta.ended(fired.run.id)
    assert (run["status"], run["error_code"]) == ("failed", "NO_CONNECTION")
    assert world.calls("crm") == []


async def test_a_schedule_is_made_only_with_the_connections_that_its_runs_need(automate, connection, sandbox):
    beta = replace(await automate(), tenant="beta")
    await connect(connection, sandbox, "beta", ["crm"])
    for plan, kinds in (({}, "the language model .* and speech to text"), ({"run_audits": False}, "speech to text")):
        with pytest.raises(Conflict, match=kinds):
            await beta.schedule("9010", **plan)
    assert await beta.schedule("9010", **ONLY_DETAILS)
    assert await beta.schedule("9010", is_active=False)


async def test_a_tenant_that_is_throttled_holds_no_other(world, connection, sandbox, query):
    """Both with keys of their own at the same vendors."""
    w = await world()
    for tenant in ("acme", "beta"):
        await connect(connection, sandbox, tenant, per_minute=60_000)
    acme, beta = (World(w.kit, w.made, sandbox, query, tenant=name) for name in ("acme", "beta"))
    began = time.monotonic()
    await beta.transcribe("9001")
    calm = time.monotonic() - began
    sandbox.set_faults([{"vendor": "elevenlabs", "kind": "throttle", "ids": ["1000-1"], "retry_after": 45}])
    (held,) = await acme.start("1000")
    until = time.monotonic() + 30
    closed = "SELECT name, tenant_id, held_until > now() + interval '30 s' FROM lanes WHERE held_until > now()"
    while not query(closed) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert query(closed) == [("elevenlabs/acme", "acme", True)]
    began = time.monotonic()
    assert (await beta.transcribe("9002"))["status"] == "completed"
    assert (await w.transcribe("9003"))["status"] == "completed"
    assert time.monotonic() - began < 10 + 3 * calm  # not 45 s
    assert query("SELECT ended_at FROM runs WHERE id = %s", held.run_id) == [(None,)]


async def test_each_credential_has_a_lane_with_the_caps_of_its_connection(automate, connection, sandbox, query):
    world = await automate(crm={"read_secret": SECRETS.get})
    await connect(connection, sandbox, "acme", max_in_flight=3, per_minute=90_000)
    acme = replace(world, tenant="acme")
    for tenant in (world, acme):
        await tenant.config(name="Own")
        await tenant.config(name="Other", model="gpt-4.1-mini")
        assert (await tenant.run_over("1000", secrets=SECRETS))["status"] == "completed"
        keyed = await tenant.run_over("1000", **ONLY_DETAILS, secrets=SECRETS, external_api_key="of-the-schedule")
        assert keyed["status"] == "completed"
    rows = query("SELECT DISTINCT l.name, l.tenant_id FROM items i JOIN lanes l ON l.id = i.lane_id ORDER BY l.name")
    schedules = dict(query("SELECT tenant_id, max(id) FROM schedules GROUP BY 1"))
    assert rows == [
        ("crm", "default"),
        ("crm/acme", "acme"),
        (f"crm/acme/schedule-{schedules['acme']}", "acme"),
        (f"crm/default/schedule-{schedules['default']}", "default"),
        ("elevenlabs", "default"),
        ("elevenlabs/acme", "acme"),
        ("llm", "default"),
        ("llm/acme", "acme"),
        ("llm/acme/gpt-4.1-mini", "acme"),
        ("llm/default/gpt-4.1-mini", "default"),
    ]
    caps = query("SELECT max_in_flight, round(per_second) FROM lanes WHERE tenant_id = 'acme'")
    assert set(caps) == {(3, 1500)}


async def test_doctor_lists_the_tenants_whose_schedules_lack_a_connection(automate, connection, sandbox, dsn):
    beta = replace(await automate(), tenant="beta")
    await connect(connection, sandbox, "beta")
    await beta.schedule("9010", run_audits=False)
    ask = partial(check_database, dsn, 10, keep_days(Settings()))
    assert [one.level for one in await ask() if one.what == "vendors"] == ["ok"]
    await connection.execute("DELETE FROM connections WHERE kind = 'speech'")
    (found,) = [one for one in await ask() if one.what == "vendors"]
    assert (found.level, found.says) == ("warn", "tenant beta has no connection speech: runs of 1 schedule fail")
    assert "ecluse --tenant beta connections create" in found.do


@pytest.mark.parametrize("waits", [True, False], ids=["both wait", "nothing waits"])
def test_the_diagnostic_says_of_a_shared_lane_what_why_says_and_no_more(dsn, waits):
    """Also when nothing of the other tenant waits any more: the vendor's last answers may still be to its calls."""
    add_tenant(dsn, "beta")
    with serving(dsn) as client, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO lanes (name, tenant_id, paused_by, held_until, held_reason, last_failure, slowed_to,"
            " slowed_until, slowed_reason) SELECT name, tenant, 'cli:ann', now() + interval '1 hour',"
            " 'Retry-After: crm GET /fiches/9040: 429', 'of another', 0.5, now() + interval '1 hour', 'of another'"
            " FROM (VALUES ('crm', NULL), ('crm/beta', 'beta')) AS l(name, tenant)"
        )
        if waits:
            connection.execute(
                "INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)"
                " SELECT t, 1, 'f', 's', t || n, 'x', l.id, now() FROM lanes l, unnest('{default,beta}'::text[]) t,"
                " generate_series(1, CASE WHEN t = 'default' THEN 3 ELSE 2 END) n WHERE l.name = 'crm'"
            )
        told = {
            tenant: client.with_key(new_key(dsn, "viewer", tenant)).get("/api/automation/diagnostic")
            for tenant in ("beta", "default")
        }
    for tenant, answer in told.items():
        assert answer.status == 200
        lanes = {lane["name"]: lane for lane in answer.json["lanes"]}
        own = {"beta": 2, "default": 3}[tenant] if waits else 0
        assert (lanes["crm"]["waiting"], lanes["crm"]["in_flight"]) == (own, 0)
        for secret in ("9040", "of another", "ann"):
            assert secret not in str(lanes["crm"])
        assert any("Lane crm is held" in one and "(Retry-After)" in one for one in answer.json["hints"])
        assert "9040" not in str([one for one in answer.json["hints"] if "Lane crm is" in one])
        assert set(lanes) == ({"crm", "crm/beta"} if tenant == "beta" else {"crm"})
    own = next(lane for lane in told["beta"].json["lanes"] if lane["name"] == "crm/beta")
    assert "9040" in own["held_reason"], "an answer to its own call"
    assert "beta" not in told["default"].body.decode()
