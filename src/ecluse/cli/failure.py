"""Exit codes of commands, and the exception that ends a command with one of them and a sentence on stderr."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

OK, BAD, REFUSED, UNREACHABLE, STILL_OPEN, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = {
    OK: "done",
    BAD: "the run did not succeed, a check failed, or the command was not confirmed",
    REFUSED: "wrong usage, or the server refused the request",
    UNREACHABLE: "the server cannot be reached, or failed",
    STILL_OPEN: "the run is still open",
    INTERRUPTED: "interrupted",
}


class Failure(Exception):
    """An error that ends the command: its exit code, and the message for stderr."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def misused(message: str) -> Failure:
    return Failure(REFUSED, message)


def meant(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean …?` with the most similar of the known words, or an empty text if none is similar."""
    found = get_close_matches(word, list(known), n=1)
    return f" Did you mean {found[0]}?" if found else ""
