"""Relay between replicas: it knows which channels have subscribers on other replicas, and sends them the ephemeral
events of those channels only.

Subscriptions and events are sent by NOTIFY. The channels subscribed to at each replica are also in a table that is read
in full every few seconds: this recovers from a lost notification, a dead replica, and unlogged tables that the database
has truncated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import psycopg
import structlog
from pydantic_core import from_json

from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.query import fetch_rows
from ecluse.realtime.channels import WHOLE_TENANT, encoded, fit
from ecluse.realtime.hub import Hub, Key, Message
from ecluse.realtime.limits import Limits

log = structlog.get_logger(__name__)

LIVE_CHANNEL, INTERESTS_CHANNEL = "ecluse_live", "ecluse_interests"
GATHER_SECONDS = 0.02
LONGEST_QUEUE = 5_000
LARGEST_NOTICE = 7_900  # bytes; PostgreSQL takes less than 8,000
WRAPPING = 150  # bytes of a notice, reserved for what surrounds its messages
CHANNELS_AT_ONCE = 10
KEYS_AT_ONCE = 20

BEAT = """
INSERT INTO realtime_replicas (replica_id, seen_at) VALUES (%(replica)s, clock_timestamp())
ON CONFLICT (replica_id) DO UPDATE SET seen_at = clock_timestamp()
"""
BURY = """
DELETE FROM realtime_replicas WHERE replica_id IN (
    SELECT replica_id FROM realtime_replicas WHERE seen_at < clock_timestamp() - interval '1 minute'
    FOR UPDATE SKIP LOCKED)
"""
ALIVE = "seen_at > clock_timestamp() - interval '20 seconds'"
READ = f"""
SELECT replica_id, tenant_id, channel, listeners FROM realtime_interests JOIN realtime_replicas USING (replica_id)
WHERE {ALIVE}
"""  # noqa: S608 - our own words
OCCUPIED = f"""
SELECT channel, sum(listeners)::int FROM realtime_interests JOIN realtime_replicas USING (replica_id)
WHERE {ALIVE} AND tenant_id = %s AND channel <> '{WHOLE_TENANT}' GROUP BY channel ORDER BY channel
"""  # noqa: S608 - our own words
# Also writes the replica's own row: after a long outage other replicas have deleted it.
PUT = f"""
WITH me AS ({BEAT}),
gone AS (
    DELETE FROM realtime_interests i USING unnest(%(gone_tenants)s::text[], %(gone)s::text[]) AS g(tenant_id, channel)
    WHERE i.replica_id = %(replica)s AND i.tenant_id = g.tenant_id AND i.channel = g.channel),
put AS (
    INSERT INTO realtime_interests (replica_id, tenant_id, channel, listeners)
    SELECT %(replica)s, p.* FROM unnest(%(tenants)s::text[], %(channels)s::text[], %(listeners)s::int[]) AS p
    ON CONFLICT (replica_id, tenant_id, channel) DO UPDATE SET listeners = excluded.listeners)
