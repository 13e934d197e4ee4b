"""Generic runs over HTTP: what is asked for is what the tables say, in the shape that the document describes."""

from __future__ import annotations

import secrets

import psycopg
import pytest
from psycopg.types.json import Jsonb
from structlog.testing import capture_logs

from ecluse.api import shapes
from ecluse.api.runs import ITEMS, RUNS
from tests.support.api_server import add_tenant, new_key

RESULTS = """
WITH begun AS (
    UPDATE runs SET status = 'running', state = 'running', started_at = ecluse_now(), selected = 3 WHERE id = %(run)s),
lane AS (INSERT INTO lanes (name) VALUES ('lane') ON CONFLICT (name) DO UPDATE SET name = 'lane' RETURNING id),
stage AS (
    INSERT INTO stages (run_id, stage, expected, fanned_out_at, started_at, deadline_at, progress_at)
    VALUES (%(run)s, 'work', 3, ecluse_now(), ecluse_now(), ecluse_now() + interval '1 hour', ecluse_now())),
item AS (
    INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)
    SELECT 'default', %(run)s, 'test', 'work', t, t, lane.id, ecluse_now() FROM lane, unnest(%(targets)s::text[]) t)
INSERT INTO outcomes (run_id, target) SELECT %(run)s, unnest(%(targets)s::text[])
"""
FAILED = """
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous)
SELECT run_id, id, 'e', 0, 1, ecluse_now(), 'r', 'TIMEOUT', 'no answer', true FROM items
WHERE run_id = %(run)s AND key = %(key)s
"""


@pytest.fixture
def started(api):
    return api.post("/api/runs", {"flow": "test", "input": {"targets": ["a"]}}).json["run_id"]


@pytest.mark.req("ENG-103", "ENG-85")
def test_a_run_is_started_listed_and_shown(api, one):
    answer = api.post(
        "/api/runs", {"flow": "test", "input": {"targets": ["a", "b"]}}, headers={"X-Request-Id": "order-66"}
    )
    assert answer.status == 201
    started = shapes.StartedRun.model_validate(answer.json)
    assert started.deduplicated is False
    stored = one("SELECT id::text, tenant_id, event_key, input->'targets', correlation_id FROM runs")
    assert stored == (started.run_id, "default", started.event_key, ["a", "b"], "order-66")

    shown = api.get(f"/api/runs/{started.run_id}")
    assert shown.status == 200
    run = shapes.RunInFull.model_validate(shown.json)
    assert (run.id, run.flow, run.status, run.state) == (started.run_id, "test", "queued", "queued")

    listed = RUNS.page.model_validate(api.get("/api/runs").json)
    assert [row.id for row in listed.runs] == [started.run_id]


def test_a_key_names_the_decision_to_run_and_a_second_start_says_so(api, one):
    first = api.post("/api/runs", {"flow": "test", "key": "monday"})
    again = api.post("/api/runs", {"flow": "test", "key": "monday"})
    assert (first.status, again.status) == (201, 200)
    assert again.json == {**first.json, "deduplicated": True}
    assert one("SELECT count(*) FROM runs") == 1


def walked(api, path, name, column):
    """What a reader gets that follows the cursors."""
    found, cursor = [], ""
    while cursor is not None:
        page = api.get(f"{path}{cursor and f'&cursor={cursor}'}").json
        found += [row[column] for row in page[name]]
        cursor = page["next_cursor"]
    return found


@pytest.mark.req("ENG-104")
def test_lists_come_in_pages_in_one_order_and_can_be_filtered(api, query):
    ids = [api.post("/api/runs", {"flow": "test", "key": f"k{n}"}).json["run_id"] for n in range(5)]
    newest_first = ids[::-1]
    for offset in range(0, 6, 2):
        page = api.get(f"/api/runs?limit=2&offset={offset}").json
        assert ([row["id"] for row in page["runs"]], page["limit"]) == (newest_first[offset : offset + 2], 2)
    assert walked(api, "/api/runs?limit=2", "runs", "id") == newest_first
    api.post(f"/api/runs/{ids[2]}/end", {"reason": "enough"})
    for filters, expected in {
        "state=cancelled": [ids[2]],
        "state=failed": [],
        "state=queued": [i for i in newest_first if i != ids[2]],
        "flow=test&state=cancelled": [ids[2]],
        "flow=other": [],
        "state=%27%20OR%201=1--": [],
    }.items():
        assert [row["id"] for row in api.get(f"/api/runs?{filters}").json["runs"]] == expected, filters


def test_runs_that_other_runs_have_started_are_listed_by_their_flow_or_target(api, dsn, query, started):
    child = api.post("/api/runs", {"flow": "test", "key": "child"}).json["run_id"]
    query("UPDATE runs SET flow = 'part', parent_run_id = %s WHERE id = %s", int(started), int(child))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(RESULTS, {"run": child, "targets": ["c"]})
    for filters, expected in {"": [started], "flow=part": [child], "target=c": [child], "flow=test": [started]}.items():
        assert [row["id"] for row in api.get(f"/api/runs?{filters}").json["runs"]] == expected, filters


