"""Requirements on a server given by DATABASE_URL: PostgreSQL from 14 on, reached directly or through a pooler in
session mode.

A pooler in transaction mode assigns a session for one transaction at a time: locks, LISTEN, settings and prepared
statements of one client would be lost, or would affect another client.
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
    """Return why a server with this version number (such as 150018) is refused, None if it is accepted."""
    if version >= OLDEST * 10_000:
        return None
    number = f"{version // 10_000}" if version >= 100_000 else f"{version // 10_000}.{version // 100 % 100}"
    return (
        f"The database is PostgreSQL {number}, and Ecluse needs {OLDEST} or newer: upgrade it, or let DATABASE_URL "
        "name another one."
    )


def is_shared(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Return True if the backends (process ids) seen by two clients, querying in turn, show that they share sessions:
    one client saw several, or both saw the same."""
    return len({*ours}) > 1 or len({*theirs}) > 1 or bool({*ours} & {*theirs})


def refuse_shared_sessions(first: Session, connect: Callable[[], Session]) -> None:
    """Raise SetUpError if `first` leads through a pooler in transaction mode, or through one that gives no second
    connection (`connect` opens it). A direct connection costs one statement."""
    # A pooler makes up the backend pid that it reports at connect: equal pids mean a direct connection.
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
    """Return the process id of the server process that runs this session's statements."""
    ((pid,),) = session.execute("SELECT pg_backend_pid()").fetchall()
    return int(pid)


def hang_up(connection: psycopg.BaseConnection[Any]) -> None:
    """Shut down the socket of a connection, so that any wait for it fails at once."""
    # Shut down, not closed: the descriptor of a closed socket may be reused before the user of the connection notices.
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


@contextmanager
def given_up_after(session: Session, seconds: float) -> Iterator[None]:
    """Shut the connection down after `seconds`, so that a statement inside fails: a pooler without a free session
    accepts a statement and never answers."""
    timer = threading.Timer(seconds, hang_up, (session,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
