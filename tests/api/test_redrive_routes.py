"""Redrives of runs over HTTP: what one would take is known before it is started, and it is started once at a time."""

from __future__ import annotations

import asyncio
import itertools
from decimal import Decimal

import psycopg
import pytest

from ecluse.api.redrives import RedrivenRun, RedrivePreview
from ecluse.engine import Redrive, Start, start_run
from tests.support.api_server import add_tenant, new_key, serving
from tests.support.automation_rows import end_run
from tests.support.engine_flows import flow, stage
from tests.support.fiche_rows import call, details, save

NAMES = itertools.count(1)


def ask(dsn, sql, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def on(dsn, do, *arguments, **options):
    async def act():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            return await do(connection, *arguments, **options)

    return asyncio.run(act())


def new_run(client, *fiche_ids, **given):
    wanted = {"name": f"schedule {next(NAMES)}", "fiche_selection": {"fiche_ids": list(fiche_ids)}, **given}
    schedule = client.post("/api/automation/schedules", wanted)
    assert schedule.status == 201, schedule.body
    return client.post(f"/api/schedules/{schedule.json['id']}/run").json["run_id"]


def preview(client, run, query=""):
    answer = client.get(f"/api/runs/{run}/redrive{query}")
    assert answer.status == 200, answer.body
    return RedrivePreview.model_validate(answer.json)


def redriven(client, run, status=201, **given):
    answer = client.post(f"/api/runs/{run}/redrive", given or None)
    assert answer.status == status, answer.body
    return RedrivenRun.model_validate(answer.json)


def taken(dsn, run):
    ((ids,),) = ask(dsn, "SELECT input -> 'override_fiche_selection' -> 'fiche_ids' FROM runs WHERE id = %s", run)
    return ids


ITEM = """
WITH lane AS (INSERT INTO lanes (name) VALUES ('of ' || %(run)s) ON CONFLICT (name) DO UPDATE SET burst = 1
              RETURNING id),
claim AS (INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
          SELECT 'r', %(run)s, %(stage)s, id, 1, 1, ecluse_now() FROM lane RETURNING id, lane_id)
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, order_at, claim_id, status, permanent,
                   error_code, error, finished_at)
SELECT 'default', %(run)s, 'automation', %(stage)s, %(fiche)s, %(fiche)s, lane_id, ecluse_now(), ecluse_now(), id,
       'failed', %(permanent)s, %(code)s, 'what ' || %(fiche)s || ' says', ecluse_now() FROM claim
"""


def fail(dsn, run, fiche, stage, code, *, permanent):
    with psycopg.connect(dsn, autocommit=True) as connection:
        given = {"run": int(run), "fiche": fiche, "stage": stage, "code": code, "permanent": permanent}
        connection.execute(ITEM, given)


def test_what_a_redrive_takes_is_told_by_code_before_it_is_started(shared_api, shared_dsn):
    run = new_run(shared_api, "1", "2", "3", "4", "5")
    on(shared_dsn, end_run, int(run), f1="successful", f2="failed/BAD_ANSWER", f3="failed/BUSY", f4="failed",
       f5="cancelled")  # fmt: skip
    fail(shared_dsn, run, "2", "audit", "BAD_ANSWER", permanent=True)
    fail(shared_dsn, run, "3", "audit", "BUSY", permanent=False)
    told = preview(shared_api, run)
    assert (told.flow, told.failed, told.cancelled, told.count, told.cannot_succeed) == ("automation", 3, 1, 3, 1)
    assert [(one.error_code, one.count, one.target, one.cannot_succeed) for one in told.groups] == [
        ("BAD_ANSWER", 1, "2", 1), ("BUSY", 1, "3", 0), ("FAILED", 1, "4", 0),
    ]  # fmt: skip
    assert [(one.error_code, one.target, one.error) for one in told.causes] == [("BAD_ANSWER", "2", "what 2 says")]
    for query, count in (
        ("?outcome=all", 4), ("?outcome=cancelled", 1), ("?error_code=BUSY", 1), ("?stage=audit", 2),
        ("?stage=fetch", 0), ("?leave_out_hopeless=true", 2), ("?error_code=BUSY&stage=audit", 1),
    ):  # fmt: skip
        assert preview(shared_api, run, query).count == count, query
    assert shared_api.get(f"/api/runs/{run}/redrive?outcome=lost").status == 422
    assert ask(shared_dsn, "SELECT count(*) FROM runs WHERE redrive_of = %s", run) == [(0,)], "nothing is started"


def test_a_redrive_takes_what_is_chosen_and_while_it_is_open_a_repetition_returns_it(shared_api, shared_dsn):
    run = new_run(shared_api, "1", "2", "3")
    on(shared_dsn, end_run, int(run), f1="failed/BUSY", f2="failed", f3="cancelled")
    first = redriven(shared_api, run, error_code="BUSY")
    assert (first.parent_run_id, first.deduplicated, taken(shared_dsn, first.run_id)) == (run, False, ["1"])
    again = redriven(shared_api, run, status=200)
    assert (again.run_id, again.deduplicated) == (first.run_id, True)
    trail = "SELECT action FROM audit_trail WHERE subject = %s AND action LIKE '%%redrive'"
    assert ask(shared_dsn, trail, f"run:{run}") == [("run.redrive",)]
    on(shared_dsn, end_run, int(first.run_id), f1="successful")
    second = redriven(shared_api, run, outcome="all")
    assert taken(shared_dsn, second.run_id) == ["2", "3"], "1 has succeeded since"
    assert shared_api.get(f"/api/runs/{run}").json["redrives"] == [first.run_id, second.run_id]


def test_targets_that_have_succeeded_since_are_left_out_unless_they_are_asked_for(shared_api, shared_dsn):
    run = new_run(shared_api, "1", "2")
    on(shared_dsn, end_run, int(run), f1="failed/BUSY", f2="failed/BUSY")
    first = redriven(shared_api, run).run_id
    on(shared_dsn, end_run, int(first), f1="successful", f2="failed/BUSY")
    assert (preview(shared_api, run).count, preview(shared_api, run).succeeded_since) == (1, 1)
    of_the_redrive = redriven(shared_api, first).run_id
    on(shared_dsn, end_run, int(of_the_redrive), f2="successful")
    told = preview(shared_api, run)
    assert (told.count, told.groups, told.failed) == (0, [], 2)
    assert (told.succeeded_since, told.succeeded_in) == (2, [first, of_the_redrive])
    refused = shared_api.post(f"/api/runs/{run}/redrive")
    assert (refused.status, refused.code) == (409, "SUCCEEDED_SINCE")
    assert f"in run {first}, {of_the_redrive}" in refused.json["error"]["message"]
    assert preview(shared_api, run, "?include_succeeded=true").count == 2
    assert taken(shared_dsn, redriven(shared_api, run, include_succeeded=True).run_id) == ["1", "2"]


@pytest.mark.parametrize(
    ("outcomes", "given", "code"),
    [
        ({"f1": "successful"}, {}, "NOTHING_FAILED"),
        ({"f1": "cancelled"}, {}, "ONLY_CANCELLED"),
        ({"f1": "failed"}, {"error_code": "BUSY"}, "NOTHING_CHOSEN"),
        ({"f1": "failed"}, {"stage": "audit"}, "NOTHING_CHOSEN"),
        ({"f1": "failed"}, {"outcome": "cancelled"}, "NOTHING_CHOSEN"),
    ],
)
def test_where_there_is_nothing_to_redrive_it_is_said_why(shared_api, shared_dsn, outcomes, given, code):
    run = new_run(shared_api, "1")
    on(shared_dsn, end_run, int(run), **outcomes)
    answer = shared_api.post(f"/api/runs/{run}/redrive", given)
    assert (answer.status, answer.code) == (409, code)
    query = "&".join(f"{name}={value}" for name, value in given.items())
    assert preview(shared_api, run, f"?{query}").count == 0


def test_a_run_that_goes_on_or_whose_flow_has_no_redrive_is_refused_and_what_to_do_is_said(shared_api, shared_dsn):
    going = new_run(shared_api, "1")
    other = shared_api.post("/api/runs", {"flow": "test"}).json["run_id"]
    for run, code, said in ((going, "RUN_NOT_ENDED", "once it has ended"), (other, "NO_REDRIVE", "POST /api/runs")):
        for answer in (shared_api.get(f"/api/runs/{run}/redrive"), shared_api.post(f"/api/runs/{run}/redrive")):
            assert (answer.status, answer.code) == (409, code)
            assert said in answer.json["error"]["message"]
    add_tenant(shared_dsn, "rival")
    rival = shared_api.with_key(new_key(shared_dsn, "admin", "rival"))
    for answer in (rival.get(f"/api/runs/{going}/redrive"), rival.post(f"/api/runs/{going}/redrive")):
        assert (answer.status, answer.code) == (404, "NOT_FOUND")


class Again(Redrive):
    """The same work, over the targets that failed."""

    async def start(self, connection, flow, run, targets, correlation_id):
        key, given = f"again-{run.id}", {"targets": list(targets)}
        link = {"redrive_of": run.id, "again": True, "correlation_id": correlation_id}
        return await start_run(connection, Start(flow, key, run.tenant_id, given, **link))


def test_a_flow_of_ones_own_says_how_its_runs_are_redriven(dsn):
    with serving(dsn, flow(stage(), "again", redrive=Again())) as client:
        client = client.with_key(new_key(dsn))
        run = client.post("/api/runs", {"flow": "again", "input": {"targets": ["1", "2", "3"]}}).json["run_id"]
        on(dsn, end_run, int(run), f1="failed/BAD_ANSWER", f2="failed/BUSY", f3="successful")
        fail(dsn, run, "1", "work", "BAD_ANSWER", permanent=True)
        fail(dsn, run, "2", "work", "FORBIDDEN", permanent=True)  # of a setting, which may be put right
        told = preview(client, run, "?stage=work")
        assert (told.count, told.cannot_succeed, [one.target for one in told.causes]) == (2, 1, ["1"])
        assert (told.calls, told.expected_seconds, told.expected_cost) == ({}, None, None), "not known"
        again = redriven(client, run, leave_out_hopeless=True)
        assert ask(dsn, "SELECT input -> 'targets', redrive_of FROM runs WHERE id = %s", again.run_id) == [
            (["2"], int(run))
        ]
        assert redriven(client, run, status=200).run_id == again.run_id


def test_the_expected_time_and_cost_are_told_where_they_are_known(shared_api, shared_dsn):
    long = {"duration_s": 90.0}
    ids = on(shared_dsn, save, ("71", details(call("a", **long), call("b"))), ("72", details(call("c", **long))))
    steps = [{"name": "a", "criteria": "b"}]
    config = shared_api.post("/api/audit-configs", {"name": "c", "steps": steps}).json["id"]
    run = new_run(shared_api, "71", "72", specific_audit_configs=[config], use_automatic_audits=False)
    on(shared_dsn, end_run, int(run), f71="failed", f72="failed")
    told = preview(shared_api, run)
    assert (told.calls, told.expected_cost) == ({"transcripts": 3, "audits": 2}, None), "no audit has a price yet"
    assert told.expected_seconds == 18, "ten a minute"
    assert told.without_cost == ["transcripts", "audits"]
    for number, cost in enumerate((Decimal("0.25"), Decimal("0.75"))):
        ask(
            shared_dsn,
            "INSERT INTO audits (tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version,"
            " trigger_source, status, error_code, error, cost, created_at, finished_at)"
            " VALUES ('default', %s, %s, '71', %s, 1, 'api', 'failed', 'X', 'y', %s, ecluse_now(), ecluse_now())",
            int(run) + number, ids[0], config, cost,
        )  # fmt: skip
    told = preview(shared_api, run)
    assert (Decimal(told.expected_cost), told.without_cost) == (1, ["transcripts"]), "two audits at 0.50 each"
    with serving(shared_dsn, ELEVENLABS_PRICES="scribe_v1=0.2", ELEVENLABS_DEFAULT_MINUTES=5) as priced:
        told = preview(priced.with_key(new_key(shared_dsn)), run)
        assert (Decimal(told.expected_cost), told.without_cost) == (Decimal("2.6"), []), (
            "3 minutes, and 5 for one unknown"
        )
    without = new_run(shared_api, "71", run_transcription=False, run_audits=False)
    on(shared_dsn, end_run, int(without), f71="failed")
    told = preview(shared_api, without)
    assert (told.calls, told.expected_seconds, told.expected_cost) == ({"transcripts": 0, "audits": 0}, None, None)
