"""Schedules of every flow over HTTP: one way to create, change, fire and preview them, with automation as a user."""

from __future__ import annotations

import itertools
from datetime import datetime
from zoneinfo import ZoneInfo

import psycopg
import pytest

from ecluse.access.permissions import ROLES
from ecluse.api.schedule_shapes import ChangedScheduleInFull, FiredRun, ScheduleInFull, Timetable
from ecluse.api.schedules import SCHEDULES, SLOTS
from tests.support.api_server import add_tenant, new_key

PATH, AUTOMATION = "/api/schedules", "/api/automation/schedules"
NAMES = itertools.count(1)
RANGE = {"mode": "date_range", "date_range": "yesterday"}


def ask(dsn, sql, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def body(**given):
    return {"flow": "test", "name": f"schedule {next(NAMES)}", "plan": {"targets": ["a"]}, **given}


def made(client, **given):
    answer = client.post(PATH, body(**given))
    assert answer.status == 201, answer.body
    return ChangedScheduleInFull.model_validate(answer.json)


def changed(client, schedule, **given):
    answer = client.ask("PATCH", f"{PATH}/{schedule.id}", given)
    assert answer.status == 200, answer.body
    return ChangedScheduleInFull.model_validate(answer.json)


def test_a_schedule_of_any_flow_is_made_shown_changed_switched_and_deleted(shared_api, shared_dsn):
    schedule = made(shared_api, cron="0 6 * * *", timezone="Europe/Paris", window_start="08:00", window_end="18:00")
    path = f"{PATH}/{schedule.id}"
    assert schedule.plan == {"targets": ["a"], "payload": None}
    assert (schedule.flow, schedule.overlap, schedule.catch_up, schedule.enabled) == ("test", "wait", "latest", True)
    assert [(fire.at.hour, fire.mark) for fire in schedule.next_fires[:1]] == [(8, "moved to the start of the window")]
    assert schedule.next_due_at == schedule.next_fires[0].at
    assert ScheduleInFull.model_validate(shared_api.get(path).json).model_dump() == schedule.model_dump(
        exclude={"once"}
    )

    after = changed(shared_api, schedule, window_start=None, window_end=None, plan={"payload": 7}, overlap="allow")
    assert after.plan == {"targets": ["a"], "payload": 7}, "only what is given"
    assert (after.window_start, after.overlap, after.cron, after.name) == (None, "allow", "0 6 * * *", schedule.name)
    assert changed(shared_api, schedule, cron=None).next_due_at is None
    assert changed(shared_api, schedule, cron="@daily").next_due_at is not None
    off = ScheduleInFull.model_validate(shared_api.post(f"{path}/disable").json)
    assert (off.enabled, off.next_due_at, off.next_fires) == (False, None, [])
    assert ScheduleInFull.model_validate(shared_api.post(f"{path}/enable").json).next_due_at is not None

    assert shared_api.ask("DELETE", path).json == {"id": schedule.id, "deleted": True}
    for method, more, given in (
        ("GET", "", None), ("PATCH", "", {"name": "x"}), ("DELETE", "", None), ("POST", "/run", None),
        ("POST", "/enable", None), ("GET", "/preview", None),
    ):  # fmt: skip
        answer = shared_api.ask(method, path + more, given)
        assert (answer.status, answer.code) == (404, "NOT_FOUND"), more
    made(shared_api, name=schedule.name)
    trail = ask(shared_dsn, "SELECT action FROM audit_trail WHERE subject = %s ORDER BY id", f"schedule:{schedule.id}")
    verbs = ("create", "update", "update", "update", "disable", "enable", "delete")
    assert [action for (action,) in trail] == [f"schedule.{verb}" for verb in verbs]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"flow": "nothing"}, "There is no flow 'nothing'"),
        ({"flow": "transcription"}, "cannot be scheduled"),
        ({"plan": {"targets": 5}}, "plan: targets"),
        ({"cron": "61 * * * *"}, "bad minute"),
        ({"timezone": "Europe/Pari"}, "did you mean Europe/Paris?"),
        ({"window_start": "08:00"}, "Execution window: give both start and end"),
        ({"window_start": "8", "window_end": "9"}, "8"),
        ({"name": " "}, "name"),
        ({"overlap": "never"}, "overlap"),
        ({"input": {}}, "input"),
        ({"flow": "automation", "plan": {}}, "by the days of their sales (date_range) or by id (fiche_ids)"),
        ({"flow": "automation", "plan": {"fiche_selection": RANGE, "schedule_type": "DAILY"}}, "schedule_type"),
        ({"flow": "automation", "plan": {"fiche_selection": RANGE, "specific_audit_configs": ["4711"]}}, "config 4711"),
        ({"flow": "automation", "plan": {"fiche_selection": RANGE, "webhook_url": "http://127.0.0.1/"}}, "webhook_url"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_kept(shared_api, shared_dsn, wrong, said):
    before = ask(shared_dsn, "SELECT count(*), max(updated_at) FROM schedules")
    answer = shared_api.post(PATH, body(**wrong))
    assert (answer.status, answer.code) == (422, "INVALID_INPUT"), answer.body
    assert said in answer.json["error"]["message"]
    assert ask(shared_dsn, "SELECT count(*), max(updated_at) FROM schedules") == before


def test_a_change_that_makes_no_sense_changes_nothing(shared_api):
    schedule = made(shared_api, cron="@daily")
    other = made(shared_api)
    for wrong in ({"cron": "x"}, {"plan": {"targets": "a"}}, {"window_end": "09:00"}, {"flow": "test"}, {"id": "7"}):
        answer = shared_api.ask("PATCH", f"{PATH}/{schedule.id}", wrong)
        assert (answer.status, answer.code) == (422, "INVALID_INPUT"), wrong
    taken = shared_api.ask("PATCH", f"{PATH}/{schedule.id}", {"name": other.name})
    assert (taken.status, taken.code) == (409, "NAME_TAKEN")
    assert shared_api.get(f"{PATH}/{schedule.id}").json["updated_at"] == schedule.updated_at.isoformat().replace(
        "+00:00", "Z"
    )


def test_a_schedule_is_run_by_hand_with_another_plan_for_this_run(shared_api, shared_dsn):
    schedule = made(shared_api)
    run, instead = (
        FiredRun.model_validate(shared_api.post(f"{PATH}/{schedule.id}/run", given).json)
        for given in (None, {"plan": {"targets": ["b"]}})
    )
    inputs = dict(ask(shared_dsn, "SELECT id::text, input -> 'targets' FROM runs WHERE schedule_id = %s", schedule.id))
    assert inputs == {run.run_id: ["a"], instead.run_id: ["b"]}
    refused = shared_api.post(f"{PATH}/{schedule.id}/run", {"plan": {"targets": 5}})
    assert (refused.status, refused.code) == (422, "INVALID_INPUT")
    shown = ScheduleInFull.model_validate(shared_api.get(f"{PATH}/{schedule.id}").json)
    assert (shown.holding_run_id, shown.last_run_id, shown.last_run_state) == (run.run_id, instead.run_id, "queued")
    once = {"headers": {"Idempotency-Key": "run-once"}}
    first, again = (shared_api.post(f"{PATH}/{schedule.id}/run", **once) for _ in range(2))
    assert first.json == again.json


def test_an_automation_schedule_is_the_same_from_both_sides(shared_api, shared_dsn):
    plan = {"fiche_selection": RANGE, "max_retries": 3, "webhook_url": "https://93.184.216.34/hook"}
    answer = shared_api.post(PATH, body(flow="automation", cron="30 6 * * *", plan=plan))
    schedule = ChangedScheduleInFull.model_validate(answer.json)
    assert schedule.once["webhook_secret"].startswith("whsec_")
    assert (schedule.plan["max_retries"], schedule.plan["webhook_url"]) == (3, "https://93.184.216.34/…")
    assert "external_api_key" not in schedule.plan
    own = shared_api.get(f"{AUTOMATION}/{schedule.id}").json
    assert (own["schedule_type"], own["cron_expression"], own["max_retries"]) == ("CRON", "30 6 * * *", 3)

    daily = shared_api.ask(
        "PATCH", f"{AUTOMATION}/{schedule.id}", {"schedule_type": "DAILY", "time_of_day": "07:15"}
    ).json
    assert (daily["cron"], daily["cron_expression"]) == ("15 7 * * *", None)
    after = changed(shared_api, schedule, plan={"fiche_selection": {"groupes": ["Paris"]}}, window_start="07:00",
                    window_end="08:00")  # fmt: skip
    assert (after.plan["fiche_selection"]["groupes"], after.plan["fiche_selection"]["date_range"]) == (
        ["Paris"],
        "yesterday",
    )
    own = shared_api.get(f"{AUTOMATION}/{schedule.id}").json
    assert (own["schedule_type"], own["time_of_day"]) == ("DAILY", "07:15"), "the same times, written as before"
    shared_api.ask("PATCH", f"{AUTOMATION}/{schedule.id}", {"max_retries": 1})
    assert shared_api.get(f"{PATH}/{schedule.id}").json["window_start"] == "07:00", "left alone"
    changed(shared_api, schedule, cron=None)
    own = shared_api.get(f"{AUTOMATION}/{schedule.id}").json
    assert (own["schedule_type"], own["time_of_day"], own["next_due_at"]) == ("MANUAL", None, None)

    fired = shared_api.post(f"{PATH}/{schedule.id}/run", {"plan": {"fiche_selection": {"fiche_ids": "7, 8"}}})
    run = FiredRun.model_validate(fired.json)
    assert run.event_key.startswith("automation-manual-")
    ((given,),) = ask(shared_dsn, "SELECT input -> 'override_fiche_selection' FROM runs WHERE id = %s", run.run_id)
    assert given == {"mode": "manual", "fiche_ids": ["7", "8"]}
    assert any("Not set on this server" in warning for warning in run.warnings)
    for wrong in ({"max_retries": 1}, {"fiche_selection": {"limit": 3}}, {"fiche_selection": 5}):
        assert shared_api.post(f"{PATH}/{schedule.id}/run", {"plan": wrong}).code == "INVALID_INPUT"
    shared_api.post(f"{PATH}/{schedule.id}/disable")
    assert shared_api.get(f"{AUTOMATION}/{schedule.id}").json["is_active"] is False
    assert shared_api.post(f"{PATH}/{schedule.id}/run").code == "SCHEDULE_INACTIVE"
    shared_api.ask("DELETE", f"{PATH}/{schedule.id}")
    assert shared_api.get(f"{AUTOMATION}/{schedule.id}").status == 404
    kept = ask(shared_dsn, "SELECT name FROM secrets WHERE name LIKE %s ORDER BY 1", f"schedule:{schedule.id}:%")
    assert kept == [(f"schedule:{schedule.id}:webhook{end}",) for end in ("", ":url")], "its open run needs them"


def test_a_key_of_an_automation_schedule_goes_in_and_never_comes_out(shared_api):
    plan = {"fiche_selection": RANGE, "external_api_key": "hunter2"}
    answer = shared_api.post(PATH, body(flow="automation", plan=plan))
    number = answer.json["id"]
    own = f"{AUTOMATION}/{number}"
    assert shared_api.get(own).json["has_external_api_key"] is True
    kept = shared_api.ask("PATCH", f"{PATH}/{number}", {"plan": {"max_retries": 1}})
    assert shared_api.get(own).json["has_external_api_key"] is True
    assert shared_api.ask("PATCH", f"{PATH}/{number}", {"plan": {"external_api_key": None}}).status == 200
    assert shared_api.get(own).json["has_external_api_key"] is False
    assert not any(b"hunter2" in one.body for one in (answer, kept, shared_api.get(f"{PATH}/{number}")))


def test_schedules_are_listed_by_flow_state_and_the_begin_of_their_names(api):
    for name, given in (
        ("Night shift", {"cron": "@daily"}), ("night 2", {"enabled": False}), ("day", {}),
        ("automated", {"flow": "automation", "plan": {"fiche_selection": RANGE}}),
    ):  # fmt: skip
        made(api, name=name, **given)

    def names(query=""):
        return [one.name for one in SCHEDULES.page.model_validate(api.get(f"{PATH}{query}").json).schedules]

    assert names() == sorted(["Night shift", "night 2", "day", "automated"])
    assert sorted(names("?q=NIGHT")) == ["Night shift", "night 2"]
    assert names("?q=%25") == []
    assert names("?flow=automation") == ["automated"]
    assert names("?enabled=false") == ["night 2"]
    first = api.get(f"{PATH}?limit=3").json
    rest = api.get(f"{PATH}?limit=3&cursor={first['next_cursor']}").json
    assert len(first["schedules"]) == 3
    assert rest["next_cursor"] is None
    assert sorted(one["name"] for one in first["schedules"] + rest["schedules"]) == sorted(names())


def test_due_times_are_previewed_with_the_changes_of_the_clocks_and_the_window(shared_api):
    zone = ZoneInfo("Europe/Paris")
    asked = {"cron": "30 2 * * 0", "timezone": "Europe/Paris", "count": 100}
    before = datetime.now(zone)
    weekly = Timetable.model_validate(shared_api.post(f"{PATH}/preview", asked).json)
    assert (len(weekly.fires), weekly.timezone) == (100, "Europe/Paris")
    assert all(before < fire.at for fire in weekly.fires)
    assert "02:30" in weekly.in_words
    marks = {fire.mark for fire in weekly.fires if fire.mark}
    assert any("moved out of the gap" in mark for mark in marks), "clocks change on Sundays"
    assert any("first of a doubled hour" in mark for mark in marks)
    clamped = shared_api.post(
        f"{PATH}/preview", {**asked, "window_start": "08:00", "window_end": "09:00", "count": 2}
    ).json
    assert [fire["mark"] for fire in clamped["fires"]] == ["moved to the start of the window"] * 2
    schedule = made(shared_api, cron="30 2 * * 0", timezone="Europe/Paris", enabled=False)
    stored = Timetable.model_validate(shared_api.get(f"{PATH}/{schedule.id}/preview").json)
    assert stored.fires == weekly.fires[:50]
    by_hand = shared_api.get(f"{PATH}/{made(shared_api).id}/preview").json
    assert (by_hand["in_words"], by_hand["fires"]) == (None, [])
    for wrong in ({"cron": "x"}, {"cron": "@daily", "timezone": "Mars"}, {"cron": "@daily", "count": 101}, {}):
        assert shared_api.post(f"{PATH}/preview", wrong).code == "INVALID_INPUT"


def test_what_became_of_due_times_is_listed_the_newest_first(shared_api, shared_dsn):
    schedule = made(shared_api, cron="@hourly")
    ask(
        shared_dsn,
        "INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, decided_at) SELECT %s,"
        " '2026-03-01 00:00Z'::timestamptz + n * interval '1 hour', 'default', 'missed', 'no ' || n, ecluse_now()"
        " FROM generate_series(1, 30) n",
        schedule.id,
    )
    path = f"{PATH}/{schedule.id}/slots"
    page = SLOTS.page.model_validate(shared_api.get(f"{path}?limit=20").json)
    assert [slot.reason for slot in page.slots] == [f"no {n}" for n in range(30, 10, -1)]
    rest = shared_api.get(f"{path}?limit=20&cursor={page.next_cursor}").json["slots"]
    assert [slot["reason"] for slot in rest] == [f"no {n}" for n in range(10, 0, -1)]
    assert len(shared_api.get(f"{PATH}/{schedule.id}").json["slots"]) == 20
    shared_api.ask("DELETE", f"{PATH}/{schedule.id}")
    assert len(shared_api.get(path).json["slots"]) == 30, "what was decided can be read"
    assert shared_api.get(f"{PATH}/4711/slots").status == 404


@pytest.mark.req("G-33")
def test_a_schedule_of_another_tenant_does_not_exist(shared_api, shared_dsn):
    add_tenant(shared_dsn, "rival")
    rival = shared_api.with_key(new_key(shared_dsn, "admin", "rival"))
    schedule = made(shared_api)
    for method, more, given in (
        ("GET", "", None), ("PATCH", "", {"name": "x"}), ("DELETE", "", None), ("POST", "/run", None),
        ("POST", "/enable", None), ("POST", "/disable", None), ("GET", "/preview", None), ("GET", "/slots", None),
    ):  # fmt: skip
        assert rival.ask(method, f"{PATH}/{schedule.id}{more}", given).status == 404, more
    assert rival.get(PATH).json["schedules"] == []


@pytest.mark.req("G-33")
def test_a_schedule_of_automation_needs_the_permissions_of_automation_as_well(api, dsn, monkeypatch):
    automated, plain = made(api, flow="automation", plan={"fiche_selection": RANGE}), made(api, cron="@daily")
    monkeypatch.setitem(ROLES, "operator", ROLES["operator"] - {"automation.read", "automation.write"})
    limited = api.with_key(new_key(dsn))
    assert [one["id"] for one in limited.get(PATH).json["schedules"]] == [plain.id]
    assert limited.get(f"{PATH}/{plain.id}").status == 200
    for method, more, given in (
        ("GET", "", None), ("PATCH", "", {"name": "x"}), ("DELETE", "", None), ("POST", "/run", None),
        ("POST", "/disable", None), ("GET", "/preview", None), ("GET", "/slots", None),
    ):  # fmt: skip
        answer = limited.ask(method, f"{PATH}/{automated.id}{more}", given)
        assert (answer.status, answer.code) == (403, "FORBIDDEN"), more
    refused = limited.post(PATH, body(flow="automation", plan={"fiche_selection": RANGE}))
    assert (refused.status, refused.code) == (403, "FORBIDDEN")


def test_a_schedule_of_a_flow_that_is_not_loaded_is_shown_and_not_changed(shared_api, shared_dsn):
    schedule = made(shared_api)
    ask(shared_dsn, "UPDATE schedules SET flow = 'gone' WHERE id = %s", schedule.id)
    assert shared_api.get(f"{PATH}/{schedule.id}").json["plan"] == {"targets": ["a"], "payload": None}
    for method, more, given in (("PATCH", "", {"name": "x"}), ("DELETE", "", None), ("POST", "/run", None)):
        assert shared_api.ask(method, f"{PATH}/{schedule.id}{more}", given).code == "FLOW_NOT_LOADED"
