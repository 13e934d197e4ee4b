"""Text for storage and messages. External text is made storable: PostgreSQL refuses NUL bytes, UTF-8 refuses lone
surrogates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

LONGEST_ERROR = 2_000
LONGEST_KEY = 500  # characters; fits into an index entry, whatever the characters are
LONGEST_FOREIGN_ID = 200  # characters of an id from another system
UNITS = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Join the first `most` names for a message, with an ellipsis if there are more."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def count_of(number: int, one: str, many: str | None = None) -> str:
    """Return a number and what it counts: `1 target`, `1,200 targets`. `many`: the words for another number than 1, if
    they are not `one` with an s (`target is`, `targets are`)."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def span(length: timedelta) -> str:
    """Return a span of time for a message, to the second if it is a minute or more: `0.5 s`, `1 min`, `1 h 10 min`."""
    total = max(0.0, length.total_seconds())
    if total < 60:
        return f"{total:.3g} s"
    left, parts = round(total), []
    for unit, seconds in UNITS.items():
        count, left = divmod(left, seconds)
        parts += [f"{count} {unit}"] if count else []
    return " ".join(parts)


def storable(text: str, longest: int = LONGEST_ERROR) -> str:
    """Return the text with the characters replaced that PostgreSQL or UTF-8 refuses, cut to `longest` characters; a cut
    text ends with an ellipsis."""
    clean = text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"