def test_items_log_and_stages_of_a_run_are_shown_as_described(api, dsn, started, query):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(RESULTS, {"run": started, "targets": ["c", "a", "b"]})
    items = ITEMS.page.model_validate(api.get(f"/api/runs/{started}/items").json)
    assert [item.key for item in items.items] == ["a", "b", "c"]
    assert items.items[0].event_id == f"test-{started}-work-a"
    assert walked(api, f"/api/runs/{started}/items?limit=2", "items", "key") == ["a", "b", "c"]
    assert api.get(f"/api/runs/{started}/items?status=failed").json["items"] == []
    assert [i["key"] for i in api.get(f"/api/runs/{started}/items?limit=1&offset=2").json["items"]] == ["c"]

    run = shapes.RunInFull.model_validate(api.get(f"/api/runs/{started}").json)
    assert [(s.stage, s.expected, s.waiting) for s in run.stages] == [("work", 3, 3)]
    assert run.outcomes == {"open": 3}

    before = api.get(f"/api/runs/{started}/end")
    preview = shapes.EndPreview.model_validate(before.json)
    assert (preview.selected, preview.finished, preview.in_flight, preview.waiting) == (3, 0, 0, 3)
    assert api.get(f"/api/runs/{started}").json["ended_at"] is None, "nothing was changed"
    api.post(f"/api/runs/{started}/end", {"reason": "enough"})
    assert api.get(f"/api/runs/{started}/end").code == "ALREADY_ENDED"
    told = shapes.LogPage.model_validate(api.get(f"/api/runs/{started}/log").json)
    assert told.log[-1].message == "running -> failed"
    newest = shapes.LogPage.model_validate(api.get(f"/api/runs/{started}/log?order=desc&limit=1").json)
    assert (newest.log, newest.total) == ([told.log[-1]], len(told.log))
    run = shapes.RunInFull.model_validate(api.get(f"/api/runs/{started}").json)
    assert (run.state, run.status, run.outcomes) == ("cancelled", "failed", {"CANCELLED": 3})
    assert (run.failed, run.cancelled, run.end_cause, run.reason) == (3, 3, "operator", "enough")
    assert (run.redrives, run.after_redrives, run.redrive_of) == ([], None, None)


@pytest.mark.req("G-73")
def test_ending_a_run_says_who_and_why_in_the_same_commit_and_only_once(api, started, query):
    answer = api.post(f"/api/runs/{started}/end", {"reason": "wrong catalogue"}, headers={"X-Request-Id": "req-1"})
    assert (answer.status, answer.json) == (200, {"run_id": started, "ended": True})
    again = api.post(f"/api/runs/{started}/end", {"reason": "once more"})
    assert (again.status, again.code) == (409, "ALREADY_ENDED")
    (name,) = query("SELECT name FROM api_keys")[0]
    ended = "SELECT state, status, end_cause, reason, ended_by FROM runs"
    assert query(ended) == [("cancelled", "failed", "operator", "wrong catalogue", name)]
    trail = "SELECT tenant_id, actor, action, subject, reason, request_id FROM audit_trail WHERE action <> 'run.start'"
    (key_id,) = query("SELECT id FROM api_keys")[0]
    assert query(trail) == [("default", f"key:{key_id}", "run.end", f"run:{started}", "wrong catalogue", "req-1")]


def test_an_end_that_cannot_be_recorded_does_not_happen(api, started, query):
    query("ALTER TABLE audit_trail ADD CONSTRAINT nothing CHECK (action <> 'run.end')")
    with capture_logs() as told:
        answer = api.post(f"/api/runs/{started}/end", {"reason": "x"})
    assert (answer.status, answer.code) == (500, "INTERNAL")
    assert "CHECK" not in answer.body.decode()
    assert [line["event"] for line in told] == ["request: failed", "request: answered"]
    assert query("SELECT status FROM runs") == [("queued",)]


@pytest.mark.parametrize(
    ("flow", "instead"), [("automation", "POST /api/automation/trigger"), ("notifications", "endpoints/ID/test")]
)
def test_what_is_not_started_by_hand_is_refused_before_there_is_a_run(api, one, flow, instead):
    refused = api.post("/api/runs", {"flow": flow, "input": {}})
    assert (refused.status, refused.code) == (422, "INVALID_INPUT")
    assert instead in refused.json["error"]["message"]
    assert one("SELECT count(*) FROM runs") == 0


def test_a_run_whose_flow_is_not_loaded_here_cannot_be_ended_here(api, started, query):
    query("UPDATE runs SET flow = 'elsewhere'")
    answer = api.post(f"/api/runs/{started}/end", {"reason": "x"})
    assert (answer.status, answer.code) == (409, "FLOW_NOT_LOADED")
    assert "'elsewhere'" in answer.json["error"]["message"]


