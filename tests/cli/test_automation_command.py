"""`ecluse automation …`: schedules and runs of automation for whoever sits at the machine, by the same rules as over
HTTP."""

from __future__ import annotations

import asyncio
import base64
import signal
from functools import partial

import psycopg
import pytest

from tests.support.automation_rows import NO_URL, WITHOUT_URL, end_run

pytestmark = pytest.mark.long

CREATE = ("automation", "schedules", "create", "--name", "nightly", "--range", "yesterday")
KEY = base64.b64encode(bytes(range(32))).decode()


def ended(dsn, run, **outcomes):
    async def end():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await end_run(connection, int(run), **outcomes)

    asyncio.run(end())


def test_where_there_is_nothing_it_says_so(ecluse):
    assert "no schedules yet: create one with" in ecluse("automation", "schedules", "list").out
    assert "no runs yet: start one with" in ecluse("automation", "runs").out
    assert ecluse("automation", "runs", "--status", "failed").out == "no matching runs\n"
    for command in ("show", "logs", "fiches", "redrive"):
        missing = ecluse("automation", command, "7")
        assert (missing.code, "there is no" in missing.err, "run 7" in missing.err) == (2, True, True)
    missing = ecluse("automation", "schedules", "show", "7")
    assert (missing.code, missing.err) == (2, "ecluse: there is no automation schedule 7\n")


def test_what_will_fail_and_how_often_a_line_was_said_can_be_read(ecluse, dsn, query):
    schedule = ecluse(*CREATE).json["schedule_id"]
    run = ecluse("automation", "trigger", schedule, "--fiches", "601,602").json["run_id"]
    query("INSERT INTO outcomes (run_id, target) SELECT %s, unnest(ARRAY['601', '602'])", run)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(WITHOUT_URL, {"run": int(run), "fiche": "602"})
    query(
        "INSERT INTO run_log (run_id, at, level, message, count, targets, fold)"
        " VALUES (%s, ecluse_now(), 'error', 'model down', 28, '{601,602}', 'x')",
        run,
    )
    first, second = ecluse("automation", "fiches", run).out.splitlines()
    assert "will fail" not in first
    assert second.split(maxsplit=2)[:2] == ["602", "open"]
    assert f"will fail: NO_URL {NO_URL} (602-2) (details missing" in second
    assert ecluse("automation", "show", run, "--json").json["will_fail"] == {"count": 1, "codes": {"NO_URL": 1}}
    assert ecluse("runs", "show", run).json["will_fail"]["codes"] == {"NO_URL": 1}
    for command in (("automation", "logs", run), ("runs", "log", run)):
        assert "error   28 × model down (601, 602)" in ecluse(*command).out  # noqa: RUF001 - as it is told


