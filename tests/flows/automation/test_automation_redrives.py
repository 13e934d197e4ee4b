"""Redrives: which fiches they take, what is said of them beforehand, and what they make of their run and schedule."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.base.errors import Conflict
from ecluse.engine import Choice, FailedTarget, load_run, preview_redrive, redrive, redrive_of
from ecluse.engine.runs.redrive import chosen, overview
from ecluse.flows.automation import events
from ecluse.flows.automation.start import start
from ecluse.flows.automation.statistics import last_run_status
from ecluse.insight import run_queries
from ecluse.insight.redrive_chains import redrives_of, standing
from tests.support.automation_rows import FLOW, end_run, new_schedule, redriven

STATED = "SELECT last_run_status, total_runs, successful_runs, partial_runs, failed_runs, cancelled_runs FROM"
STATED += " automation_schedules WHERE id = %s"


def failed(fiche_id, code="BUSY", cause=None):
    return FailedTarget(fiche_id, code, "it failed", "audit", cause, cause and f"{fiche_id}: {cause}")


SOME = [failed("1"), failed("2", "NO_URL", "NO_URL"), failed("3", "CANCELLED"), failed("4", "NO_URL", "NO_URL"),
        failed("5", "CANCELLED", "NOT_FOUND")]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "leave_out_hopeless", "taken"),
    [("failed", False, "124"), ("failed", True, "1"), ("all", False, "12345"), ("all", True, "13")],
)
def test_a_redrive_takes_failures_and_on_request_what_was_cancelled(outcome, leave_out_hopeless, taken):
    choice = Choice(outcome, leave_out_hopeless=leave_out_hopeless)
    assert chosen(7, SOME, choice) == list(taken)


@pytest.mark.parametrize(
    ("there", "code", "says"),
    [
        ([], "NOTHING_FAILED", "nothing to redrive"),
        (
            [failed("3", "CANCELLED")],
            "ONLY_CANCELLED",
            "1 unfinished target was cancelled: start the redrive with outcome all",
        ),
        ([failed("2", "NO_URL", "NO_URL")], "ONLY_HOPELESS", "1 NO_URL"),
    ],
)
def test_where_there_is_nothing_to_redrive_it_is_said_why(there, code, says):
    with pytest.raises(Conflict) as refused:
        chosen(7, there, Choice(leave_out_hopeless=True))
    assert refused.value.code == code
    assert says in refused.value.message


def test_which_of_them_cannot_succeed_is_told_by_cause():
    assert overview(SOME, Choice()) == {
        "failed": 3,
        "cancelled": 2,
        "cannot_succeed": 2,
        "groups": [
            {"error_code": "NO_URL", "count": 2, "target": "2", "error": "it failed", "cannot_succeed": 2},
            {"error_code": "BUSY", "count": 1, "target": "1", "error": "it failed", "cannot_succeed": 0},
        ],
        "causes": [{"error_code": "NO_URL", "count": 2, "target": "2", "error": "2: NO_URL"}],
        "succeeded_since": 0,
        "succeeded_in": [],
    }
    both = overview(SOME, Choice("all"))
    assert (sum(group["count"] for group in both["groups"]), both["cannot_succeed"]) == (5, 3)
    assert [one["error_code"] for one in both["causes"]] == ["NO_URL", "NOT_FOUND"]


@pytest.mark.parametrize(
    ("choice", "taken"),
    [
        (Choice("cancelled"), "35"),
        (Choice(error_code="NO_URL"), "24"),
        (Choice("all", stage="audit"), "12345"),
        (Choice("cancelled", leave_out_hopeless=True), "3"),
    ],
)
def test_targets_are_chosen_by_outcome_code_and_stage(choice, taken):
    assert chosen(7, SOME, choice) == list(taken)


def test_a_choice_that_finds_nothing_says_so():
    for choice in (Choice(error_code="UNKNOWN"), Choice(stage="fetch")):
        with pytest.raises(Conflict) as refused:
            chosen(7, SOME, choice)
        assert refused.value.code == "NOTHING_CHOSEN"


@pytest.mark.parametrize(
    ("came_to", "redriven", "is_redrive", "says"),
    [
        ("success", None, False, "success"),
        ("failed", None, False, "failed"),
        ("cancelled", None, False, "cancelled"),
        ("failed", {"successful": 27, "failed": 2, "cancelled": 0}, True, "partial"),  # nothing new has failed
        ("failed", {"successful": 0, "failed": 2, "cancelled": 0}, True, "failed"),
        ("partial", {"successful": 28, "failed": 1, "cancelled": 0}, True, "partial"),
        ("success", {"successful": 29, "failed": 0, "cancelled": 0}, True, "success"),
        ("failed", {"successful": 20, "failed": 9, "cancelled": 7}, True, "cancelled"),  # seven were never finished
        ("cancelled", {"successful": 27, "failed": 2, "cancelled": 0}, True, "partial"),  # the redrive was
        ("failed", None, True, None),  # of an earlier run
    ],
)
def test_a_redrive_says_how_its_run_stands_and_never_makes_it_worse(came_to, redriven, is_redrive, says):
    assert last_run_status(came_to, redriven, is_redrive=is_redrive) == says


async def ended(connection, run, **outcomes):
    await end_run(connection, run.id, **outcomes)
    await events.ended(connection, [await load_run(connection, run.id)])


async def test_a_redrive_does_not_turn_its_schedule_red_and_its_run_says_where_it_stands(connection, query):
    schedule = (await new_schedule(connection))["id"]
    first = (await start(connection, FLOW, "default", schedule, None)).run
    await ended(connection, first, f1="successful", f2="failed", f3="failed", f4="ignored")
    assert query(STATED, schedule) == [("partial", 1, 0, 1, 0, 0)]
    second = (await redriven(connection, first.id)).run
    assert query("SELECT redrive_of, parent_run_id FROM runs WHERE id = %s", second.id) == [(first.id, first.id)]
    assert query("SELECT last_run_id FROM schedules WHERE id = %s", schedule) == [(first.id,)]
    shown = await run_queries.show_run(connection, "default", first.id)
    assert shown["after_redrives"] == {"selected": 4, "successful": 1, "failed": 2, "ignored": 1, "cancelled": 0}
    await ended(connection, second, f2="failed", f3="failed")
    assert query(STATED, schedule) == [("partial", 2, 0, 1, 1, 0)], "what failed had failed before"
    third = (await redriven(connection, second.id)).run
    await ended(connection, third, f2="successful", f3="cancelled")
    assert query(STATED, schedule) == [("partial", 3, 0, 1, 1, 1)]
    shown = await run_queries.show_run(connection, "default", first.id)
    assert shown["redrives"] == [second.id, third.id]
    assert shown["after_redrives"] == {"selected": 4, "successful": 2, "failed": 1, "ignored": 1, "cancelled": 0}
    # The cancelled one had failed before, and that is what is known of it; of the redrive itself, too.
    assert (await standing(connection, [second.id]))[second.id]["cancelled"] == 0
    assert await redrives_of(connection, [second.id, third.id]) == {second.id: [third.id]}
    fourth = (await redriven(connection, second.id)).run
    await ended(connection, fourth, f2="successful", f3="successful")
    assert query(STATED, schedule) == [("success", 4, 1, 1, 1, 1)]
    shown = await run_queries.show_run(connection, "default", first.id)
    assert (shown["status"], shown["after_redrives"]["failed"]) == ("partial", 0)


async def test_a_redrive_of_an_earlier_run_says_nothing_of_the_last(connection, query):
    schedule = (await new_schedule(connection))["id"]
    first, last = [(await start(connection, FLOW, "default", schedule, None)).run for _ in range(2)]
    await ended(connection, first, f1="failed")
    await ended(connection, last, f1="successful")
    again = (await redriven(connection, first.id)).run
    await ended(connection, again, f1="failed")
    assert query(STATED, schedule) == [("success", 3, 1, 0, 2, 0)]


@pytest.mark.req("G-89")
async def test_what_was_cancelled_is_redriven_on_request_only(connection, query):
    schedule = (await new_schedule(connection))["id"]
    first = (await start(connection, FLOW, "default", schedule, None)).run
    await ended(connection, first, f1="successful", f2="cancelled", f3="cancelled")
    assert query(STATED, schedule) == [("cancelled", 1, 0, 0, 0, 1)], "no failure"
    with pytest.raises(Conflict) as refused:
        await redriven(connection, first.id)
    assert refused.value.code == "ONLY_CANCELLED"
    again = (await redriven(connection, first.id, outcome="all")).run
    assert dict(again.input)["override_fiche_selection"]["fiche_ids"] == ["2", "3"]
    await ended(connection, again, f2="successful", f3="failed")
    assert query(STATED, schedule) == [("partial", 2, 0, 1, 0, 1)]
    stands = (await standing(connection, [first.id]))[first.id]
    assert stands == {"selected": 3, "successful": 2, "failed": 1, "ignored": 0, "cancelled": 0}


async def test_a_redrive_makes_the_calls_that_its_preview_expects_of_targets_that_cannot_succeed(automate, connection):
    """Without a URL or recordings no call is made; a recording that the provider refuses is sent to it again."""
    world = await automate(audit_wait=timedelta(seconds=20))
    await world.config()
    world.sandbox.set_faults([{"kind": "refused", "vendor": "elevenlabs", "code": "bad_audio", "ids": ["1000-1"]}])
    run = await world.run_over("1000", "9100", "9200")
    assert run["failed_fiches"] == 3
    first = await load_run(connection, run["id"])
    none = {"transcripts": 0, "audits": 0}
    for code, calls in (("NO_URL", none), ("NO_TRANSCRIPT", none), (None, {"transcripts": 1, "audits": 0})):
        told = await preview_redrive(connection, redrive_of(world.flow), first, Choice(error_code=code))
        assert (told["cannot_succeed"], told["calls"], told["expected_cost"]) == (told["count"], calls, None), code
    assert told["count"] == 3

    def sent():
        paths = [one["path"] for one in world.sandbox.ledger(kind="call")]
        return [sum(path.endswith(end) for path in paths) for end in ("/speech-to-text", "/chat/completions")]

    before = sent()
    again = await redrive(connection, world.flow, first, Choice())
    assert (await world.ended(again.run.id))["failed_fiches"] == 3
    assert [now - then for now, then in zip(sent(), before, strict=True)] == [1, 0]


async def test_what_cannot_succeed_is_known_before_it_is_tried_again(automate, connection, query):
    """A fiche with a recording without a URL, one without recordings, one whose model was down."""
    world = await automate(audit_wait=timedelta(seconds=20))
    config = await world.config()
    down = [f"automation-1-audit-1000-{config}"]
    world.sandbox.set_faults([{"kind": "server_error", "vendor": "llm", "ids": down}])
    run = await world.run_over("1000", "1008", "9100", "9200")
    assert (run["successful_fiches"], run["failed_fiches"]) == (1, 3)
    first = await load_run(connection, run["id"])
    previewed = await preview_redrive(connection, redrive_of(world.flow), first, Choice())
    causes = {one["error_code"]: (one["count"], one["target"]) for one in previewed["causes"]}
    counts = {name: previewed[name] for name in ("run_id", "failed", "cancelled", "count", "cannot_succeed")}
    assert counts == {"run_id": str(run["id"]), "failed": 3, "cancelled": 0, "count": 3, "cannot_succeed": 2}
    assert causes == {"NO_URL": (1, "9200"), "NO_TRANSCRIPT": (1, "9100")}
    world.sandbox.set_faults([])
    again = await redrive(connection, world.flow, first, Choice(leave_out_hopeless=True))
    assert dict(again.run.input)["override_fiche_selection"]["fiche_ids"] == ["1000"]
    assert (await world.ended(again.run.id))["status"] == "completed"
    shown = await run_queries.show_run(connection, "default", run["id"])
    assert shown["after_redrives"] == {"selected": 4, "successful": 2, "failed": 2, "ignored": 0, "cancelled": 0}
