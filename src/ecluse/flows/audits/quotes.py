"""Does a quote stand in a transcript, and where? Blanks, capitals, accents written apart and typographic quotes make no
difference; every word does."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

# After NFKD, in which no-break blanks are blanks and an ellipsis is three dots.
ALIKE = {"'": "‘’‚‛′´`", '"': "“”„‟″«»", "-": "‐‑‒–—―−"}  # noqa: RUF001

NEAR = 1_000  # characters


class Found(NamedTuple):
    call_id: str
    position: int  # of its first character, in the recording's text


class Spoken:
    """What was said in one recording."""

    def __init__(self, call_id: str, text: str) -> None:
        self.call_id, self.text = call_id, text

    @cached_property
    def _plain(self) -> str:
        return plain(self.text)

    def find(self, quote: str, wanted: str) -> int | None:
        """`wanted` is the quote in plain. Most are word for word, which is the quicker look."""
        if (at := self.text.find(quote)) >= 0:
            return at
        at = self._plain.find(wanted)
        if at < 0:
            return None
        # About as far into the text as into its plain form: a part around there is searched again, and mapped back.
        middle, reach = len(self.text) * at // len(self._plain), NEAR + 2 * len(wanted)
        while True:
            start = max(0, middle - reach)
            part = self.text[start : middle + reach]
            if (at := plain(part).find(wanted)) >= 0:
                return start + _origin(part, at)
            reach *= 4


def find(quote: str, recordings: Sequence[Spoken]) -> Found | None:
    """In the first recording that has it."""
    quote = quote.strip()
    wanted = plain(quote).strip('"')
    if not wanted:
        return None
    for recording in recordings:
        if (at := recording.find(quote, wanted)) is not None:
            return Found(recording.call_id, at)
    return None


def plain(text: str) -> str:
    """A longer beginning of a text never has a shorter plain form."""
    text = unicodedata.normalize("NFKD", text)
    for one, others in ALIKE.items():
        for other in others:
            text = text.replace(other, one)
    text = " ".join(text.casefold().split())
    return text.replace(' "', '"').replace('" ', '"')  # « like this » and "like this"


def _origin(text: str, at: int) -> int:
    """Where in the text the character stands which is `at` in its plain form: by halves, since beginnings only grow."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        if len(plain(text[:middle])) > at:
            high = middle
        else:
            low = middle + 1
    return low - 1