@pytest.mark.req("AUT-08", "AUT-09", "AUT-11", "AUT-12")
def test_a_schedule_is_made_listed_shown_changed_switched_and_deleted(ecluse, one, query):
    made = ecluse(*CREATE, "--type", "MONTHLY", "--at", "02:30", "--day-of-month", "30", "--tz", "Europe/Paris",
                  "--groupe", "Paris", "--groupe", "Lyon", "--max-fiches", "10",
                  "--more", '{"run_audits": false, "fiche_selection": {"use_rlm": true}}')  # fmt: skip
    assert (made.code, made.err) == (0, "")
    schedule = made.json["schedule_id"]
    assert made.json["next_due_at"]
    (line,) = ecluse("automation", "schedules", "list").out.splitlines()
    assert line.split()[:4] == [schedule, "default", "MONTHLY", "nightly"]
    shown = ecluse("automation", "schedules", "show", schedule).json
    assert (shown["cron"], shown["run_audits"], len(shown["next_fires"])) == ("30 2 30L * *", False, 5)
    chosen = shown["fiche_selection"]
    assert (chosen["groupes"], chosen["max_fiches"], chosen["use_rlm"]) == (["Paris", "Lyon"], 10, True)
    preview = ecluse("automation", "schedules", "preview", schedule, "-n", "12").out.splitlines()
    assert preview[0] == "At 02:30 on day 30, or the last day, of every month (Europe/Paris)"
    assert len(preview) == 13

    changed = ecluse("automation", "schedules", "update", schedule, "--cron", "@daily", "--fiches", "8,7", "--mode",
                     "manual").json  # fmt: skip
    assert (changed["schedule_type"], changed["cron"], changed["time_of_day"]) == ("CRON", "@daily", None)
    assert changed["fiche_selection"]["fiche_ids"] == ["8", "7"]
    assert ecluse("automation", "schedules", "disable", schedule).json["next_due_at"] is None
    assert " disabled " in ecluse("automation", "schedules", "list").out
    assert ecluse("automation", "schedules", "enable", schedule).json["next_due_at"]
    assert ecluse("automation", "schedules", "delete", schedule).out == f"deleted automation schedule {schedule}\n"
    assert ecluse("automation", "schedules", "show", schedule).code == 2
    done = query("SELECT action FROM audit_trail WHERE actor LIKE 'cli:%%' ORDER BY id")
    assert [action for (action,) in done] == [
        f"automation_schedule.{verb}" for verb in ("create", "update", "disable", "enable", "delete")
    ]
    assert one("SELECT deleted_at IS NOT NULL FROM schedules")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*CREATE, "--type", "DAILY"), "--type DAILY needs --at"),
        ((*CREATE, "--at", "06:00"), "--at goes with --type DAILY"),
        ((*CREATE, "--cron", "61 * * * *"), "bad minute"),
        ((*CREATE, "--type", "MANUAL", "--cron", "@daily"), "--cron goes with --type CRON, not with MANUAL"),
        ((*CREATE, "--cron", "@daily", "--more", '{"scheduleType": "MANUAL"}'), "CRON, not with MANUAL"),
        ((*CREATE, "--tz", "Europe/Pari"), "did you mean Europe/Paris?"),
        ((*CREATE, "--range", "custom", "--start-date", "2026-02-01", "--end-date", "2026-01-01"), "backwards"),
        ((*CREATE, "--cron", "@daily", "--more", '{"scheduleType": "MANUAL"}'), "--cron goes with scheduleType CRON"),
        ((*CREATE, "--type", "DAILY", "--at", "25:00"), "--at: String should match"),
        ((*CREATE, "--type", "WEEKLY", "--at", "06:00", "--day-of-week", "9"), "--day-of-week: Input should be"),
        ((*CREATE, "--fiches", "1"), "--fiches go with mode 'manual'"),
        ((*CREATE, "--fiches", "x" * 201, "--mode", "manual"), "--fiches: a fiche id is"),
        ((*CREATE[:-2], "--more", '{"ficheSelection": {"mode": "manual", "ficheIds": [7]}}'), "Selection.ficheIds"),
        ((*CREATE, "--more", '{"maxRetries": 70}'), "maxRetries: Input should be"),
        ((*CREATE, "--more", "[]"), "JSON object"),
        ((*CREATE, "--more", '{"owner": "me"}'), "owner"),
        ((*CREATE, "--more", r'{"fiche_selection": {"groupes": ["\ud800"]}}'), "half a character"),
        ((*CREATE, "--more", r'{"fiche_selection": {"groupes": ["\u0000"]}}'), "cannot contain NUL"),
        ((*CREATE, "--more", '{"max_retries": ' + "9" * 5000 + "}"), "--more is not valid JSON"),
        ((*CREATE, "--more", "[" * 100_000), "--more is not valid JSON"),
        ((*CREATE, "--groupe", "\udcff"), "half a character"),
        ((*CREATE, "--more", '{"webhook_url": "http://127.0.0.1/"}'), "webhook_url"),
        ((*CREATE, "--tenant", "acme"), "There is no tenant 'acme'"),
        ((*CREATE, "--external-api-key-file", "/nowhere/key"), "Cannot read the key from /nowhere/key"),
        (("automation", "schedules", "create", "--name", "x"), "(--range), or by id (--fiches)"),
        (("automation", "schedules", "update", "7"), "Nothing to change"),
        (("automation", "schedules", "update", "7", "--name", "x"), "there is no schedule 7"),
        (("automation", "trigger", "7"), "there is no schedule 7"),
        (("schedules", "create", "automation", "--name", "x"), "ecluse automation schedules create"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_one_line(ecluse, one, arguments, said):
    answer = ecluse(*arguments)
    assert answer.code == 2
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert one("SELECT count(*) FROM schedules") == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "cron"),
    [
        ((), "MANUAL", None),
        (("--cron", "@daily"), "CRON", "@daily"),
        (("--type", "CRON", "--cron", "@daily"), "CRON", "@daily"),
        (("--more", '{"scheduleType": "DAILY", "timeOfDay": "06:05"}'), "DAILY", "5 6 * * *"),
        (("--type", "MANUAL", "--more", '{"schedule_type": "CRON"}'), "MANUAL", None),
    ],
)  # fmt: skip
@pytest.mark.req("G-39")
def test_the_type_of_a_new_one_is_what_is_said_or_follows_from_its_expression(ecluse, arguments, kind, cron):
    made = ecluse(*CREATE, *arguments)
    assert (made.code, made.err) == (0, "")
    shown = ecluse("automation", "schedules", "show", made.json["schedule_id"]).json
    assert (shown["schedule_type"], shown["cron"]) == (kind, cron)


