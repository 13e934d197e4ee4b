"""Whatever is done to the replicas, the database or the wire: each run ends as it would have without it, no write at
the vendor is lost or done twice, and nothing is said that is not so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.cases import CASES, FEW_HANDS, fits
from tests.faults.chaos import Plan, play
from tests.faults.conftest import played
from tests.faults.subjects import (
    AUTOMATION,
    BATCH,
    ENRICHMENT,
    HELLO,
    NAIVE,
    NEW_FLOW,
    OLD,
    PRICING,
    STEADY_OLD,
    SUBJECTS,
    Subject,
)
from tests.faults.world import Violated

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # the first test waits for the cases of all the others
AT_A_POINT = [name for name in CASES if any(name == f"killed {point}" for one in SUBJECTS for point in one.points)]
ALONE = [name for name, case in CASES.items() if case.alone]
SPECIAL = [*AT_A_POINT, *ALONE, "put to sleep", "all killed at once"]
OTHER = [name for name in CASES if name not in SPECIAL]
# A run of automation takes longer than all others: of its cases, those that are its own are played each time.
EACH_TIME = {"killed in dispatch", "killed after step dispatch-transcriptions", "killed after step fan-out-audit",
             "killed after step finalize", "database crashed", "ended by the operator while paying"}  # fmt: skip

OF_BATCHES = {"killed after intent", "killed before send", "killed after send", "random kills"}
SELDOM = {
    AUTOMATION: EACH_TIME,
    BATCH: OF_BATCHES,
    PRICING: {"killed after send", "all killed at once"},
    ENRICHMENT: {"killed in commit", "all killed at once"},
}


def each_subject(*names: str) -> pytest.MarkDecorator:
    """With each of these cases."""
    return pytest.mark.parametrize(
        ("subject", "case"),
        [
            pytest.param(one, name, id=f"{one.name}-{name}", marks=[pytest.mark.slow] if rarely(one, name) else [])
            for one in SUBJECTS
            for name in names
            if fits(name, one)
        ],
    )


def rarely(subject: Subject, name: str) -> bool:
    return CASES[name].slow or (subject in SELDOM and name not in SELDOM[subject])


@pytest.fixture
def outcome(side_by_side, subject, case) -> Callable[[], None]:
    """How the case ended that this test is about; it was played before, together with others."""

    def ended() -> None:
        print(f"{side_by_side[subject, case].result():.1f} s")  # pytest -rP

    return ended


@pytest.mark.req("ENG-05", "ENG-06")
@each_subject(*AT_A_POINT)
def test_killed_at_any_point_the_run_ends_as_without_the_kill(outcome, subject, case):
    outcome()


@pytest.mark.req("ENG-05", "ENG-06", "ENG-19", "ENG-99")
@each_subject("all killed at once")
def test_all_that_is_needed_to_go_on_is_in_the_database(outcome, subject, case):
    outcome()


@pytest.mark.req("ENG-27")
@each_subject("put to sleep")
def test_who_was_declared_dead_writes_nothing_any_more_and_says_why_it_leaves(outcome, subject, case):
    outcome()


@pytest.mark.req("ENG-05")
@each_subject(*OTHER)
def test_the_run_ends_as_without_the_fault(outcome, subject, case):
    outcome()


@pytest.mark.alone
@pytest.mark.req("ENG-19")
@each_subject(*ALONE)
def test_others_go_on_in_time(shared, fork_server, subject, case):
    print(f"{played(CASES[case], subject, shared, fork_server):.1f} s")


def test_the_checks_catch_a_flow_without_the_effect_protocol(world_of):
    world = world_of(NAIVE)
    report = play(world, Plan(kills=6, effects=80, targets=40, open_runs=1, pause=(0.2, 0.8), freezes=0), quiet=True)
    assert report.tally.doubled, "no write was applied twice at the vendor"
    assert report.tally.verify != "clean", "the auditor accepts writes that were not recorded"
    with pytest.raises(Violated):
        world.check()


def test_the_checks_accept_a_run_without_faults(world_of):
    world = world_of(HELLO)
    world.start_replica()
    world.start_run()
    world.wait_until_ended()
    tally = world.check()
    assert (tally.applied, tally.wanted, tally.sends) == (80, 80, 80)


@pytest.mark.req("ENG-05", "ENG-06")
def test_new_code_goes_on_with_runs_that_old_code_began(world_of):
    world = world_of(OLD)
    old = world.start_replica(FEW_HANDS)
    run = world.start_run()
    world.wait_for(lambda: world.one("SELECT count(*) FROM items WHERE status = 'succeeded'") >= 8, "old work is done")
    old.kill()
    world.start_replica(flow=NEW_FLOW)
    world.wait_until_ended()
    world.check()
    by = {row["by"]: row["n"] for row in world.ask("SELECT result->>'by' AS by, count(*) AS n FROM items GROUP BY 1")}
    assert by["old"] >= 8, "what old code has done is done"
    assert by["new"] >= 8, "the rest is done by new code"
    flaky = world.ask("SELECT DISTINCT status, executions FROM items WHERE stage = 'first' AND payload = 'true'")
    assert flaky == [{"status": "succeeded", "executions": 4}], "old code would have given up after 2"
    assert world.one("SELECT count(*) FROM items WHERE run_id = %s AND stage = 'second'", run) == OLD.targets


@pytest.mark.req("ENG-19")
def test_old_code_leaves_the_items_of_newer_stages_alone(world_of):
    world = world_of(STEADY_OLD)
    new = world.start_replica(FEW_HANDS, flow=NEW_FLOW)
    world.start_run(160)
    world.wait_until_busy(new)
    old = world.start_replica(FEW_HANDS)
    world.wait_until_ended()
    taken = {(row["replica_id"], row["stage"]) for row in world.ask("SELECT DISTINCT replica_id, stage FROM claims")}
    assert (old.id, "first") in taken, "old code did nothing at all: the test proves nothing"
    assert (old.id, "second") not in taken
    assert world.one("SELECT count(*) FROM items WHERE stage = 'second' AND status = 'succeeded'") == 160


@pytest.mark.req("ENG-05")
def test_old_code_that_inherits_a_run_of_newer_code_leaves_it_to_newer_code(world_of):
    world = world_of(STEADY_OLD)
    new = world.start_replica(FEW_HANDS, flow=NEW_FLOW)
    world.start_run()
    world.wait_until_busy(new)
    world.start_replica(FEW_HANDS)
    second = "SELECT count(*) FROM items WHERE stage = 'second' AND status = 'succeeded'"
    world.wait_for(lambda: world.one(second) >= 5, "the run is past what old code knows")
    new.kill()
    world.wait_for(lambda: world.one("SELECT count(*) FROM replicas WHERE state = 'dead'"), "old code inherits it")
    world.start_replica(flow=NEW_FLOW)
    world.wait_until_ended()
    world.check()
