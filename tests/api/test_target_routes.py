"""Targets over HTTP: what became of each, one in full, and every run that selected it."""

from __future__ import annotations

from urllib.parse import quote

import psycopg
import pytest

from ecluse.api.targets import RUNS_OF_TARGET, TARGETS, TargetInFull
from ecluse.base.errors import TransientError
from ecluse.engine import Done, RetryPolicy
from tests.support.api_server import add_tenant, new_key, serving
from tests.support.engine_flows import flow, stage
from tests.support.waits import wait_for

SLASHED = "a/b ?#é"
SELECT = """
WITH run AS (UPDATE runs SET selected = cardinality(%(targets)s::text[]) WHERE id = %(run)s)
INSERT INTO outcomes (run_id, target, outcome, error_code, reason)
SELECT %(run)s, t, CASE WHEN t = 'bad' THEN 'failed' END, CASE WHEN t = 'bad' THEN 'BROKEN' END,
       CASE WHEN t = 'bad' THEN 'it broke' END FROM unnest(%(targets)s::text[]) t
"""
WORK = """
WITH lane AS (INSERT INTO lanes (name, paused_at, paused_by, paused_reason)
              VALUES ('slow', ecluse_now(), 'cli:ann', 'invoice') RETURNING id),
stage AS (
    INSERT INTO stages (run_id, stage, expected, fanned_out_at, started_at, deadline_at, progress_at)
    VALUES (%(run)s, 'work', 1, ecluse_now(), ecluse_now(), ecluse_now() + interval '1 hour', ecluse_now())),
item AS (
    INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, round, executions)
    SELECT 'default', %(run)s, 'test', 'work', %(target)s, %(target)s, id, ecluse_now(), 1, 1 FROM lane RETURNING id),
attempt AS (
    INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous)
    SELECT %(run)s, id, 'e', 0, 1, ecluse_now(), 'r', 'TIMEOUT', 'no answer', true FROM item),
effect AS (
    INSERT INTO effects (id, tenant_id, run_id, item_id, stage, key, target, round, class, state, wanted, before, sends,
                         claim_id, quiet, last_send_at)
    SELECT gen_random_uuid(), 'default', %(run)s, id, 'work', %(target)s, %(target)s, 0, 'C2', 'unknown',
           '{"price": 2}', '{"price": 1}', 1, 1, '1 minute', ecluse_now() FROM item),
child AS (
    INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, parent_run_id, created_at)
    VALUES ('default', 'test', 'child', false, 'queued', 'queued', %(run)s, ecluse_now()) RETURNING id),
waiter AS (INSERT INTO run_waiters (run_id, waiter_run_id, target) SELECT id, %(run)s, %(target)s FROM child)
INSERT INTO run_log (run_id, at, level, message, event_id, targets)
SELECT %(run)s, ecluse_now(), 'warning', m, e, t FROM (VALUES
    ('by its event', 'test-' || %(run)s || '-work-' || %(target)s, NULL),
    ('by its name', NULL, ARRAY[%(target)s, 'bad']), ('of another', NULL, ARRAY['bad'])) AS l(m, e, t)
"""


def path(target):
    return quote(target, safe="")


@pytest.fixture
def run(api, dsn):
    run_id = api.post("/api/runs", {"flow": "test"}).json["run_id"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SELECT, {"run": int(run_id), "targets": [SLASHED, "bad", "good"]})
        connection.execute(WORK, {"run": int(run_id), "target": SLASHED})
    return run_id


def test_targets_are_listed_with_their_outcomes_and_filtered(api, run):
    page = TARGETS.page.model_validate(api.get(f"/api/runs/{run}/targets").json)
    assert [(row.target, row.outcome) for row in page.targets] == [(SLASHED, None), ("bad", "failed"), ("good", None)]
    for filters, wanted in {
        "outcome=failed": ["bad"],
        "outcome=open": [SLASHED, "good"],
        "error_code=BROKEN": ["bad"],
        "target=good": ["good"],
        f"target={path(SLASHED)}": [SLASHED],
    }.items():
        assert [row["target"] for row in api.get(f"/api/runs/{run}/targets?{filters}").json["targets"]] == wanted
    first = api.get(f"/api/runs/{run}/targets?limit=2").json
    rest = api.get(f"/api/runs/{run}/targets?limit=2&cursor={first['next_cursor']}").json
    assert ([row["target"] for row in rest["targets"]], rest["next_cursor"]) == (["good"], None)


