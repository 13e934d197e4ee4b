"""A transcript in pieces that can be read and quoted one by one: derived from the words by speaker, pauses and length,
or from the bare text where there are no words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple, Protocol

LONGEST = 600  # characters; a single word that is longer stays whole
PAUSE = 1.5  # seconds of silence after which something new begins
SENTENCE = re.compile(r"(?<=[.!?…])\s+")


class Chunk(NamedTuple):
    position: int
    speaker: str | None
    start_s: float | None
    end_s: float | None
    text: str


class Word(Protocol):
    """As the provider tells it; blanks between words are words, too."""

    @property
    def text(self) -> str: ...
    @property
    def start(self) -> float | None: ...
    @property
    def end(self) -> float | None: ...
    @property
    def speaker_id(self) -> str | None: ...


def derive(text: str, words: Sequence[Word]) -> list[Chunk] | None:
    """None: words that make no sense (they say nothing where the text does, or their times run backwards): whoever
    stores them should keep them as they are."""
    if not words:
        return [Chunk(n, None, None, None, part) for n, part in enumerate(_of_text(text))]
    pieces = [Chunk(n, *piece) for n, piece in enumerate(_pieces(words))]
    if (not pieces and text.strip()) or any(not _in_order(piece) for piece in pieces):
        return None
    return pieces


def _in_order(piece: Chunk) -> bool:
    start, end = piece.start_s, piece.end_s
    return all(time is None or isfinite(time) for time in (start, end)) and not (
        start is not None and end is not None and end < start
    )


def _pieces(words: Sequence[Word]) -> Iterator[tuple[str | None, float | None, float | None, str]]:
    """Blanks are of whoever speaks before or after: they break nothing."""
    piece: list[Word] = []
    last: Word | None = None  # spoken in this piece
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
    if before.speaker_id != word.speaker_id or length + len(word.text) > LONGEST:
        return True
    return before.end is not None and word.start is not None and word.start - before.end > PAUSE


def _piece(words: Sequence[Word]) -> tuple[str | None, float | None, float | None, str]:
    spoken = [word for word in words if word.text.strip()]
    return spoken[0].speaker_id, spoken[0].start, spoken[-1].end, _joined(words)


def _joined(words: Sequence[Word]) -> str:
    """Some providers send the blanks as words of their own, some send none."""
    blanks = any(not word.text.strip() or word.text != word.text.strip() for word in words)
    return "".join(word.text for word in words).strip() if blanks else " ".join(word.text for word in words)


def _of_text(text: str) -> Iterator[str]:
    """Whole sentences while they fit; a sentence that does not is cut between words."""
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
    while len(sentence) > LONGEST:
        at = sentence.rfind(" ", 1, LONGEST + 1)
        at = at if at > 0 else sentence.find(" ", LONGEST)
        if at < 0:
            break
        yield sentence[:at].rstrip()
        sentence = sentence[at:].lstrip()
    if sentence:
        yield sentence
