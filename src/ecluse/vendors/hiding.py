"""Removal of keys from a vendor's answers. A vendor, or a gateway in front of it, may repeat the request in its answer:
each client removes its own keys from every answer before any part of it is stored or shown, in every spelling that JSON
and URLs have for them."""

from __future__ import annotations

import json
from urllib.parse import quote

from ecluse.base.masking import HIDDEN, masked

SHORTEST = 8  # characters; a shorter text is no real key, and occurs in ordinary words


class HiddenKeys:
    """The keys of one client, which are replaced by `***` in texts and answers."""

    def __init__(self) -> None:
        self._spellings: list[str] = []

    def add(self, key: str | None) -> None:
        """Hide this key from now on. None, and keys shorter than SHORTEST, are ignored."""
        if key and len(key) >= SHORTEST:
            found = {*self._spellings, key, quote(key, safe=""), json.dumps(key)[1:-1]}
            self._spellings = sorted(found, key=len, reverse=True)  # a spelling may begin with a shorter one

    def removed(self, text: str) -> str:
        """Return the text without the keys."""
        for spelling in self._spellings:
            text = text.replace(spelling, HIDDEN)
        return text

    def in_text(self, text: str) -> str:
        """Return the text without the keys, and without text that looks like another secret; it is cut off at
        `masking.LONGEST`."""
        return masked(self.removed(text))

    def in_answer(self, answer: bytearray) -> bytearray:
        """Return the body of an answer without the keys."""
        for spelling in self._spellings:
            key = spelling.encode()
            if key in answer:
                answer = answer.replace(key, HIDDEN.encode())
        return answer
