"""`ecluse doctor` in situations that are broken on purpose: it finds them, says what to do, and changes nothing."""

from __future__ import annotations

import re
import subprocess
import sys

import psycopg
import pytest

from ecluse.bootstrap.checks import FREE, _disk
from ecluse.bootstrap.edge import kept
from ecluse.db.pools import most_connections
from ecluse.doctor.database import allowed_connections
from ecluse.doctor.findings import graded
from ecluse.engine import ROLES
from ecluse.settings import Settings
from ecluse.settings.limits import LimitKnobs
from tests.support.api_server import new_key
from tests.support.command_line import free_port

KEY = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="


@pytest.fixture
def doctor(ecluse):
    """Its exit code, and what it says of each thing that is not ok."""

    def look(**variables):
        answer = ecluse("doctor", "--json", **variables)
        findings = answer.json["findings"]
        assert answer.json["ok"] is (answer.code == 0)
        assert (findings[0]["what"], findings[0]["level"]) == ("server", "warn"), "none runs: the host checks"
        assert all(finding["do"] for finding in findings if finding["level"] != "ok")
        return answer.code, {(f["what"], f["level"]): f["says"] for f in findings[1:]}

    return look


def new_run(query) -> int:
    ((run_id,),) = query(
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)"
        " VALUES ('default', 'hello', 'x', true, 'queued', 'queued', now()) RETURNING id"
    )
    return run_id


def live_replica(query, work="{}"):
    query("INSERT INTO replicas (id, host, pid, work) VALUES ('r1', 'h', 1, %s)", work)


def test_nothing_wrong(doctor, query, ecluse):
    live_replica(query)
    code, found = doctor(ECLUSE_SECRET_KEY=KEY)
    assert code == 0
    assert {what: says for (what, level), says in found.items() if level != "ok"} == {}
    said = ecluse("doctor", ECLUSE_SECRET_KEY=KEY)
    assert said.code == 0
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [["ok", what] for what, _ in found]


@pytest.mark.req("ENG-101", "G-36")
def test_the_advice_fits_the_error_of_the_server(operator, dsn, server, one):
    def of_server(**variables):
        answer = operator("doctor", "--json", **variables)
        assert answer.code != 0
        return next((f["says"], f["do"]) for f in answer.json["findings"] if f["level"] == "fail")

    says, do = of_server(ECLUSE_KEY=new_key(dsn, "viewer"))
    assert ("FORBIDDEN" in says, do) == (True, "use an admin key of the tenant default")
    name = one("SELECT current_database()")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        try:
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
            says, do = of_server()
        finally:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    assert "DATABASE_AWAY" in says
    assert do == "start PostgreSQL, or see in the server's log why it does not reach it"


def test_an_environment_that_cannot_be_read_is_named(doctor):
    code, found = doctor(ECLUSE_HANDS="many")
    assert code == 1
    assert "ECLUSE_HANDS" in found["environment", "fail"]


@pytest.mark.req("ENG-100", "G-36")
def test_a_knob_below_its_minimum_is_named(doctor):
    code, found = doctor(ECLUSE_HANDS="0", ECLUSE_HEARTBEAT_SECONDS="2")
    assert code == 0
    assert found["environment", "warn"] == "ECLUSE_HANDS=0 is below its minimum, 1 is used"


def test_a_database_that_does_not_answer(doctor):
    code, found = doctor(DATABASE_URL="postgresql://bob:hunter2@127.0.0.1:1/x")
    assert code == 1
    assert "is unavailable" in found["database", "fail"]
    assert "hunter2" not in str(found)


def test_a_host_without_a_database_is_left_without_one(bare, tmp_path):
    answer = bare("doctor", ECLUSE_DATA_DIR=str(tmp_path / "data"))
    assert answer.code == 0
    assert "warn  database     there is none in" in answer.out
    assert answer.out.splitlines()[0].count("ecluse serve") == 1
    assert not (tmp_path / "data").exists()


def test_a_database_of_ones_own_without_a_key_for_secrets_is_named(doctor, tmp_path):
    _, found = doctor()
    assert "no key to encrypt secrets" in found["secrets", "warn"]
    (tmp_path / "key").write_text(KEY)
    for key in ({"ECLUSE_SECRET_KEY": KEY}, {"ECLUSE_SECRET_KEY_FILE": str(tmp_path / "key")}):
        found = doctor(**key)[1]
        assert (found["secrets", "ok"], ("secrets", "warn") in found) == ("none stored", False)


