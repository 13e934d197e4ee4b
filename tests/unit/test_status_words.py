"""One vocabulary inside, each flow's own words outside, and the moves between them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base.errors import ForbiddenTransition
from ecluse.engine.model.states import PLAIN, State, StatusMap, terminal_state

PRICING = StatusMap(
    meaning={
        "PREVIEW": State.DRAFT,
        "QUEUED": State.QUEUED,
        "APPLYING": State.RUNNING,
        "APPLIED": State.SUCCEEDED,
        "PARTIAL": State.PARTIAL,
        "FAILED": State.FAILED,
        "ROLLED_BACK": State.REVERTED,
    },
    moves={
        "PREVIEW": frozenset({"QUEUED"}),
        "QUEUED": frozenset({"APPLYING"}),
        "APPLYING": frozenset({"APPLIED", "PARTIAL", "FAILED"}),
        "PARTIAL": frozenset({"APPLYING", "ROLLED_BACK"}),
        "FAILED": frozenset({"APPLYING"}),
        "APPLIED": frozenset({"ROLLED_BACK"}),
    },
    initial="PREVIEW",
)
PRICING_MOVES = [
    ("PREVIEW", "QUEUED"),
    ("QUEUED", "APPLYING"),
    ("APPLYING", "APPLIED"),
    ("APPLYING", "PARTIAL"),
    ("APPLYING", "FAILED"),
    ("PARTIAL", "APPLYING"),
    ("PARTIAL", "ROLLED_BACK"),
    ("FAILED", "APPLYING"),
    ("APPLIED", "ROLLED_BACK"),
]
PLAIN_MOVES = [
    ("queued", "running"),
    ("queued", "failed"),
    ("running", "completed"),
    ("running", "partial"),
    ("running", "failed"),
]
FLOWS = [("plain", PLAIN, PLAIN_MOVES), ("pricing", PRICING, PRICING_MOVES)]
LISTED = [pytest.param(words, *move, id=f"{name} {'-'.join(move)}") for name, words, moves in FLOWS for move in moves]
UNLISTED = [
    pytest.param(words, *pair, id=f"{name} {'-'.join(pair)}")
    for name, words, moves in FLOWS
    for pair in product(words.meaning, repeat=2)
    if pair not in moves
]


def test_the_two_tables_cover_every_pair() -> None:
    assert len(LISTED) == 5 + 9
    assert len(UNLISTED) == 5 * 5 - 5 + 7 * 7 - 9


@pytest.mark.req("ENG-98")
@pytest.mark.parametrize(("words", "from_word", "to_word"), LISTED)
def test_a_listed_move_is_allowed(words: StatusMap, from_word: str, to_word: str) -> None:
    words.check(from_word, to_word)
    assert words.status(words.meaning[to_word], after=from_word) == to_word


@pytest.mark.req("ENG-98")
@pytest.mark.parametrize(("words", "from_word", "to_word"), UNLISTED)
def test_every_other_move_is_refused_naming_both_states(words: StatusMap, from_word: str, to_word: str) -> None:
    with pytest.raises(ForbiddenTransition) as refused:
        words.check(from_word, to_word)
    assert (refused.value.from_status, refused.value.to_status) == (from_word, to_word)
    assert str(refused.value) == f"run cannot go from {from_word} to {to_word}"


@pytest.mark.req("ENG-98")
@pytest.mark.parametrize(("words", "from_word", "to_word"), UNLISTED)
def test_there_is_no_word_for_a_state_that_cannot_be_reached(words: StatusMap, from_word: str, to_word: str) -> None:
    state = words.meaning[to_word]
    with pytest.raises(ForbiddenTransition) as refused:
        words.status(state, after=from_word)
    assert (refused.value.from_status, refused.value.to_status) == (from_word, state.value)


@pytest.mark.req("ENG-98")
@given(st.text(max_size=10), st.text(max_size=10))
def test_a_word_of_another_flow_is_refused(from_word: str, to_word: str) -> None:
    for one, other in [("APPLYING", to_word), (from_word, "APPLIED"), (from_word, to_word)]:
        with pytest.raises(ForbiddenTransition):
            PRICING.check(one, other)


@pytest.mark.req("ENG-97")
@pytest.mark.parametrize(
    ("state", "plain", "pricing"),
    [
        (State.SUCCEEDED, "completed", "APPLIED"),
        (State.PARTIAL, "partial", "PARTIAL"),
        (State.FAILED, "failed", "FAILED"),
    ],
)
def test_one_state_has_each_flows_own_word(state: State, plain: str, pricing: str) -> None:
    assert PLAIN.status(state, after="running") == plain
    assert PRICING.status(state, after="APPLYING") == pricing
    assert PLAIN.meaning[plain] is PRICING.meaning[pricing] is state


@pytest.mark.req("ENG-97")
def test_the_plain_words_are_the_ones_on_the_wire() -> None:
    assert PLAIN.initial == "queued"
    assert {word: state.value for word, state in PLAIN.meaning.items()} == {
        "queued": "queued",
        "running": "running",
        "completed": "succeeded",
        "partial": "partial",
        "failed": "failed",
    }


@pytest.mark.req("ENG-97")
def test_two_statuses_of_one_state_are_distinguished_by_the_statuses_before_them() -> None:
    words = StatusMap(
        meaning={
            "armed": State.QUEUED,
            "busy": State.RUNNING,
            "failed": State.FAILED,
            "scheduler_failed": State.FAILED,
        },
        moves={"armed": frozenset({"busy", "scheduler_failed"}), "busy": frozenset({"failed"})},
        initial="armed",
    )
    assert words.status(State.FAILED, after="armed") == "scheduler_failed"
    assert words.status(State.FAILED, after="busy") == "failed"


def test_where_two_words_can_be_reached_the_choice_is_always_the_same() -> None:
    words = StatusMap(
        meaning={"a": State.QUEUED, "b": State.FAILED, "c": State.FAILED, "d": State.FAILED},
        moves={"a": frozenset({"d", "c", "b"})},
        initial="a",
    )
    assert words.status(State.FAILED, after="a") == "b"


@pytest.mark.parametrize(
    ("initial", "moves"),
    [
        pytest.param("b", {}, id="the first one"),
        pytest.param("a", {"b": frozenset({"a"})}, id="one to come from"),
        pytest.param("a", {"a": frozenset({"b"})}, id="one to go to"),
    ],
)
def test_a_word_without_a_meaning_is_refused_by_name(initial, moves) -> None:
    with pytest.raises(ValueError, match=r"without a meaning: \['b'\]"):
        StatusMap(meaning={"a": State.QUEUED}, moves=moves, initial=initial)


def test_the_neutral_vocabulary_is_open_or_ended() -> None:
    ended = {"succeeded", "partial", "failed", "skipped", "reverted", "expired", "cancelled"}
    assert {state.value for state in State} == {"draft", "queued", "running"} | ended


@pytest.mark.req("ENG-94")
@pytest.mark.parametrize(
    ("successful", "failed", "state"),
    [
        (5, 0, State.SUCCEEDED),
        (1, 0, State.SUCCEEDED),
        (4, 1, State.PARTIAL),
        (1, 1, State.PARTIAL),
        (1, 999, State.PARTIAL),
        (0, 1, State.FAILED),
        (0, 7, State.FAILED),
    ],
)
def test_a_run_comes_to_what_its_units_came_to(successful: int, failed: int, state: State) -> None:
    assert terminal_state(successful, failed) is state


@pytest.mark.req("ENG-96")
def test_a_run_with_nothing_to_do_ends_as_a_success() -> None:
    assert terminal_state(0, 0) is State.SUCCEEDED
    assert PLAIN.status(terminal_state(0, 0), after="running") == "completed"


@pytest.mark.req("ENG-94")
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_every_pair_of_counts_has_an_end_that_both_flows_have_a_word_for(successful: int, failed: int) -> None:
    state = terminal_state(successful, failed)
    assert state in (State.SUCCEEDED, State.PARTIAL, State.FAILED)
    assert (state is State.SUCCEEDED) == (failed == 0)
    assert (state is State.PARTIAL) == (failed > 0 and successful > 0)
    assert PLAIN.status(state, after="running")
    assert PRICING.status(state, after="APPLYING")
