"""Search for a quote in transcripts. Differences in whitespace, case, encoding of accents and typographic quotes are
ignored; every word must match."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

# Applied after NFKD, which turns no-break spaces into spaces and an ellipsis into three dots.
ALIKE = {"'": "‘’‚‛′´`", '"': "“”„‟″«»", "-": "‐‑‒–—―−"}  # noqa: RUF001

NEAR = 1_000  # characters


class Found(NamedTuple):
    """The place at which a quote was found."""

    call_id: str
    position: int  # of its first character, in the recording's text


class Spoken:
    """The text of one recording, in which quotes are searched."""

    def __init__(self, call_id: str, text: str) -> None:
        self.call_id, self.text = call_id, text

    @cached_property
    def _plain(self) -> str:
        return plain(self.text)

    def find(self, quote: str, wanted: str) -> int | None:
        """Return the position of a quote in the text, or None; `wanted` is its plain form. Most quotes are verbatim, so
        the faster exact search comes first."""
        if (at := self.text.find(quote)) >= 0:
            return at
        at = self._plain.find(wanted)
        if at < 0:
            return None
        # The match is about as far into the text as into its plain form: search a part of the text around there again,
        # and map the position back.
        middle, reach = len(self.text) * at // len(self._plain), NEAR + 2 * len(wanted)
        while True:
            start = max(0, middle - reach)
            part = self.text[start : middle + reach]
            if (at := plain(part).find(wanted)) >= 0:
                return start + _origin(part, at)
            reach *= 4


def find(quote: str, recordings: Sequence[Spoken]) -> Found | None:
    """Find a quote in the first recording that contains it; return None if no recording does."""
    quote = quote.strip()
    wanted = plain(quote).strip('"')
    if not wanted:
        return None
    for recording in recordings:
        if (at := recording.find(quote, wanted)) is not None:
            return Found(recording.call_id, at)
    return None


def plain(text: str) -> str:
    """Normalize a text for comparison. A longer prefix of a text never has a shorter plain form (see `_origin`)."""
    text = unicodedata.normalize("NFKD", text)
    for one, others in ALIKE.items():
        for other in others:
            text = text.replace(other, one)
    text = " ".join(text.casefold().split())
    return text.replace(' "', '"').replace('" ', '"')  # « like this » and "like this"


def _origin(text: str, at: int) -> int:
    """Return the position in the text of the character at `at` in its plain form. Binary search: the plain forms of
    prefixes only grow."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        if len(plain(text[:middle])) > at:
            high = middle
        else:
            low = middle + 1
    return low - 1
