"""Commands on keys, tenants, lanes, leases, schedules, fiches, transcriptions, audits and retention, end to end."""

from __future__ import annotations

import asyncio
import json
import re

import psycopg
import pytest

from ecluse.access import keys
from tests.support.automation_rows import end_run
from tests.support.command_line import operating
from tests.support.fiche_rows import call, details, save
from tests.support.waits import wait_for

STEPS = '[{"name": "Consent", "criteria": "agrees", "weight": 2}]'
AUTOMATION = ("schedules", "create", "automation", "--name")


@pytest.fixture
def operator(bare, dsn):
    with operating(bare, dsn) as one:
        yield one


@pytest.fixture
def fiche(dsn):
    async def fill() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await save(connection, ("171", details(call("never", ""), call("some"))))

    asyncio.run(fill())


def refused(answer, *said):
    assert (answer.code, answer.out) == (2, ""), answer
    for text in said:
        assert text in answer.err


@pytest.mark.req("G-32", "G-33")
def test_tenants_and_keys_are_made_listed_and_taken_away_and_the_trail_tells(operator, one, bare):
    operator.done("tenants", "create", "acme", "--name", "Acme Ltd")
    acme = ("--tenant", "acme")
    made = operator.done(*acme, "keys", "create", "dashboard", "--role", "viewer", "--expires-in", "30d")
    hashed = one("SELECT hash FROM api_keys WHERE tenant_id = 'acme'")
    assert bytes(hashed) == keys.digest(made["key"])
    listed = operator(*acme, "keys", "list").out
    assert ("dashboard" in listed, made["key"] in listed) == (True, False)
    assert operator.done("me", ECLUSE_KEY=made["key"])["tenant_id"] == "acme"
    used = wait_for(lambda: operator.done(*acme, "keys", "list")["keys"][0]["last_used_at"])
    assert used[:10] in operator(*acme, "keys", "list").out
    refused(operator(*acme, "keys", "list", ECLUSE_KEY=made["key"]), "FORBIDDEN")
    operator.done(*acme, "keys", "revoke", made["id"])
    assert operator.done(*acme, "keys", "list", "--state", "revoked")["keys"][0]["id"] == made["id"]
    operator.done("tenants", "disable", "acme", "--reason", "unpaid", "--yes")
    refused(operator(*acme, "runs", "start", "hello"), "TENANT_DISABLED")
    operator.done("tenants", "enable", "acme")
    trail = operator.done("trail")["entries"] + operator.done(*acme, "trail")["entries"]
    done = [row["action"] for row in trail if row["times"] is None]
    assert [row["subject"] for row in operator.done("trail", "export", "--action", "tenant.create")["rows"]] == [
        "tenant:acme"
    ]
    assert done == ["tenant.enable", "tenant.disable", "tenant.create", "key.revoke", "key.create"]


@pytest.mark.req("G-33")
def test_a_key_is_limited_to_groups_or_to_a_user(operator, query):
    create = ("keys", "create", "x", "--role", "viewer")
    operator.done(*create, "--scope", "GROUP", "--groupes", "Paris,Lyon")
    operator.done(*create, "--scope", "SELF", "--crm-user-id", "7")
    assert query("SELECT scope, groupes, crm_user_id FROM api_keys WHERE name = 'x' ORDER BY id") == [
        ("GROUP", ["Paris", "Lyon"], None),
        ("SELF", [], "7"),
    ]
    refused(operator(*create, "--scope", "GROUP"), "groupes")
    refused(operator(*create, "--expires-in", "soon"), "--expires-in")


RUN = """
WITH run AS (
    INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, started_at)
    VALUES ('default', 'automation', 'a', true, 'running', 'running', now(), now()) RETURNING id),
stage AS (
    INSERT INTO stages (run_id, stage, started_at, deadline_at, progress_at)
    SELECT id, 'audit', now(), '2030-01-02 03:04:05Z', now() FROM run)
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)
SELECT 'default', run.id, 'automation', 'audit', 'k', 'k', l.id, now() FROM run, lanes l WHERE l.name = 'speech'
"""