def test_connections_that_the_replicas_may_take_are_compared_with_those_that_are_allowed(doctor, query, one):
    everything = most_connections(("api", "scheduler", "worker"), 10)
    assert f"one replica may open {everything}" in doctor()[1]["connections", "ok"]
    for number in (1, 2):
        query("INSERT INTO replicas (id, host, pid, roles) VALUES (%s, 'h', 1, '{api,scheduler,worker}')", f"r{number}")
    assert f"2 live replicas may open {2 * everything}" in doctor()[1]["connections", "ok"]
    query(f"ALTER DATABASE {one('SELECT current_database()')} CONNECTION LIMIT {2 * everything - 1}")
    assert f"{2 * everything - 1} allowed" in doctor()[1]["connections", "warn"]
    assert ("connections", "ok") in doctor(ECLUSE_DB_POOL="4")[1]


@pytest.mark.parametrize(
    ("roles", "size", "most"),
    [
        (("api", "scheduler", "worker"), 10, 48),
        (("api",), 10, 26),
        (("worker",), 10, 35),
        (("scheduler",), 10, 17),
        (("api", "scheduler", "worker"), 3, 29),
        (("api",), 3, 15),
        (("worker",), 3, 20),
        (("scheduler",), 3, 10),
    ],
)
def test_what_a_process_takes_follows_from_its_roles_and_the_pool_size(roles, size, most):
    assert most_connections(roles, size) == most


def test_the_smallest_limit_counts_and_minus_one_is_none():
    assert [allowed_connections(97, *limits) for limits in [(-1, -1), (20, -1), (-1, 30), (200, 10)]] == [
        97,
        20,
        30,
        10,
    ]


def test_a_schema_that_is_missing_older_or_newer(bare, empty_dsn, doctor, query):
    missing = bare("doctor", "--json", DATABASE_URL=empty_dsn)
    assert missing.code == 1
    assert missing.json["findings"][-1]["says"].startswith("revision none")
    for revision, says in [("0001", "this program needs"), ("9999", "newer than this program")]:
        query("UPDATE alembic_version SET version_num = %s", revision)
        code, found = doctor()
        assert code == 1
        assert says in found["schema", "fail"]


def test_nobody_works(doctor, query):
    code, found = doctor()
    assert "no live worker or scheduler" in found["replicas", "warn"]
    assert code == 0, "a warning fails nothing"
    query("INSERT INTO replicas (id, host, pid, beat_at) VALUES ('r1', 'h', 1, now() - interval '1 hour')")
    _, found = doctor()
    assert ("replicas", "ok") not in found


def test_runs_that_nobody_leads_or_that_are_past_their_deadline(doctor, query):
    run_id = new_run(query)
    assert ("runs", "ok") in doctor()[1]
    query("UPDATE runs SET created_at = created_at - interval '1 minute'")
    assert doctor()[1]["runs", "warn"] == f"no live replica leads {run_id} (hello)"
    live_replica(query, work="{hello/read}")
    assert doctor()[1]["runs", "warn"] == f"no live replica leads {run_id} (hello)", "though one has room for it"
    query("UPDATE replicas SET tenant_share = 0.75")
    query(
        "INSERT INTO dbos.workflow_status (workflow_uuid, status, executor_id)"
        " SELECT 'default/' || n, 'PENDING', 'r1' FROM generate_series(1, 1500) n"
    )
    assert ("runs", "ok") in doctor()[1], "the replica leads as many runs of the tenant as it may"
    query("UPDATE runs SET status = 'running', state = 'running'")
    assert doctor()[1]["runs", "warn"] == f"no live replica leads {run_id} (hello)"
    query("UPDATE runs SET orchestrated = false")
    query(
        "INSERT INTO stages (run_id, stage, started_at, deadline_at, progress_at)"
        " VALUES (%s, 'read', now(), now() - interval '2 minutes', now())",
        run_id,
    )
    assert doctor()[1]["runs", "warn"] == f"past the deadline of a stage: {run_id} (read)"


