"""What a given server must be: PostgreSQL from 14 on, reached directly or through a pooler in session mode.

In transaction mode a pooler lends a session for one transaction at a time: locks, LISTEN, settings and prepared
statements of one client would be lost, or be another client's.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from ecluse.base.errors import SetUpError

OLDEST = 14
DIRECTLY = "connect directly to PostgreSQL, or through the pooler in session mode"
SHARED = (
    "DATABASE_URL leads to a connection pooler in transaction mode, in which a session's locks, settings and "
    f"notifications are lost: {DIRECTLY}."
)
OPTIONS_REFUSED = (
    "DATABASE_URL leads to a connection pooler, which refuses the start-up parameters in it ({why}): leave out "
    f"`options`, and {DIRECTLY}."
)
TOO_FEW = (
    "DATABASE_URL leads to a connection pooler that gave no second connection within {seconds:.0f} s: raise its pool "
    "size (docs/operations.md says how many a replica needs), or connect directly to PostgreSQL."
)
SECOND_WITHIN_SECONDS = 5.0
LOOKS = 4

Session = psycopg.Connection[tuple[Any, ...]]


def too_old(version: int) -> str | None:
    """Why a server with this version number, such as 150018, is refused."""
    if version >= OLDEST * 10_000:
        return None
    number = f"{version // 10_000}" if version >= 100_000 else f"{version // 10_000}.{version // 100 % 100}"
    return (
        f"The database is PostgreSQL {number}, and Ecluse needs {OLDEST} or newer: upgrade it, or let DATABASE_URL "
        "name another one."
    )


def is_shared(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether two clients were served, in turn, by backends (process ids) of which neither has one to itself."""
    return len({*ours}) > 1 or len({*theirs}) > 1 or bool({*ours} & {*theirs})


def refuse_shared_sessions(first: Session, connect: Callable[[], Session]) -> None:
    """Raises SetUpError for a pooler in transaction mode. One statement for a direct connection."""
    # A pooler invents the number that a client is told when it connects.
    if _backend(first) == first.info.backend_pid:
        return
    try:
        with connect() as second, given_up_after(second, SECOND_WITHIN_SECONDS):
            looks = [(_backend(first), _backend(second)) for _ in range(LOOKS)]
    except psycopg.OperationalError as error:
        raise SetUpError(TOO_FEW.format(seconds=SECOND_WITHIN_SECONDS)) from error
    ours, theirs = zip(*looks, strict=True)
    if is_shared(ours, theirs):
        raise SetUpError(SHARED)


def _backend(session: Session) -> int:
    ((pid,),) = session.execute("SELECT pg_backend_pid()").fetchall()
    return int(pid)


def hang_up(connection: psycopg.BaseConnection[Any]) -> None:
    # Shut down, not closed: the number of a closed file may be somebody else's by the time it is noticed.
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


@contextmanager
def given_up_after(session: Session, seconds: float) -> Iterator[None]:
    """A pooler without a free session accepts a statement and says nothing: then the connection is found lost."""
    timer = threading.Timer(seconds, hang_up, (session,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
