"""Connections and pools: explicit time limits on every socket and session, and errors an operator can act on.

A network partition must be noticed in seconds, not when TCP gives up: hence the keepalives. The server ends a session
that idles inside a transaction, so that locks do not outlive a process that hangs.
"""

from __future__ import annotations

import asyncio
import json
import re
import select
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import set_json_loads
from psycopg_pool import AsyncConnectionPool
from pydantic_core import from_json

from ecluse.base.errors import SetUpError
from ecluse.db.outage import one_line
from ecluse.db.server import OPTIONS_REFUSED, given_up_after, hang_up, refuse_shared_sessions, too_old

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
    # Before PostgreSQL 18 a disabled scan type adds so much to the estimated cost that the JIT compiles even the
    # smallest function at every call: 100 ms for ecluse_now().
    "jit": "off",
}
# By a statement, not as start-up options: a pooler in session mode refuses or ignores those. Settings given in the
# address are kept, and settings that this version of PostgreSQL does not know are left out.
SET = """
SELECT set_config(p.name, s.value, false) FROM unnest(%s::text[], %s::text[]) AS s(name, value)
JOIN pg_settings p ON lower(p.name) = s.name AND p.source <> 'client'
"""
SET_WITHIN_SECONDS = 5.0
ANSWER_WITHIN_SECONDS = 15.0  # includes the checks on a second connection
GIVE_IT = "Give it as postgresql://user:password@host:5432/database, or unset it to use the embedded PostgreSQL."

NOTHING_MORE: Mapping[str, str] = {}
RECENT_SECONDS = 5.0
TRANSACTION_LIMITS_SINCE = 170_000
TRANSACTION_SECONDS = 120


def _from_json(data: bytes | str) -> Any:
    try:
        return from_json(data)  # five times as fast as json.loads
    except ValueError:  # nested more than 200 deep
        return json.loads(data)


set_json_loads(_from_json)

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Pool = AsyncConnectionPool[Connection]


def normalise(url: str) -> str:
    """Convert a PostgreSQL address into a postgresql:// URL that libpq, SQLAlchemy and DBOS read alike, with our time
    limits where it sets none. Raise SetUpError if it is invalid or names no database."""
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        # The text that libpq quotes at the end may be a password.
        why = re.sub(r'(?<!parameter)(:| after) ".*"', r'\1 "…"', one_line(error))
        raise SetUpError(f"DATABASE_URL is not a PostgreSQL address ({why}). {GIVE_IT}") from error
    user, password = given.pop("user", ""), given.pop("password", "")
    database = given.pop("dbname", "")
    if not database:
        raise SetUpError(f"DATABASE_URL names no database. {GIVE_IT}")
    hosts = given.get("host", "").count(",") + 1
    if "port" in given and "," not in given["port"]:
        given["port"] = ",".join([given["port"]] * hosts)  # libpq applies one port to all hosts, SQLAlchemy does not
    who = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted({**LIBPQ, **given}.items()))
    return f"postgresql://{who}{'@' if who else ''}/{quote(database, safe='')}?{query}"


def check(dsn: str) -> None:
    """Connect to the database once; raise SetUpError, with advice, if it is unavailable, too old or behind an
    unsuitable pooler. Changes no setting of the session: behind a pooler it may be shared with other clients."""
    try:
        with psycopg.connect(dsn, autocommit=True) as connection, given_up_after(connection, ANSWER_WITHIN_SECONDS):
            if why := too_old(connection.info.server_version):
                raise SetUpError(why)
            refuse_shared_sessions(connection, lambda: psycopg.connect(dsn, autocommit=True))
    except psycopg.Error as error:
        if "unsupported startup parameter" in str(error):  # the text of PgBouncer alone
            raise SetUpError(OPTIONS_REFUSED.format(why=one_line(error))) from error
        raise SetUpError(
            f"The database is unavailable: {one_line(error)}. Check that PostgreSQL is running and that "
            "DATABASE_URL names the right host, port, user and database, or unset it to use the embedded PostgreSQL."
        ) from error


