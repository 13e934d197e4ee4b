"""Automation schedules over HTTP: what is kept, shown and changed, and what is refused before anything is."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ecluse.bootstrap import automation_config
from ecluse.engine import load_run
from ecluse.flows.automation import events
from ecluse.flows.automation.queries import staleness
from ecluse.flows.automation.shapes import AutomationSchedule, ChangedAutomationSchedule
from ecluse.flows.automation.surface import ALL_SCHEDULES
from ecluse.settings import Settings
from tests.support.api_server import add_tenant, new_key, serving
from tests.support.databases import everything_stored

PATH = "/api/automation/schedules"
RANGE = {"mode": "date_range", "date_range": "yesterday"}
NAMES = itertools.count(1)
FULL = {
    "scheduleType": "WEEKLY",
    "timezone": "Europe/Paris",
    "timeOfDay": "06:30",
    "dayOfWeek": 1,
    "catchUp": "skip",
    "ficheSelection": {
        "mode": "filter",
        "dateRange": "custom",
        "startDate": "2026-01-01",
        "endDate": "2026-01-31",
        "groupes": ["Paris"],
        "onlyWithRecordings": True,
        "onlyUnaudited": True,
        "useRlm": True,
        "maxFiches": 100,
        "maxRecordingsPerFiche": 20,
    },
    "runTranscription": False,
    "skipIfTranscribed": False,
    "transcriptionPriority": "high",
    "runAudits": False,
    "useAutomaticAudits": False,
    "continueOnError": False,
    "retryFailed": True,
    "maxRetries": 3,
    "notifyEmails": ["ops@example.com"],
    "notifyOnComplete": True,
    "notifyOnError": False,
}


def ask(dsn, sql, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


async def told(dsn, run_id, what):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await what(connection, await load_run(connection, run_id))


def body(**given):
    return {"name": f"schedule {next(NAMES)}", "schedule_type": "MANUAL", "fiche_selection": RANGE, **given}


def made(client, **given):
    answer = client.post(PATH, body(**given))
    assert answer.status == 201, answer.body
    return shown(answer)


def change(client, schedule, **changes):
    answer = client.ask("PATCH", f"{PATH}/{schedule.id}", changes)
    assert answer.status == 200, answer.body
    return shown(answer)


def shown(answer):
    """Without the secret, which is shown once."""
    told = ChangedAutomationSchedule.model_validate(answer.json).model_dump(exclude={"webhook_secret"})
    return AutomationSchedule.model_validate(told)


@pytest.mark.req(
    "AUT-08", "AUT-33", "AUT-34", "AUT-35", "AUT-36", "AUT-37", "AUT-38", "AUT-39", "AUT-40", "AUT-41", "G-39"
)
def test_everything_that_is_said_is_kept_in_columns_of_its_own(shared_api, shared_dsn):
    answer = shared_api.post(PATH, {"name": "in full", **FULL})
    assert answer.status == 201, answer.body
    schedule = shown(answer)
    ((row,),) = ask(shared_dsn, "SELECT to_jsonb(s) FROM automation_schedules s WHERE id = %s", schedule.id)
    kept = {
        "name": "in full", "schedule_type": "WEEKLY", "timezone": "Europe/Paris", "time_of_day": "06:30",
        "day_of_week": 1, "day_of_month": None, "cron_expression": None, "is_active": True, "catch_up": "skip",
        "fiche_selection_mode": "filter", "fiche_selection_date_range": "custom",
        "fiche_selection_start_date": "2026-01-01", "fiche_selection_end_date": "2026-01-31",
        "fiche_selection_fiche_ids": [], "fiche_selection_groupes": ["Paris"],
        "fiche_selection_only_with_recordings": True, "fiche_selection_only_unaudited": True,
        "fiche_selection_use_rlm": True, "fiche_selection_max_fiches": 100,
        "fiche_selection_max_recordings_per_fiche": 20, "run_transcription": False, "skip_if_transcribed": False,
        "transcription_priority": "high", "run_audits": False, "use_automatic_audits": False,
        "specific_audit_configs": [], "continue_on_error": False, "retry_failed": True, "max_retries": 3,
        "webhook_url": None, "notify_emails": ["ops@example.com"], "notify_on_complete": True,
        "notify_on_error": False, "has_external_api_key": False, "last_run_at": None, "last_run_status": None,
        "total_runs": 0, "successful_runs": 0, "partial_runs": 0, "failed_runs": 0,
    }  # fmt: skip
    assert {name: row[name] for name in kept} == kept
    assert (schedule.cron, schedule.fiche_selection.groupes) == ("30 6 * * 1", ["Paris"])
    assert all(fire.at.weekday() == 0 for fire in schedule.next_fires)
    assert schedule.next_due_at == schedule.next_fires[0].at


@pytest.mark.req("AUT-09", "AUT-10", "AUT-11", "AUT-12", "G-72")
def test_a_schedule_is_made_shown_listed_changed_and_deleted(shared_api, shared_dsn):
    schedule = made(shared_api)
    path = f"{PATH}/{schedule.id}"
    assert AutomationSchedule.model_validate(shared_api.get(path).json) == schedule
    page = ALL_SCHEDULES.page.model_validate(shared_api.get(f"{PATH}?limit=200").json)
    assert [one.name for one in page.schedules] == sorted(one.name for one in page.schedules)
    assert schedule.id in {one.id for one in page.schedules}
    assert len(shared_api.get(f"{PATH}?limit=1").json["schedules"]) == 1
    changed = change(shared_api, schedule, name="another name", max_retries=2)
    assert (changed.name, changed.max_retries, changed.fiche_selection) == ("another name", 2, schedule.fiche_selection)
    run = shared_api.post("/api/automation/trigger", {"scheduleId": schedule.id}).json["run_id"]
    assert [one["id"] for one in shared_api.get(path).json["runs"]] == [run]
    assert shared_api.ask("DELETE", path).json == {"id": schedule.id, "deleted": True}
    for method, given in (("GET", None), ("PATCH", {"name": "x"}), ("DELETE", None)):
        answer = shared_api.ask(method, path, given)
        assert (answer.status, answer.code) == (404, "NOT_FOUND")
    assert schedule.id not in {one["id"] for one in shared_api.get(f"{PATH}?limit=200").json["schedules"]}
    assert [one["id"] for one in shared_api.get(f"{path}/runs").json["runs"]] == [run], "what it did can be read"
    assert shared_api.get(f"/api/automation/runs/{run}").json["status"] == "running", "and goes on"
    made(shared_api, name="another name")
    trail = ask(shared_dsn, "SELECT action FROM audit_trail WHERE subject = %s ORDER BY id", f"schedule:{schedule.id}")
    assert [action for (action,) in trail] == [
        f"automation_schedule.{verb}" for verb in ("create", "update", "trigger", "delete")
    ]


@pytest.mark.req("AUT-41", "G-39")
@pytest.mark.parametrize(
    ("given", "cron"),
    [
        ({"schedule_type": "MANUAL"}, None),
        ({"schedule_type": "DAILY", "time_of_day": "23:05"}, "5 23 * * *"),
        ({"schedule_type": "WEEKLY", "time_of_day": "00:00", "day_of_week": 0}, "0 0 * * 0"),
        ({"schedule_type": "MONTHLY", "time_of_day": "12:00", "day_of_month": 30}, "0 12 30L * *"),
        ({"schedule_type": "CRON", "cron_expression": "*/10 8-18 * * 1-5"}, "*/10 8-18 * * 1-5"),
    ],
)
def test_every_type_is_due_when_it_says(shared_api, given, cron):
    schedule = made(shared_api, timezone="Asia/Kathmandu", **given)
    assert schedule.cron == cron
    assert (schedule.next_due_at is None) == (cron is None)
    assert len(schedule.next_fires) == (0 if cron is None else 5)
    off = change(shared_api, schedule, is_active=False)
    assert (off.is_active, off.next_due_at, off.next_fires) == (False, None, [])
    assert change(shared_api, schedule, is_active=True).next_fires[:1] == schedule.next_fires[:1]


@pytest.mark.req("G-34", "AUT-129", "AUT-151", "G-69")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"schedule_type": "DAILY"}, "DAILY needs time_of_day"),
        ({"schedule_type": "MANUAL", "time_of_day": "06:00"}, "time_of_day goes with"),
        ({"schedule_type": "MANUAL", "cron_expression": "@daily"}, "cron_expression goes with schedule_type CRON"),
        ({"schedule_type": "CRON", "cron_expression": "61 * * * *"}, "bad minute"),
        ({"fiche_selection": {**RANGE, "groupes": ["\ud800"]}}, "lone surrogates"),
        ({"schedule_type": "CRON", "cron_expression": "0 0 30 2 *"}, "bad day-of-month"),
        ({"schedule_type": "DAILY", "time_of_day": "06:00", "timezone": "Europe/Pari"}, "did you mean Europe/Paris?"),
        ({"timezone": "Mars"}, "no time zone 'Mars'"),
        ({"fiche_selection": {"mode": "date_range", "date_range": None}}, "needs a date_range"),
        ({"fiche_selection": {**RANGE, "date_range": "custom", "start_date": "2026-02-01", "end_date": "2026-01-01"}},
         "backwards"),
        ({"fiche_selection": {"mode": "manual", "fiche_ids": ["12", 201 * "x"]}}, "these are not: 'xxx"),
        ({"fiche_selection": {"mode": "manual", "fiche_ids": [""]}}, "1 to 200 characters"),
        ({"fiche_selection": {**RANGE, "limit": 3}}, "limit"),
        ({"fiche_selection": None}, "fiche_selection"),
        ({"name": "  "}, "name"),
        ({"unknown": 1}, "unknown"),
        ({"specific_audit_configs": ["4711"]}, "there is no audit config 4711"),
        ({"webhook_url": "http://127.0.0.1/hook"}, "webhook_url"),
        ({"webhook_url": "ftp://example.com/"}, "webhook_url"),
        ({"webhook_url": "https://hooks.example.com/…"}, "as it is shown"),
        ({"notify_emails": ["me"]}, "not a mail address"),
        ({"id": 5}, "id"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_and_nothing_is_kept(shared_api, shared_dsn, wrong, said):
    schedule = made(shared_api)
    before = ask(shared_dsn, "SELECT count(*), max(updated_at) FROM schedules")
    answer = shared_api.post(PATH, body(**wrong))
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert said in answer.json["error"]["message"]
    changed = shared_api.ask("PATCH", f"{PATH}/{schedule.id}", wrong)
    assert (changed.status, changed.code) == (422, "INVALID_INPUT"), changed.body
    assert ask(shared_dsn, "SELECT count(*), max(updated_at) FROM schedules") == before
    assert ask(shared_dsn, "SELECT count(*) FROM schedules s LEFT JOIN automation_settings a USING (id)"
                           " WHERE a.id IS NULL") == [(0,)]  # fmt: skip


def test_a_name_is_taken_once(shared_api):
    schedule = made(shared_api)
    answer = shared_api.post(PATH, body(name=schedule.name))
    assert (answer.status, answer.code) == (409, "NAME_TAKEN")
    assert f"'{schedule.name}' already" in answer.json["error"]["message"]
    other = made(shared_api)
    renamed = shared_api.ask("PATCH", f"{PATH}/{other.id}", {"name": f" {schedule.name} "})
    assert (renamed.status, renamed.code) == (409, "NAME_TAKEN")
    assert shared_api.get(f"{PATH}/{other.id}").json["name"] == other.name


def test_the_secret_of_a_webhook_is_shown_once_and_sealed(shared_api, shared_dsn):
    path, key = f"{PATH}/{{}}/rotate-secret", {"Idempotency-Key": "a-schedule-with-a-webhook"}
    wanted = body(webhook_url="https://93.184.216.34/hook")
    first, again = (shared_api.post(PATH, wanted, headers=key) for _ in range(2))
    secret, schedule = first.json["webhook_secret"], shown(first)
    assert secret.startswith("whsec_")
    assert (again.json["id"], again.json["webhook_secret"]) == (schedule.id, None), "a repetition does not have it"
    assert schedule.webhook_signed
    assert "webhook_secret" not in shared_api.get(f"{PATH}/{schedule.id}").json
    moved = shared_api.ask("PATCH", f"{PATH}/{schedule.id}", {"webhookUrl": "https://93.184.216.34/other"})
    assert moved.json["webhook_secret"] is None, "the same signs at the new address"
    rotated = shared_api.post(path.format(schedule.id)).json["webhook_secret"]
    assert rotated.startswith("whsec_")
    assert rotated != secret
    names = "SELECT name FROM secrets WHERE name LIKE %s ORDER BY 1"
    of_schedule = f"schedule:{schedule.id}:%"
    sealed = [(f"schedule:{schedule.id}:webhook{old}",) for old in ("", ":old", ":url")]
    assert ask(shared_dsn, names, of_schedule) == sealed
    stored = ask(shared_dsn, "SELECT answer::text FROM idempotency_keys WHERE answer IS NOT NULL")
    assert secret not in str(stored)
    shared_api.ask("DELETE", f"{PATH}/{schedule.id}")
    assert ask(shared_dsn, names, of_schedule) == []
    trail = ask(shared_dsn, "SELECT action FROM audit_trail WHERE subject = %s ORDER BY id", f"schedule:{schedule.id}")
    assert ("automation_schedule.rotate-secret",) in trail


def test_a_schedule_gets_a_secret_with_its_webhook_or_by_rotation(shared_api, shared_dsn):
    without = made(shared_api)
    refused = shared_api.post(f"{PATH}/{without.id}/rotate-secret")
    assert (refused.status, refused.code) == (409, "NO_WEBHOOK")
    later = shared_api.ask("PATCH", f"{PATH}/{without.id}", {"webhook_url": "https://93.184.216.34/hook"})
    assert later.json["webhook_secret"].startswith("whsec_")
    ask(shared_dsn, "DELETE FROM secrets WHERE name LIKE %s", f"schedule:{without.id}:%")
    assert not shared_api.get(f"{PATH}/{without.id}").json["webhook_signed"], "made before there were secrets"
    assert shared_api.ask("PATCH", f"{PATH}/{without.id}", {"max_retries": 1}).json["webhook_secret"] is None
    assert shared_api.post(f"{PATH}/{without.id}/rotate-secret").json["webhook_secret"].startswith("whsec_")


def test_a_webhook_needs_a_key_to_seal_its_secret_with(dsn, one):
    with serving(dsn, settings=Settings(ECLUSE_SECRET_KEY=None)) as client:
        api = client.with_key(new_key(dsn))
        refused = api.post(PATH, body(webhook_url="https://93.184.216.34/hook"))
        assert (refused.status, refused.code) == (409, "NO_SECRET_KEY")
        assert refused.json["error"]["message"].startswith("webhook_url: this server has no encryption key")
        assert "ECLUSE_SECRET_KEY" in refused.json["error"]["message"]
        assert one("SELECT count(*) FROM schedules") == 0
        assert api.post(PATH, body()).status == 201


@pytest.mark.req("AUT-11")
def test_a_change_touches_only_what_is_given(shared_api):
    schedule = made(shared_api, schedule_type="WEEKLY", time_of_day="06:00", day_of_week=3, notify_on_complete=True)
    daily = change(shared_api, schedule, schedule_type="DAILY")
    assert (daily.cron, daily.day_of_week, daily.notify_on_complete) == ("0 6 * * *", None, True)
    narrowed = change(shared_api, schedule, ficheSelection={"groupes": ["Lyon"], "maxFiches": 5})
    assert narrowed.fiche_selection.model_dump() == {
        **daily.fiche_selection.model_dump(), "groupes": ["Lyon"], "max_fiches": 5,
    }  # fmt: skip
    by_hand = change(shared_api, schedule, fiche_selection={"mode": "manual", "fiche_ids": "7, 8"})
    assert (by_hand.fiche_selection.fiche_ids, by_hand.fiche_selection.date_range) == (["7", "8"], None)
    assert change(shared_api, schedule).updated_at >= by_hand.updated_at


@pytest.mark.req("G-33", "ENG-88", "G-39")
def test_a_key_goes_in_and_never_comes_out(shared_api, shared_dsn):
    secret = "crm-key-of-this-schedule"  # noqa: S105 - to be looked for
    once = {"headers": {"Idempotency-Key": "with-a-key"}}
    given = body(external_api_key=secret)
    answers = [shared_api.post(PATH, given, **once), shared_api.post(PATH, given, **once)]
    number = answers[0].json["id"]
    path = f"{PATH}/{number}"
    answers += [shared_api.get(path), shared_api.get(f"{PATH}?limit=200")]
    assert answers[0].json["has_external_api_key"] is True
    stored = "SELECT count(*) FROM secrets WHERE name = %s"
    assert ask(shared_dsn, stored, f"schedule:{number}") == [(1,)]
    answers.append(shared_api.ask("PATCH", path, {"max_retries": 1}))
    assert answers[-1].json["has_external_api_key"] is True, "left alone"
    answers.append(shared_api.ask("PATCH", path, {"external_api_key": None}))
    assert answers[-1].json["has_external_api_key"] is False
    assert ask(shared_dsn, stored, f"schedule:{number}") == [(0,)]
    answers.append(shared_api.ask("PATCH", path, {"externalApiKey": secret}))
    assert answers[-1].json["has_external_api_key"] is True
    assert shared_api.ask("DELETE", path).status == 200
    assert ask(shared_dsn, stored, f"schedule:{number}") == [(0,)]
    assert not any(secret in answer.body.decode() for answer in answers)
    dump = ask(shared_dsn, "SELECT s::text, a::text FROM schedules s JOIN automation_settings a USING (id)")
    dump += ask(shared_dsn, "SELECT k::text FROM idempotency_keys k") + ask(
        shared_dsn, "SELECT t::text FROM audit_trail t"
    )
    assert secret not in str(dump)


@pytest.mark.req("G-72")
def test_a_run_that_goes_on_keeps_the_key_of_its_deleted_schedule(shared_api, shared_dsn):
    schedule = made(shared_api, external_api_key="k")
    assert shared_api.post("/api/automation/trigger", {"scheduleId": schedule.id}).status == 200
    assert shared_api.ask("DELETE", f"{PATH}/{schedule.id}").status == 200
    assert ask(shared_dsn, "SELECT count(*) FROM secrets WHERE name = %s", f"schedule:{schedule.id}") == [(1,)]


def test_without_a_key_to_seal_with_no_key_is_taken(dsn):
    with serving(dsn, settings=Settings()) as client:
        client = client.with_key(new_key(dsn))
        refused = client.post(PATH, body(external_api_key="secret"))
        assert (refused.status, refused.code) == (409, "NO_SECRET_KEY")
        assert ask(dsn, "SELECT count(*) FROM schedules") == [(0,)]
        schedule = made(client)
        assert client.ask("PATCH", f"{PATH}/{schedule.id}", {"external_api_key": "x"}).code == "NO_SECRET_KEY"
        assert client.ask("PATCH", f"{PATH}/{schedule.id}", {"external_api_key": None}).status == 200


@pytest.mark.req("AUT-39", "G-33")
def test_of_a_webhook_only_where_it_goes_is_shown(shared_api, shared_dsn):
    url = "https://hooks.example.com/services/T0/SECRET?token=SECRET"
    schedule = made(shared_api, webhook_url=url)
    assert schedule.webhook_url == "https://hooks.example.com/…"
    assert "SECRET" not in shared_api.get(f"{PATH}?limit=200").body.decode()
    change(shared_api, schedule, max_retries=1)
    assert "T0/SECRET" not in everything_stored(shared_dsn)
    sealed = "SELECT count(*) FROM secrets WHERE name = %s"
    assert ask(shared_dsn, sealed, f"schedule:{schedule.id}:webhook:url") == [(1,)], "left alone"
    shown = shared_api.ask("PATCH", f"{PATH}/{schedule.id}", {"webhook_url": schedule.webhook_url})
    assert shown.status == 422
    assert change(shared_api, schedule, webhook_url=None).webhook_url is None
    assert ask(shared_dsn, sealed, f"schedule:{schedule.id}:webhook:url") == [(0,)]


def test_audit_configs_are_named_as_text_and_must_be_there(shared_api):
    steps = [{"name": "a", "criteria": "b"}]
    config = shared_api.post("/api/audit-configs", {"name": "c", "steps": steps, "is_active": False}).json["id"]
    schedule = made(shared_api, specific_audit_configs=[config, int(config)])
    assert schedule.specific_audit_configs == [config]
    assert shared_api.ask("DELETE", f"/api/audit-configs/{config}").status == 200
    assert change(shared_api, schedule, max_retries=1).specific_audit_configs == [config], "what was there stays"


@pytest.mark.req("AUT-05", "G-33")
def test_who_may_only_read_changes_and_starts_nothing(shared_api, shared_dsn):
    schedule = made(shared_api)
    viewer = shared_api.with_key(new_key(shared_dsn, "viewer"))
    run = shared_api.post("/api/automation/trigger", {"scheduleId": schedule.id}).json["run_id"]
    for path in (PATH, f"{PATH}/{schedule.id}", f"{PATH}/{schedule.id}/runs", f"/api/automation/runs/{run}"):
        assert viewer.get(path).status == 200
    before = ask(shared_dsn, "SELECT (SELECT count(*) FROM runs), (SELECT max(updated_at) FROM schedules)")
    for method, path, given in (
        ("POST", PATH, body()), ("PATCH", f"{PATH}/{schedule.id}", {"name": "x"}),
        ("DELETE", f"{PATH}/{schedule.id}", None), ("POST", "/api/automation/trigger", {"scheduleId": schedule.id}),
        ("POST", f"/api/runs/{run}/redrive", None),
    ):  # fmt: skip
        answer = viewer.ask(method, path, given)
        assert (answer.status, answer.code) == (403, "FORBIDDEN")
        wanted = "runs.write" if path.startswith("/api/runs/") else "automation.write"
        assert wanted in answer.json["error"]["message"]
    assert ask(shared_dsn, "SELECT (SELECT count(*) FROM runs), (SELECT max(updated_at) FROM schedules)") == before


@pytest.mark.req("G-33")
def test_a_schedule_of_another_tenant_does_not_exist(shared_api, shared_dsn):
    add_tenant(shared_dsn, "rival")
    rival = shared_api.with_key(new_key(shared_dsn, "admin", "rival"))
    schedule = made(shared_api)
    for method, path, given in (
        ("GET", "", None), ("PATCH", "", {"name": "x"}), ("DELETE", "", None), ("GET", "/runs", None),
        ("POST", "/rotate-secret", None),
    ):  # fmt: skip
        answer = rival.ask(method, f"{PATH}/{schedule.id}{path}", given)
        assert (answer.status, answer.code) == (404, "NOT_FOUND")
    assert rival.get(PATH).json["schedules"] == []
    for wrong in ("0", "x", "-1", "99999999999999999999", "1e3"):
        assert shared_api.get(f"{PATH}/{wrong}").status == 404


@pytest.mark.req("AUT-136")
@pytest.mark.parametrize(
    ("knob", "minutes"),
    [
        ("AUTOMATION_FICHE_DETAILS_MAX_WAIT_MS", 10),
        ("AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS", 15),
        ("AUTOMATION_AUDIT_MAX_WAIT_MS", 30),
        ("AUTOMATION_SCHEDULER_STALE_GRACE_MS", 15),
    ],
)
def test_every_wait_counts_towards_how_long_a_run_may_take(monkeypatch, knob, minutes):
    monkeypatch.setenv(knob, str((minutes + 60) * 60_000))
    assert automation_config(Settings()).longest == timedelta(minutes=70 + 60)


@pytest.mark.req("AUT-136")
@pytest.mark.parametrize(("minutes", "stale"), [(None, False), (0, False), (70, False), (70.1, True)])
def test_a_run_is_stale_seventy_minutes_after_it_began_with_the_knobs_as_they_are(minutes, stale):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    since = None if minutes is None else now - timedelta(minutes=minutes)
    assert staleness(since, now, automation_config(Settings()).longest) == {
        "is_stale": stale, "stale_at": None if since is None else since + timedelta(minutes=70),
    }  # fmt: skip


@pytest.mark.req("AUT-195", "AUT-10", "AUT-136")
def test_why_a_schedule_was_not_triggered_can_be_seen(shared_api, shared_dsn):
    schedule = made(shared_api, schedule_type="DAILY", time_of_day="06:00")
    assert (schedule.is_stale, schedule.overdue, schedule.failures) == (False, False, 0)
    run = int(shared_api.post("/api/automation/trigger", {"scheduleId": schedule.id}).json["run_id"])
    asyncio.run(told(shared_dsn, run, events.begun))
    began = "UPDATE automation_settings SET last_run_at = ecluse_now() - %s * interval '1 minute' WHERE id = %s"
    ask(shared_dsn, "UPDATE schedules SET last_fired_at = NULL WHERE id = %s", schedule.id)  # the later one counts
    ask(shared_dsn, began, 69, schedule.id)
    going = AutomationSchedule.model_validate(shared_api.get(f"{PATH}/{schedule.id}").json)
    assert (going.is_stale, going.overdue, going.last_run_status) == (False, False, "running")
    ask(shared_dsn, began, 71, schedule.id)
    ask(
        shared_dsn,
        "UPDATE schedules SET next_due_at = ecluse_now() - interval '2 minutes', failures = 3, error = 'no such input'"
        " WHERE id = %s",
        schedule.id,
    )
    ask(
        shared_dsn,
        "INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, decided_at)"
        " SELECT %s, ecluse_now() - n * interval '1 day', 'default', 'missed', 'no scheduler was running in time',"
        " ecluse_now()"
        " FROM generate_series(1, 3) n",
        schedule.id,
    )
    shown = AutomationSchedule.model_validate(shared_api.get(f"{PATH}/{schedule.id}").json)
    assert (shown.is_stale, shown.overdue, shown.failures, shown.error) == (True, True, 3, "no such input")
    assert shown.stale_at == shown.last_run_at + timedelta(minutes=70)
    assert (shown.holding_run_id, [one.id for one in shown.runs]) == (str(run), [str(run)]), "what it waits for"
    assert [(slot.state, slot.reason) for slot in shown.slots] == [("missed", "no scheduler was running in time")] * 3
    assert shown.slots[0].due_at > shown.slots[1].due_at
    trouble = shared_api.get("/api/automation/diagnostic").json["schedules"]
    assert schedule.id in {one["id"] for one in trouble["worst"]}
    off = change(shared_api, schedule, is_active=False)
    assert (off.is_active, off.next_due_at, off.next_fires) == (False, None, [])
    ask(shared_dsn, "UPDATE schedules SET failures = 0, error = NULL, next_due_at = NULL WHERE id = %s", schedule.id)
    assert shared_api.post(f"/api/runs/{run}/end", {"reason": "stuck"}).status == 200
    calm = AutomationSchedule.model_validate(shared_api.get(f"{PATH}/{schedule.id}").json)
    assert (calm.is_stale, calm.stale_at, calm.overdue, calm.last_run_status) == (False, None, False, "cancelled")
    assert calm.holding_run_id is None, "it has ended: nothing waits for it"


def test_one_that_was_spoilt_by_hand_is_shown_all_the_same(shared_api, shared_dsn):
    schedule = made(shared_api)
    spoil = "UPDATE automation_settings SET fiche_selection_mode = 'manual' WHERE id = %s"
    ask(shared_dsn, spoil, schedule.id)
    assert shared_api.get(f"{PATH}/{schedule.id}").json["fiche_selection"]["mode"] == "manual"
    assert shared_api.get(PATH).status == 200
    refused = shared_api.ask("PATCH", f"{PATH}/{schedule.id}", {"max_retries": 1})
    assert (refused.status, refused.code) == (422, "INVALID_INPUT")
    ask(shared_dsn, "UPDATE automation_settings SET fiche_selection_mode = 'filter' WHERE id = %s", schedule.id)


def test_a_repetition_with_the_same_idempotency_key_makes_nothing(shared_api):
    given, once = body(), {"headers": {"Idempotency-Key": "schedule-once"}}
    first, again = (shared_api.post(PATH, given, **once) for _ in range(2))
    assert (first.status, again.status, again.headers["Idempotent-Replay"]) == (201, 201, "true")
    assert first.json == again.json
