"""Split of a transcript into chunks that can be read and quoted one by one: by speaker, pauses and length of the words,
or by sentences of the text if there are no words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple, Protocol

LONGEST = 600  # characters; a single word that is longer stays whole
PAUSE = 1.5  # seconds of silence after which a new chunk begins
SENTENCE = re.compile(r"(?<=[.!?…])\s+")


class Chunk(NamedTuple):
    """A part of a transcript: its position, counted from 0, its speaker and times if they are known, and its text."""

    position: int
    speaker: str | None
    start_s: float | None
    end_s: float | None
    text: str


class Word(Protocol):
    """A word as the provider sends it; blanks between words are words, too."""

    @property
    def text(self) -> str: ...
    @property
    def start(self) -> float | None: ...
    @property
    def end(self) -> float | None: ...
    @property
    def speaker_id(self) -> str | None: ...


def derive(text: str, words: Sequence[Word]) -> list[Chunk] | None:
    """Return the chunks of a transcript. None if the words are unusable (all blank although the text is not, or times
    that run backwards or are not finite): the caller should then store text and words unchanged."""
    if not words:
        return [Chunk(n, None, None, None, part) for n, part in enumerate(_of_text(text))]
    pieces = [Chunk(n, *piece) for n, piece in enumerate(_pieces(words))]
    if (not pieces and text.strip()) or any(not _in_order(piece) for piece in pieces):
        return None
    return pieces


def _in_order(piece: Chunk) -> bool:
    """Return True if the times of a chunk are finite and in order."""
    start, end = piece.start_s, piece.end_s
    return all(time is None or isfinite(time) for time in (start, end)) and not (
        start is not None and end is not None and end < start
    )


def _pieces(words: Sequence[Word]) -> Iterator[tuple[str | None, float | None, float | None, str]]:
    """Yield speaker, start, end and text of each chunk of these words. Blanks never begin a new chunk, whatever their
    speaker or times."""
    piece: list[Word] = []
    last: Word | None = None  # the last one that is not blank
    length = 0
    for word in words:
        spoken = bool(word.text.strip())
        if spoken and last is not None and _breaks(last, word, length):
            yield _piece(piece)
            piece, length = [], 0
        piece.append(word)
        length += len(word.text)
        last = word if spoken else last
    if any(word.text.strip() for word in piece):
        yield _piece(piece)


def _breaks(before: Word, word: Word, length: int) -> bool:
    """Return True if a new chunk begins with this word. `before` is the last word that is not blank, `length` the
    number of characters in the chunk so far."""
    if before.speaker_id != word.speaker_id or length + len(word.text) > LONGEST:
        return True
    return before.end is not None and word.start is not None and word.start - before.end > PAUSE


def _piece(words: Sequence[Word]) -> tuple[str | None, float | None, float | None, str]:
    """Return speaker, start, end and text of a chunk of these words, of which at least one is not blank."""
    spoken = [word for word in words if word.text.strip()]
    return spoken[0].speaker_id, spoken[0].start, spoken[-1].end, _joined(words)


def _joined(words: Sequence[Word]) -> str:
    """Return the text of the words. Some providers send blanks as words of their own; for the others, blanks are added
    between words."""
    blanks = any(not word.text.strip() or word.text != word.text.strip() for word in words)
    return "".join(word.text for word in words).strip() if blanks else " ".join(word.text for word in words)


def _of_text(text: str) -> Iterator[str]:
    """Yield the text in chunks of whole sentences, at most LONGEST characters each. A longer sentence is cut between
    words; a longer word stays whole."""
    parts = [part for sentence in SENTENCE.split(text.strip()) if sentence for part in _cut(sentence)]
    if not parts:
        return
    piece = parts[0]
    for _, part in pairwise(parts):
        if len(piece) + 1 + len(part) > LONGEST:
            yield piece
            piece = part
        else:
            piece = f"{piece} {part}"
    yield piece


def _cut(sentence: str) -> Iterator[str]:
    """Yield the sentence in parts of at most LONGEST characters, cut between words; a longer word stays whole."""
    while len(sentence) > LONGEST:
        at = sentence.rfind(" ", 1, LONGEST + 1)
        at = at if at > 0 else sentence.find(" ", LONGEST)
        if at < 0:
            break
        yield sentence[:at].rstrip()
        sentence = sentence[at:].lstrip()
    if sentence:
        yield sentence
