"""API keys. A key is random and shown once; only its SHA-256 is stored, and the key is looked up by that.

A look-up is cached for a second, so a revoked key stops working within a second on every replica. While the database is
slow or unavailable, a key that was found less than ten seconds ago goes on working, so that load by other callers does
not lock out a valid key. The time of a key's last use is written in a background task, at most once a minute.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import psycopg

from ecluse.access import tenants
from ecluse.access.permissions import ROLES, permissions_of
from ecluse.base.clock import Clock
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import ignoring_outage, is_unavailable
from ecluse.db.query import fetch_all, fetch_one, fetch_value
from ecluse.db.reads import Reads

PREFIX = "ecl_"
HINT = len(PREFIX) + 4
FRESH_SECONDS = 1.0
KEPT_SECONDS = 10.0  # while the database does not answer
PATIENCE_SECONDS = 0.25  # for the look-up of a key that is kept
NOTED_SECONDS = 60.0
MANY = 1_000
LIFETIME = r"([1-9][0-9]{0,5})([mhd])"
NEVER = "never"
UNITS = {"m": "minutes", "h": "hours", "d": "days"}
SCOPES = ("ALL", "GROUP", "SELF")

VALID = """
SELECT k.key_id, k.name, k.tenant_id AS tenant, k.role, k.scope, k.groupes, k.crm_user_id, k.agent_id, k.host_id,
       t.disabled_at IS NOT NULL AS disabled
FROM credentials k JOIN tenants t ON t.id = k.tenant_id
WHERE (k.expires_at IS NULL OR k.expires_at > ecluse_now())
"""

NOTE_USE = """
UPDATE api_keys SET last_used_at = ecluse_now()
WHERE id = %s AND (last_used_at IS NULL OR last_used_at < ecluse_now() - interval '1 minute')
"""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, as its API key or the credential of an agent describes it."""

    key_id: int
    tenant: str
    role: str
    scope: str
    groupes: Sequence[str]
    crm_user_id: str | None
    disabled: bool  # the tenant is disabled
    name: str = ""  # for people
    agent_id: str | None = None  # of an agent, which has no key
    host_id: str | None = None

    @property
    def actor(self) -> str:
        return f"key:{self.key_id}" if self.agent_id is None else f"agent:{self.agent_id}"

    @property
    def administers_tenants(self) -> bool:
        """True for an admin key of the tenant `default` with scope ALL, which may act for every tenant."""
        return self.tenant == tenants.DEFAULT and self.role == "admin" and self.scope == "ALL"

    def may(self, permission: str) -> bool:
        return permission in permissions_of(self.role)


def lifetime(text: str) -> timedelta | None:
    """Parse the lifetime of a key, such as 90m, 12h or 30d; None for `never`. Raise InvalidInput for any other text."""
    if text == NEVER:
        return None
    if not (match := re.fullmatch(LIFETIME, text)):
        raise InvalidInput(
            f"expires_in: must be a number of minutes, hours or days, such as 90m, 12h or 30d, not {text!r}"
        )
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Known(NamedTuple):
    """The caller of a key, as the database had it at `at` (seconds of the monotonic clock)."""

    caller: Caller
    at: float


class Keys:
    """Look-ups of API keys and credentials of agents for the requests of this process, cached for FRESH_SECONDS, and
    for KEPT_SECONDS while the database does not answer. Requests with the same key share one look-up."""

    def __init__(self, reads: Reads, pool: Pool, clock: Clock) -> None:
        self._reads, self._pool, self._clock = reads, pool, clock
        self._known: dict[bytes, Known] = {}
        self._asking: dict[bytes, asyncio.Task[Caller | None]] = {}
        self._noted: dict[int, float] = {}
        self._writing: set[asyncio.Task[None]] = set()

    async def find(self, key: str) -> Caller | None:
        """Return the caller that this key belongs to; None if the key is unknown, expired or revoked (callers do not
        learn which). The use of an API key is noted."""
        hashed, now = digest(key), self._clock.monotonic()
        known = self._known.get(hashed)
        caller = known.caller if known and now < known.at + FRESH_SECONDS else await self._look_up(hashed, known)
        if caller is not None and caller.agent_id is None:
            self._note_use(caller.key_id, now)
        return caller

    async def _look_up(self, hashed: bytes, known: Known | None) -> Caller | None:
        asking = self._asking.get(hashed)
        if asking is None:
            asking = self._asking[hashed] = asyncio.create_task(self._ask(hashed))
            asking.add_done_callback(lambda task: self._asked(hashed, task))
        if known is None or self._clock.monotonic() >= known.at + KEPT_SECONDS:
            return await asyncio.shield(asking)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await asyncio.shield(asking)
        except (TimeoutError, psycopg.Error) as error:
            if isinstance(error, psycopg.Error) and not is_unavailable(error):
                raise
            return known.caller

    def _asked(self, hashed: bytes, task: asyncio.Task[Caller | None]) -> None:
        del self._asking[hashed]
        if not task.cancelled():
            task.exception()  # for requests that did not wait for it; the next one asks again

    async def _ask(self, hashed: bytes) -> Caller | None:
        at = self._clock.monotonic()
        caller = await self._reads(lambda connection: _found(connection, hashed))
        self._known.pop(hashed, None)
        if caller is not None:
            if len(self._known) > MANY:
                self._known.clear()
            self._known[hashed] = Known(caller, at)
        return caller

    def _note_use(self, key_id: int, now: float) -> None:
        if self._noted.get(key_id, now) <= now:
            self._noted[key_id] = now + NOTED_SECONDS
            task = asyncio.create_task(self._write_use(key_id))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write_use(self, key_id: int) -> None:
        with ignoring_outage("API key: last use"):
            async with self._pool.connection() as connection:
                await connection.execute(NOTE_USE, (key_id,))

    async def settle(self) -> None:
        await asyncio.gather(*self._writing)


