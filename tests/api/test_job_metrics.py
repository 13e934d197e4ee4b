"""Jobs in the metrics: what waits and runs by organisation, agents, lost leases, and the results of fires."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from ecluse.flows.jobs import states
from tests.support.job_world import JobWorld, claim
from tests.support.metrics import scrape
from tests.support.pricing_rows import connected

OURS = ("default",)


def test_jobs_agents_and_lost_leases_are_scraped(api, dsn, query, tmp_path):
    world = JobWorld(api, tmp_path)
    host = world.host()
    agent = world.credential(host)
    world.job(host)
    world.job(host, retryPolicy={"maxRetries": 1, "backoffMs": 3_600_000})
    assert len(claim(agent).json["jobs"]) == 1
    query("UPDATE job_runs SET due_at = due_at - interval '1 minute'")
    found = scrape(api)
    assert found["ecluse_jobs_pending"][OURS] == found["ecluse_jobs_running"][OURS] == 1
    assert found["ecluse_agents_online"][OURS] == 1
    assert 60 <= found["ecluse_jobs_oldest_pending_seconds"][()] < 120
    query("UPDATE job_runs SET lease_ends_at = ecluse_now() WHERE status = 'running'")

    async def sweep() -> None:
        async with connected(dsn) as connection:
            await states.end_overdue(connection, timedelta(hours=1), leases=True)

    before = states.leases_lost[OURS]
    asyncio.run(sweep())
    assert states.leases_lost[OURS] == before + 1
    assert scrape(api)["ecluse_job_leases_lost_total"][OURS] == before + 1