def test_a_lane_is_paused_after_a_preview_of_what_fails_and_resumed(operator, query, one):
    query("INSERT INTO lanes (name, max_in_flight) VALUES ('speech', 5)")
    query(RUN)
    pause = ("lanes", "pause", "speech", "--reason", "invoice unpaid")
    unasked = operator(*pause)
    refused(unasked, "Use --yes to confirm", "2030-01-02 03:04:05Z")
    assert one("SELECT count(*) FROM lanes WHERE paused_at IS NOT NULL") == 0
    operator.done(*pause, "--yes")
    assert "invoice unpaid" in operator("lanes", "list").out
    operator.done("lanes", "resume", "speech", "--reason", "paid", "--yes")
    assert one("SELECT count(*) FROM lanes WHERE paused_at IS NOT NULL") == 0
    operator.done("lanes", "cap", "speech", "--max-in-flight", "3", "--yes")
    assert operator.done("lanes", "show", "speech")["max_in_flight"] == 3
    refused(operator("lanes", "pause", "speach", "--reason", "x", "--yes"), "speach")


HELD = (
    "INSERT INTO leases (tenant_id, key, fence, owner, ttl, acquired_at, expires_at, token)"
    " VALUES ('default', 'fiche:1', 1, 'worker', '120 s', ecluse_now(), ecluse_now() + interval '120 s', %s)"
)
TOKEN = "0123abcd-0000-4000-8000-000000000000"  # noqa: S105


@pytest.mark.req("ENG-36", "ENG-88", "ENG-38")
def test_a_lease_is_listed_without_its_token_and_released_with_a_reason(operator, query, one):
    query(HELD, TOKEN)
    shown = operator("leases", "list").out + json.dumps(operator.done("leases", "list"))
    assert ("fiche:1" in shown, TOKEN in shown) == (True, False)
    refused(operator("leases", "release", "fiche:1"), "missing: --reason")
    operator.done("leases", "release", "fiche:1", "--reason", "worker hangs")
    assert one("SELECT end_cause, reason FROM leases") == ("forced", "worker hangs")
    assert one("SELECT action, subject, reason FROM audit_trail") == ("lease.release", "lease:fiche:1", "worker hangs")


@pytest.mark.req("G-28")
def test_a_schedule_of_any_flow_is_made_previewed_switched_run_and_deleted(operator, one):
    preview = operator.done("schedules", "preview", "cron", "@hourly", "--tz", "Europe/Paris", "--count", "50")
    assert len(next(value for value in preview.values() if isinstance(value, list))) == 50
    create = ("schedules", "create", "hello", "--name", "nightly", "--cron", "30 2 * * *", "--tz", "Europe/Paris")
    made = operator.done(*create)
    schedule = made["id"]
    assert "nightly" in operator("schedules", "list").out
    assert operator.done("schedules", "disable", schedule)["next_due_at"] is None
    assert operator.done("schedules", "enable", schedule)["next_due_at"]
    run = operator.done("schedules", "run", schedule)
    assert one("SELECT schedule_id FROM runs WHERE id = %s", run["run_id"]) == int(schedule)
    refused(operator(*create[:-1], "Europe/Pari"), "Europe/Paris")
    operator.done("schedules", "delete", schedule)
    refused(operator("schedules", "show", schedule), f"There is no schedule {schedule}")


