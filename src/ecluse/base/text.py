"""Text from outside, made storable: PostgreSQL refuses NUL bytes, UTF-8 refuses lone surrogates."""

from __future__ import annotations

from typing import Any

LONGEST_ERROR = 2_000
LONGEST_KEY = 500  # characters: what fits into an index, whatever they are


def storable(text: str, longest: int = LONGEST_ERROR) -> str:
    clean = text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def storable_json(value: Any) -> Any:
    """The same for whatever JSON held, however long."""
    if isinstance(value, str):
        return storable(value, max(1, len(value)))
    if isinstance(value, list):
        return [storable_json(one) for one in value]
    if isinstance(value, dict):
        return {storable_json(name): storable_json(one) for name, one in value.items()}
    return value
