"""Chunks of a transcript: what begins a new one, and what cannot be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ecluse.flows.transcriptions.chunks import LONGEST, PAUSE, derive
from ecluse.vendors.elevenlabs import Word


def word(text, start=None, end=None, speaker="a"):
    return Word(text=text, start=start, end=end, type="word", speaker_id=speaker)


def texts(chunks):
    return [chunk.text for chunk in chunks]


@pytest.mark.req("TRX-46")
def test_a_new_speaker_begins_a_new_piece_with_its_own_times():
    words = [word("Bonjour", 0.0, 0.5), word(" ", 0.5, 0.6), word("Anne", 0.6, 1.0), word("Oui", 1.1, 1.4, speaker="b")]
    assert derive("Bonjour Anne Oui", words) == [(0, "a", 0.0, 1.0, "Bonjour Anne"), (1, "b", 1.1, 1.4, "Oui")]


@pytest.mark.req("TRX-46")
def test_a_long_pause_begins_a_new_piece_and_a_short_one_does_not():
    words = [word("one", 0, 1), word("two", 1 + PAUSE, 3), word("three", 3.01 + PAUSE, 5)]
    assert texts(derive("", words)) == ["one two", "three"]


@pytest.mark.req("TRX-46")
def test_nothing_grows_longer_than_the_limit_but_a_word_that_is():
    words = [word("word")] * 300 + [word("x" * (LONGEST + 50))]
    found = texts(derive("", words))
    assert found[-1] == "x" * (LONGEST + 50)
    assert all(len(text) <= LONGEST * 1.25 for text in found[:-1])
    assert " ".join(found).split() == [one.text for one in words]


def test_blanks_have_no_speaker_and_make_no_chunk_of_their_own():
    words = [word(" ", speaker="c"), word("one"), word(" ", speaker="b"), word("two"), word("\n")]
    assert derive("", words) == [(0, "a", None, None, "one two")]
    assert derive("", [word(" ")]) == []


@pytest.mark.req("TRX-46")
def test_without_words_the_text_is_cut_between_sentences():
    sentence = "This is said. " * 100
    found = derive(sentence, [])
    assert len(found) == 3
    assert all(len(chunk.text) <= LONGEST and chunk.text.endswith(".") for chunk in found)
    assert [chunk[:4] for chunk in found] == [(n, None, None, None) for n in range(3)]
    assert derive("  ", []) == []


@given(some.text(alphabet="ab .!?\n", max_size=3_000))
def test_no_character_of_a_text_is_lost(text):
    assert "".join(" ".join(texts(derive(text, []))).split()) == "".join(text.split())


@pytest.mark.req("TRX-47")
@pytest.mark.parametrize(
    "wrong", [[word(" ")], [word("x", 2, 1)], [word("x", 1, float("inf"))]], ids=["silent", "backwards", "endless"]
)
def test_words_that_make_no_sense_give_no_pieces(wrong):
    assert derive("said", wrong) is None