@pytest.mark.req("ENG-18")
def test_items_that_no_live_worker_can_do(doctor, query):
    run_id = new_run(query)
    query("INSERT INTO lanes (name) VALUES ('lane')")
    query(
        "INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)"
        " SELECT 'default', %s, 'hello', 'read', n::text, n::text, 1, now() FROM generate_series(1, 3) n",
        run_id,
    )
    live_replica(query, work="{other/stage}")
    assert doctor()[1]["work", "warn"] == "3 items of hello/read are due, but no live worker has loaded the flow"
    query("UPDATE replicas SET work = '{hello/read}'")
    assert doctor()[1]["work", "ok"].startswith("3 items due")


def test_a_vendor_that_is_down_and_a_pause_with_the_clock(doctor, query):
    query(
        "INSERT INTO lanes (name, trips, failures, failing_since, last_failure) VALUES"
        " ('llm', 2, 5, '2026-03-01 10:02:11Z', '503 gone')"
    )
    _, found = doctor()
    assert found["lanes", "warn"] == "llm: vendor down since 2026-03-01 10:02:11+0000: 503 gone"
    query("UPDATE lanes SET paused_at = now(), paused_by = 'bob', paused_reason = 'x', clock_stopped_at = now()")
    _, found = doctor()
    assert found["lanes", "warn"] == "llm is paused by bob: x; the clock of its stages is stopped"


def test_lanes_outbox_and_schedules_that_stand_still(doctor, query):
    query("INSERT INTO lanes (name, held_until, held_reason) VALUES ('crm', now() + interval '1 hour', 'Retry-After')")
    query("INSERT INTO lanes (name, paused_at, paused_by, paused_reason) VALUES ('erp', now(), 'bob', 'night shift')")
    query(
        "INSERT INTO events_outbox (tenant_id, event_key, event_type, aggregate, correlation_id, producer, occurred_at,"
        " error) VALUES ('default', 'k', 't', 'a', 'c', 'ecluse', now() - interval '1 hour', 'refused')"
    )
    query(
        "INSERT INTO schedules (tenant_id, flow, name, zone_rules, handled_until, error, created_at, updated_at)"
        " VALUES ('default', 'hello', 'nightly', '', now(), 'no such time zone', now(), now())"
    )
    code, found = doctor()
    assert code == 0
    clock = "the clock of its stages keeps running: items that still wait at the deadline fail"
    assert found["lanes", "warn"] == f"erp is paused by bob: night shift; {clock}"
    assert re.search(r"\b3[67]\d\d s old: refused", found["outbox", "warn"])
    assert found["schedules", "warn"] == "nightly: no such time zone"


REFUSED = """
WITH item AS (
    INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)
    SELECT 'default', %s, 'hello', 'work', 'a', 'a', id, now() FROM lanes WHERE name = 'crm' RETURNING id)
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous)
SELECT %s, id, 'e', 0, 1, ecluse_now(), 'r1', 'UNAUTHORIZED', 'crm answered 401', false FROM item
"""
SUCCEEDED = """
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, succeeded, taken_at)
SELECT 'r1', 1, 'work', id, 1, 1, ecluse_now() FROM lanes WHERE name = 'crm'
"""


def test_a_refused_key_is_named_until_a_call_succeeds(doctor, query):
    live_replica(query)
    query("INSERT INTO lanes (name) VALUES ('crm')")
    query(REFUSED, *[new_run(query)] * 2)
    said = doctor()[1]["vendors", "warn"]
    assert "crm: key refused, 1 call in" in said
    assert said.endswith("crm answered 401")
    query(SUCCEEDED)
    assert ("vendors", "warn") not in doctor()[1]


PAID = """
INSERT INTO paid_calls (item_id, claim_id, tenant_id, run_id, root_run_id, root_day, day, vendor, model, priced,
                        reserved, cost, state, at)
VALUES (1, 1, 'default', 1, 1, now(), now(), 'llm', 'gpt-9', false, 0, 0, 'settled', now())
"""