SELECT pg_notify('{INTERESTS_CHANNEL}', notice) FROM unnest(%(notices)s::text[]) AS notice
"""  # noqa: S608 - our own words
PASS_ON = f"SELECT pg_notify('{LIVE_CHANNEL}', notice) FROM unnest(%s::text[]) AS notice"  # noqa: S608
LEAVE = f"""
WITH gone AS (DELETE FROM realtime_replicas WHERE replica_id = %s RETURNING 1)
SELECT pg_notify('{INTERESTS_CHANNEL}', '') FROM gone
"""  # noqa: S608 - our own words


class Relay:
    """The relay of one replica. It registers itself with the hub for messages and for changes of subscriptions; `run`
    does the work. `answers`: clients can subscribe at this replica; `look_every`: seconds between two readings of the
    table."""

    def __init__(
        self, pool: Pool, replica: str, hub: Hub, *, answers: bool, look_every: float = Limits.look_every
    ) -> None:
        self._pool, self._replica, self._hub, self._answers = pool, replica, hub, answers
        self._look_every = look_every
        self._elsewhere: dict[Key, set[str]] = {}
        self._put: dict[Key, int] = {}  # this replica's interests, as stored in the table
        self._looking: list[str] | None = None  # notices received while the table is being read
        self._queue: deque[Message] = deque()
        self._count = 0
        self._next_look = 0.0
        self._wake = asyncio.Event()
        self.looked = asyncio.Event()  # the table has been read at least once
        hub.changed = self._wake.set
        hub.onward.append(self)

    def wants(self, tenant: str, channels: Sequence[str]) -> bool:
        """Return True if another replica has subscribers to one of these channels."""
        return any((tenant, channel) in self._elsewhere for channel in (*channels, WHOLE_TENANT))

    def take(self, message: Message) -> None:
        """Queue a message for other replicas; if the queue is full, it is dropped and counted."""
        if len(self._queue) < LONGEST_QUEUE:
            self._queue.append(message)
            self._wake.set()
        else:
            self._hub.dropped["relay full"] += 1

    def hear_live(self, notice: str) -> None:
        """Deliver the messages of a notice from another replica to local listeners."""
        if notice and (parsed := from_json(notice))["r"] != self._replica:
            for one in parsed["m"]:
                self._hub.deliver(Message(one["t"], one["e"], one["c"], one["d"], not_to=one["x"]))

    def hear_interests(self, notice: str) -> None:
        """Apply a change of subscriptions at another replica; an empty notice makes `run` read the table."""
        if not notice:  # a replica left, or notices may have been missed
            self._next_look = 0.0
            self._wake.set()
            return
        if self._looking is not None:
            self._looking.append(notice)
        self._apply(notice)

    def _apply(self, notice: str) -> None:
        """Apply a notice of changed subscriptions to `_elsewhere`."""
        changes = from_json(notice)
        replica = changes["r"]
        if replica == self._replica:
            return
        for tenant, channel in changes["+"]:
            self._elsewhere.setdefault((tenant, channel), set()).add(replica)
        for tenant, channel in changes["-"]:
            if replicas := self._elsewhere.get((tenant, channel)):
                replicas.discard(replica)
                if not replicas:
                    del self._elsewhere[tenant, channel]

    async def run(self) -> None:
        """Read the subscriptions of other replicas, store those of this one, and send queued messages, until cancelled.
        While the database is unavailable, queued messages are dropped and counted."""
        clock = asyncio.get_running_loop().time
        while True:
            self._wake.clear()
            try:
                async with self._pool.connection() as connection:
                    if clock() >= self._next_look:
                        self._next_look = clock() + self._look_every
                        await self._look(connection)
                    await self._put_interests(connection)
                    await self._pass_on(connection)
            except psycopg.Error as error:
                if not is_unavailable(error):
                    raise
                log.warning("realtime relay: database unavailable", error=one_line(error))
                self._hub.dropped["relay away"] += len(self._queue)
                self._queue.clear()
                self._next_look = 0.0
                await asyncio.sleep(self._look_every / 5)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._next_look - clock())):
                    await self._wake.wait()
                await asyncio.sleep(GATHER_SECONDS)

    async def leave(self) -> None:
        """Delete this replica's subscriptions from the table and notify the others. If the database is unavailable,
        that is logged, and the others time the subscriptions out."""
        try:
            async with self._pool.connection() as connection:
                await connection.execute(LEAVE, (self._replica,))
        except psycopg.Error as error:
            log.warning(
                "realtime relay: subscriptions not deleted at the stop, other replicas will time them out",
                error=one_line(error),
            )

    async def _look(self, connection: Connection) -> None:
        """Record that this replica is alive, delete the rows of dead replicas, and read the subscriptions of the live
        ones."""
        if self._answers:
            await connection.execute(BEAT, {"replica": self._replica})
        await connection.execute(BURY)
        self._looking = []
        try:
            rows = await fetch_rows(connection, READ)
            self._elsewhere, self._put = {}, {}
            for replica, tenant, channel, listeners in rows:
                if replica == self._replica:
                    self._put[tenant, channel] = listeners
                else:
                    self._elsewhere.setdefault((tenant, channel), set()).add(replica)
            for notice in self._looking:
                self._apply(notice)
        finally:
            self._looking = None
        self.looked.set()

    async def _put_interests(self, connection: Connection) -> None:
        """Store this replica's subscriptions if they have changed, and notify the others."""
        wanted = self._hub.counts()
        if not self._answers or wanted == self._put:
            return
        changed = [(*key, count) for key, count in wanted.items() if self._put.get(key) != count]
        gone = [key for key in self._put if key not in wanted]
        tenants, channels, listeners = _columns(changed, 3)
        gone_tenants, gone_channels = _columns(gone, 2)
        await connection.execute(
            PUT,
            {
                "replica": self._replica,
                "tenants": tenants,
                "channels": channels,
                "listeners": listeners,
                "gone_tenants": gone_tenants,
                "gone": gone_channels,
                "notices": list(self._notices([key for key in wanted if key not in self._put], gone)),
            },
        )
        self._put = wanted

    def _notices(self, new: Sequence[Key], gone: Sequence[Key]) -> Iterator[str]:
        """Yield the notices of new and gone subscriptions, each small enough for NOTIFY."""
        for sign, keys in (("+", new), ("-", gone)):
            for start in range(0, len(keys), KEYS_AT_ONCE):
                notice = {"r": self._replica, "+": [], "-": [], sign: keys[start : start + KEYS_AT_ONCE]}
                yield encoded(notice).decode()

    async def _pass_on(self, connection: Connection) -> None:
        """Send the queued messages to other replicas."""
        if self._queue:
            messages, self._queue = self._queue, deque()
            pieces = [piece for message in messages for piece in self._pieces(message)]
            await connection.execute(PASS_ON, (list(self._packed(pieces)),))

    def _pieces(self, message: Message) -> Iterator[str]:
        """Yield the message as parts of notices, each for at most CHANNELS_AT_ONCE of its channels. Of a message with
        more channels, only those that other replicas subscribe to are sent."""
        channels = message.channels
        if len(channels) > CHANNELS_AT_ONCE:
            channels = [name for name in channels if (message.tenant, name) in self._elsewhere]
        for start in range(0, max(len(channels), 1), CHANNELS_AT_ONCE):
            yield in_a_notice(message, channels[start : start + CHANNELS_AT_ONCE])

    def _packed(self, pieces: Iterable[str]) -> Iterator[str]:
        """Pack parts of messages into as few notices as possible. Each notice has a number: PostgreSQL deduplicates
        equal notices of a transaction."""
        together: list[str] = []
        size = 0
        for piece in pieces:
            length = len(piece.encode()) + 1
            if together and size + length > LARGEST_NOTICE - WRAPPING:
                yield self._wrapped(together)
                together, size = [], 0
            together.append(piece)
            size += length
        if together:
            yield self._wrapped(together)

    def _wrapped(self, pieces: Sequence[str]) -> str:
        """Return a notice that contains these messages."""
        self._count += 1
        return f'{{"r":{encoded(self._replica).decode()},"n":{self._count},"m":[{",".join(pieces)}]}}'


def in_a_notice(message: Message, channels: Sequence[str]) -> str:
    """Return the message as a part of a notice, its data shortened if it is too large for NOTIFY."""
    fields = {"t": message.tenant, "e": message.event, "c": channels, "d": message.data, "x": message.not_to}
    most = LARGEST_NOTICE - WRAPPING - 1
    limit = most - len(encoded({**fields, "d": ""}))
    while len(piece := encoded(fields)) > most:
        payload = message.payload
        fields["d"] = fit(payload if isinstance(payload, dict) else {"data": str(payload)}, max(limit, 18)).decode()
        limit = limit * 3 // 4  # JSON within JSON is longer, because its quotes are escaped
    return piece.decode()


def _columns(rows: Sequence[Sequence[object]], count: int) -> list[list[object]]:
    """Return the rows as `count` columns, for unnest."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(count)]


async def occupied(connection: Connection, tenant: str) -> dict[str, int]:
    """Return the number of listeners per channel of this tenant, over all replicas."""
    return dict(await fetch_rows(connection, OCCUPIED, (tenant,)))
