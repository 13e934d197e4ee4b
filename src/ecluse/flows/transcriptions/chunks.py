"""A transcript in pieces that can be read and quoted one by one: derived from the words by speaker, pauses and length,
or from the bare text where there are no words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LONGEST = 600  # characters; a single word that is longer stays whole
PAUSE = 1.5  # seconds of silence after which something new begins
SENTENCE = re.compile(r"(?<=[.!?…])\s+")


class Chunk(NamedTuple):
    position: int
    speaker: str | None
    start_s: float | None
    end_s: float | None
    text: str


class Word(NamedTuple):
    text: str
    start: float | None
    end: float | None
    speaker: str | None


def derive(text: str, words: Sequence[Any] | None) -> list[Chunk] | None:
    """None: these words cannot be read, and whoever stores them should keep them as they are."""
    if not words:
        return [Chunk(n, None, None, None, part) for n, part in enumerate(_of_text(text))]
    read = [_word(word) for word in words]
    if None in read:
        return None
    pieces = list(_pieces([word for word in read if word is not None]))
    return [Chunk(n, *piece) for n, piece in enumerate(pieces)]


def _word(given: Any) -> Word | None:
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        return None
    times = given.get("start"), given.get("end")
    speaker = given.get("speaker_id")
    if not all(time is None or (isinstance(time, int | float) and time == time) for time in times):
        return None
    return Word(given["text"], *times, None if speaker is None else str(speaker))


def _pieces(words: Sequence[Word]) -> Iterator[tuple[str | None, float | None, float | None, str]]:
    """Blanks between words are words, too, of whoever speaks before or after: they break nothing."""
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
    if before.speaker != word.speaker or length + len(word.text) > LONGEST:
        return True
    return before.end is not None and word.start is not None and word.start - before.end > PAUSE


def _piece(words: Sequence[Word]) -> tuple[str | None, float | None, float | None, str]:
    spoken = [word for word in words if word.text.strip()]
    return spoken[0].speaker, spoken[0].start, spoken[-1].end, _joined(words)


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
