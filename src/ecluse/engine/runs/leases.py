"""Leases: one holder per (tenant, key). A process holds a lease for its ttl, which its heartbeat extends (the ttl only
bounds the holding after a crash). A run holds a lease for as long as the run is open; if it has a ttl, too, the replica
that works on the run extends the lease, and if that replica dies or the ttl passes, the run must acquire it anew. Each
holding is a row with its own fence number, higher than all former ones of the key: a write under a lease locks that row
first, and fails if the lease was lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import structlog

from ecluse.base.errors import EcluseError, InvalidInput
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import as_json, fetch_row, fetch_rows
from ecluse.engine.runs import run_log
from ecluse.engine.runs.lifecycle import RunEnded, lock_open

log = structlog.get_logger(__name__)


class LeaseLost(EcluseError):
    """The lease is no longer held: another holder has it, or may have. The caller must store nothing under it."""

    code = "LEASE_LOST"


@dataclass(frozen=True)
class Lease:
    """A lease as its holder has it: `token` proves the holding, `fence` orders the holdings of a key."""

    tenant_id: str
    key: str
    fence: int
    token: UUID = field(repr=False)
    owner: str
    run_id: int | None
    attempt: int  # 1, or one more than the former holder's if that lease expired without a release
    remaining: timedelta | None  # at the time of reading; None: held by a run without a ttl

    def facts(self) -> dict[str, Any]:
        """Return the fields of a log line about the lease, with the token shortened."""
        lock = {"lock_key": self.key, "lock_token": str(self.token)[:8], "fence": self.fence, "attempt": self.attempt}
        left = self.remaining and round(self.remaining.total_seconds(), 1)
        return {**lock, "tenant_id": self.tenant_id, "owner": self.owner, "run_id": self.run_id, "lock_ttl": left}


@dataclass(frozen=True)
class Held:
    """Result of `acquire`: another owner holds the lease. Wait for that owner or its run instead of starting a second
    one."""

    owner: str
    run_id: int | None
    remaining: timedelta | None  # None: held for as long as the run is open


OPEN_RUN = "SELECT 1 FROM runs WHERE id = %(run)s AND ended_at IS NULL FOR NO KEY UPDATE"
# One `acquire` at a time per key, so that fence numbers grow in the order of the holdings.
TURN = "SELECT pg_advisory_xact_lock(hashtextextended(%(tenant)s || '/' || %(key)s, 10))"
COLUMNS = "tenant_id, key, fence, token, owner, run_id, attempt, expires_at - ecluse_now()"
HOLDER = f"""
SELECT {COLUMNS} FROM leases
WHERE tenant_id = %(tenant)s AND key = %(key)s AND ended_at IS NULL
"""  # noqa: S608 - our own names
END = "UPDATE leases SET ended_at = ecluse_now(), end_cause = "
MINE = "tenant_id = %s AND key = %s AND fence = %s AND token = %s AND ended_at IS NULL"
EXPIRE = f"{END} 'expired' WHERE {MINE} AND expires_at <= ecluse_now()"
# A run's own lease is lost if the replica that worked on the run has died.
EXPIRE_ORPHANED = f"""
{END} 'expired' WHERE {MINE} AND (expires_at <= ecluse_now()
    OR EXISTS (SELECT 1 FROM replicas r WHERE r.id = replica_id AND r.state = 'dead'))
"""  # noqa: S608 - our own names
EXTEND = f"UPDATE leases SET replica_id = %s, expires_at = ecluse_now() + ttl WHERE {MINE}"  # noqa: S608 - our own names
# Extends the lease that a run holds, for the replica that works on it, unless the ttl has passed or the former replica
# has died.
KEEP = f"""
UPDATE leases l SET replica_id = %(replica)s, expires_at = ecluse_now() + ttl
WHERE tenant_id = %(tenant)s AND key = %(key)s AND run_id = %(run)s AND ended_at IS NULL AND expires_at > ecluse_now()
  AND NOT EXISTS (SELECT 1 FROM replicas r WHERE r.id = l.replica_id AND r.state = 'dead')
RETURNING {COLUMNS}
"""  # noqa: S608 - our own names
# If retention has deleted the last row of a key, its fence numbers continue above all deleted ones.
FORMER = "coalesce(last.fence, (SELECT highest FROM pruned WHERE kind = 'leases'), 0)"
TAKE = f"""
INSERT INTO leases (tenant_id, key, fence, owner, run_id, replica_id, attempt, ttl, acquired_at, expires_at)
SELECT %(tenant)s, %(key)s, {FORMER} + 1, %(owner)s, %(run)s, %(replica)s,
       CASE last.end_cause WHEN 'expired' THEN last.attempt + 1 ELSE 1 END, %(ttl)s, at, at + %(ttl)s
