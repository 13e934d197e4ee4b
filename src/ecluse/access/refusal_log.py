"""Refused requests in the audit trail: invalid credentials, by address, and requests that a key may not make.

Refusals are counted in memory and written once a second, as one row per minute, actor and subject. Each process writes
at most MOST different rows per minute and kind, and counts all further refusals in one row, so that refused requests
cannot fill the disk.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from ipaddress import IPv6Address, ip_address, ip_network
from typing import NamedTuple

from fastapi import Request

from ecluse.base.text import storable
from ecluse.db.connect import Pool
from ecluse.db.outage import ignoring_outage
from ecluse.db.query import as_json

SYSTEM = "system"  # tenant of rows that belong to none
INVALID, REFUSED = "credentials.invalid", "request.refused"
WRITE_SECONDS = 1.0
MOST = 100
OTHERS = "others"

WRITE = """
INSERT INTO audit_trail AS t (tenant_id, at, actor, action, subject, reason, address, times)
SELECT tenant, date_trunc('minute', ecluse_now()), actor, action, subject, reason, address, times
FROM jsonb_to_recordset(%s::jsonb)
    AS n(tenant text, actor text, action text, subject text, reason text, address text, times integer)
ORDER BY tenant, actor, action, subject
ON CONFLICT (tenant_id, actor, action, subject, at) WHERE times IS NOT NULL
DO UPDATE SET times = t.times + excluded.times
"""


class AuditedRefusal(NamedTuple):
    """What identifies a refusal in the audit trail: equal refusals within a minute are one row with a count."""

    tenant: str
    actor: str
    action: str
    subject: str


class Refusals:
    """Counts the refusals of this process and writes them to the audit trail, `write_seconds` after the first one."""

    def __init__(self, pool: Pool, write_seconds: float = WRITE_SECONDS) -> None:
        self._pool, self._write_seconds = pool, write_seconds
        self._counts: Counter[AuditedRefusal] = Counter()
        self._firsts: dict[AuditedRefusal, tuple[str | None, str]] = {}  # reason and address
        self._minute, self._known = 0.0, Counter[str]()
        self._seen: set[AuditedRefusal] = set()
        self._writing: asyncio.Task[None] | None = None

    def invalid_credentials(self, address: str) -> None:
        """Count a request whose key or signature is not valid, under the network of its address."""
        self._count(AuditedRefusal(SYSTEM, f"address:{network_of(address)}", INVALID, "key"), (None, address))

    def forbidden(self, tenant: str, actor: str, subject: str, reason: str, address: str) -> None:
        """Count a request that the actor's key may not make. The row keeps reason and address of the first one."""
        self._count(AuditedRefusal(tenant, actor, REFUSED, subject), (storable(reason), address))

    def _count(self, one: AuditedRefusal, first: tuple[str | None, str] | None = None) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._minute + 60:
            self._minute, self._seen, self._known = now, set(), Counter()
        if one not in self._seen:
            if self._known[one.action] >= MOST:
                one = AuditedRefusal(SYSTEM, OTHERS, one.action, OTHERS)
                first = None
            self._known[one.action] += one not in self._seen
            self._seen.add(one)
        self._counts[one] += 1
        if first is not None:
            self._firsts.setdefault(one, first)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        await asyncio.sleep(self._write_seconds)
        counts, firsts, self._counts, self._firsts = self._counts, self._firsts, Counter(), {}
        self._writing = None
        rows = [
            {**one._asdict(), **dict(zip(("reason", "address"), firsts.get(one, ()), strict=False)), "times": times}
            for one, times in counts.items()
        ]
        with ignoring_outage("audit trail: refusals"):
            async with self._pool.connection() as connection:
                await connection.execute(WRITE, (as_json(rows),))

    async def settle(self) -> None:
        """Wait until the refusals counted so far are written."""
        if self._writing is not None:
            await self._writing


def address_of(request: Request) -> str:
    """Return the address of the client, as a trusted proxy says it."""
    return storable(request.client.host, 100) if request.client else "unknown"  # a socket file has none


def network_of(address: str) -> str:
    """Return an IPv4 address as it is, and of an IPv6 address its network of 64 bits, since one host has at least so
    many. Text that is no address is returned, too, cut to 100 characters."""
    try:
        found = ip_address(address)
    except ValueError:  # a socket file, or no address at all
        return storable(address, 100)
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else str(found)