def test_the_secret_of_a_webhook_is_printed_once_when_it_is_made_or_rotated(ecluse, query):
    hook = '{"webhook_url": "https://93.184.216.34/hook"}'
    refused = ecluse(*CREATE, "--more", hook)
    assert (refused.code, "set ECLUSE_SECRET_KEY" in refused.err) == (2, True)
    ecluse = partial(ecluse, ECLUSE_SECRET_KEY=base64.b64encode(bytes(32)).decode())
    made = ecluse(*CREATE, "--more", hook).json
    assert made["webhook_secret"].startswith("whsec_")
    assert "webhook_secret" not in ecluse("automation", "schedules", "update", made["schedule_id"], "--more", hook).json
    rotated = ecluse("automation", "schedules", "rotate-secret", made["schedule_id"]).json
    assert rotated["webhook_secret"].startswith("whsec_")
    assert rotated["webhook_secret"] != made["webhook_secret"]
    assert query("SELECT count(*) FROM secrets WHERE name LIKE 'schedule:%%:webhook%%'") == [(2,)]
    taken = ecluse(*CREATE)
    assert (taken.code, "'nightly' already" in taken.err) == (2, True)


def test_a_change_that_makes_no_sense_or_cannot_be_stored_changes_nothing(ecluse, one):
    schedule = ecluse(*CREATE, "--cron", "@daily").json["schedule_id"]
    half = r'{"fiche_selection": {"groupes": ["\ud800"]}}'
    for wrong in (("--type", "MANUAL", "--cron", "@daily"), ("--more", half)):
        answer = ecluse("automation", "schedules", "update", schedule, *wrong)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert one("SELECT schedule_type, fiche_selection_groupes FROM automation_schedules") == ("CRON", [])


@pytest.mark.req("G-33")
def test_a_key_comes_from_a_file_and_is_sealed(ecluse, one, tmp_path):
    file = tmp_path / "key"
    file.write_text("crm-secret\n")
    given = (*CREATE, "--external-api-key-file", str(file))
    refused = ecluse(*given)
    assert (refused.code, "ECLUSE_SECRET_KEY" in refused.err) == (2, True)
    schedule = ecluse(*given, ECLUSE_SECRET_KEY=KEY).json["schedule_id"]
    shown = ecluse("automation", "schedules", "show", schedule)
    assert (shown.json["has_external_api_key"], "crm-secret" in shown.out) == (True, False)
    assert one("SELECT name FROM secrets") == f"schedule:{schedule}"