RESULT_OF = "UPDATE items SET result = %s WHERE key = %s"
# Of 10,000 bytes with its quotes, of one more, as many that are stored in a few, and of many that are not.
SIZED = {"a": "x" * 9_998, "b": "x" * 9_999, "c": "x" * 500_000, "d": secrets.token_hex(20_000), "e": None}


def test_large_results_are_left_out_of_the_list_of_items_and_shown_with_a_single_one(api, dsn, started):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(RESULTS, {"run": started, "targets": list(SIZED)})
        connection.cursor().executemany(RESULT_OF, [(Jsonb(text), key) for key, text in SIZED.items() if text])
    items = ITEMS.page.model_validate(api.get(f"/api/runs/{started}/items").json).items
    assert {item.key: item.result for item in items} == {**dict.fromkeys(SIZED), "a": SIZED["a"]}
    assert {item.key for item in items if item.result_bytes} == {"a", "b", "c", "d"}
    assert next(item.result_bytes for item in items if item.key == "d") > 20_000
    for item in items:
        one = shapes.ItemInFull.model_validate(api.get(f"/api/runs/{started}/items/{item.id}").json)
        assert (one.key, one.result, one.attempts) == (item.key, SIZED[item.key], [])


def test_an_item_is_shown_with_its_attempts_and_found_in_its_own_run_only(api, dsn, started, one):
    other = api.post("/api/runs", {"flow": "test", "key": "other"}).json["run_id"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(RESULTS, {"run": started, "targets": ["a", "b"]})
        connection.execute(FAILED, {"run": started, "key": "a"})
    item = one("SELECT id FROM items WHERE key = 'a'")
    shown = shapes.ItemInFull.model_validate(api.get(f"/api/runs/{started}/items/{item}").json)
    assert [attempt.error_code for attempt in shown.attempts] == ["TIMEOUT"]
    add_tenant(dsn, "rival")
    rival = api.with_key(new_key(dsn, "admin", "rival"))
    for client, path in ((api, f"{other}/items/{item}"), (api, f"{started}/items/{item + 1000}")):
        refused = client.get(f"/api/runs/{path}")
        assert (refused.status, refused.code) == (404, "NOT_FOUND")
    assert rival.get(f"/api/runs/{started}/items/{item}").json["error"]["message"] == f"There is no run {started}."


@pytest.mark.req("ENG-106", "G-32")
def test_another_tenants_run_answers_exactly_like_one_that_does_not_exist(api, dsn, started, one):
    add_tenant(dsn, "rival")
    rival = api.with_key(new_key(dsn, "admin", "rival"))
    absent = str(int(started) + 1000)
    for method, path, body in [
        ("GET", "", None),
        ("GET", "/items", None),
        ("GET", "/log", None),
        ("GET", "/waiting", None),
        ("GET", "/outcomes.csv", None),
        ("POST", "/end", {"reason": "theirs"}),
    ]:
        answers = []
        for run_id in (started, absent):
            answer = rival.ask(method, f"/api/runs/{run_id}{path}", body, headers={"X-Request-Id": "same"})
            answers.append((answer.status, answer.body.replace(run_id.encode(), b"ID")))
        assert answers[0] == answers[1]
        assert answers[0][0] == 404
    assert rival.get("/api/runs").json["runs"] == []
    assert one("SELECT status FROM runs") == "queued"


def test_the_same_event_key_is_two_runs_for_two_tenants(api, dsn):
    add_tenant(dsn, "rival")
    rival = api.with_key(new_key(dsn, "operator", "rival"))
    answers = [client.post("/api/runs", {"flow": "test", "key": "monday"}) for client in (api, rival)]
    assert [answer.status for answer in answers] == [201, 201]
    assert answers[0].json["run_id"] != answers[1].json["run_id"]


@pytest.mark.req("ENG-53")
def test_why_its_items_wait_is_answered_for_each_and_never_empty(api, query, started, dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(RESULTS, {"run": int(started), "targets": ["a", "b", "c"]})
        connection.execute("UPDATE lanes SET paused_at = now(), paused_by = 'cli:ann', paused_reason = 'invoice'")
    page = shapes.WaitingPage.model_validate(api.get(f"/api/runs/{started}/waiting?limit=2").json)
    assert [(row.key, row.cause) for row in page.waiting] == [("a", "paused"), ("b", "paused")]
    assert all("invoice" in row.detail and "ann" not in row.detail for row in page.waiting)
    (group,) = page.groups
    assert (group.cause, group.lane, group.count, len(group.sample)) == ("paused", page.waiting[0].lane, 3, 3)
    assert (page.total, page.in_flight, page.blocked) == (3, 0, True)
    assert "paused by an operator: invoice" in page.summary