def _values(settings: Mapping[str, str]) -> list[list[str]]:
    wanted = {**SESSION, **settings}
    return [list(wanted), list(wanted.values())]


async def _settle(connection: Connection, settings: Mapping[str, str]) -> None:
    """Apply the settings of SESSION and the given ones to a new connection; it is shut down if that takes longer than
    SET_WITHIN_SECONDS."""
    with hanging_up_after(connection, SET_WITHIN_SECONDS):
        await connection.execute(SET, _values(settings), prepare=False)


async def open_session(dsn: str, settings: Mapping[str, str] = NOTHING_MORE) -> Connection:
    """Open an autocommit connection outside the pools, with the settings of SESSION and the given ones."""
    connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    try:
        await _settle(connection, settings)
    except BaseException:
        await connection.close()
        raise
    return connection


def open_blocking_session(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a blocking autocommit connection with the settings of SESSION, for use in a thread."""
    connection = psycopg.connect(dsn, autocommit=True)
    try:
        connection.execute(SET, _values(NOTHING_MORE), prepare=False)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def hanging_up_after(connection: Connection, seconds: float) -> Iterator[None]:
    """Shut the connection down after `seconds`, so that a statement inside fails with a lost connection: a peer that
    accepts data and never answers (a half-open socket, a proxy) must not be waited for."""
    timer = asyncio.get_running_loop().call_later(seconds, hang_up, connection)
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def together(connection: Connection) -> AsyncIterator[None]:
    """Open a transaction in pipeline mode: statements are sent together with the next one whose result is fetched, for
    fewer round trips. Inside, a cursor has fetched rows but no rowcount, and an error may appear at a later statement.

    In the middle of a pipeline the server does not count a session as idle, so the locks of a process that hangs there
    are released only by the limit on transactions, from PostgreSQL 17 on; older servers get no pipeline.
    """
    async with AsyncExitStack() as stack:
        if connection.info.server_version >= TRANSACTION_LIMITS_SINCE:
            await stack.enter_async_context(connection.pipeline())
        await stack.enter_async_context(connection.transaction())
        yield


_asked_for_at: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()


def doubt_all() -> None:
    """Have every connection of the pools with `checked` checked the next time it is handed out; called after a
    connection was found lost."""
    _asked_for_at.clear()


async def _still_lives(connection: Connection, recent_seconds: float) -> None:
    """Check that a pooled connection works before it is handed out; raise psycopg.Error if it does not. A connection
    handed out within `recent_seconds` is queried only if input has arrived on it since (a FATAL message, end of
    file)."""
    now = time.monotonic()
    recent = now - _asked_for_at.get(connection, now - recent_seconds) < recent_seconds
    if not recent or has_input(connection):
        await AsyncConnectionPool.check_connection(connection)
    _asked_for_at[connection] = now


def has_input(connection: Connection | psycopg.Connection[Any]) -> bool:
    """Return True if there is unread input on the connection's socket: on an idle one, the server has closed it."""
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
    recent_seconds: float = RECENT_SECONDS,
) -> Pool:
    """Create a pool of at most `size` autocommit connections: a single statement is its own transaction, several take
    `connection.transaction()` or `together`. The caller opens it. `settings` are session settings besides our own. With
    `checked`, a connection is checked before it is handed out, unless it was handed out within the last
    `recent_seconds`; callers that retry failures can do without. `transaction_seconds` limits a transaction, from
    PostgreSQL 17 on."""

    async def set_up_session(connection: Connection) -> None:
        await connection.set_autocommit(True)
        await _settle(connection, {**settings, "transaction_timeout": f"{transaction_seconds}s"})

    return AsyncConnectionPool(
        dsn,
        connection_class=Connection,
        configure=set_up_session,
        check=partial(_still_lives, recent_seconds=recent_seconds) if checked else None,
        min_size=1,
        max_size=size,
        # Both short: within reconnect_timeout the pool retries at growing intervals, for timeout callers wait. Callers
        # retry anyway, and should find the database as soon as it is back.
        reconnect_timeout=2.5,
        timeout=3,
        open=False,
    )
