"""Text for storage and messages. External text is made storable: PostgreSQL refuses NUL bytes, UTF-8 refuses lone
surrogates."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_ERROR = 2_000
LONGEST_KEY = 500  # characters; fits into an index entry, whatever the characters are
LONGEST_FOREIGN_ID = 200  # characters of an id from another system


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Join the first `most` names for a message, with an ellipsis if there are more."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def storable(text: str, longest: int = LONGEST_ERROR) -> str:
    """Return the text with the characters replaced that PostgreSQL or UTF-8 refuses, cut to `longest` characters; a cut
    text ends with an ellipsis."""
    clean = text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"