@pytest.mark.req("G-29")
def test_runs_are_started_looked_at_and_redriven(ecluse, dsn, one, query):
    schedule = ecluse("automation", "schedules", "create", "--name", "two", "--fiches", "1 2 3", "--more",
                      '{"fiche_selection": {"max_fiches": 2}}').json["schedule_id"]  # fmt: skip
    by_hand = ecluse("runs", "start", "automation", "--input", "{}")
    assert (by_hand.code, "use `ecluse schedules run SCHEDULE`" in by_hand.err) == (2, True)
    assert one("SELECT count(*) FROM runs") == 0
    unknown = ecluse("automation", "trigger", "three")
    assert (unknown.code, unknown.err) == (2, "ecluse: there is no automation schedule 'three'\n")
    started = ecluse("automation", "trigger", "two")
    assert started.code == 0
    assert "no server is running" in started.err
    run, (no_config, warning) = started.json["run_id"], started.json["warnings"]
    assert "There is no audit config for it" in no_config
    assert "the first 2 are taken" in warning
    assert ecluse("automation", "fiches", run).out == "no fiches selected yet\n"
    instead = ecluse("automation", "trigger", schedule, "--fiches", "7,8", "--override", '{"max_fiches": null}').json
    assert one("SELECT input->'override_fiche_selection' FROM runs WHERE id = %s", instead["run_id"]) == {
        "mode": "manual", "fiche_ids": ["7", "8"], "max_fiches": None,
    }  # fmt: skip
    for wrong, said in ((("--fiches", " , "), "--fiches is empty"), (("--fiches", "x" * 201), "--fiches: a fiche"),
                        (("--override", '{"fiches": 1}'), "fiches")):  # fmt: skip
        answer = ecluse("automation", "trigger", schedule, *wrong)
        assert (answer.code, said in answer.err) == (2, True)
    by_generic = ecluse("schedules", "run", schedule)
    assert (by_generic.code, f"ecluse automation trigger {schedule}" in by_generic.err) == (2, True)

    early = ecluse("automation", "redrive", run)
    assert (early.code, "still going" in early.err) == (2, True)
    ended(dsn, run, f1="failed", f2="successful")
    again = ecluse("automation", "redrive", run).json
    assert (again["parent_run_id"], again["deduplicated"]) == (run, False)
    assert ecluse("automation", "redrive", run).json["run_id"] == again["run_id"]
    lines = ecluse("automation", "runs", "--schedule", schedule).out.splitlines()
    assert [line.split()[0] for line in lines] == [again["run_id"], instead["run_id"], run]
    assert lines[2].split()[4] == "partial"
    assert lines[2].endswith("2 = 1+1+0")
    assert lines[0].endswith(f"0 = …  redrive of {run}")
    assert ecluse("automation", "runs", "--status", "partial", "--json").json["runs"][0]["id"] == int(run)
    shown = ecluse("automation", "show", run).out
    assert "partial" in shown
    assert "selected             2 = 1 successful + 1 failed + 0 ignored\n" in shown
    assert "after_redrives       2 = 1 successful + 1 failed + 0 ignored\n" in shown
    assert "total_fiches" not in shown
    assert f'redrives             ["{again["run_id"]}"]' in shown
    assert ecluse("automation", "show", run, "--json").json["failed_fiches"] == 1
    (line,) = ecluse("automation", "fiches", run, "--status", "failed").out.splitlines()
    assert line.split() == ["1", "failed", "1", "was", "failed"]
    assert ecluse("automation", "logs", run).out == "no log lines yet\n"

    ecluse("automation", "schedules", "disable", schedule)
    off = ecluse("automation", "trigger", schedule)
    assert (off.code, "switched off" in off.err) == (2, True)
    assert query("SELECT count(*) FROM runs") == [(3,)]


