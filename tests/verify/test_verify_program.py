"""The auditor as a program: exit codes, what it prints, and what it says when it cannot look."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from psycopg.conninfo import make_conninfo

from ecluse.verify import audit
from tests.support.command_line import Answer
from tests.support.fork_server import ForkServer
from tests.verify.world import DIED, UNGUARDED, World

NOWHERE = "postgresql://unknown:secret@127.0.0.1:1/nothing"
Program = Callable[..., Answer]


@pytest.fixture
def by_itself(fork_server: ForkServer) -> Program:
    """`python -m ecluse.verify`."""
    return lambda dsn, *arguments: Answer(*fork_server.run("ecluse.verify", ["--database-url", dsn, *arguments]))


@pytest.fixture
def as_command(bare: Program) -> Program:
    return lambda dsn, *arguments: bare("verify", *arguments, DATABASE_URL=dsn)


@pytest.fixture(params=["by_itself", "as_command"])
def program(request: pytest.FixtureRequest) -> Program:
    either: Program = request.getfixturevalue(request.param)
    return either


def test_it_starts_without_the_rest_of_the_program_loaded(dsn: str) -> None:
    command = [sys.executable, "-m", "ecluse.verify", "--database-url", dsn]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nclean: 0 runs, " in done.stdout


def test_a_world_in_order_is_exit_code_0_and_says_how_much_was_looked_at(world: World, program: Program) -> None:
    done = program(world.dsn, "--ledger", world.sandbox.url)
    assert (done.code, done.err) == (0, "")
    runs = world.one("SELECT count(*) FROM runs")
    assert done.out.startswith(f"clean: {runs} runs, 19 items, 10 effects, 9 ledger effects checked (I-01 {runs}, ")


def test_a_ledger_that_begins_later_than_the_data_is_noted(world: World, by_itself: Program) -> None:
    world.sandbox.reset()
    done = by_itself(world.dsn, "--ledger", world.sandbox.url)
    assert done.code == 1
    (note,) = [line for line in done.out.splitlines() if line.startswith("note: the ledger begins at ")]
    assert note.endswith(" effects were sent before: what it lacks of them counts as a violation")


def test_violations_are_exit_code_1_and_a_readable_list(world: World, program: Program) -> None:
    world.sql("DELETE FROM outcomes WHERE target = 'SKU-00006'")
    done = program(world.dsn, "--ledger", f"{world.sandbox.url}/", "--json")
    assert (done.code, done.err) == (1, "")
    first, *_, verdict, last = done.out.splitlines()
    assert first == "I-01 run 1: selected 8 but 7 outcomes"
    runs = world.one("SELECT count(*) FROM runs")
    assert verdict.startswith(f"2 violations (I-01: 2): {runs} runs, ")
    report = json.loads(last)
    assert report["verify"] == [
        {"invariant": "I-01", "subject": "run 1", "message": "selected 8 but 7 outcomes"},
        {
            "invariant": "I-01",
            "subject": "run 1 target SKU-00006",
            "message": "has items, but was not selected",
        },
    ]
    assert report["checked"]["items"] == 19


def test_json_of_a_clean_world_is_one_word_and_the_counts(world: World, by_itself: Program) -> None:
    report = json.loads(by_itself(world.dsn, "--ledger", world.sandbox.url, "--json").out.splitlines()[-1])
    assert report["verify"] == "clean"
    assert report["checked"].keys() >= {"runs", "items", "effects", "ledger_effects", "I-01", "I-19"}


def test_many_violations_of_one_kind_are_cut_short(world: World) -> None:
    world.sql("INSERT INTO outcomes (run_id, target) SELECT n, 'x' FROM generate_series(101, 125) n")
    report = audit(world.dsn, world.sandbox.url)
    lines = report.text().splitlines()
    assert sum(line.startswith("I-01 run") for line in lines) == 20
    assert "I-01 … and 5 more" in lines
    assert len(json.loads(report.json())["verify"]) == 25


def test_what_a_key_holds_is_neither_a_line_of_its_own_nor_a_command_to_the_terminal(world: World) -> None:
    world.sql(r"INSERT INTO outcomes (run_id, target) SELECT run_id, E'x\nI-99 \x1b[2J\u202e' FROM outcomes LIMIT 1")
    world.sql(r"UPDATE items SET target = E'y\nclean: \x1b[2J' WHERE key = 'in hand'")
    printed = audit(world.dsn, world.sandbox.url).text()
    assert printed.replace("\n", "").isprintable()
    assert r"target y\nclean: \x1b[2J: has items, but was not selected" in printed
    assert not [line for line in printed.splitlines() if line.startswith(("I-99", "clean"))]


def test_a_database_that_does_not_answer_is_exit_code_2(program: Program) -> None:
    done = program(NOWHERE)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "is unavailable" in done.err
    assert "secret" not in done.err


def test_a_database_that_was_never_migrated_is_exit_code_2(empty_dsn: str, program: Program) -> None:
    done = program(empty_dsn)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "does not fit this version" in done.err
    assert "`ecluse migrate`" in done.err


def test_an_address_that_is_none_is_exit_code_2_and_its_password_stays_ours(by_itself: Program) -> None:
    done = by_itself("postgresql://user:secret@host/x?nonsense=secret")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "not a PostgreSQL address" in done.err
    assert "secret" not in done.err


@pytest.mark.parametrize("where", ["http://127.0.0.1:1", "{sandbox}/price-list", "nonsense", "http://[", "http://a b"])
def test_a_ledger_that_is_not_there_is_exit_code_2(world: World, by_itself: Program, where: str) -> None:
    done = by_itself(world.dsn, "--ledger", where.format(sandbox=world.sandbox.url))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "no ledger at" in done.err


def test_a_user_who_may_not_read_gets_that_as_the_reason(world: World, by_itself: Program) -> None:
    if not world.one("SELECT rolsuper FROM pg_roles WHERE rolname = current_user"):
        pytest.skip("makes a role that logs in without a password: needs the embedded server")
    world.sql("CREATE ROLE blind LOGIN")
    try:
        done = by_itself(make_conninfo(world.dsn, user="blind"))
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert "permission denied" in done.err
    finally:
        world.sql("DROP ROLE blind")


def test_without_a_ledger_the_tables_are_judged_alone_and_that_is_said(world: World) -> None:
    world.put("SKU-00001", "1.00")  # which the ledger alone knows
    report = audit(world.dsn, None)
    assert report.violations == []
    assert report.checked["ledger_effects"] == report.checked["I-03"] == report.checked["I-06"] == 0
    assert "note: no ledger given" in report.text()


def test_without_a_live_replica_nothing_is_stuck_and_a_note_says_so(world: World) -> None:
    world.sql("UPDATE replicas SET state = 'dead', ended_at = now() - interval '1 hour'")
    world.change("in hand", "claims", "replica_id = %(died)s", died=DIED)
    world.sql("DELETE FROM dbos.workflow_status; UPDATE stages SET deadline_at = now() - interval '1 hour'")
    report = audit(world.dsn, world.sandbox.url)
    assert report.violations == []
    assert "note: no live replica" in report.text()


def test_where_the_clock_was_moved_instants_are_not_compared_and_that_is_said(world: World) -> None:
    world.sql("""UPDATE clock_offset SET "offset" = '1 day'""")
    world.change("SKU-00001", "effects", "first_send_at = first_send_at + interval '1 second'")
    world.sql("UPDATE stages SET deadline_at = now() - interval '1 hour'")
    report = audit(world.dsn, world.sandbox.url)
    assert report.violations == []
    assert "note: the database clock is moved" in report.text()


def test_a_stage_whose_clock_stands_still_is_not_stuck(world: World) -> None:
    world.sql("UPDATE stages SET deadline_at = now() - interval '1 hour' WHERE ended_at IS NULL")
    assert {one.invariant for one in audit(world.dsn, None).violations} == {"I-19"}
    world.sql("UPDATE lanes SET paused_at = now(), paused_by = 'a', paused_reason = 'x', clock_stopped_at = now()")
    assert audit(world.dsn, None).violations == []


MANY = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, ended_at, end_cause, selected,
                  successful, failed, ignored)
VALUES ('t', 'many', 'many', false, 'completed', 'succeeded', now(), now(), 'normal', 50000, 50000, 0, 0);
INSERT INTO stages (run_id, stage, expected, fanned_out_at, started_at, deadline_at, progress_at, ended_at, budget)
SELECT id, 'write', 50000, now(), now(), now(), now(), now(), 3 FROM runs;
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, succeeded, taken_at)
SELECT 'a replica', r.id, 'write', 1, 100, 100, now() FROM runs r, generate_series(1, 500);
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, claim_id, status, executions,
                   finished_at)
SELECT 't', r.id, 'many', 'write', n, n, 1, now(), 1 + n / 100, 'succeeded', 2, now()
FROM runs r, generate_series(0, 49999) n;
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous)
SELECT run_id, id, key, 0, 1, now(), 'a replica', 'TIMEOUT', 'no answer', true FROM items;
INSERT INTO outcomes (run_id, target, outcome) SELECT run_id, target, 'successful' FROM items;
INSERT INTO effects (id, tenant_id, run_id, item_id, stage, key, target, round, class, state, wanted, sends, claim_id,
                     quiet, first_send_at, last_send_at, settled_at)
SELECT gen_random_uuid(), 't', run_id, id, 'write', key, target, 0, 'C2', 'applied', '{}', 1, 1, '1 s', now(), now(),
       now() FROM items;
INSERT INTO run_log (run_id, at, level, message) SELECT id, now(), 'info', 'queued -> running' FROM runs;
INSERT INTO run_log (run_id, at, level, message) SELECT id, now(), 'info', 'running -> completed' FROM runs;
"""


def test_fifty_thousand_items_without_statistics_are_audited(dsn: str, query: Callable[..., list[object]]) -> None:
    query(f"{UNGUARDED}; {MANY}")
    report = audit(dsn, None)
    assert report.violations == []
    assert (report.checked["items"], report.checked["I-04"], report.checked["I-13"]) == (50_000, 50_000, 50_000)


def test_a_report_of_very_many_violations_is_still_readable(dsn: str, query: Callable[..., list[object]]) -> None:
    query(f"{UNGUARDED}; {MANY}")
    query("DELETE FROM outcomes; DELETE FROM claims")
    report = audit(dsn, None)
    assert len(report.violations) > 100_000
    assert len(report.text().splitlines()) < 1_000
