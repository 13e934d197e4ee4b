"""One holder per key, numbers that grow, and no write of a holder that has lost its lease. Time passes by moving the
database's clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection, Pool
from ecluse.db.connect import pool as open_pool
from ecluse.db.query import fetch_all
from ecluse.engine import (
    Held,
    Lease,
    LeaseLost,
    Start,
    acquire_lease,
    force_release,
    release_lease,
    start_run,
    still_mine,
)
from ecluse.engine.kit import Kit
from ecluse.engine.runs.lifecycle import RunEnded
from tests.support.engine_flows import flow, stage, until
from tests.support.runs import end_run

TTL = timedelta(seconds=120)
KEY = "company_enrichment:552100554"
ONE_STAGE = stage()
FLOW = flow(ONE_STAGE)
ITEMS_ONLY = flow(ONE_STAGE, "items", story=None)


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    async with open_pool(dsn, size=12) as pool:
        yield pool


@pytest.fixture
async def connection(pool: Pool) -> AsyncIterator[Connection]:
    async with pool.connection() as connection:
        yield connection


@pytest.fixture
def later(query: Callable[..., list[Any]]) -> Callable[[timedelta], object]:
    return lambda by: query('UPDATE clock_offset SET "offset" = "offset" + %s', by)


async def take(connection: Connection, owner: str = "me", **options: Any) -> Lease:
    lease = await acquire_lease(connection, "t", KEY, owner=owner, **{"ttl": TTL, **options})
    assert isinstance(lease, Lease)
    return lease


BLOCKED = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


async def write_under(connection: Connection, lease: Lease) -> None:
    async with connection.transaction():
        await still_mine(connection, lease)


async def new_run(connection: Connection, key: str = "run") -> int:
    return (await start_run(connection, Start(FLOW, key, tenant_id="t"))).run.id


@pytest.mark.req("ENG-30", "ENG-37")
async def test_whoever_comes_second_is_told_who_holds_it_and_for_how_long(connection, one):
    lease = await take(connection, "first")
    held = await acquire_lease(connection, "t", KEY, owner="second", ttl=TTL)
    assert isinstance(held, Held)
    assert (held.owner, held.run_id) == ("first", None)
    assert held.remaining is not None
    assert timedelta(0) < held.remaining <= TTL
    row = one("SELECT key, token, expires_at - acquired_at, ended_at FROM leases")
    assert row == (KEY, lease.token, TTL, None)


@pytest.mark.req("G-81")
async def test_two_tenants_do_not_share_a_key(connection):
    await take(connection)
    assert isinstance(await acquire_lease(connection, "other", KEY, owner="me", ttl=TTL), Lease)


@pytest.mark.req("ENG-31")
async def test_only_the_token_releases(connection, one):
    lease = await take(connection)
    forged = Lease(**{**vars(lease), "token": "00000000-0000-0000-0000-000000000000"})
    assert await release_lease(connection, forged) is False
    with pytest.raises(LeaseLost):
        await still_mine(connection, forged)
    assert one("SELECT ended_at FROM leases") is None
    assert await release_lease(connection, lease) is True
    assert await release_lease(connection, lease) is False
    assert (await take(connection)).fence == lease.fence + 1


@pytest.mark.req("ENG-33")
async def test_an_expired_lease_is_taken_over_as_one_more_attempt(connection, later, query):
    first = await take(connection, "first")
    later(TTL)
    second = await take(connection, "second")
    assert (second.attempt, second.fence) == (2, first.fence + 1)
    with pytest.raises(LeaseLost):
        await still_mine(connection, first)
    await release_lease(connection, second)
    assert (await take(connection)).attempt == 1, "it was released: nothing is resumed"
    assert query("SELECT end_cause FROM leases ORDER BY fence") == [("expired",), ("released",), (None,)]


async def test_one_that_is_released_while_somebody_finds_it_expired_is_free(pool, connection, later, query):
    lease = await take(connection, "first")
    later(TTL)
    async with pool.connection() as other, other.transaction():
        assert await release_lease(other, lease)
        second = asyncio.create_task(take(connection, "second"))
        await until(lambda: query(BLOCKED))
    assert (await second).attempt == 1


async def test_whoever_writes_under_a_runs_lease_waits_for_its_end_without_holding_the_lease(pool, connection, query):
    """In one order, the run first: otherwise the two would wait for each other."""
    run = await new_run(connection)
    lease = await take(connection, ttl=None, run_id=run)
    async with pool.connection() as other, other.transaction():
        await other.execute("SELECT 1 FROM runs FOR NO KEY UPDATE")
        writing = asyncio.create_task(write_under(connection, lease))
        await until(lambda: query(BLOCKED))
        await other.execute("SELECT 1 FROM leases FOR UPDATE NOWAIT")
    await writing


@pytest.mark.req("ENG-32", "ENG-39")
async def test_the_heartbeat_extends_what_its_process_holds_and_nothing_else(start_kit, connection, later, query):
    kit = await start_kit(beat=0.1, sweep_every=0.2)
    ours = await take(connection, replica=kit.replica)
    other = await acquire_lease(connection, "t", "other", owner="other", ttl=TTL, replica="somebody-else")
    assert isinstance(other, Lease)
    for _ in range(3):
        later(TTL * 0.75)
        await until(lambda: query("SELECT 1 FROM leases WHERE key = %s AND expires_at > ecluse_now() + ttl * 0.9", KEY))
    await still_mine(connection, ours)
    await until(lambda: query("SELECT 1 FROM leases WHERE key = 'other' AND end_cause = 'expired'"), 20)
    with pytest.raises(LeaseLost):
        await still_mine(connection, other)


@pytest.mark.req("ENG-39")
async def test_those_who_ask_for_it_do_not_keep_it_from_being_extended(start_kit, pool, connection, later, query):
    kit = await start_kit(beat=0.1)
    await take(connection, replica=kit.replica)
    async with pool.connection() as other, other.transaction():
        assert isinstance(await acquire_lease(other, "t", KEY, owner="other", ttl=TTL), Held)
        later(TTL / 2)
        await until(lambda: query("SELECT 1 FROM leases WHERE expires_at > ecluse_now() + ttl * 0.9"))


async def test_a_beat_does_not_wait_for_a_write_under_the_lease(start_kit, pool, connection, query):
    kit = await start_kit(beat=0.1)
    lease = await take(connection, replica=kit.replica)
    beat = "SELECT beat_at FROM replicas"
    async with pool.connection() as writer, writer.transaction():
        await still_mine(writer, lease)
        before = query(beat)
        await until(lambda: query(beat) != before)
    await until(lambda: query("SELECT 1 FROM leases WHERE expires_at > acquired_at + ttl"))


@pytest.mark.req("ENG-39")
async def test_a_lease_of_a_run_lasts_until_the_run_ends_however_long_that_takes(start_kit, connection, later, one):
    kit: Kit = await start_kit(ITEMS_ONLY)
    run = (await start_run(connection, Start(ITEMS_ONLY, "run", tenant_id="t"))).run
    lease = await take(connection, ttl=None, run_id=run.id)
    later(timedelta(days=30))
    held = await acquire_lease(connection, "t", KEY, owner="second", ttl=TTL)
    assert held == Held("me", run.id, None)
    assert await take(connection, ttl=None, run_id=run.id) == lease, "a replay has its own back"
    await end_run(kit, run.id, "enough")
    assert one("SELECT end_cause FROM leases") == "run ended"
    assert one("SELECT l.ended_at <= r.ended_at FROM leases l JOIN runs r ON r.id = l.run_id")
    assert (await take(connection, "second")).attempt == 1


async def test_a_run_that_has_ended_can_hold_nothing(start_kit, connection, query):
    kit: Kit = await start_kit(FLOW)
    run_id = await new_run(connection)
    await end_run(kit, run_id, "enough")
    with pytest.raises(RunEnded):
        await acquire_lease(connection, "t", KEY, owner="me", run_id=run_id)
    assert query("SELECT 1 FROM leases") == []


@pytest.mark.req("ENG-37")
async def test_a_run_and_its_lease_are_one_commit(pool, connection, query):
    await take(connection, "holder")
    async with pool.connection() as other, other.transaction() as both:
        run_id = await new_run(other)
        if isinstance(await acquire_lease(other, "t", KEY, owner="run", run_id=run_id), Held):
            raise psycopg.Rollback(both)
    assert query("SELECT 1 FROM runs") == []


@pytest.mark.req("ENG-38")
async def test_a_forced_release_needs_a_reason_and_fences_the_holder(connection, one):
    run_id = await new_run(connection)
    lease = await take(connection, ttl=None, run_id=run_id)
    with pytest.raises(InvalidInput):
        await force_release(connection, "t", KEY, reason="  ", by="cli:me")
    assert await force_release(connection, "other", KEY, reason="why", by="cli:me") is False
    assert await force_release(connection, "t", KEY, reason="provider hangs", by="cli:me") is True
    assert one("SELECT end_cause, reason, ended_by FROM leases") == ("forced", "provider hangs", "cli:me")
    assert one("SELECT data->>'reason' FROM run_log WHERE level = 'warning'") == "provider hangs"
    with pytest.raises(LeaseLost):
        await still_mine(connection, lease)
    assert await force_release(connection, "t", KEY, reason="again", by="cli:me") is False
    assert (await take(connection, "second")).fence == lease.fence + 1


@pytest.mark.req("ENG-36", "ENG-88")
async def test_who_holds_what_is_listed_and_logged_with_a_shortened_token(connection, later):
    with capture_logs() as lines:
        lease = await take(connection, "first", replica="r")
        later(TTL)
        second = await take(connection, "second")
        await force_release(connection, "t", KEY, reason="why", by="cli:me")
        run_id = await new_run(connection)
        held = await take(connection, ttl=None, run_id=run_id)
    assert [line["log_level"] for line in lines] == ["info", "warning", "warning", "info"]
    assert [line["lock_token"] for line in lines] == [str(one.token)[:8] for one in (lease, second, second, held)]
    assert {line["lock_key"] for line in lines} == {KEY}
    assert [line["lock_ttl"] and round(line["lock_ttl"], -1) for line in lines] == [120, 120, 120, None]
    (row,) = await fetch_all(connection, dict, "SELECT * FROM lease_list")
    assert (row["tenant_id"], row["key"], row["owner"], row["run_id"], row["attempt"]) == ("t", KEY, "me", run_id, 1)
    assert (row["token"], row["remaining_seconds"]) == (str(held.token)[:8], None)
    for said in (*lines, row, held):
        assert str(held.token) not in repr(said)


@pytest.mark.req("ENG-35")
async def test_without_a_database_nothing_is_acquired(dsn, query):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        pid = connection.info.backend_pid
        query("SELECT pg_terminate_backend(%s, 5000)", pid)
        with pytest.raises(psycopg.OperationalError):
            await acquire_lease(connection, "t", KEY, owner="me", ttl=TTL)
    assert query("SELECT 1 FROM leases") == []


async def compete(pool: Pool, name: str, chance: random.Random, stop: asyncio.Event) -> None:
    """Takes it when it can; writes, and then releases it, forgets it, or goes on as if nothing could have happened."""
    while not stop.is_set():
        async with pool.connection() as connection:
            lease = await acquire_lease(connection, "t", KEY, owner=name, ttl=TTL)
            if isinstance(lease, Held):
                await asyncio.sleep(chance.uniform(0, 0.01))
                continue
            for _ in range(chance.randrange(1, 5)):
                await asyncio.sleep(chance.uniform(0, 0.01))
                try:
                    async with connection.transaction():
                        await still_mine(connection, lease)
                        await connection.execute("INSERT INTO accepted (fence) VALUES (%s)", (lease.fence,))
                        await asyncio.sleep(chance.uniform(0, 0.002))
                except LeaseLost:
                    break
            if chance.random() < 0.6:
                await release_lease(connection, lease)


CAUSES = "SELECT DISTINCT end_cause FROM leases WHERE ended_at IS NOT NULL"


@pytest.mark.req("ENG-30", "ENG-33", "ENG-34", "ENG-38")
async def test_in_a_race_the_accepted_writes_of_two_holders_never_mix(pool, query, one, later):
    query("CREATE TABLE accepted (place bigint GENERATED ALWAYS AS IDENTITY, fence bigint NOT NULL)")
    chance, *chances = map(random.Random, range(11))
    stop = asyncio.Event()
    tasks = [asyncio.create_task(compete(pool, f"c{n}", own, stop)) for n, own in enumerate(chances)]
    async with pool.connection() as connection:
        while one("SELECT count(DISTINCT fence) FROM accepted") < 60 or len(query(CAUSES)) < 3:
            await asyncio.sleep(chance.uniform(0, 0.01))
            if chance.random() < 0.5:
                later(TTL)
            elif chance.random() < 0.3:
                await force_release(connection, "t", KEY, reason="the race", by="test")
    stop.set()
    await asyncio.gather(*tasks)
    fences = [fence for (fence,) in query("SELECT fence FROM accepted ORDER BY place")]
    assert fences == sorted(fences), "a write of a former holder was accepted"
    assert one("SELECT count(*) = max(fence) FROM leases")
    overlaps = "SELECT 1 FROM leases a JOIN leases b ON b.fence > a.fence AND b.acquired_at < a.ended_at"
    assert query(overlaps) == []
