"""How we connect: explicit time limits on every socket and session, and errors an operator can act on.

A partition must be noticed in seconds, not when TCP gives up: hence the keepalives. A session that idles inside a
transaction loses it, so that nobody's locks outlive their holder.
"""

from __future__ import annotations

import asyncio
import re
import select
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool

from ecluse.base.errors import SetUpError
from ecluse.db.server import OPTIONS_REFUSED, given_up_after, hang_up, refuse_shared_sessions, too_old

log = structlog.get_logger(__name__)

LIBPQ = {
    "connect_timeout": "5",
    "tcp_user_timeout": "5000",
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "application_name": "ecluse",
}
SESSION = {
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "3s",
    "statement_timeout": "60s",
    "client_connection_check_interval": "5s",
    "timezone": "UTC",
    # Before PostgreSQL 18 a scan that is switched off counts as so costly that the smallest function is compiled at
    # every call: 100 ms for ecluse_now().
    "jit": "off",
}
# By a statement, not as start-up options: those are refused or ignored by a pooler in session mode. What the address
# sets itself stays, and what this version of PostgreSQL does not know is left out.
SET = """
SELECT set_config(p.name, s.value, false) FROM unnest(%s::text[], %s::text[]) AS s(name, value)
JOIN pg_settings p ON lower(p.name) = s.name AND p.source <> 'client'
"""
SET_WITHIN_SECONDS = 5.0
ANSWER_WITHIN_SECONDS = 15.0  # with all that is asked of a second connection
GIVE_IT = "Give it as postgresql://user:password@host:5432/database, or unset it to use the embedded PostgreSQL."

NOTHING_MORE: Mapping[str, str] = {}
RECENT_SECONDS = 5.0
TRANSACTION_LIMITS_SINCE = 170_000
TRANSACTION_SECONDS = 120

# Conditions that pass: connection, read-only or idle session, conflict, resources, lock, operator.
PASSING = ("08", "25006", "25P03", "25P04", "40", "53", "55P03", "57")


def is_away(error: BaseException) -> bool:
    """Is the database away, or does it refuse what it was given? The error's class does not say: a key too long for its
    index is an OperationalError, a session closed for idling an InternalError. Its SQLSTATE does."""
    if not isinstance(error, psycopg.Error) or isinstance(error, psycopg.errors.PipelineAborted):
        return False  # the latter: something before it was refused
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(PASSING)


@contextmanager
def ignoring_outage(doing: str) -> Iterator[None]:
    """Log and ignore that the database is unavailable: the caller's loop tries again anyway."""
    try:
        yield
    except psycopg.Error as error:
        if not is_away(error):
            raise
        log.warning(f"{doing}: database unavailable", error=one_line(error))


Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Pool = AsyncConnectionPool[Connection]


def normalise(url: str) -> str:
    """One spelling for libpq, SQLAlchemy and DBOS: a postgresql:// URL with our time limits, where it has none."""
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        # What libpq quotes at the end may be a password.
        why = re.sub(r'(?<!parameter)(:| after) ".*"', r'\1 "…"', one_line(error))
        raise SetUpError(f"DATABASE_URL is not a PostgreSQL address ({why}). {GIVE_IT}") from error
    user, password = given.pop("user", ""), given.pop("password", "")
    database = given.pop("dbname", "")
    if not database:
        raise SetUpError(f"DATABASE_URL names no database. {GIVE_IT}")
    hosts = given.get("host", "").count(",") + 1
    if "port" in given and "," not in given["port"]:
        given["port"] = ",".join([given["port"]] * hosts)  # libpq takes one port for all hosts, SQLAlchemy does not
    who = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted({**LIBPQ, **given}.items()))
    return f"postgresql://{who}{'@' if who else ''}/{quote(database, safe='')}?{query}"