def test_a_target_is_shown_in_full(api, run):
    answer = api.get(f"/api/runs/{run}/targets/{path(SLASHED)}")
    assert answer.status == 200, answer.body
    shown = TargetInFull.model_validate(answer.json)
    (item,) = shown.items
    assert (item.stage, item.key, item.event_id) == ("work", SLASHED, f"test-{run}-work-{SLASHED}-retry-1")
    assert [(one.error_code, one.ambiguous) for one in item.attempts] == [("TIMEOUT", True)]
    (effect,) = shown.effects
    assert (effect.state, effect.sends, effect.wanted, effect.before) == ("unknown", 1, {"price": 2}, {"price": 1})
    assert [line.message.partition(" (")[0] for line in shown.log] == ["by its event", "by its name"]
    assert [child.flow for child in shown.runs] == ["test"]
    (waits,) = shown.waiting
    assert waits.cause == "paused"
    assert "ann" not in waits.detail
    unencoded = api.get(f"/api/runs/{run}/targets/a/b%20%3F%23%C3%A9")
    assert unencoded.json["target"] == SLASHED
    settled = TargetInFull.model_validate(api.get(f"/api/runs/{run}/targets/bad").json)
    assert (settled.outcome, settled.waiting, settled.items) == ("failed", [], [])


def test_every_run_that_selected_a_target_is_found(api, dsn, run):
    other = api.post("/api/runs", {"flow": "test"}).json["run_id"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SELECT, {"run": int(other), "targets": [SLASHED]})
    page = RUNS_OF_TARGET.page.model_validate(api.get(f"/api/targets/{path(SLASHED)}").json)
    assert [row.run_id for row in page.runs] == [other, run]
    assert [row["id"] for row in api.get(f"/api/runs?target={path(SLASHED)}").json["runs"]] == [other, run]
    assert [row["id"] for row in api.get("/api/runs?target=bad").json["runs"]] == [run]
    first = api.get(f"/api/targets/{path(SLASHED)}?limit=1").json
    assert [row["run_id"] for row in first["runs"]] == [other]
    last = api.get(f"/api/targets/{path(SLASHED)}?limit=1&cursor={first['next_cursor']}").json
    assert ([row["run_id"] for row in last["runs"]], last["next_cursor"]) == ([run], None)


def test_runs_are_found_by_schedule_and_instant(api, query, run):
    query("UPDATE runs SET schedule_id = 5, created_at = '2020-02-01T12:00:00Z' WHERE id = %s", int(run))
    for filters, wanted in {
        "schedule_id=5": [run],
        "schedule_id=6": [],
        "since=2020-02-01T12:00:00Z&until=2020-02-01T12:00:01Z": [run],
        "since=2020-02-01T13:00:00%2B01:00&until=2020-03-01": [run],
        "until=2020-02-01T12:00:00Z": [],
    }.items():
        assert [row["id"] for row in api.get(f"/api/runs?{filters}").json["runs"]] == wanted, filters


BAD = [
    ("/api/runs/{run}/targets/nothing", 404),
    ("/api/runs/{run}/targets/%00", 404),
    ("/api/runs/999/targets/bad", 404),
    ("/api/runs/x/targets", 404),
    ("/api/targets/nothing", 404),
    ("/api/targets/%00x", 404),
    ("/api/runs/{run}/targets?outcome=lost", 422),
    ("/api/runs/{run}/targets?colour=red", 422),
    ("/api/runs/{run}/targets?cursor=garbage", 422),
    ("/api/runs?since=soon", 422),
    ("/api/runs?schedule_id=-1", 422),
    ("/api/runs?target=%00", 422),
]


def test_what_does_not_exist_is_refused(api, run):
    for address, status in BAD:
        answer = api.get(address.format(run=run))
        assert (answer.status, answer.code) == (status, {404: "NOT_FOUND", 422: "INVALID_INPUT"}[status]), address


def test_another_tenant_finds_none_of_it(api, dsn, run):
    add_tenant(dsn, "rival")
    rival = api.with_key(new_key(dsn, "admin", "rival"))
    for address in (f"/api/runs/{run}/targets", f"/api/runs/{run}/targets/bad", "/api/targets/bad"):
        assert (rival.get(address).status, rival.get(address).code) == (404, "NOT_FOUND")
    assert rival.get("/api/runs?target=bad").json["runs"] == []


def test_a_target_that_failed_at_first_shows_each_attempt(dsn):
    tries = []

    async def work(_, item):
        tries.append(item.key)
        if len(tries) == 1:
            raise TransientError("slow down", code="THROTTLED", ambiguous=False)
        return Done()

    with serving(
        dsn, flow(stage(work, retry=RetryPolicy(executions=3, base=0.01))), roles=frozenset({"api", "worker"})
    ) as client:
        client = client.with_key(new_key(dsn))
        run_id = client.post("/api/runs", {"flow": "test", "input": {"targets": ["a"]}}).json["run_id"]
        wait_for(lambda: client.get(f"/api/runs/{run_id}").json["ended_at"])
        shown = TargetInFull.model_validate(client.get(f"/api/runs/{run_id}/targets/a").json)
    assert (shown.outcome, [one.error_code for one in shown.items[0].attempts]) == ("successful", ["THROTTLED"])
