"""Check of the quotes in an answer: each is searched for in the transcripts, and a step is unverified if none of its
quotes is found. Differences in whitespace, case, encoding of accents and typographic quotes are ignored; every word
must match."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

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
    def _normalized(self) -> str:
        return normalized(self.text)

    def find(self, quote: str, wanted: str) -> int | None:
        """Return the position of a quote in the text; None if the text does not contain it. `wanted` is the normalized
        quote, and not empty. Most quotes are verbatim, so the faster exact search comes first."""
        if (at := self.text.find(quote)) >= 0:
            return at
        at = self._normalized.find(wanted)
        if at < 0:
            return None
        # The match is about as far into the text as into its normalized form: search a part of the text around there
        # again, and map the position back.
        middle, reach = len(self.text) * at // len(self._normalized), NEAR + 2 * len(wanted)
        while True:
            start = max(0, middle - reach)
            part = self.text[start : middle + reach]
            if (at := normalized(part).find(wanted)) >= 0:
                return start + _origin(part, at)
            reach *= 4


def check(quotes: Sequence[str], recordings: Sequence[Spoken]) -> dict[str, Any]:
    """Return the fields about quotes of one step of an audit. `evidence`: each quote with the recording and position
    where it was found, or as not verified. `unverified`: true if the step has quotes and none of them is in a
    transcript, so that its score may rest on words that were not spoken."""
    evidence = [_evidence(quote, find(quote, recordings)) for quote in quotes]
    return {"evidence": evidence, "unverified": bool(evidence) and not any(one["verified"] for one in evidence)}


def _evidence(quote: str, found: Found | None) -> dict[str, Any]:
    """Return a quote with the place where it was found; as not verified if `found` is None."""
    if found is None:
        return {"quote": quote, "call_id": None, "position": None, "verified": False}
    return {"quote": quote, "call_id": found.call_id, "position": found.position, "verified": True}


def find(quote: str, recordings: Sequence[Spoken]) -> Found | None:
    """Return the place of a quote in the first recording that contains it; None if no recording does, or if the quote
    is empty apart from whitespace and quotation marks."""
    quote = quote.strip()
    wanted = normalized(quote).strip('"')
    if not wanted:
        return None
    for recording in recordings:
        if (at := recording.find(quote, wanted)) is not None:
            return Found(recording.call_id, at)
    return None


def normalized(text: str) -> str:
    """Return the form of a text that is compared: casefolded, accents decomposed, typographic marks replaced,
    whitespace collapsed. A longer prefix of a text never has a shorter normalized form (`_origin` relies on it)."""
    text = unicodedata.normalize("NFKD", text)
    for one, others in ALIKE.items():
        for other in others:
            text = text.replace(other, one)
    text = " ".join(text.casefold().split())
    return text.replace(' "', '"').replace('" ', '"')  # « like this » and "like this"


def _origin(text: str, at: int) -> int:
    """Return the position in the text of the character at `at` in its normalized form. Binary search: the normalized
    form of a longer prefix is never shorter."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        if len(normalized(text[:middle])) > at:
            high = middle
        else:
            low = middle + 1
    return low - 1