FROM (SELECT 1) AS once LEFT JOIN (
    SELECT * FROM leases WHERE tenant_id = %(tenant)s AND key = %(key)s ORDER BY fence DESC LIMIT 1) AS last ON true,
LATERAL (SELECT greatest(ecluse_now(), last.ended_at) AS at) AS instant
RETURNING {COLUMNS}
"""  # noqa: S608 - our own names

# Skip rows that are locked by a write under the lease: no other holder can take them meanwhile, and the next heartbeat
# comes soon.
RENEW = """
UPDATE leases SET expires_at = ecluse_now() + ttl WHERE (tenant_id, key, fence) IN (
    SELECT tenant_id, key, fence FROM leases WHERE replica_id = %s AND ended_at IS NULL
    FOR UPDATE SKIP LOCKED)
"""
END_EXPIRED = f"""
{END} 'expired' WHERE (tenant_id, key, fence) IN (
    SELECT tenant_id, key, fence FROM leases
    WHERE ended_at IS NULL AND run_id IS NULL AND expires_at <= ecluse_now() FOR UPDATE SKIP LOCKED)
"""  # noqa: S608 - our own names
FORCE = f"""
{END} 'forced', reason = %s, ended_by = %s WHERE tenant_id = %s AND key = %s AND ended_at IS NULL RETURNING {COLUMNS}
"""
END_OF_RUNS = f"{END} 'run ended' WHERE run_id = ANY(%(runs)s) AND ended_at IS NULL"
# For many runs and keys at once, without the lock of TURN: the second of two transactions waits at the unique index for
# the first one's commit, and gets no lease. Keys are inserted in one order, against deadlocks.
HOLD = f"""
INSERT INTO leases (tenant_id, key, fence, owner, run_id, attempt, acquired_at)
SELECT w.tenant, w.key, {FORMER} + 1, 'run ' || w.run, w.run,
       CASE last.end_cause WHEN 'expired' THEN last.attempt + 1 ELSE 1 END, greatest(ecluse_now(), last.ended_at)
FROM jsonb_to_recordset(%s::jsonb) AS w(run bigint, tenant text, key text)
LEFT JOIN LATERAL (SELECT * FROM leases l WHERE l.tenant_id = w.tenant AND l.key = w.key
                   ORDER BY fence DESC LIMIT 1) AS last ON true
