"""Handling of an unavailable database: how it is recognized, and two ways to go on. A loop that repeats anyway ignores
the outage (`ignoring_outage`); work that must be done is repeated until the database is back (`until_back`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psycopg
import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 0.5

# SQLSTATEs of temporary conditions: connection, read-only or idle session, conflict, resources, lock, operator.
PASSING = ("08", "25006", "25P03", "25P04", "40", "53", "55P03", "57")


def is_unavailable(error: BaseException) -> bool:
    """Return True if the database is unavailable, False if it refuses the statement. The class of the error does not
    decide (a key too long for its index is an OperationalError, a session closed for idling an InternalError); its
    SQLSTATE does."""
    if not isinstance(error, psycopg.Error) or isinstance(error, psycopg.errors.PipelineAborted):
        return False  # PipelineAborted: an earlier statement was refused
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(PASSING)


@contextmanager
def ignoring_outage(doing: str) -> Iterator[None]:
    """Log and ignore an error of the body if the database is unavailable: the caller's loop retries anyway. Other
    errors are raised. `doing` names the loop in the log."""
    try:
        yield
    except psycopg.Error as error:
        if not is_unavailable(error):
            raise
        log.warning(f"{doing}: database unavailable", error=one_line(error))


async def until_back(doing: str, attempt: Callable[[], Awaitable[T]], *, pause: float = RETRY_SECONDS) -> T:
    """Repeat `attempt` while the database is unavailable, with pauses of `pause` seconds, and return its result; other
    errors are raised. An attempt may have been committed although its answer was lost, so it must be idempotent.
    `doing` names the work in the log."""
    while True:
        try:
            return await attempt()
        except psycopg.Error as error:
            if not is_unavailable(error):
                raise
            log.warning(f"{doing}: database unavailable, trying again", error=one_line(error))
            await asyncio.sleep(pause)


def one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks."""
    return " ".join(str(error).split())
