"""Cost of waiting agents: 200 long polls at one server. Measures its CPU time and the transactions of the database (a
single statement is one, too) while nothing happens; then the time from a run-now request to the answer of its agent's
poll, also while another host has 50,000 jobs waiting.

`python -m bench.agents [--agents 200] [--seconds 60] [--jobs 200] [--json]`
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import uvloop

from bench.harness import fresh_database
from bench.reads import process, ready
from bench.server import server
from ecluse.access import keys
from ecluse.db.connect import normalise
from ecluse.migrations.runner import upgrade

TICKS = 100  # of CPU time per second, as /proc counts them
BACKLOG = """
WITH made AS (
    INSERT INTO jobs (id, tenant_id, key, job_schedule_id, server_instance_id, host_id, type, payload, max_attempts,
        backoff_ms, backoff_type, created_by, created_at)
    SELECT 'many' || n, 'default', 'many' || n, 's', 'v', 'crowded', 'noop', '{}', 1, 0, 'fixed', 'bench', now()
    FROM generate_series(1, 50000) n RETURNING id, tenant_id, host_id)
INSERT INTO job_runs (id, tenant_id, job_id, host_id, attempt, due_at)
SELECT id, tenant_id, id, host_id, 1, now() FROM made
"""
COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"


class Fleet:
    """Agents without a program: each claims, notes when a job came, reports it, and claims again."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.arrived: dict[str, asyncio.Future[float]] = {}
        self.schedules: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def post(self, path: str, body: Any, key: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._session.post(path, json=body, headers=headers) as answer:
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def add(self, name: str) -> None:
        host = (await self.post("/api/jobs/hosts", {"name": name}))["id"]
        place = (await self.post("/api/jobs/servers", {"name": name, "hostId": host}))["id"]
        given = {"name": name, "serverInstanceId": place, "cronExpression": "0 0 1 1 *", "jobType": "noop"}
        self.schedules.append((await self.post("/api/jobs/schedules", given))["id"])
        token = (await self.post(f"/api/jobs/hosts/{host}/token", {}))["token"]
        about = {"token": token, "hostname": name, "version": "1", "platform": "bench"}
        credential = (await self.post("/api/agent/enrol", about))["credential"]
        self._tasks.append(asyncio.create_task(self._work(credential)))

    async def _work(self, credential: str) -> None:
        while True:
            body = {"max": 1, "waitSeconds": 30, "types": [], "version": "1", "claimKey": str(uuid.uuid4())}
            for job in (await self.post("/api/agent/jobs/claim", body, credential))["jobs"]:
                self.arrived.setdefault(job["jobId"], asyncio.Future()).set_result(time.monotonic())
                result = {"fence": job["fence"], "status": "succeeded"}
                await self.post(f"/api/agent/job-runs/{job['jobRunId']}/result", result, credential)

    async def run_now(self, schedule: str) -> float:
        """Return the milliseconds from the request to the arrival of the job at its agent."""
        began = time.monotonic()
        job = (await self.post(f"/api/jobs/schedules/{schedule}/run", {}))["jobId"]
        return (await self.arrived.setdefault(job, asyncio.Future()) - began) * 1000

    def stop(self) -> None:
        for one in self._tasks:
            one.cancel()


def cpu_seconds(port: int) -> float:
    """Return the CPU time of the process that listens on this port."""
    listed = subprocess.run(["ss", "-Hltnp", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    pid = listed.split("pid=")[1].split(",")[0]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(dsn: str, agents: int, seconds: float, jobs: int) -> dict[str, float]:
    chance = random.Random(1)  # noqa: S311 - repeatable, not secret
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        _, key = await keys.create(connection, "default", "operator", "bench")
        with process(dsn) as port:
            headers, limit = {"Authorization": f"Bearer {key}"}, aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers, connector=limit) as session:
                await ready(session, f"http://127.0.0.1:{port}")
                fleet, alone = Fleet(session), await _commits(connection)
                await asyncio.sleep(10)
                before = (await _commits(connection) - alone) / 11.5
                for n in range(agents):
                    await fleet.add(f"agent {n}")
                    await asyncio.sleep(30 / agents)  # their polls end spread over the time that they take
                commits = await _commits(connection)
                cpu, began = cpu_seconds(port), time.monotonic()
                await asyncio.sleep(seconds)
                spent = time.monotonic() - began
                idle_cpu = (cpu_seconds(port) - cpu) / spent
                idle = (await _commits(connection) - commits) / (spent + 1.5)
                latencies = []
                for _ in range(jobs):
                    await asyncio.sleep(chance.uniform(0.02, 0.08))
                    latencies.append(await fleet.run_now(chance.choice(fleet.schedules)))
                await connection.execute(BACKLOG)
                beside = [await fleet.run_now(chance.choice(fleet.schedules)) for _ in range(jobs // 4)]
                fleet.stop()
    return {
        "idle_cpu_percent": idle_cpu * 100,
        "idle_transactions_per_second": idle,
        "of_which_without_agents": before,
        "median_ms": statistics.median(latencies),
        "p99_ms": sorted(latencies)[int(len(latencies) * 0.99)],
        "beside_backlog_median_ms": statistics.median(beside),
        "beside_backlog_max_ms": max(beside),
    }


async def _commits(connection: psycopg.AsyncConnection[Any]) -> int:
    """Return the transactions of the database so far; outside of a transaction, each statement is one."""
    await asyncio.sleep(1.5)  # sessions report their counts at intervals
    row = await (await connection.execute(COMMITS)).fetchone()
    assert row is not None
    return int(row[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.agents", description=__doc__)
    parser.add_argument("--dsn")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server(options.dsn, None) as (dsn, _), fresh_database(dsn) as own:
        upgrade(normalise(own))
        found = uvloop.run(measure(own, options.agents, options.seconds, options.jobs))
    print(json.dumps(found) if options.json else "\n".join(f"{name:<28}{value:8.1f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