def check(dsn: str) -> None:
    """Connect once, or say what is wrong and what to do. Changes nothing in the session: it may be another client's."""
    try:
        with psycopg.connect(dsn, autocommit=True) as connection, given_up_after(connection, ANSWER_WITHIN_SECONDS):
            if why := too_old(connection.info.server_version):
                raise SetUpError(why)
            refuse_shared_sessions(connection, lambda: psycopg.connect(dsn, autocommit=True))
    except psycopg.Error as error:
        if "unsupported startup parameter" in str(error):  # only PgBouncer says so
            raise SetUpError(OPTIONS_REFUSED.format(why=one_line(error))) from error
        raise SetUpError(
            f"The database does not answer: {one_line(error)}. Check that PostgreSQL is running and that "
            "DATABASE_URL names the right host, port, user and database, or unset it to use the embedded PostgreSQL."
        ) from error


def _values(settings: Mapping[str, str]) -> list[list[str]]:
    wanted = {**SESSION, **settings}
    return [list(wanted), list(wanted.values())]


async def _settle(connection: Connection, settings: Mapping[str, str]) -> None:
    with hanging_up_after(connection, SET_WITHIN_SECONDS):
        await connection.execute(SET, _values(settings), prepare=False)


async def open_session(dsn: str, settings: Mapping[str, str] = NOTHING_MORE) -> Connection:
    """A connection outside the pools, with our limits and `settings`; autocommit."""
    connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    try:
        await _settle(connection, settings)
    except BaseException:
        await connection.close()
        raise
    return connection


def open_blocking_session(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """The same for a thread of its own."""
    connection = psycopg.connect(dsn, autocommit=True)
    try:
        connection.execute(SET, _values(NOTHING_MORE), prepare=False)
    except BaseException:
        connection.close()
        raise
    return connection


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextmanager
def hanging_up_after(connection: Connection, seconds: float) -> Iterator[None]:
    """A peer that swallows what it is sent (a half-open socket, a proxy) must be given up on: whoever waits for its
    answer inside finds the connection lost."""
    timer = asyncio.get_running_loop().call_later(seconds, hang_up, connection)
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def together(connection: Connection) -> AsyncIterator[None]:
    """A transaction whose statements go out with the next one whose answer is wanted: fewer round trips. Inside, a
    cursor knows what it fetches, not its rowcount, and an error may show at a later statement.

    In the middle of a pipeline a session is not idle for the server. What a process that sleeps there has locked is
    free again only where transactions have a limit of their own, from PostgreSQL 17 on.
    """
    async with AsyncExitStack() as stack:
        if connection.info.server_version >= TRANSACTION_LIMITS_SINCE:
            await stack.enter_async_context(connection.pipeline())
        await stack.enter_async_context(connection.transaction())
        yield


_asked_for_at: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()


def doubt_all() -> None:
    """For whoever has lost a connection: the others are asked before they are handed out."""
    _asked_for_at.clear()


async def _still_lives(connection: Connection) -> None:
    """One that was handed out a moment ago is not asked: it would not have come back if its server had gone. Whatever
    has come in since, a farewell or the end, is a reason to ask."""
    now = time.monotonic()
    recent = now - _asked_for_at.get(connection, now - RECENT_SECONDS) < RECENT_SECONDS
    if not recent or _something_came_in(connection):
        await AsyncConnectionPool.check_connection(connection)
    _asked_for_at[connection] = now


def _something_came_in(connection: Connection) -> bool:
    watch = select.poll()
    watch.register(connection.fileno(), select.POLLIN)
    return bool(watch.poll(0))


def pool(
    dsn: str,
    *,
    size: int,
    settings: Mapping[str, str] = NOTHING_MORE,
    checked: bool = True,
    transaction_seconds: int = TRANSACTION_SECONDS,
) -> Pool:
    """Autocommit connections: a single statement is its own transaction, several take `connection.transaction()` or
    `together`. A `checked` connection is known to live when it is handed out; whoever repeats what failed need not pay
    for that."""

    async def set_up_session(connection: Connection) -> None:
        await connection.set_autocommit(True)
        await _settle(connection, {**settings, "transaction_timeout": f"{transaction_seconds}s"})

    return AsyncConnectionPool(
        dsn,
        connection_class=Connection,
        configure=set_up_session,
        check=_still_lives if checked else None,
        min_size=1,
        max_size=size,
        # Short, both of them: the pool tries again at growing intervals within one, callers wait for the other; whoever
        # needs the database tries again anyway, and should find it as soon as it is back.
        reconnect_timeout=2.5,
        timeout=3,
        open=False,
    )