WHERE last.fence IS NULL OR last.ended_at IS NOT NULL ORDER BY w.tenant, w.key
ON CONFLICT DO NOTHING RETURNING tenant_id, key
"""  # noqa: S608 - our own names
HOLDERS = """
SELECT k.tenant, k.key, l.run_id FROM unnest(%s::text[], %s::text[]) AS k(tenant, key)
JOIN leases l ON l.tenant_id = k.tenant AND l.key = k.key AND l.ended_at IS NULL
"""


async def acquire(
    connection: Connection,
    tenant: str,
    key: str,
    *,
    owner: str,
    ttl: timedelta | None = None,
    replica: str | None = None,
    run_id: int | None = None,
) -> Lease | Held:
    """Acquire the lease of (tenant, key) and return it; if another holder has it, return that as `Held`. Part of the
    caller's transaction, if there is one, so that a run and its lease may be one commit.

    Without `run_id`, a process gets the lease for `ttl`, which the heartbeat of `replica` extends. With `run_id` (a run
    of any tenant), the run gets it until the run ends, and if it holds the lease already, the same lease again; raise
    RunEnded if that run is not open. A run with a `ttl` is worked on by `replica`, whose heartbeat extends the lease;
    if the ttl has passed, or the former replica has died, the run gets a new lease with the next `attempt`."""
    given = {"tenant": tenant, "key": key, "owner": owner, "ttl": ttl, "replica": replica, "run": run_id}
    # The usual case of a run with several items. The run need not be locked: its end ends its leases.
    if run_id is not None and ttl is not None and (row := await fetch_row(connection, KEEP, given)) is not None:
        return Lease(*row)
    async with connection.transaction():
        if run_id is not None and await fetch_row(connection, OPEN_RUN, given) is None:
            raise RunEnded
        await connection.execute(TURN, given)
        lease = await _holder(connection, given)
        if lease is not None and run_id is not None and lease.run_id == run_id:
            if ttl is None:
                return lease
            if not (await connection.execute(EXPIRE_ORPHANED, _mine(lease))).rowcount:
                await connection.execute(EXTEND, (replica, *_mine(lease)))
                return lease
            lease = None
        if lease is not None and lease.remaining is not None and lease.remaining <= timedelta(0):
            # EXPIRE checks again under the row's lock: the holder may be extending, writing under or releasing it.
            expired = (await connection.execute(EXPIRE, _mine(lease))).rowcount
            lease = None if expired else await _holder(connection, given)
        if lease is not None:
            return Held(lease.owner, lease.run_id, lease.remaining)
        (row,) = await fetch_rows(connection, TAKE, given)
    lease = Lease(*row)
    if lease.attempt > 1:
        log.warning("leases: acquired after the former holder let it expire", **lease.facts())
    else:
        log.info("leases: acquired", **lease.facts())
    return lease


async def hold_for_runs(
    connection: Connection, wanted: Sequence[tuple[int, str, str]]
) -> dict[tuple[str, str], int | None]:
    """Acquire leases, given as (run id, tenant, key), that runs hold until they end. The caller's transaction has
    inserted the runs, or locked them and found them open. Return the run that now holds each (tenant, key), which may
    be another one; None: a process holds it."""
    first = {(tenant, key): run for run, tenant, key in reversed(wanted)}
    held: dict[tuple[str, str], int | None] = {}
    while left := {pair: run for pair, run in first.items() if pair not in held}:
        rows = [{"run": run, "tenant": tenant, "key": key} for (tenant, key), run in left.items()]
        had = set(await fetch_rows(connection, HOLD, (as_json(rows),)))
        held |= {(tenant, key): left[tenant, key] for tenant, key in had}
        # A lease that was released between the two statements is in neither result: try again.
        held |= await _holders(connection, left.keys() - had)
    return held


async def holders(connection: Connection, tenant: str, keys: Collection[str]) -> dict[str, int | None]:
    """Return the keys among `keys` that are held in the tenant, each with the run that holds it (None: a process)."""
    held = await _holders(connection, {(tenant, key) for key in keys})
    return {key: run for (_, key), run in held.items()}


async def _holders(connection: Connection, pairs: Collection[tuple[str, str]]) -> dict[tuple[str, str], int | None]:
    if not pairs:
        return {}
    tenants, keys = zip(*pairs, strict=True)
    rows = await fetch_rows(connection, HOLDERS, (list(tenants), list(keys)))
    return {(tenant, key): run for tenant, key, run in rows}


async def still_mine(connection: Connection, lease: Lease) -> None:
    """Lock the lease until the end of the caller's transaction, so that no other holder can take it before. Raise
    LeaseLost if it is no longer held. Called before a write under the lease, in the same transaction. Lock order: runs
    → leases, like the end of a run."""
    if lease.run_id is not None:
        await lock_open(connection, [lease.run_id])
    if await fetch_row(connection, f"SELECT 1 FROM leases WHERE {MINE} FOR UPDATE", _mine(lease)) is None:  # noqa: S608
        raise LeaseLost(f"lease {lease.key} (fence {lease.fence}) is no longer held by {lease.owner}")


async def release(connection: Connection, lease: Lease) -> bool:
    """Release the lease, which its token identifies. Return False if it had been lost before."""
    cursor = await connection.execute(f"{END} 'released' WHERE {MINE}", _mine(lease))
    log.info("leases: released" if cursor.rowcount else "leases: lost before its release", **lease.facts())
    return cursor.rowcount == 1


async def force_release(connection: Connection, tenant: str, key: str, *, reason: str, by: str) -> bool:
    """Release a lease on behalf of the operator `by`: its holder cannot write under it any more. Return False if it is
    not held. Raise InvalidInput if the reason is empty."""
    if not reason.strip():
        raise InvalidInput("reason: required to release a lease by force; it is stored with the lease")
    async with connection.transaction():
        row = await fetch_row(connection, FORCE, (storable(reason.strip()), by, tenant, key))
        if row is None:
            return False
        lease = Lease(*row)
        if lease.run_id is not None:
            message = f"lease {key} released by force"
            await run_log.write(connection, lease.run_id, message, level="warning", reason=reason.strip(), by=by)
    log.warning("leases: released by force", reason=reason.strip(), by=by, **lease.facts())
    return True


async def end_expired(pool: Pool) -> None:
    """End the leases of processes whose ttl has passed (the process has died), and that no other holder has acquired
    since. A periodic job."""
    async with pool.connection() as connection:
        await connection.execute(END_EXPIRED)


async def _holder(connection: Connection, given: Mapping[str, Any]) -> Lease | None:
    row = await fetch_row(connection, HOLDER, given)
    return Lease(*row) if row else None


def _mine(lease: Lease) -> tuple[object, ...]:
    return (lease.tenant_id, lease.key, lease.fence, lease.token)