@pytest.mark.req("AUT-08", "AUT-09", "AUT-11", "AUT-12", "G-39")
def test_a_schedule_of_automation_has_its_own_options(operator):
    made = operator.done(*AUTOMATION, "nightly", "--range", "yesterday", "--type", "MONTHLY", "--at", "02:30",
                         "--day-of-month", "30", "--tz", "Europe/Paris", "--groupe", "Paris", "--groupe", "Lyon",
                         "--max-fiches", "10", "--no-run-audits", "--fiche-selection-use-rlm")  # fmt: skip
    schedule = made["schedule"] if isinstance(made.get("schedule"), dict) else made
    shown = operator.done("automation", "schedules", "show", schedule["id"])
    assert (shown["cron"], shown["run_audits"]) == ("30 2 30L * *", False)
    chosen = shown["fiche_selection"]
    assert (chosen["groupes"], chosen["max_fiches"], chosen["use_rlm"]) == (["Paris", "Lyon"], 10, True)
    update = ("schedules", "update", "automation", schedule["id"])
    operator.done(*update, "--type", "CRON", "--cron", "@daily", "--mode", "manual", "--fiches", "8,7")
    changed = operator.done("automation", "schedules", "show", schedule["id"])
    assert (changed["schedule_type"], changed["cron"]) == ("CRON", "@daily")
    assert changed["fiche_selection"]["fiche_ids"] == ["8", "7"]
    refused(
        operator(*AUTOMATION, "x", "--range", "yesterday", "--type", "WEEKLY", "--at", "06:00", "--day-of-week", "9")
    )
    refused(operator(*AUTOMATION, "x"), "date_range")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*AUTOMATION, "x", "--type", "DAILY", "--at", "25:00"), "--at: This should be a time of day from 00:00 to"),
        ((*AUTOMATION, "x", "--type", "FOO"), "--type: 'FOO' is not one of"),
        (("budgets", "set", "5"), "--period: give day or month"),
        (("keys", "create", "x", "--role", "viewer", "--expires-in", "yesterday"), "--expires-in: This should be such"),
        (("login", "prod"), "options only: --url, --key-file, --profile"),
        (("tenants", "create", "Bad/Name"), "ID: This should be up to 100 letters"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_typed(operator, arguments, said):
    refused(operator(*arguments), said)


def test_a_list_beside_other_fields_says_that_it_is_empty(operator):
    shown = operator("connections", "list")
    assert shown.err.startswith("no connections: `ecluse connections create")
    assert "limit" not in shown.out


def test_a_list_without_a_match_for_its_filters_is_not_called_empty(operator):
    assert operator("runs", "list", "--limit", "5").err.startswith("no runs yet")
    assert operator("runs", "list", "--state", "queued").err.startswith("no runs match the filters")


@pytest.mark.req("G-33")
def test_a_key_comes_from_a_file_and_is_sealed(operator, one, tmp_path):
    file = tmp_path / "key"
    file.write_text("crm-secret\n")
    given = (*AUTOMATION, "sealed", "--range", "yesterday", "--external-api-key-file", str(file))
    made = operator(*given, "--json")
    assert (made.code, "crm-secret" in made.out) == (0, False)
    assert one("SELECT name FROM secrets").startswith("schedule:")
    refused(operator(*given[:-1], "/nowhere/key"), "cannot read /nowhere/key")


@pytest.mark.req("G-29")
def test_a_run_of_automation_is_redriven_after_a_preview(operator, dsn, one):
    made = operator.done(*AUTOMATION, "two", "--fiches", "1,2", "--mode", "manual")
    schedule = one("SELECT id FROM schedules")
    assert str(schedule) in json.dumps(made)
    run = operator.done("schedules", "run", str(schedule))["run_id"]

    async def end() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await end_run(connection, int(run), f1="failed", f2="successful")

    asyncio.run(end())
    failed = operator.done("runs", "targets", run, "--outcome", "failed")["targets"]
    assert [row["target"] for row in failed] == ["1"]
    refused(operator("runs", "redrive", run), "Use --yes to confirm")
    again = operator.done("runs", "redrive", run, "--yes")
    assert one("SELECT redrive_of FROM runs WHERE id = %s", again["run_id"]) == int(run)


@pytest.mark.req("TRX-93", "TRX-94", "G-23")
def test_a_fiche_is_queued_and_its_state_and_recordings_are_read(operator, fiche, query):
    first = operator.done("transcriptions", "start", "171", "--priority", "high")
    second = operator.done("transcriptions", "start", "171")
    assert (first["attached"], second["attached"], first["run_id"]) == (False, True, second["run_id"])
    status = operator.done("transcriptions", "status", "171")
    assert first["run_id"] in json.dumps(status)
    batch = operator.done("transcriptions", "batch", "172", "171", "--priority", "low")
    assert "172" in json.dumps(batch)
    shown = operator("fiches", "show", "171").out
    assert re.search(r"^recordings:\n", shown, re.MULTILINE)
    told = operator.done("fiches", "show", "171")["recordings"]
    assert {row["call_id"]: row["url_missing"] for row in told} == {"some": False, "never": True}
    assert operator.done("fiches", "list", "--groupe", "none")["fiches"] == []
    assert query("SELECT count(*) FROM runs") == [(2,)]


@pytest.mark.req("G-91")
def test_an_audit_is_asked_for_listed_and_shown(operator, fiche, query):
    config = operator.done("audits", "configs", "create", "Compliance", "--steps", STEPS)["id"]
    started = operator.done("audits", "run", "171", config, "--use-rlm")
    assert query("SELECT run_id::text, status, use_rlm FROM audits") == [(started["run_id"], "pending", True)]
    (row,) = operator.done("audits", "list", "--fiche-id", "171", "--status", "pending")["audits"]
    assert (row["id"], row["config_name"]) == (started["audit_id"], "Compliance")
    assert "Compliance" in operator("audits", "show", started["audit_id"]).out
    refused(operator("audits", "run", "999", config), "999")


@pytest.mark.req("G-81")
def test_what_to_connect_with_is_shown(operator):
    shown = operator.done("realtime", "show")
    assert shown["key"]
    assert str(shown["app_id"]).isdecimal()


def test_the_url_of_a_webhook_is_not_that_of_the_server(operator):
    """A field of the body has the option; that of the connection stands before the command."""
    create = ("notifications", "endpoints", "create", "webhook", "--events", "hello/*")
    made = operator.done("--url", operator.variables["ECLUSE_URL"], *create, "--url", "https://93.184.216.34/hook")
    assert made["url"].startswith("https://93.184.216.34/")
    assert "hello/*" in operator("notifications", "endpoints", "list").out


OLD = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, selected, successful, failed, ignored,
                  end_cause, created_at, started_at, ended_at)