async def _found(connection: Connection, hashed: bytes) -> Caller | None:
    return await fetch_one(connection, Caller, f"{VALID} AND k.hash = %s", (hashed,))


async def find_by_ids(connection: Connection, key_ids: Sequence[int]) -> list[Caller]:
    """Return the callers of these keys. Keys that are unknown, revoked or expired are left out."""
    return await fetch_all(connection, Caller, f"{VALID} AND k.key_id = ANY(%s)", (list(key_ids),))


async def create(
    connection: Connection,
    tenant: str,
    role: str,
    name: str,
    *,
    expires_in: timedelta | None = None,
    scope: str = "ALL",
    groupes: Sequence[str] = (),
    crm_user_id: str | None = None,
) -> tuple[int, str]:
    """Create a key; return its id and the key itself, of which only the hash is stored. Raise InvalidInput if role,
    name or scope is not valid, NotFound if there is no such tenant. `expires_in` None: it does not expire."""
    if role not in ROLES:
        raise InvalidInput(f"role: must be one of {', '.join(ROLES)}, not {role!r}")
    if not name.strip():
        raise InvalidInput("name: say who or what is going to use the key")
    _check_scope(scope, groupes, crm_user_id)
    await tenants.require(connection, tenant)
    key = PREFIX + secrets.token_urlsafe(32)
    key_id = await fetch_value(
        connection,
        "INSERT INTO api_keys (tenant_id, name, hint, hash, role, created_at, expires_at, scope, groupes,"
        " crm_user_id) VALUES (%s, %s, %s, %s, %s, ecluse_now(), ecluse_now() + %s, %s, %s, %s) RETURNING id",
        (
            *(tenant, storable(name.strip(), 200), key[:HINT], digest(key), role, expires_in),
            *(scope, list(groupes), crm_user_id),
        ),
    )
    return key_id, key


def _check_scope(scope: str, groupes: Sequence[str], crm_user_id: str | None) -> None:
    if scope not in SCOPES:
        raise InvalidInput(f"scope: must be one of {', '.join(SCOPES)}, not {scope!r}")
    if (scope == "GROUP") != bool(groupes) or not all(one.strip() for one in groupes):
        raise InvalidInput("groupes: a key of scope GROUP needs at least one; a key of another scope has none")
    if (scope == "SELF") != bool(crm_user_id and crm_user_id.strip()):
        raise InvalidInput("crm_user_id: a key of scope SELF needs one; a key of another scope has none")


async def revoke(connection: Connection, key_id: int, *, of_tenant: str | None = None) -> tuple[str, bool]:
    """Revoke a key, irreversibly; return its tenant, and whether it was this call that revoked it. Raise NotFound if
    there is no such key or, with `of_tenant`, if it belongs to another tenant."""
    tenant = await fetch_value(connection, "SELECT tenant_id FROM api_keys WHERE id = %s", (key_id,))
    if tenant is None or of_tenant not in (None, tenant):
        raise NotFound(f"There is no key {key_id}. `ecluse keys list` shows them.")
    cursor = await connection.execute(
        "UPDATE api_keys SET revoked_at = ecluse_now() WHERE id = %s AND revoked_at IS NULL", (key_id,)
    )
    return tenant, bool(cursor.rowcount)
