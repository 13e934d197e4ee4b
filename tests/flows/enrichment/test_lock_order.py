"""Transactions that wait for each other's companies and jobs: whatever their order in time, none is a deadlock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import timedelta

import pytest

from ecluse.db.connect import Connection
from ecluse.engine import pause_lane
from ecluse.engine.runs.lifecycle import load_run
from ecluse.engine.work.completion import end_by_operator
from ecluse.flows.enrichment import records
from ecluse.flows.enrichment.flow import LANES
from ecluse.flows.enrichment.requests import Launched
from ecluse.flows.enrichment.states import Trigger
from ecluse.vendors.registers import Source
from tests.support.engine_flows import until
from tests.support.enrichment_world import World
from tests.support.registers import SNCF, some_sirens


async def pause(world: World) -> None:
    """From now on no job makes a call."""
    async with world.kit.pool.connection() as connection:
        for lane in LANES.values():
            await pause_lane(connection, lane, reason="test", by="test")


def waits_for(world: World, waiting: Connection, *others: Connection) -> Awaitable[None]:
    pids = [other.info.backend_pid for other in others]
    return until(lambda: world.query("SELECT pg_blocking_pids(%s)", waiting.info.backend_pid) == [(pids,)])


async def end(world: World, connection: Connection, job: int | None) -> None:
    assert job is not None
    run = await load_run(connection, job)
    assert await end_by_operator(connection, world.kit.flow("enrichment"), run, "test", by="test")


async def create(world: World, connection: Connection, *sirens: str) -> list[Launched]:
    async with connection.transaction():
        return [launched for _, launched in await world.create(connection, *sirens)]


async def test_a_call_begins_beside_a_request_that_has_marked_the_company_as_stale(world: World) -> None:
    """The request saw the company before it had this job, and starts one, too."""
    await world.enriched(SNCF)
    await pause(world)
    _, launched = await world.request(SNCF, trigger=Trigger.MANUAL)
    world.later(timedelta(days=31))
    job = launched.job_id or 0
    async with world.kit.pool.connection() as asking, world.kit.pool.connection() as calling:

        async def call() -> bool:
            async with calling.transaction():
                return await records.begin_call(calling, job, SNCF, Source.SEARCH, 1)

        async with asking.transaction():
            await records.mark_stale(asking, timedelta(days=30), [SNCF])
            begun = asyncio.create_task(call())
            await waits_for(world, calling, asking)
            with pytest.raises(records.Taken):
                async with asking.transaction():
                    await records.put_jobs(asking, [{**world.job(job), "run_id": job + 1, "asked": []}])
        assert await begun
    assert (world.job(job)["status"], world.company(SNCF)["enrichment_status"]) == ("RUNNING", "RUNNING")


async def test_a_group_starts_no_job_before_it_has_seen_all_its_companies(world: World) -> None:
    """It has to wait for the end of a job of the first one. Another group starts both, meanwhile."""
    first, second = some_sirens("62", 2)
    await pause(world)
    world.query("INSERT INTO tenants (id, name, created_at) VALUES ('acme', 'acme', ecluse_now())")
    _, known = await world.request(second)
    _, ending = await world.request(first)
    connect = world.kit.pool.connection
    async with connect() as one, connect() as other, connect() as operator, connect() as rival:
        await end(world, operator, known.job_id)
        async with other.transaction():
            async with rival.transaction(force_rollback=True):
                await world.create(rival, second)
                async with operator.transaction():
                    await end(world, operator, ending.job_id)
                    waiting = asyncio.create_task(create(world, one, first, second))
                    await waits_for(world, one, operator)
                await waits_for(world, one, rival)
                ((_, begun),) = await world.create(other, first, tenant="acme")
            await waits_for(world, one, other)
            ((_, also),) = await world.create(other, second, tenant="acme")
        assert [launched.job_id for launched in await waiting] == [begun.job_id, also.job_id]
    assert (begun.result, also.result) == ("started", "started")
