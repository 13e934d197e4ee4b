"""Hide secrets before they are written anywhere: by the name of the field that holds them, and by patterns in text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"
ORIGIN_ENDS = "/…"  # in place of the path and query of a URL
SECRETS = r"key|token|secret|passw(?:or)?d|passphrase|authorization|cookie|credentials?|signature"
SECRET_NAME = re.compile(f"({SECRETS})$", re.IGNORECASE)
# Plurals, only at the beginning of a word: api_keys and apiKeys, not monkeys.
SECRET_NAMES = re.compile(r"(?:^|[_\W])(?i:key|token|secret|password)s$|[a-z\d](?:Key|Token|Secret|Password)s$")
# Names that end like a secret's, but hold ids and limits that people need to see.
NO_SECRETS = frozenset({"key", "event_key", "dedup_key", "group_key", "lock_key", "idempotency_key", "max_per_key"})

SIGNED = rf"[\w.-]*(?:{SECRETS}|hmac)|sig|auth|awsaccesskeyid|x-amz-[\w-]+|x-goog-[\w-]+"
NAME = r"(?<![\w-])[\w-]*(?:(?:api|access|secret|private)[_ -]?key|token|secret|passw(?:or)?d|passphrase)"
WORD = r"[\w.~+/=-]{6,}"
# No pattern scans the same text again from every position: the texts are untrusted (ReDoS).
IN_TEXT = [
    (re.compile(pattern, re.IGNORECASE), instead)
    for pattern, instead in (
        (r"\b(ecl_)[\w-]+", rf"\1{HIDDEN}"),
        (rf"\b(authorization\s{{0,9}}[:=]\s{{0,9}}(?:[\w-]{{1,20}} )?){WORD}", rf"\1{HIDDEN}"),
        (rf"\b(bearer|basic)\s+{WORD}", rf"\1 {HIDDEN}"),
        (r"(://)[^\s/?#@:\"']{0,500}:[^\s/?#\"']{0,5000}@", rf"\1{HIDDEN}@"),
        (rf"([?&;](?:{SIGNED})=)[^&;\s\"'<>]+", rf"\1{HIDDEN}"),  # in a URL
        (rf"({NAME})=('[^']*'|[^\s,;&\"')]+)", rf"\1={HIDDEN}"),  # in a connection string
        (rf"({NAME}: ?)(?<!expected token: )(?<!expected token:){WORD}", rf"\1{HIDDEN}"),  # in a header
        (rf"([\"'][\w-]*(?:{SECRETS})[\"']\s*:\s*)(\"[^\"]*\"|'[^']*')", rf'\1"{HIDDEN}"'),  # in JSON
    )
]
# A text without any of these matches no pattern above, and most texts have none.
SIGNS = re.compile(r"[:=]|ecl_|bearer|basic", re.IGNORECASE)
DEEPEST = 6
LONGEST = 50_000
SHORTEST = 4


def masked(text: str) -> str:
    """Return the text with the secrets in it replaced by `***`; text beyond LONGEST characters is cut off."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}…"
    if SIGNS.search(text) is None:
        return text
    for pattern, instead in IN_TEXT:
        text = pattern.sub(instead, text)
    return text


def masked_value(value: Any, name: str = "", depth: int = 0) -> Any:
    """Convert any value into JSON types, with its secrets hidden and texts longer than LONGEST cut off; values nested
    deeper than DEEPEST levels become texts. `name`: the field that holds the value; it decides whether the whole value
    is a secret. `depth`: the number of levels above it, for the recursion."""
    if value is None or isinstance(value, bool):
        return value
    if name and name.lower().removesuffix("s") not in NO_SECRETS and _is_secret(name, value):
        # The first characters distinguish the tokens of locks.
        return f"{str(value)[:8]}…" if name == "lock_token" else HIDDEN
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < DEEPEST and isinstance(value, Mapping):
        return {str(inner): masked_value(what, str(inner), depth + 1) for inner, what in value.items()}
    if depth < DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [masked_value(one, "", depth + 1) for one in value]
    return masked(value if isinstance(value, str) else str(value))


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a JSON value with its secrets hidden and texts longer than LONGEST cut off. `name`: the field that holds
    the value; it decides whether the whole value is a secret."""
    if value is None or isinstance(value, bool):
        return value
    if name and name.lower().removesuffix("s") not in NO_SECRETS and _is_secret(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        return {inner: without_secrets(what, inner) for inner, what in value.items()}
    if isinstance(value, list):
        return [without_secrets(one) for one in value]
    return masked(value) if isinstance(value, str) else value


def hidden_texts(value: Any, name: str = "") -> list[str]:
    """Return the texts that `without_secrets` hides because of the names of their fields, the longest first. Texts
    shorter than SHORTEST are left out: they occur everywhere. `name`: the field that holds the value."""
    if isinstance(value, Mapping | list) and without_secrets(value, name) != HIDDEN:
        inner = value.items() if isinstance(value, Mapping) else (("", one) for one in value)
        return sorted({text for named, one in inner for text in hidden_texts(one, named)}, key=len, reverse=True)
    return [text for text in _texts(value) if len(text) >= SHORTEST] if without_secrets(value, name) == HIDDEN else []


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping | list):
        return [text for one in (value.values() if isinstance(value, Mapping) else value) for text in _texts(one)]
    return [str(value)]


def without_texts(value: Any, hidden: Sequence[str]) -> Any:
    """Return a text or a JSON value with every occurrence of the texts `hidden`, and all other secrets, replaced by
    `***`. Only texts inside an object are cut off at LONGEST; longer ones elsewhere are masked part by part."""
    if isinstance(value, Mapping):
        return without_secrets({name: without_texts(one, hidden) for name, one in value.items()})
    if isinstance(value, list):
        return [without_texts(one, hidden) for one in value]
    if not isinstance(value, str):
        return value
    for text in hidden:
        value = value.replace(text, HIDDEN)
    return "".join(masked(value[start : start + LONGEST]) for start in range(0, len(value), LONGEST))


def _is_secret(name: str, value: Any) -> bool:
    # A number under a plural name is a count, not a secret.
    return bool(SECRET_NAME.search(name) or (SECRET_NAMES.search(name) and not isinstance(value, int | float)))


def origin_of(url: str) -> str:
    """Return the scheme, host and port of a URL, followed by `/…` in place of path and query, which are often a secret;
    user and password are left out. A result passed in again is returned unchanged."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{ORIGIN_ENDS}"
