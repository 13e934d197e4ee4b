"""Automation runs over HTTP: what is started and what is not, where a run stands, what became of each fiche."""

from __future__ import annotations

import asyncio
import itertools
import json

import psycopg
import pytest

from ecluse.api.redrives import RedrivenRun, RedrivePreview
from ecluse.flows.automation.shapes import (
    AutomationFichePage,
    AutomationLogPage,
    AutomationRun,
    Diagnostic,
    Triggered,
)
from ecluse.flows.automation.surface import ALL_RUNS
from tests.support.api_server import add_connections, add_tenant, new_key, serving
from tests.support.automation_rows import NO_URL, WITHOUT_URL, end_run
from tests.support.fiche_rows import call, details, save

SCHEDULES, RUNS, TRIGGER = "/api/automation/schedules", "/api/automation/runs", "/api/automation/trigger"
NAMES = itertools.count(1)
TRANSCRIBED = """
UPDATE recordings SET has_transcription = true, transcription_text = 'said', transcribed_at = ecluse_now()
WHERE call_id = %s
"""


def ask(dsn, sql, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def on(dsn, do, *arguments, **options):
    async def act():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            return await do(connection, *arguments, **options)

    return asyncio.run(act())


def new_schedule(client, *fiche_ids, **given):
    selection = {"mode": "manual", "fiche_ids": list(fiche_ids)}
    wanted = {"name": f"schedule {next(NAMES)}", "schedule_type": "MANUAL", "fiche_selection": selection, **given}
    answer = client.post(SCHEDULES, wanted)
    assert answer.status == 201, answer.body
    return answer.json["id"]


def triggered(client, schedule, **override):
    given = {"scheduleId": schedule, **({"overrideFicheSelection": override} if override else {})}
    answer = client.post(TRIGGER, given)
    assert answer.status == 200, answer.body
    return Triggered.model_validate(answer.json)


def about_fiches(started):
    """Without what this server lacks: it has no vendors."""
    return [one for one in started.warnings if not one.startswith(("Not set", "There is no audit config"))]


@pytest.mark.req("AUT-116")
def test_a_run_that_cannot_succeed_is_said_to_be_one(shared_api):
    nothing = triggered(shared_api, new_schedule(shared_api))
    assert [one.split(":")[0] for one in nothing.warnings] == [
        "No fiche is given", "Not set on this server", "There is no audit config for it",
    ]  # fmt: skip
    assert "CRM_BASE_URL" in nothing.warnings[1]
    assert "LLM_API_KEY" in nothing.warnings[1]
    (only,) = triggered(shared_api, new_schedule(shared_api, "7", run_transcription=False, run_audits=False)).warnings
    assert "LLM_API_KEY" not in only


def shown(client, run):
    answer = client.get(f"{RUNS}/{run}")
    assert answer.status == 200, answer.body
    return AutomationRun.model_validate(answer.json)


@pytest.mark.req("AUT-04", "AUT-06", "AUT-10", "AUT-13", "AUT-14")
def test_a_trigger_answers_with_the_run_there_is_to_look_at(shared_api, shared_dsn):
    schedule = new_schedule(shared_api, "7")
    started = triggered(shared_api, schedule, mode="manual", ficheIds="8 9", useRlm=True)
    assert (len(started.event_ids), about_fiches(started)) == (1, [])
    run = shown(shared_api, started.run_id)
    assert (run.status, run.state, run.schedule_id, run.event_id) == (
        "running",
        "queued",
        schedule,
        started.event_ids[0],
    )
    assert run.event_id.startswith("automation-manual-")
    (told,) = ask(
        shared_dsn,
        "SELECT payload FROM events_outbox WHERE event_type = 'automation/run' AND event_key = %s",
        f"{run.event_id}:automation/run",
    )[0]
    assert told["override_fiche_selection"] == {"mode": "manual", "fiche_ids": ["8", "9"], "use_rlm": True}
    assert (told["run_id"], told["schedule_id"]) == (run.id, schedule)
    for path in (f"{SCHEDULES}/{schedule}/runs", f"{RUNS}?schedule_id={schedule}"):
        page = ALL_RUNS.page.model_validate(shared_api.get(path).json)
        assert [one.id for one in page.runs] == [run.id]
    assert [one["id"] for one in shared_api.get(f"{SCHEDULES}/{schedule}").json["runs"]] == [run.id]
    trail = "SELECT count(*) FROM audit_trail WHERE action = 'automation_schedule.trigger' AND subject = %s"
    assert ask(shared_dsn, trail, f"schedule:{schedule}") == [(1,)]


@pytest.mark.req("AUT-17", "G-41", "G-47", "G-34")
@pytest.mark.parametrize(
    ("given", "status", "code"),
    [
        ({"scheduleId": "4711"}, 404, "NOT_FOUND"),
        ({"scheduleId": "OFF"}, 409, "SCHEDULE_INACTIVE"),
        ({"scheduleId": "DELETED"}, 404, "NOT_FOUND"),
        ({"scheduleId": "OTHER"}, 404, "NOT_FOUND"),
        ({}, 422, "INVALID_INPUT"),
        ({"scheduleId": ""}, 422, "INVALID_INPUT"),
        ({"scheduleId": "x"}, 422, "INVALID_INPUT"),
        ({"scheduleId": 7}, 422, "INVALID_INPUT"),
        ({"scheduleId": None}, 422, "INVALID_INPUT"),
        ({"scheduleId": "99999999999999999999"}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "schedule_id": "ON"}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "dryRun": True}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": []}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": {"fiches": ["1"]}}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": {"ficheIds": ["1", ""]}}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": {"ficheIds": [201 * "a"]}}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": {"maxFiches": -1}}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": {"mode": "date_range"}}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": {"dateRange": "today"}}, 422, "INVALID_INPUT"),
        ({"scheduleId": "ON", "overrideFicheSelection": {"mode": "filter", "dateRange": "custom",
          "startDate": "2026-02-01", "endDate": "2026-01-31"}}, 422, "INVALID_INPUT"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_started(shared_api, shared_dsn, given, status, code):
    ids = {name: new_schedule(shared_api, "7", is_active=name != "OFF") for name in ("ON", "OFF", "DELETED")}
    shared_api.ask("DELETE", f"{SCHEDULES}/{ids['DELETED']}")
    add_connections(shared_dsn, "acme")
    ids["OTHER"] = new_schedule(shared_api.with_key(new_key(shared_dsn, "operator", "acme")), "7")
    before = ask(shared_dsn, "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM events_outbox)")
    meant = {name: ids.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
    answer = shared_api.post(TRIGGER, meant)
    assert (answer.status, answer.code) == (status, code), answer.body
    assert ask(shared_dsn, "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM events_outbox)") == before


@pytest.mark.req("G-29")
def test_a_run_by_hand_is_allowed_while_another_is_active(shared_api):
    schedule = new_schedule(shared_api, "7")
    first, second = triggered(shared_api, schedule), triggered(shared_api, schedule)
    assert first.run_id != second.run_id
    row = shared_api.get(f"{SCHEDULES}/{schedule}").json
    assert (row["holding_run_id"], row["last_run_id"]) == (first.run_id, second.run_id)


@pytest.mark.req("AUT-58", "G-47")
def test_a_list_longer_than_its_limit_is_cut_and_the_answer_says_so(shared_api):
    schedule = new_schedule(shared_api, "1", "2", "3", "2")
    assert about_fiches(triggered(shared_api, schedule, maxFiches=3)) == []
    (warning,) = about_fiches(triggered(shared_api, schedule, maxFiches=2))
    assert "the first 2 are taken" in warning


@pytest.mark.req("G-46")
def test_a_wait_that_cannot_be_enough_is_said_at_once(dsn):
    on(dsn, save, ("1", details(*(call(f"a{n}") for n in range(3)))), ("2", details(call("b"))))
    knobs = {"TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": 1, "AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS": 180_000}
    with serving(dsn, **knobs) as client:
        client = client.with_key(new_key(dsn))
        schedule = new_schedule(client, "1", "2", "3", run_audits=False)
        (warning,) = about_fiches(triggered(client, schedule))
        assert "4 recordings have no transcript yet, which takes 4 min at 1 a minute" in warning
        assert about_fiches(triggered(client, schedule, maxFiches=1))[1:] == [], "3 fit"
        ask(dsn, TRANSCRIBED, "b")
        assert about_fiches(triggered(client, schedule)) == []
        idle = new_schedule(client, "1", "2", run_transcription=False, run_audits=False)
        assert about_fiches(triggered(client, idle)) == []
        budgets = client.get("/api/automation/diagnostic").json["budgets"]
        assert (budgets["recordings_that_fit"], budgets["recordings_per_minute"]) == (3, 1)


def test_a_trigger_repeated_with_the_same_idempotency_key_starts_nothing(shared_api, shared_dsn):
    schedule = new_schedule(shared_api, "7")
    once = {"headers": {"Idempotency-Key": "trigger-once"}}
    first, again = (shared_api.post(TRIGGER, {"scheduleId": schedule}, **once) for _ in range(2))
    assert (first.json, again.headers["Idempotent-Replay"]) == (again.json, "true")
    assert ask(shared_dsn, "SELECT count(*) FROM runs WHERE schedule_id = %s", schedule) == [(1,)]


FACTS = """
INSERT INTO automation_run_facts (run_id, schedule_id, config_snapshot, result_summary, transcriptions_run, audits_run)
VALUES (%s, %s, %s, '{"status": "partial"}', 5, 6)
"""
SNAPSHOT = {
    "schedule_name": "as it was",
    "schedule_type": "MANUAL",
    "specific_audit_configs": [9007199254740993],
    "selection_summary": {"selection": {"picked": 3, "dropped": {"groupe": 1}}},
    "audit_configs": [{"id": "3", "version": 2, "name": "Compliance"}],
    "budget_warning": "too many",
}


@pytest.mark.req("AUT-14", "AUT-44", "AUT-45", "AUT-56", "AUT-66", "AUT-72", "AUT-195")
def test_a_run_is_shown_in_full(shared_api, shared_dsn):
    schedule = new_schedule(shared_api, "7")
    run = triggered(shared_api, schedule).run_id
    new = shown(shared_api, run)
    assert (new.phase, new.config_snapshot, new.selection_summary, new.api_errors, new.stages) == (
        None,
        {},
        None,
        [],
        [],
    )
    ask(shared_dsn, FACTS, run, schedule, json.dumps(SNAPSHOT))
    failed = [{"date": "01/02/2026", "code": "VENDOR_UNAVAILABLE", "status": 503, "error": "down"}]
    ask(
        shared_dsn,
        "UPDATE runs SET status = 'running', state = 'running', phase = 'transcribing', started_at = ecluse_now(),"
        " error_details = %s, selected = 3 WHERE id = %s",
        json.dumps({"apiErrors": failed}),
        run,
    )
    ask(
        shared_dsn,
        "INSERT INTO stages (run_id, stage, expected, started_at, deadline_at, progress_at) VALUES"
        " (%s, 'fetch', 3, ecluse_now(), ecluse_now(), ecluse_now())",
        run,
    )
    ask(
        shared_dsn,
        "INSERT INTO outcomes (run_id, target, outcome, error_code, reason) VALUES (%s, '1', NULL, NULL, NULL),"
        " (%s, '2', 'ignored', 'NOT_FOUND', 'gone'), (%s, '3', 'failed', 'X', 'y')",
        run, run, run,
    )  # fmt: skip
    shared_api.ask("PATCH", f"{SCHEDULES}/{schedule}", {"name": f"renamed {schedule}"})
    going = shown(shared_api, run)
    assert (going.status, going.state, going.phase) == ("running", "running", "transcribing")
    assert (going.total_fiches, going.successful_fiches, going.failed_fiches, going.ignored_fiches) == (2, 0, 1, 1)
    assert going.config_snapshot["schedule_name"] == "as it was"
    assert going.config_snapshot["specific_audit_configs"] == ["9007199254740993"]
    assert going.selection_summary == SNAPSHOT["selection_summary"]
    assert (going.audit_configs, going.budget_warning) == (SNAPSHOT["audit_configs"], "too many")
    assert going.api_errors == going.error_details["apiErrors"] == failed
    assert [(stage.stage, stage.expected, stage.waiting) for stage in going.stages] == [("fetch", 3, 3)]
    assert (going.is_stale, going.stale_at > going.started_at) == (False, True)
    ask(shared_dsn, "UPDATE runs SET started_at = ecluse_now() - interval '71 minutes' WHERE id = %s", run)
    assert shown(shared_api, run).is_stale
    ask(
        shared_dsn,
        "UPDATE outcomes SET outcome = 'successful' WHERE run_id = %s AND outcome IS NULL",
        run,
    )
    ask(
        shared_dsn,
        "UPDATE runs SET status = 'partial', state = 'partial', successful = 1, failed = 1, ignored = 1,"
        " end_cause = 'normal', ended_at = started_at + interval '1500 milliseconds' WHERE id = %s",
        run,
    )
    ended = shown(shared_api, run)
    assert (ended.status, ended.duration_ms, ended.is_stale, ended.stale_at) == ("partial", 1500, False, None)
    assert (ended.transcriptions_run, ended.audits_run, ended.result_summary) == (5, 6, {"status": "partial"})


@pytest.mark.req("AUT-15")
def test_logs_are_in_the_order_of_their_time(shared_api, shared_dsn):
    run = triggered(shared_api, new_schedule(shared_api, "7")).run_id
    ask(shared_dsn, "DELETE FROM run_log WHERE run_id = %s", run)
    ask(
        shared_dsn,
        "INSERT INTO run_log (run_id, at, level, message, data) SELECT %s, ecluse_now() + n * interval '1 second',"
        " 'warning', 'line ' || n, '{\"n\": 1}' FROM unnest(ARRAY[3, 1, 2]) n",
        run,
    )
    page = AutomationLogPage.model_validate(shared_api.get(f"{RUNS}/{run}/logs").json)
    assert [line.message for line in page.logs] == ["line 1", "line 2", "line 3"]
    assert (page.logs[0].level, page.logs[0].metadata) == ("warning", {"n": 1})
    rest = shared_api.get(f"{RUNS}/{run}/logs?limit=1&offset=1").json["logs"]
    assert [line["message"] for line in rest] == ["line 2"]
    newest = AutomationLogPage.model_validate(shared_api.get(f"{RUNS}/{run}/logs?order=desc&limit=2").json)
    assert ([line.message for line in newest.logs], newest.total) == (["line 3", "line 2"], 3)
    assert shared_api.get(f"{RUNS}/{run}/logs?offset=9").json["total"] == 3
    assert shared_api.get(f"{RUNS}/{run}/logs?order=newest").status == 422


@pytest.mark.req("AUT-15", "AUT-64")
def test_a_run_says_what_will_fail_which_days_are_missing_and_how_often_a_line_was_said(shared_api, shared_dsn):
    run = triggered(shared_api, new_schedule(shared_api, "601", "602")).run_id
    ask(shared_dsn, "INSERT INTO outcomes (run_id, target) VALUES (%s, '601'), (%s, '602')", run, run)
    told = {"apiErrors": [{"date": "02/03/2026"}], "missing_days": ["2026-03-02"], "selection_incomplete": "lacks"}
    ask(shared_dsn, "UPDATE runs SET selected = 2, error_details = %s WHERE id = %s", json.dumps(told), run)
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        connection.execute(WITHOUT_URL, {"run": int(run), "fiche": "602"})
    ask(
        shared_dsn,
        "INSERT INTO run_log (run_id, at, level, message, count, targets, last_at, fold) VALUES"
        " (%s, ecluse_now(), 'error', 'model down', 28, '{601,602}', ecluse_now(), 'x')",
        run,
    )
    found = shown(shared_api, run)
    assert (found.will_fail.count, found.will_fail.codes) == (1, {"NO_URL": 1})
    assert (found.selection_incomplete, found.missing_days) == ("lacks", ["2026-03-02"])
    page = AutomationFichePage.model_validate(shared_api.get(f"{RUNS}/{run}/fiches").json)
    first, second = page.fiches
    assert (first.will_fail, second.status) == (None, "open")
    assert (second.will_fail.code, second.will_fail.reason) == ("NO_URL", f"{NO_URL} (602-2)")
    plain = shared_api.get(f"/api/runs/{run}").json
    assert plain["will_fail"] == {"count": 1, "codes": {"NO_URL": 1}}
    assert plain["selection_incomplete"] == "lacks"
    assert (
        f'"602","","","","false","NO_URL: {NO_URL} (602-2)"'
        in shared_api.get(f"/api/runs/{run}/outcomes.csv").body.decode()
    )
    for path, name in ((f"{RUNS}/{run}/logs", "logs"), (f"/api/runs/{run}/log", "log")):
        (line,) = [line for line in shared_api.get(path).json[name] if line["count"] > 1]
        assert line["message"] == "28 × model down (601, 602)"  # noqa: RUF001 - as it is told
        assert (line["count"], line["targets"]) == (28, ["601", "602"])


@pytest.mark.req("AUT-195")
def test_what_became_of_each_fiche_and_what_it_still_lacks(shared_api, shared_dsn):
    ids = on(shared_dsn, save, ("501", details(call("x"), call("y"))), ("502", details()))
    ask(shared_dsn, TRANSCRIBED, "x")
    run = triggered(shared_api, new_schedule(shared_api, "501", "502", "503", "504")).run_id
    other = triggered(shared_api, new_schedule(shared_api, "501")).run_id
    ask(
        shared_dsn,
        "INSERT INTO outcomes (run_id, target, outcome, error_code, reason) VALUES (%s, '501', NULL, NULL, NULL),"
        " (%s, '502', 'successful', NULL, NULL), (%s, '503', 'failed', 'DETAILS_NOT_FETCHED', 'no details'),"
        " (%s, '504', 'ignored', 'NOT_FOUND', 'Fiche not found (404)')",
        run, run, run, run,
    )  # fmt: skip
    ask(
        shared_dsn,
        "INSERT INTO automation_run_fiches (run_id, fiche_id, fiche_cache_id, recordings_count, transcription_run_id)"
        " VALUES (%s, '501', %s, 2, %s)",
        run, ids[0], other,
    )  # fmt: skip
    config = shared_api.post("/api/audit-configs", {"name": "c", "steps": [{"name": "a", "criteria": "b"}]}).json["id"]
    ask(
        shared_dsn,
        "INSERT INTO audits (tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version,"
        " trigger_source, automation_run_id, status, error_code, error, created_at, finished_at)"
        " VALUES ('default', %s, %s, '502', %s, 1, 'automation', %s, 'failed', 'X', 'y', ecluse_now(),"
        " ecluse_now())",
        run, ids[1], config, run,
    )  # fmt: skip
    rows = AutomationFichePage.model_validate(shared_api.get(f"{RUNS}/{run}/fiches").json).fiches
    assert [(row.fiche_id, row.status, row.details) for row in rows] == [
        ("501", "open", "ready"), ("502", "successful", "ready"), ("503", "failed", "missing"),
        ("504", "ignored", "missing"),
    ]  # fmt: skip
    assert (rows[0].recordings.total, rows[0].recordings.transcribed, rows[0].recordings_count) == (2, 1, 2)
    assert (rows[0].transcription_run_id, rows[0].transcription_status) == (other, "queued")
    assert (rows[1].audits.total, rows[1].audits.completed, rows[1].audits.failed) == (1, 0, 1)
    assert (rows[2].error, rows[2].error_code, rows[2].ignore_reason) == ("no details", "DETAILS_NOT_FETCHED", None)
    assert (rows[3].error, rows[3].error_code, rows[3].ignore_reason) == (None, "NOT_FOUND", "Fiche not found (404)")
    for status, found in (("open", ["501"]), ("failed", ["503"]), ("ignored", ["504"]), ("successful", ["502"])):
        page = shared_api.get(f"{RUNS}/{run}/fiches?status={status}").json["fiches"]
        assert [row["fiche_id"] for row in page] == found
    assert [row["fiche_id"] for row in shared_api.get(f"{RUNS}/{run}/fiches?limit=2&offset=2").json["fiches"]] == [
        "503", "504",
    ]  # fmt: skip
    assert shared_api.get(f"{RUNS}/{run}/fiches?status=lost").status == 422


def test_runs_are_listed_by_status_and_schedule(shared_api, shared_dsn):
    schedule = new_schedule(shared_api, "7")
    runs = [triggered(shared_api, schedule).run_id for _ in range(3)]
    on(shared_dsn, end_run, int(runs[0]), f1="failed", f2="successful")
    page = shared_api.get(f"{SCHEDULES}/{schedule}/runs").json["runs"]
    assert [(one["id"], one["status"]) for one in page] == [
        (runs[2], "running"), (runs[1], "running"), (runs[0], "partial"),
    ]  # fmt: skip
    for status, found in (("running", runs[:0:-1]), ("partial", runs[:1]), ("failed", [])):
        for path in (f"{SCHEDULES}/{schedule}/runs?status={status}", f"{RUNS}?schedule_id={schedule}&status={status}"):
            assert [one["id"] for one in shared_api.get(path).json["runs"]] == found
    assert shared_api.get(f"{RUNS}?schedule_id=4711").status == 404
    assert shared_api.get(f"{RUNS}?status=lost").status == 422
    assert shared_api.get(f"{RUNS}?limit=201").status == 422


@pytest.mark.req("G-89")
def test_cancelled_fiches_are_told_apart_and_redriven_on_request(shared_api, shared_dsn):
    run = triggered(shared_api, new_schedule(shared_api, "1", "2", "3")).run_id
    on(shared_dsn, end_run, int(run), f1="successful", f2="cancelled", f3="cancelled")
    ended = shown(shared_api, run)
    assert (ended.status, ended.state, ended.ended_by) == ("partial", "cancelled", "laptop")
    assert (ended.selected, ended.total_fiches, ended.failed_fiches, ended.cancelled_fiches) == (3, 3, 2, 2)
    for status, there in (("cancelled", True), ("partial", False)):
        assert (run in [one["id"] for one in shared_api.get(f"{RUNS}?status={status}").json["runs"]]) is there
    path = f"/api/runs/{run}/redrive"
    told = RedrivePreview.model_validate(shared_api.get(path).json)
    assert (told.failed, told.cancelled, told.count, told.cannot_succeed) == (0, 2, 0, 0)
    assert RedrivePreview.model_validate(shared_api.get(f"{path}?outcome=all").json).count == 2
    refused = shared_api.post(path)
    assert (refused.status, refused.code) == (409, "ONLY_CANCELLED")
    assert "outcome all" in refused.json["error"]["message"]
    assert shared_api.post(path, {"outcomes": "all"}).status == 422
    again = RedrivenRun.model_validate(shared_api.post(path, {"outcome": "all"}).json)
    assert again.parent_run_id == run
    on(shared_dsn, end_run, int(again.run_id), f2="successful", f3="failed")
    stands = shown(shared_api, run).after_redrives
    assert (stands.selected, stands.successful, stands.failed, stands.cancelled) == (3, 2, 1, 0)
    listed = {one["id"]: one for one in shared_api.get(f"{RUNS}?limit=200").json["runs"]}
    assert (listed[again.run_id]["parent_run_id"], listed[run]["parent_run_id"]) == (run, None)


def test_failed_fiches_are_redriven_as_a_linked_run_and_once_at_a_time(shared_api, shared_dsn):
    schedule = new_schedule(shared_api, "1", "2", "3")
    run = triggered(shared_api, schedule).run_id
    path = f"/api/runs/{run}/redrive"
    early = shared_api.post(path)
    assert (early.status, early.code) == (409, "RUN_NOT_ENDED")
    on(shared_dsn, end_run, int(run), f1="failed", f2="successful", f3="failed")
    first = RedrivenRun.model_validate(shared_api.post(path).json)
    assert (first.parent_run_id, first.deduplicated) == (run, False)
    second = RedrivenRun.model_validate(shared_api.post(path).json)
    assert (second.run_id, second.deduplicated) == (first.run_id, True)
    assert shown(shared_api, run).redrives == [first.run_id]
    assert shown(shared_api, first.run_id).parent_run_id == run
    ((given,),) = ask(shared_dsn, "SELECT input FROM runs WHERE id = %s", first.run_id)
    assert given["override_fiche_selection"] == {"mode": "manual", "fiche_ids": ["1", "3"], "max_fiches": None}
    on(shared_dsn, end_run, int(first.run_id), f1="successful", f3="ignored")
    nothing = shared_api.post(f"/api/runs/{first.run_id}/redrive")
    assert (nothing.status, nothing.code) == (409, "NOTHING_FAILED")
    shared_api.ask("PATCH", f"{SCHEDULES}/{schedule}", {"is_active": False})
    assert shared_api.post(path).code == "SCHEDULE_INACTIVE"
    shared_api.ask("DELETE", f"{SCHEDULES}/{schedule}")
    assert shared_api.post(path).code == "SCHEDULE_GONE"
    trail = "SELECT count(*) FROM audit_trail WHERE action = 'run.redrive' AND subject = %s"
    assert ask(shared_dsn, trail, f"run:{run}") == [(1,)]


@pytest.mark.req("G-73", "AUT-85")
def test_an_operator_cancels_a_run_with_a_reason(shared_api):
    schedule = new_schedule(shared_api, "7")
    run = triggered(shared_api, schedule).run_id
    assert shared_api.post(f"/api/runs/{run}/end", {"reason": "wrong fiches"}).status == 200
    ended = shown(shared_api, run)
    assert (ended.status, ended.state, ended.end_cause) == ("failed", "cancelled", "operator")
    assert ended.ended_by
    assert "wrong fiches" in str(ended.error_message)
    row = shared_api.get(f"{SCHEDULES}/{schedule}").json
    assert (row["last_run_status"], row["failed_runs"], row["total_runs"]) == ("cancelled", 0, 1)
    assert row["cancelled_runs"] == 1


@pytest.mark.req("G-33")
def test_only_automation_runs_of_the_own_tenant_exist(shared_api, shared_dsn):
    add_tenant(shared_dsn, "acme")
    rival = shared_api.with_key(new_key(shared_dsn, "admin", "acme"))
    mine = triggered(shared_api, new_schedule(shared_api, "7")).run_id
    test_run = shared_api.post("/api/runs", {"flow": "test"}).json["run_id"]
    for client, run in ((rival, mine), (shared_api, test_run), (shared_api, "4711"), (shared_api, "x")):
        for method, path in (("GET", ""), ("GET", "/logs"), ("GET", "/fiches")):
            answer = client.ask(method, f"{RUNS}/{run}{path}")
            assert (answer.status, answer.code) == (404, "NOT_FOUND"), path
    assert mine not in {one["id"] for one in rival.get(f"{RUNS}?limit=200").json["runs"]}
    assert test_run not in {one["id"] for one in shared_api.get(f"{RUNS}?limit=200").json["runs"]}


@pytest.mark.req("AUT-16", "G-33")
def test_the_diagnostic_says_what_is_set_and_what_to_do_and_no_secret(dsn):
    secrets = {
        "CRM_API_KEY": "crm-secret", "ELEVENLABS_API_KEY": "speech-secret", "CRM_BASE_URL": "http://user:pw@crm.test",
    }  # fmt: skip
    with serving(dsn, roles=frozenset({"api", "worker", "scheduler"}), **secrets) as client:
        answer = client.with_key(new_key(dsn, "viewer")).get("/api/automation/diagnostic")
        found = Diagnostic.model_validate(answer.json)
    said = answer.body.decode()
    assert not any(secret in said for secret in ("crm-secret", "speech-secret", "pw@"))
    assert found.settings["CRM_API_KEY"]
    assert (found.settings["LLM_API_KEY"], found.settings["SMTP_HOST"]) == (False, False)
    assert "Set LLM_API_KEY, LLM_MODEL: runs fail until then." in found.hints
    assert found.budgets["recordings_that_fit"] == 150
    assert found.budgets["stale_after_seconds"] == 70 * 60
    assert found.knobs["AUTOMATION_SCHEDULER_WINDOW_MINUTES"] == 20
    assert {lane["name"] for lane in found.lanes} >= {"crm", "crm-sales"}
    assert [one["works_on_automation"] for one in found.replicas] == [True]
    assert not any("replica" in hint for hint in found.hints)


def test_the_diagnostic_says_when_nobody_works_and_which_lane_is_paused(shared_api, shared_dsn):
    ask(
        shared_dsn,
        "INSERT INTO lanes (name, burst, paused_at, paused_by, paused_reason) VALUES"
        " ('crm', 1, ecluse_now(), 'me', 'unpaid') ON CONFLICT (name) DO UPDATE SET paused_at = ecluse_now(),"
        " paused_by = 'me', paused_reason = 'unpaid'",
    )
    hints = shared_api.get("/api/automation/diagnostic").json["hints"]
    assert any(hint.startswith("No live replica has the role scheduler") for hint in hints)
    assert any(hint.startswith("No live replica works on automation") for hint in hints)
    assert any(hint.startswith("Lane crm is paused (unpaid)") for hint in hints)
