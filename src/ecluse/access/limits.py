"""Limits per API key and tenant: requests weighted by cost, bytes, open streams and polls, and numbers of stored
records. A request beyond a limit is answered 429 with the name of the limit and Retry-After.

Requests and bytes are counted in memory, by each replica for itself, in token buckets that hold what a minute allows.
Records are counted in the transaction that adds one, and only one such transaction of a tenant runs at a time. The
limits on what a tenant does at once are in `db/shares.py`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ecluse.access.envelope import Refused
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row, fetch_value
from ecluse.db.shares import Shares

KNOB = "ECLUSE_LIMIT_"  # and the name of the limit in capitals
MEGABYTE = 1_000_000
MANY = 10_000  # buckets; if there are more, the unused ones are removed
ROWS_PER_UNIT = 20
BYTES_PER_UNIT = 10_000  # of a body: about as long as a read takes
LARGE_SECONDS = 5.0  # less than the idle timeout of the transaction in which an answer is encoded

COUNTED = {
    "schedules": "SELECT count(*) FROM schedules WHERE tenant_id = %s AND deleted_at IS NULL",
    "audit_configs": "SELECT count(*) FROM audit_configs WHERE tenant_id = %s AND deleted_at IS NULL",
    "endpoints": "SELECT count(*) FROM notification_endpoints WHERE tenant_id = %s",
    "pricing_projects": "SELECT count(*) FROM pricing_projects WHERE tenant_id = %s AND deleted_at IS NULL",
    "pricing_rules": "SELECT count(*) FROM pricing_rules WHERE tenant_id = %s AND deleted_at IS NULL",
    "rule_runs": "SELECT count(*) FROM rule_runs WHERE tenant_id = %s",
    "job_hosts": "SELECT count(*) FROM job_hosts WHERE tenant_id = %s AND deleted_at IS NULL",
    "job_servers": "SELECT count(*) FROM job_servers WHERE tenant_id = %s AND deleted_at IS NULL",
    "api_keys": "SELECT count(*) FROM key_list WHERE tenant_id = %s AND state = 'valid'",
    "mail_addresses": "SELECT count(*) FROM mail_addresses WHERE tenant_id = %s",
}
ALL_COUNTS = f"SELECT {', '.join(f'({statement})' for statement in COUNTED.values())}"
OPEN = {"page_streams": "open page streams", "streams": "open streams of events", "polls": "waiting polls"}
# Concurrent transactions of a tenant check a count one after the other.
LOCK = "SELECT FROM tenants WHERE id = %s FOR NO KEY UPDATE"


@dataclass(frozen=True)
class Allowed:
    """The limits as the knobs set them; 0: no limit."""

    key_requests: int = 6_000  # a minute, weighted by cost
    tenant_requests: int = 12_000
    key_megabytes: int = 300  # a minute, of bodies and answers
    tenant_megabytes: int = 600
    key_page_streams: int = 50  # open at once
    tenant_page_streams: int = 100
    key_streams: int = 1_000
    tenant_streams: int = 2_000
    key_polls: int = 10
    tenant_polls: int = 1_000
    schedules: int = 1_000
    audit_configs: int = 500
    endpoints: int = 50
    pricing_projects: int = 100
    pricing_rules: int = 1_000
    rule_runs: int = 10_000
    job_hosts: int = 500
    job_servers: int = 1_000
    api_keys: int = 500
    mail_addresses: int = 500
    answer_megabytes: int = 10  # of one answer


class Bucket(NamedTuple):
    """How much of a minute's allowance was used at the instant `at`. The used part drains evenly, to nothing within a
    minute."""

    used: float = 0.0
    at: float = 0.0


def used(bucket: Bucket, per_minute: float, now: float) -> float:
    return max(0.0, bucket.used - (now - bucket.at) * per_minute / 60)


def seconds_until(bucket: Bucket, per_minute: float, cost: float, now: float) -> float:
    """Return the seconds until the bucket has room for `cost`; 0: it has room now. A cost above what a minute allows
    waits for an empty bucket."""
    over = used(bucket, per_minute, now) + min(cost, per_minute) - per_minute
    return max(0.0, over) * 60 / per_minute


def cost_of(method: str, rows: int) -> int:
    """Return the cost of a request: 1 for a read, 5 for a change, and 1 more per 20 of the rows that it asks for."""
    return (1 if method in ("GET", "HEAD") else 5) + rows // ROWS_PER_UNIT


def limit_exceeded(code: str, limit: str, says: str, seconds: float) -> Refused:
    """Return the refusal (429) of a request that exceeds a limit. `limit`: the name of the limit; `says`: a sentence
    about it; `seconds`: when to retry, rounded up to at least 1."""
    wait = max(1, math.ceil(seconds))
    details = [{"where": limit, "problem": says}]
    return Refused(429, code, f"{says} Try again in {wait} s.", {"Retry-After": str(wait)}, details)


def _count_reached(name: str, most: int, remedy: str) -> Refused:
    what, knob = name.replace("_", " "), f"{KNOB}{name.upper()}"
    says = f"A tenant may have {most} {what}, and this one has no room ({name})."
    says = f"{says} {remedy} the operator of the server to raise {knob}."
    details = [{"where": name, "problem": says}]
    return Refused(429, "LIMIT_REACHED", says, {"Retry-After": "60"}, details)  # no sooner than by hand


class Charged(Protocol):
    """Who a request is charged to: the caller of an API key or, of the Pusher HTTP API, the app that signed it."""

    @property
    def actor(self) -> str: ...

    @property
    def tenant(self) -> str: ...


class LimitUse(NamedTuple):
    """A limit that applies to a caller, and how much of it is used."""

    name: str
    limit: int | None
    used: int | None = None  # None: of one answer
    resets_in_seconds: int | None = None  # until nothing is used any more; None: it does not reset by itself


class Limiter:
    """The limits in force in this process, and what its callers have used of them."""

    def __init__(self, allowed: Allowed, now: Callable[[], float] = time.monotonic) -> None:
        self.allowed, self._now = allowed, now
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._open: Counter[tuple[str, str]] = Counter()
        self.large = Shares("large_bodies_at_once", 1, LARGE_SECONDS)

    def charge(self, caller: Charged, cost: int) -> None:
        """Charge a request of this cost to the caller's key and tenant. Raise Refused, and charge nothing, if one of
        them has used up the requests or the megabytes that a minute allows."""
        now = self._now()
        for name, whose, most in (*self._rates(caller, "requests"), *self._rates(caller, "megabytes")):
            bucket, requests = self._buckets.get((name, whose), Bucket()), name.endswith("requests")
            if wait := seconds_until(bucket, most, cost if requests else 1, now):
                what = f"{most} units of requests" if requests else f"{most // MEGABYTE} MB of bodies and answers"
                says = f"This {name.partition('_')[0]} may have {what} a minute ({name}), and they are used up."
                raise limit_exceeded("RATE_LIMITED", name, says, wait)
        self._use(caller, "requests", cost, now)

    def count_bytes(self, caller: Charged, count: int) -> None:
        """Count bytes that were received or are about to be sent. Nothing is refused here: bytes beyond the limit delay
        later requests."""
        self._use(caller, "megabytes", count, self._now())

    def open(self, caller: Charged, what: str) -> Callable[[], None]:
        """Count an open stream or poll (`what` in OPEN) and return the function to call when it ends. Raise Refused if
        the key or its tenant has as many as allowed."""
        held = [(name, whose) for name, whose, _ in self._whose(caller, what)]
        for name, whose, most in self._whose(caller, what):
            if most and self._open[name, whose] >= most:
                says = f"This {name.partition('_')[0]} has {most} {OPEN[what]}, as many as allowed ({name})."
                raise limit_exceeded("TOO_MANY_CONNECTIONS", name, says, 10)
        self._open.update(held)

        def close() -> None:
            self._open.subtract(held)
            for one in held:
                if not self._open[one]:
                    del self._open[one]

        return close

    async def require_room(self, connection: Connection, tenant: str, name: str) -> None:
        """Raise Refused if the tenant already has as many records of this kind (`name` in COUNTED) as allowed. Call it
        in the transaction that inserts one: it locks the tenant, so that no other transaction inserts one meanwhile."""
        if most := getattr(self.allowed, name):
            await connection.execute(LOCK, (tenant,))
            if await fetch_value(connection, COUNTED[name], (tenant,)) >= most:
                raise _count_reached(name, most, "Remove one first, or ask")

    @asynccontextmanager
    async def room_kept(self, connection: Connection, tenant: str, name: str) -> AsyncIterator[None]:
        """Raise Refused at the end of the block if it has added records of this kind (`name` in COUNTED), and the
        tenant then has more than allowed. For records that are not added one by one. Call it in the transaction that
        inserts them: it locks the tenant, so that no other transaction inserts one meanwhile."""
        if not (most := getattr(self.allowed, name)):
            yield
            return
        await connection.execute(LOCK, (tenant,))
        before = await fetch_value(connection, COUNTED[name], (tenant,))
        yield
        if max(before, most) < await fetch_value(connection, COUNTED[name], (tenant,)):
            raise _count_reached(name, most, "Ask")

    async def standing(self, connection: Connection, caller: Charged) -> list[LimitUse]:
        """Return every limit above that applies to the caller, with what is used of it; requests, bytes, streams and
        polls are those of this process."""
        now, found = self._now(), []
        for name, whose, most in (*self._whose(caller, "requests"), *self._whose(caller, "megabytes")):
            unit = MEGABYTE if name.endswith("megabytes") else 1
            level = used(self._buckets.get((name, whose), Bucket()), most * unit, now)
            resets = math.ceil(level * 60 / (most * unit)) if most else 0
            found.append(LimitUse(name, most or None, math.ceil(level / unit), resets))
        for what in OPEN:
            for name, whose, most in self._whose(caller, what):
                found.append(LimitUse(name, most or None, self._open[name, whose]))
        counts = await fetch_row(connection, ALL_COUNTS, (caller.tenant,) * len(COUNTED)) or ()
        return found + [
            LimitUse(name, getattr(self.allowed, name) or None, count)
            for name, count in zip(COUNTED, counts, strict=True)
        ]

    def _whose(self, caller: Charged, what: str) -> Iterator[tuple[str, str, int]]:
        """Yield name, owner and value of the limit on `what`, first of the caller's key, then of its tenant."""
        for per, whose in (("key", caller.actor), ("tenant", caller.tenant)):
            yield (name := f"{per}_{what}"), whose, getattr(self.allowed, name)

    def _rates(self, caller: Charged, what: str) -> Iterator[tuple[str, str, int]]:
        unit = MEGABYTE if what == "megabytes" else 1
        return ((name, whose, most * unit) for name, whose, most in self._whose(caller, what) if most)

    def _use(self, caller: Charged, what: str, amount: int, now: float) -> None:
        if len(self._buckets) > MANY:
            self._buckets = {whose: one for whose, one in self._buckets.items() if now - one.at < 60}
        for name, whose, most in self._rates(caller, what):
            bucket = self._buckets.get((name, whose), Bucket())
            self._buckets[name, whose] = Bucket(used(bucket, most, now) + amount, now)
