"""`ecluse doctor` in situations that are broken on purpose: it finds them, says what to do, and changes nothing."""

from __future__ import annotations

import re

import pytest

from ecluse.cli.doctor import FREE, _disk, graded

FLOW = "hello_flow:FLOW"


@pytest.fixture
def doctor(ecluse):
    """Its exit code, and what it says of each thing that is not ok."""

    def look(**variables):
        answer = ecluse("doctor", "--json", **variables)
        findings = answer.json["findings"]
        assert answer.json["ok"] is (answer.code == 0)
        assert all(finding["do"] for finding in findings if finding["level"] != "ok")
        return answer.code, {(f["what"], f["level"]): f["says"] for f in findings}

    return look


def live_replica(query, work="{}"):
    query("INSERT INTO replicas (id, host, pid, work) VALUES ('r1', 'h', 1, %s)", work)


def test_nothing_wrong(doctor, query, ecluse):
    live_replica(query)
    code, found = doctor()
    assert code == 0
    assert {level for _, level in found} == {"ok"}
    said = ecluse("doctor")
    assert said.code == 0
    assert [line.split()[:2] for line in said.out.splitlines()] == [["ok", what] for what, _ in found]


@pytest.mark.req("ENG-101", "G-36")
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
    assert "does not answer" in found["database", "fail"]
    assert "hunter2" not in str(found)


def test_a_schema_that_is_missing_older_or_newer(bare, empty_dsn, doctor, query):
    missing = bare("doctor", "--json", DATABASE_URL=empty_dsn)
    assert missing.code == 1
    assert missing.json["findings"][-1]["says"].startswith("revision none")
    for revision, says in [("0001", "this program wants"), ("9999", "newer than this program")]:
        query("UPDATE alembic_version SET version_num = %s", revision)
        code, found = doctor()
        assert code == 1
        assert says in found["schema", "fail"]


def test_nobody_works(doctor, query):
    _, found = doctor()
    assert "no worker or scheduler is running" in found["replicas", "warn"]
    query("INSERT INTO replicas (id, host, pid, beat_at) VALUES ('r1', 'h', 1, now() - interval '1 hour')")
    _, found = doctor()
    assert ("replicas", "ok") not in found


def test_runs_that_nobody_leads_or_that_are_past_their_deadline(doctor, query, ecluse):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    assert ("runs", "ok") in doctor()[1]
    query("UPDATE runs SET created_at = created_at - interval '1 minute'")
    assert doctor()[1]["runs", "warn"] == f"nobody leads {run_id} (hello)"
    query("UPDATE runs SET orchestrated = false")
    query(
        "INSERT INTO stages (run_id, stage, started_at, deadline_at, progress_at)"
        " VALUES (%s, 'read', now(), now() - interval '2 minutes', now())",
        run_id,
    )
    assert doctor()[1]["runs", "warn"] == f"past their deadline: {run_id} (read)"


@pytest.mark.req("ENG-18")
def test_items_that_no_live_worker_can_do(doctor, query, ecluse):
    run_id = ecluse("runs", "start", FLOW).json["run_id"]
    query("INSERT INTO lanes (name) VALUES ('lane')")
    query(
        "INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at)"
        " SELECT 'default', %s, 'hello', 'read', n::text, n::text, 1, now() FROM generate_series(1, 3) n",
        run_id,
    )
    live_replica(query, work="{other/stage}")
    assert doctor()[1]["work", "warn"] == "3 items of hello/read wait, and no live worker does that"
    query("UPDATE replicas SET work = '{hello/read}'")
    assert doctor()[1]["work", "ok"].startswith("3 items due")


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
    assert found["lanes", "warn"] == "erp is paused by bob: night shift"
    assert re.search(r"\b3[67]\d\d s old: refused", found["outbox", "warn"])
    assert found["schedules", "warn"] == "nightly: no such time zone"


def test_time_that_was_moved_is_noticed(doctor, query):
    query("""UPDATE clock_offset SET "offset" = '1 day'""")
    assert "1 day" in doctor()[1]["clock", "warn"]


def test_what_comes_from_outside_does_not_move_the_terminal(ecluse, query):
    query("INSERT INTO lanes (name, paused_at, paused_by, paused_reason) VALUES ('x', now(), 'b', E'\\x1b[2J\\nok')")
    said = ecluse("doctor").out
    assert "\x1b" not in said
    assert len([line for line in said.splitlines() if "paused" in line]) == 1


def test_limits_have_two_steps():
    assert [graded(seconds, 1, 30) for seconds in (0.5, 2, 31)] == ["ok", "warn", "fail"]
    assert [_disk(free, "/x").level for free in (FREE[0] + 1, FREE[0] - 1, FREE[1] - 1)] == ["ok", "warn", "fail"]