def test_work_that_a_budget_holds_and_a_model_that_has_no_price_at_present(doctor, query):
    live_replica(query)
    query("INSERT INTO lanes (name) VALUES ('llm')")
    query(
        "INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, postponed_cause,"
        " postponed_why) SELECT 'default', %s, 'hello', 'work', 'a', 'a', id, now(), 'budget', 'the budget is used up'"
        " FROM lanes",
        new_run(query),
    )
    query(
        "INSERT INTO budgets (tenant_id, scope, subject_id, period, amount, created_at, updated_at)"
        " VALUES ('default', 'tenant', 0, 'day', 1, now(), now())"
    )
    assert doctor()[1]["budgets", "warn"] == "1 item of tenant default waits for a budget: the budget is used up"
    query("DELETE FROM items")
    query(PAID)
    assert doctor()[1]["budgets", "warn"].endswith("no price for llm gpt-9")
    assert ("budgets", "warn") not in doctor(LLM_PRICES="gpt-9=1/2")[1], "a price was set since"


def test_time_that_was_moved_is_noticed(doctor, query):
    query("""UPDATE clock_offset SET "offset" = '1 day'""")
    assert "1 day" in doctor()[1]["clock", "warn"]


def test_what_comes_from_outside_does_not_move_the_terminal(ecluse, query):
    query("INSERT INTO lanes (name, paused_at, paused_by, paused_reason) VALUES ('x', now(), 'b', E'\\x1b[2J\\nok')")
    said = ecluse("doctor").out
    assert "\x1b" not in said
    assert len([line for line in said.splitlines() if "paused" in line]) == 1


def test_both_limits_of_descriptors_are_shown(doctor):
    _, found = doctor()
    assert re.match(r"soft limit \d+, hard limit \d+: at most \d+ connections of clients", found["descriptors", "ok"])


@pytest.mark.parametrize(("soft", "number"), [(256, 128), (1024, 348), (65_536, 348)])
def test_descriptors_are_kept_for_database_and_vendors_but_no_more_than_half(soft, number):
    assert kept(Settings(), ROLES, soft) == number


def test_the_soft_limit_is_raised_to_the_hard_one():
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512));"
        "from ecluse.base import descriptors as one; one.raise_limit(); print(*one.limits())"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["512", "512"]


def test_limits_are_shown_and_those_that_are_off_are_warned_of_with_what_follows(doctor):
    says = doctor()[1]["limits", "ok"].split(", ")
    assert {"ECLUSE_LIMIT_KEY_REQUESTS=6000", "ECLUSE_TENANT_SLOTS_SHARE=0.75", "ECLUSE_MAILS_PER_DAY=500"} <= {*says}
    assert len(says) == len(LimitKnobs.model_fields) + 2
    off = {"ECLUSE_LIMIT_SCHEDULES": "0", "ECLUSE_TENANT_SLOTS_SHARE": "1", "ECLUSE_MAILS_PER_DAY": "0"}
    code, found = doctor(ECLUSE_LIMIT_API_KEYS="7", **off)
    assert code == 0
    schedules, share, mails, rest = found["limits", "warn"].split("; ")
    assert schedules == "ECLUSE_LIMIT_SCHEDULES=0: without a limit, one tenant can use up what others need"
    assert share == "ECLUSE_TENANT_SLOTS_SHARE=1: calls of one tenant that hang can hold all worker slots"
    assert mails == "ECLUSE_MAILS_PER_DAY=0: no mail is sent"
    assert "ECLUSE_LIMIT_API_KEYS=7" in rest


def test_limits_have_two_steps():
    assert [graded(seconds, 1, 30) for seconds in (0.5, 2, 31)] == ["ok", "warn", "fail"]
    assert [_disk(free, "/x").level for free in (FREE[0] + 1, FREE[0] - 1, FREE[1] - 1)] == ["ok", "warn", "fail"]


def test_with_a_server_its_findings_are_shown(operator, bare, dsn):
    answer = operator("doctor", "--json")
    found = {one["what"]: one["level"] for one in answer.json["findings"]}
    assert (found["server"], found["schema"], answer.code) == ("ok", "ok", 0)
    viewer = operator("doctor", ECLUSE_KEY=new_key(dsn, "viewer"))
    assert (viewer.code, "FORBIDDEN" in viewer.out, "use an admin key" in viewer.out) == (1, True, True)
    closed = operator("doctor", ECLUSE_URL=f"http://127.0.0.1:{free_port()}")
    assert (closed.code, closed.out.startswith("fail  server")) == (1, True)
