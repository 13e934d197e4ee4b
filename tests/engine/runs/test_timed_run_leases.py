"""Leases of runs with a ttl: of any tenant, extended by the replica that works on the run, lost with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from ecluse.db.connect import Connection
from ecluse.db.connect import pool as open_pool
from ecluse.engine import Held, Lease, Start, acquire_lease, start_run
from ecluse.engine.runs.leases import RENEW, end_expired
from ecluse.engine.runs.lifecycle import RunEnded
from tests.support.engine_flows import flow, stage

TTL = timedelta(seconds=120)
END = """
UPDATE runs SET ended_at = now(), status = 'failed', state = 'failed', end_cause = 'operator', selected = 0,
    successful = 0, failed = 0, ignored = 0
"""
KEY = "company_enrichment:552100554"
FLOW = flow(stage())
HELD = (
    "SELECT attempt, fence, replica_id, expires_at - ecluse_now() > interval '119 s' FROM leases WHERE ended_at IS NULL"
)


@pytest.fixture
async def connection(dsn: str) -> AsyncIterator[Connection]:
    async with open_pool(dsn, size=2) as pool, pool.connection() as connection:
        yield connection


@pytest.fixture
async def run(connection: Connection) -> int:
    return (await start_run(connection, Start(FLOW, "run", tenant_id="acme"))).run.id


async def take(connection: Connection, run: int, replica: str, **options: Any) -> Lease:
    given = {"owner": f"run {run}", "ttl": TTL, "replica": replica, "run_id": run, **options}
    lease = await acquire_lease(connection, "system", KEY, **given)
    assert isinstance(lease, Lease)
    return lease


def join(query, replica: str) -> None:
    query("INSERT INTO replicas (id, host, pid, roles, work, hands) VALUES (%s, 'h', 1, '{}', '{}', 1)", replica)


@pytest.mark.req("ENR-52")
async def test_the_replica_that_works_on_the_run_extends_its_lease(connection, run, query, one):
    join(query, "r1"), join(query, "r2")
    first = await take(connection, run, "r1")
    query("UPDATE clock_offset SET \"offset\" = interval '100 s'")
    assert one(HELD) == (1, first.fence, "r1", False)
    await connection.execute(RENEW, ("r1",))
    assert one(HELD) == (1, first.fence, "r1", True)

    query("UPDATE clock_offset SET \"offset\" = interval '200 s'")
    again = await take(connection, run, "r2")
    assert (again.attempt, again.fence) == (1, first.fence)
    assert one(HELD) == (1, first.fence, "r2", True)
    await connection.execute(RENEW, ("r1",))


@pytest.mark.req("ENR-54", "ENG-33")
@pytest.mark.parametrize("how", ["expired", "its replica died"])
async def test_a_lost_lease_is_taken_again_by_its_run_as_one_more_attempt(connection, run, query, how):
    join(query, "r1"), join(query, "r2")
    first = await take(connection, run, "r1")
    if how == "expired":
        query("UPDATE clock_offset SET \"offset\" = interval '120 s'")
    else:
        query("UPDATE replicas SET state = 'dead', ended_at = now() WHERE id = 'r1'")
    second = await take(connection, run, "r2")
    assert (second.attempt, second.fence) == (2, first.fence + 1)
    assert query("SELECT end_cause FROM leases ORDER BY fence") == [("expired",), (None,)]


async def test_a_replica_that_left_hands_the_lease_over(connection, run, query):
    join(query, "r1"), join(query, "r2")
    await take(connection, run, "r1")
    query("UPDATE replicas SET state = 'left', ended_at = now() WHERE id = 'r1'")
    assert (await take(connection, run, "r2")).attempt == 1


async def test_it_stays_with_its_run_while_another_may_take_it_only_when_it_has_expired(connection, run, query, dsn):
    join(query, "r1")
    await take(connection, run, "r1")
    other = (await start_run(connection, Start(FLOW, "other", tenant_id="zeta"))).run.id
    held = await acquire_lease(connection, "system", KEY, owner="other", ttl=TTL, replica="r1", run_id=other)
    assert isinstance(held, Held)
    query("UPDATE clock_offset SET \"offset\" = interval '120 s'")
    async with open_pool(dsn, size=1) as pool:
        await end_expired(pool)
    assert query("SELECT run_id FROM leases WHERE ended_at IS NULL") == [(run,)], "its run may resume"
    assert (await take(connection, other, "r1")).attempt == 2


async def test_an_ended_run_of_another_tenant_gets_none(connection, run, query):
    query(END)
    with pytest.raises(RunEnded):
        await take(connection, run, "r1")


def test_a_lease_has_a_run_or_a_ttl(query):
    with pytest.raises(psycopg.errors.CheckViolation):
        query("INSERT INTO leases (tenant_id, key, fence, owner, acquired_at) VALUES ('t', 'k', 1, 'o', now())")
