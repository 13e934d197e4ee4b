"""What a gate decides from one look at its stage."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.engine.lead.gate import GateEnded, Redispatch, StageProgress, Wait, decide, next_round_at
from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.flow import Lane, Stage
from ecluse.engine.model.item import Done, Item

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SHORTEST = 0.01  # seconds: what a pause is rounded up to


async def never(context: WorkContext, item: Item) -> Done:
    raise AssertionError("a gate looks at counts; it works on nothing")


STAGE = Stage(name="fiches", lane=Lane("crm"), work=never, poll=timedelta(seconds=20), rounds=2)
ONE_SHOT = replace(STAGE, rounds=0)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def look(age: float = 30, *, quiet: float = 0, deadline: float = 600, **facts) -> StageProgress:
    """Ten items fanned out, as the facts say, `age` seconds after the start and `quiet` after the last progress."""
    counts = {"expected": 10, "succeeded": 0, "ignored": 0, "failed": 0, "failed_for_good": 0, "in_flight": 0}
    now = START + seconds(age)
    instants = {"now": now, "started_at": START, "deadline_at": START + seconds(deadline)}
    return StageProgress(
        **{**instants, "progress_at": now - seconds(quiet), "fanned_out": True, "round": 0, **counts, **facts}
    )


def pause(seen: StageProgress, stage: Stage = STAGE) -> float:
    verdict = decide(seen, stage)
    assert isinstance(verdict, Wait)
    return verdict.seconds


DONE = [
    pytest.param(look(expected=0), STAGE, id="nothing was to be done"),
    pytest.param(look(succeeded=10), STAGE, id="all succeeded"),
    pytest.param(look(ignored=10), STAGE, id="all were ignored"),
    pytest.param(look(succeeded=7, ignored=2, failed=1), ONE_SHOT, id="some failed and there are no rounds"),
    pytest.param(look(succeeded=7, failed=3, failed_for_good=3), STAGE, id="some failed for good"),
    pytest.param(look(succeeded=7, failed=3, round=2), STAGE, id="some failed in the last round"),
    pytest.param(look(succeeded=7, failed=3, round=2, quiet=500, age=599), STAGE, id="the same after a long stall"),
    pytest.param(look(599.999, succeeded=10), STAGE, id="all succeeded at the last moment"),
]
WAITING = [
    pytest.param(look(succeeded=9), STAGE, id="one is not finished"),
    pytest.param(look(succeeded=9, in_flight=1), STAGE, id="one is in flight"),
    pytest.param(look(succeeded=10, fanned_out=False), STAGE, id="the fan-out is not complete"),
    pytest.param(look(expected=0, fanned_out=False), STAGE, id="the fan-out has not begun"),
    pytest.param(look(succeeded=7, failed=3), STAGE, id="failed ones may heal in a further round"),
    pytest.param(look(succeeded=7, failed=3, failed_for_good=2), STAGE, id="one of the failed may heal"),
    pytest.param(look(500, quiet=400, succeeded=7), STAGE, id="a stall without a failure ends nothing"),
    pytest.param(look(500, quiet=400, succeeded=7, in_flight=3), STAGE, id="a stall of work in hand ends nothing"),
    pytest.param(look(500, quiet=400, succeeded=7, failed=1), ONE_SHOT, id="a stall without rounds ends nothing"),
    pytest.param(look(500, quiet=400, failed=3, round=2), STAGE, id="a stall after the last round ends nothing"),
    pytest.param(look(500, quiet=400, failed=3, failed_for_good=3), STAGE, id="nothing of what failed may heal"),
]


@pytest.mark.parametrize(("seen", "stage"), DONE)
def test_a_gate_passes_as_soon_as_nothing_can_change_any_more(seen: StageProgress, stage: Stage) -> None:
    assert decide(seen, stage) == GateEnded("done")


@pytest.mark.parametrize(("seen", "stage"), WAITING)
def test_a_gate_waits_while_something_may_still_change(seen: StageProgress, stage: Stage) -> None:
    assert pause(seen, stage) >= 1


@pytest.mark.req("ENG-91")
@pytest.mark.parametrize(("seen", "stage"), WAITING)
@pytest.mark.parametrize("late", [0, 0.001, 86_400])
def test_at_its_deadline_a_gate_passes_whatever_is_missing(seen: StageProgress, stage: Stage, late: float) -> None:
    assert decide(replace(seen, now=seen.deadline_at + seconds(late)), stage) == GateEnded("timeout")


@pytest.mark.req("ENG-91")
def test_what_is_missing_at_the_deadline_has_an_error_text() -> None:
    assert STAGE.incomplete == "Not finished in time (timeout/stall)"


def test_items_that_finished_between_two_polls_end_the_gate_as_done_even_after_the_deadline() -> None:
    assert decide(look(601, succeeded=10), STAGE) == GateEnded("done")


@pytest.mark.req("ENG-90")
@pytest.mark.parametrize("poll", [1, 20, 60])
def test_three_poll_intervals_without_progress_are_a_stall(poll: float) -> None:
    stage = replace(STAGE, poll=seconds(poll))
    assert isinstance(decide(look(500, quiet=3 * poll - 0.001, failed=3), stage), Wait)
    assert decide(look(500, quiet=3 * poll, failed=3), stage) == Redispatch(1)


@pytest.mark.req("ENG-90")
@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"failed": 10}, id="all failed"),
        pytest.param({"succeeded": 9, "failed": 1}, id="one failed"),
        pytest.param({"succeeded": 5, "failed": 1}, id="one failed and others are waiting"),
        pytest.param({"succeeded": 5, "failed": 1, "in_flight": 4}, id="one failed and others are in hand"),
        pytest.param({"failed": 10, "failed_for_good": 9}, id="one of the failed may heal"),
    ],
)
@pytest.mark.parametrize("round_", [0, 1])
def test_on_a_stall_what_failed_gets_the_next_round(facts, round_: int) -> None:
    assert decide(look(100, quiet=60, round=round_, **facts), STAGE) == Redispatch(round_ + 1)


@pytest.mark.parametrize(
    ("age", "expected"),
    [(0, 1), (5, 1), (10, 1), (15, 1.5), (30, 3), (100, 10), (200, 20), (400, 20), (599.5, 0.5), (595, 5)],
)
def test_pauses_grow_from_a_second_to_the_poll_interval_and_end_at_the_deadline(age: float, expected: float) -> None:
    assert pause(look(age)) == expected


@pytest.mark.parametrize("left", [0.000_001, 0.009])
def test_no_pause_is_so_short_that_it_is_none(left: float) -> None:
    assert pause(look(600 - left)) == SHORTEST


@pytest.mark.parametrize(("poll", "age", "expected"), [(0.2, 0, 0.2), (0.2, 300, 0.2), (5, 300, 5), (60, 300, 30)])
def test_the_poll_interval_is_the_longest_pause(poll: float, age: float, expected: float) -> None:
    assert pause(look(age), replace(STAGE, poll=seconds(poll))) == expected


@pytest.mark.parametrize(("quiet", "expected"), [(0, 20), (40, 20), (45, 15), (59.5, 0.5)])
def test_a_pause_ends_when_the_stall_begins_if_something_may_heal(quiet: float, expected: float) -> None:
    assert pause(look(300, quiet=quiet, failed=3)) == expected
    assert pause(look(300, quiet=quiet, failed=3), ONE_SHOT) == 20


def test_a_stall_before_the_fan_out_is_complete_is_no_reason_to_look_all_the_time() -> None:
    assert pause(look(300, quiet=60, failed=3, fanned_out=False)) >= 1


def test_a_look_knows_how_many_are_finished_and_how_many_wait() -> None:
    seen = look(succeeded=3, ignored=2, failed=1, in_flight=3)
    assert (seen.finished, seen.waiting) == (6, 1)


@st.composite
def looks(draw: st.DrawFn) -> StageProgress:
    count = st.integers(0, 5)
    facts = {name: draw(count) for name in ("succeeded", "ignored", "failed", "in_flight")}
    return look(
        draw(st.floats(0, 700)),
        quiet=draw(st.floats(0, 700)),
        fanned_out=draw(st.booleans()),
        round=draw(st.integers(0, 3)),
        expected=sum(facts.values()) + draw(count),
        failed_for_good=draw(st.integers(0, facts["failed"])),
        **facts,
    )


@pytest.mark.req("ENG-91")
@given(looks(), st.floats(0.1, 120), st.integers(0, 3))
def test_whatever_it_sees_a_gate_never_waits_past_its_deadline(seen: StageProgress, poll: float, rounds: int) -> None:
    stage = replace(STAGE, poll=seconds(poll), rounds=rounds)
    left = (seen.deadline_at - seen.now).total_seconds()
    verdict = decide(seen, stage)
    assert isinstance(verdict, GateEnded) or left > 0
    assert verdict != GateEnded("timeout") or left <= 0
    if isinstance(verdict, Wait):
        assert SHORTEST <= verdict.seconds <= max(min(left, stage.poll.total_seconds()), SHORTEST)
    if isinstance(verdict, Redispatch):
        assert verdict.round == seen.round + 1 <= rounds
        assert seen.failed > seen.failed_for_good
    if verdict == GateEnded("done"):
        assert seen.fanned_out
        assert seen.finished == seen.expected


def test_while_its_clock_is_stopped_a_gate_neither_times_out_nor_opens_a_round_nor_is_busy() -> None:
    """The time that it has had is no measure of the work then; what is done still ends it."""
    late = look(9_000, succeeded=7, failed=3, quiet=8_000, clock_stopped=True)
    assert pause(late) == STAGE.poll.total_seconds()
    assert decide(replace(late, clock_stopped=False), STAGE) == GateEnded("timeout")
    assert decide(look(500, quiet=400, failed=3, clock_stopped=True), STAGE) == Wait(20)
    assert decide(look(500, quiet=400, failed=3), STAGE) == Redispatch(1)
    assert decide(look(9_000, succeeded=10, clock_stopped=True), STAGE) == GateEnded("done")


@pytest.mark.req("ENG-91", "ENG-90")
@given(
    poll=st.sampled_from([1.0, 7.0, 20.0, 300.0]),
    max_wait=st.integers(1, 1_000).map(lambda whole: whole + 0.5),  # never just at the end of a stall
    rounds=st.integers(0, 3),
    failed=st.integers(0, 3),
)
def test_a_gate_whose_work_never_ends_passes_at_its_deadline_and_no_later(poll, max_wait, rounds, failed) -> None:
    stage = replace(STAGE, poll=seconds(poll), rounds=rounds)
    seen = look(0, deadline=max_wait, failed=failed)
    opened = []
    for _ in range(2_000):
        verdict = decide(seen, stage)
        if isinstance(verdict, GateEnded):
            break
        if isinstance(verdict, Redispatch):
            opened.append((seen.now - seen.progress_at).total_seconds())
            seen = replace(seen, round=verdict.round, progress_at=seen.now)  # and what failed fails again at once
        else:
            seen = replace(seen, now=seen.now + seconds(verdict.seconds))
    assert verdict == GateEnded("timeout")
    assert seen.now <= seen.deadline_at + seconds(SHORTEST)
    # A round is opened at the stall, not a poll later, and only while there are rounds and time.
    assert opened == pytest.approx([3 * poll] * (min(rounds, int(max_wait / (3 * poll))) if failed else 0), abs=0.05)


@pytest.mark.parametrize(
    ("seen", "stage", "at"),
    [
        (look(40, quiet=30, succeeded=7, failed=3), STAGE, START + seconds(70)),
        (look(40, quiet=30, succeeded=7, failed=3), ONE_SHOT, None),
        (look(40, quiet=30, succeeded=7, failed=3, failed_for_good=3), STAGE, None),
        (look(40, quiet=30, succeeded=7, failed=3, round=2), STAGE, None),
        (look(40, quiet=30, succeeded=7, failed=3, fanned_out=False), STAGE, None),
        (look(40, quiet=30, succeeded=7, failed=3, deadline=70), STAGE, None),
        (look(40, quiet=30, succeeded=7), STAGE, None),
        (look(40, quiet=30, succeeded=7, failed=3, clock_stopped=True), STAGE, None),
    ],
)
def test_when_another_round_will_be_opened_is_known_where_one_will_be(seen, stage, at):
    assert next_round_at(seen, stage) == at