def test_waiting_for_a_run_comes_to_an_end_without_a_server(ecluse):
    schedule = ecluse("automation", "schedules", "create", "--name", "none", "--mode", "manual").json["schedule_id"]
    given_up = ecluse("automation", "trigger", schedule, "--wait")
    assert given_up.code == 4
    assert "no worker of its flow is live" in given_up.err


# Of fiche 1 an item that failed for good.
CLAIM = """
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
VALUES ('r', RUN, 'audit', 1, 1, 1, now())
"""
ITEM = """
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, claim_id, status, permanent,
    error_code, error, finished_at)
SELECT 'default', RUN, 'automation', 'audit', '1-7', '1', 1, now(), max(id), 'failed', true, 'NO_URL', 'no URL', now()
FROM claims
"""
HOPELESS = (CLAIM, ITEM)


@pytest.mark.req("G-89")
def test_what_cannot_succeed_and_what_was_cancelled_is_said_before_a_redrive(ecluse, dsn, query):
    schedule = ecluse("automation", "schedules", "create", "--name", "two", "--fiches", "1 2").json["schedule_id"]
    run = ecluse("automation", "trigger", schedule).json["run_id"]
    ended(dsn, run, f1="failed", f2="failed", f3="cancelled", f4="successful")
    for statement in HOPELESS:
        query(statement.replace("RUN", run))
    (line,) = ecluse("automation", "runs", "--status", "cancelled").out.splitlines()
    assert (line.split()[4], line.endswith("4 = 1+2+0 + 1 cancelled")) == ("cancelled", True)
    assert ecluse("automation", "show", str(run)).out.split("\nstatus", 1)[1].split()[0] == "cancelled"
    listed = [one.split()[:2] for one in ecluse("automation", "fiches", str(run)).out.splitlines()]
    assert sorted(status for _, status in listed) == ["cancelled", "failed", "failed", "successful"]
    silent = ecluse("automation", "redrive", run)
    told = "1 of 2 fiches cannot succeed as they are:\n       1  NO_URL  (fiche 1: no URL)\n"
    assert (silent.code, silent.out, silent.err.startswith(told), "--yes" in silent.err) == (2, "", True, True)
    assert query("SELECT count(*) FROM runs") == [(1,)]

    def taken(*options):
        again = ecluse("automation", "redrive", run, *options).json["run_id"]
        ((given,),) = query("SELECT input->'override_fiche_selection'->'fiche_ids' FROM runs WHERE id = %s", again)
        ended(dsn, again, f2="failed")
        return given

    assert taken("--yes") == ["1", "2"]
    assert taken("--leave-out-hopeless") == ["2"]
    assert taken("--leave-out-hopeless", "--cancelled") == ["2", "3"]


def test_a_run_can_be_waited_for(ecluse, serve):
    """Over no fiches at all: nobody need be asked for anything."""
    server = serve()
    server.wait_until_ready()
    schedule = ecluse("automation", "schedules", "create", "--name", "none", "--mode", "manual").json["schedule_id"]
    done = ecluse("automation", "trigger", schedule, "--wait")
    assert (done.code, "automation: completed" in done.out) == (0, True)
    run = done.out.splitlines()[0]
    assert "run_id" in run
    last = ecluse("automation", "runs", "--json").json["runs"][0]["id"]
    log = ecluse("automation", "logs", str(last)).out
    assert "Processing manual fiche selection" in log
    assert ecluse("automation", "logs", str(last), "--tail", "2").out.splitlines() == log.splitlines()[-2:]
    assert "no_fiches_manual" in ecluse("automation", "show", str(last)).out
    assert "last: success" in ecluse("automation", "schedules", "list").out
    server.end(signal.SIGTERM)