SELECT 'default', 'hello', 'old', false, 'completed', 'succeeded', 0, 0, 0, 0, 'normal', at, at, at
FROM (SELECT clock_timestamp() - interval '100 days') AS t(at)
"""


@pytest.mark.req("G-71")
def test_what_retention_would_delete_is_shown_by_kind_and_knob(operator, query):
    query(OLD)
    kinds = {row["kind"]: row for row in operator.done("retention", "show")["kinds"]}
    assert (kinds["runs"]["knob"], kinds["runs"]["days"], kinds["runs"]["rows"]) == ("ECLUSE_KEEP_RUNS_DAYS", 90, 1)
    assert "ECLUSE_KEEP_RUNS_DAYS" in operator("retention", "show").out
    refused(operator("retention", "prune"), "Use --yes to confirm")
    assert operator.done("retention", "prune", "--yes")["asked"] is True


def test_a_fiche_is_erased_by_a_yes_and_by_nothing_else(operator, fiche, query):
    refused(operator("erase", "fiche", "171", "--reason", "asked for"), "Use --yes to confirm")
    assert query("SELECT count(*) FROM fiche_cache") == [(1,)]
    operator.done("erase", "fiche", "171", "--reason", "asked for", "--yes")
    assert query("SELECT count(*) FROM fiche_cache") == [(0,)]
    assert query("SELECT action, subject FROM audit_trail") == [("fiche.erase", "fiche:171")]
