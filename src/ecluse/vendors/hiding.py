"""Removal of keys from a vendor's answers. A vendor, or a gateway in front of it, may repeat the request in its answer:
each client removes its own keys from every answer before any part of it is stored or shown, in every spelling that
JSON, URLs, HTML and base64 have for them."""

from __future__ import annotations

import base64
import html
import json
import re
from urllib.parse import quote, quote_plus, urlsplit

from ecluse.base.masking import HIDDEN, masked

SHORTEST = 8  # characters; a shorter text is no real key, and occurs in ordinary words
SHORTEST_PART = 16  # characters of a part of a URL; shorter ones are mostly words


class HiddenKeys:
    """The keys of one client, which are replaced by `***` in texts and answers."""

    def __init__(self, *keys: str | None) -> None:
        self._spellings: list[str] = []
        for key in keys:
            self.add(key)

    def add(self, key: str | None) -> None:
        """Hide this key from now on. None, and keys shorter than SHORTEST, are ignored."""
        if key and len(key) >= SHORTEST:
            found = {*self._spellings, *spellings(key)}
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

    def in_answer(self, answer: bytearray, *, cut_off: bool = False) -> bytearray:
        """Return the body of an answer without the keys. `cut_off`: its end was not received, so that it may end within
        a key."""
        keys = [spelling.encode() for spelling in self._spellings]
        for key in keys:
            if key in answer:
                answer = answer.replace(key, HIDDEN.encode())
        if cut_off:
            begun = (size for key in keys for size in range(len(key) - 1, 0, -1) if answer.endswith(key[:size]))
            del answer[len(answer) - max(begun, default=0) :]
        return answer


def secret_parts(url: str) -> list[str]:
    """Return what may be secret in a URL that is a secret itself: the whole, path and query, and their longer parts."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    return [url, parts.path, target, *(one for one in re.split("[/?&=]", target) if len(one) >= SHORTEST_PART)]


def spellings(key: str) -> set[str]:
    """Return the texts by which a key may occur in an answer."""
    urls = {quote(key, safe=""), quote(key), quote_plus(key)}
    lower = {re.sub("%..", lambda found: found[0].lower(), url) for url in urls}
    texts = {json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1]}
    texts |= {re.sub("[&<>]", lambda mark: f"\\u{ord(mark[0]):04x}", text) for text in texts}  # as Go writes JSON
    texts |= {re.sub(r"\\\"|[&<>']", lambda mark: f"\\u{ord(mark[0][-1]):04X}", text) for text in texts}  # as PHP may
    slashes = {text.replace("/", "\\/") for text in texts}  # as PHP does
    pages = {html.escape(key), html.escape(key, quote=False)}
    pages |= {page.replace("&#x27;", "&#39;").replace("&quot;", "&#34;") for page in pages}
    return {key, *urls, *lower, *texts, *slashes, *pages, *_in_base64(key.encode())}


def _in_base64(key: bytes) -> set[str]:
    """Return what base64 makes of a key within a longer text: it depends on the place of the key, modulo 3. Characters
    that the text beside the key changes are left out."""
    found = set[str]()
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + key).decode()
        found.add(encoded[(before * 8 + 5) // 6 : (before + len(key)) * 8 // 6])
    return found | {text.translate(str.maketrans("+/", "-_")) for text in found}
