"""LISTEN on one connection for the whole process. A notification is only a wake-up: it may be lost (a restart, a
half-open socket), so every listener also polls, and after a reconnect all listeners are woken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from psycopg import sql

from ecluse.db.connect import hanging_up_after, open_session
from ecluse.db.outage import until_back

Hear = Callable[[str], None]
RECONNECT_AFTER = 1.0
PROBE_EVERY = 10.0
ANSWER_WITHIN = 5.0


async def listen(
    dsn: str,
    channels: Mapping[str, Hear],
    *,
    probe_every: float = PROBE_EVERY,
    answer_within: float = ANSWER_WITHIN,
) -> None:
    """Listen until cancelled. `channels` maps a channel to the callback for its payloads; after each (re)connect every
    callback gets an empty payload, because notifications may have been lost while there was no connection. The
    connection is probed every `probe_every` seconds, and replaced if it does not answer within `answer_within`."""

    async def listening() -> None:
        async with await open_session(dsn) as connection:
            for channel in channels:
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            for hear in channels.values():
                hear("")
            while True:
                async for notice in connection.notifies(timeout=probe_every):
                    channels[notice.channel](notice.payload)
                with hanging_up_after(connection, answer_within):
                    await connection.execute("SELECT 1")  # a half-open socket is noticed only by a query

    await until_back("listen", listening, pause=RECONNECT_AFTER)
