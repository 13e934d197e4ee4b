"""Text from outside, made fit for the database, and messages as sentences."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base.text import LONGEST_ERROR, span, storable

ANY_TEXT = st.text(st.characters(), max_size=60)  # lone surrogates and NUL included


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "", id="nothing stays nothing"),
        pytest.param("Vendor said no", "Vendor said no", id="plain text stays"),
        pytest.param("déjà vu 🙂", "déjà vu 🙂", id="what UTF-8 can say stays"),
        pytest.param("a\x00b", "a\ufffdb", id="NUL is shown as replaced"),
        pytest.param("a\ud800b", "a?b", id="half a character is shown as replaced"),
        pytest.param("line\nline\ttab", "line\nline\ttab", id="other control characters stay"),
    ],
)
def test_only_what_the_database_refuses_is_replaced(text: str, expected: str) -> None:
    assert storable(text) == expected


@pytest.mark.parametrize(
    ("text", "longest", "expected"),
    [
        ("abcde", 5, "abcde"),
        ("abcdef", 5, "abcd…"),
        ("abc", 1, "…"),
        ("🙂🙂🙂", 2, "🙂…"),
        ("\x00\x00\x00", 2, "\ufffd…"),
    ],
)
def test_text_longer_than_allowed_ends_in_an_ellipsis(text: str, longest: int, expected: str) -> None:
    assert storable(text, longest) == expected


def test_an_error_text_is_cut_at_two_thousand_characters() -> None:
    assert storable("x" * 2_000) == "x" * 2_000
    assert storable("x" * 2_001) == "x" * 1_999 + "…"
    assert LONGEST_ERROR == 2_000


@given(ANY_TEXT, st.integers(1, 50))
def test_whatever_comes_in_can_be_stored_and_is_not_too_long(text: str, longest: int) -> None:
    stored = storable(text, longest)
    assert stored.encode("utf-8").decode("utf-8") == stored
    assert "\x00" not in stored
    assert len(stored) == min(len(text), longest)


@given(ANY_TEXT)
def test_storable_text_is_left_alone(text: str) -> None:
    assert storable(storable(text)) == storable(text)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 s"),
        (0.25, "0.25 s"),
        (59, "59 s"),
        (60, "1 min"),
        (90, "1 min 30 s"),
        (4_200, "1 h 10 min"),
        (4_201, "1 h 10 min 1 s"),
        (3_600, "1 h"),
        (172_800, "2 d"),
        (176_400, "2 d 1 h"),
    ],
)
def test_a_span_is_said_in_units(seconds: float, said: str) -> None:
    assert span(timedelta(seconds=seconds)) == said
