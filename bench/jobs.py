"""The scheduler of jobs, with 100,000 schedules of 1,000 organisations: the duration of a tick with nothing due; the
time from the due instant to the rows Job and JobRun for 3,000 schedules that are due at once, on one replica and on
three, and for a single one; and the delay of one organisation's fire while another has 50,000 schedules due.

The clock of the database is moved to just before the instants, so that a run takes about two minutes.

`python -m bench.jobs [--schedules 100000] [--due 3000] [--flood 50000] [--json]`
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import uvloop

from bench.harness import ROOT, fresh_database
from bench.server import server
from ecluse.base import logging
from ecluse.base.cron import ZONE_RULES
from ecluse.db.connect import normalise
from ecluse.db.connect import pool as open_pool
from ecluse.engine.kit import Kit
from ecluse.engine.schedule.slot_decisions import FiringLimits
from ecluse.engine.schedule.ticks import tick
from ecluse.flows.jobs.flow import FLOW
from ecluse.migrations.runner import upgrade

ORGANISATIONS = 1_000
REPLICAS = 3
EMPTY_TICKS = 200
SINGLES = 10
LONGEST_SECONDS = 300

PLACES = """
WITH t AS (
    INSERT INTO tenants (id, name, created_at) SELECT 'org' || n, 'org' || n, now()
    FROM generate_series(0, %(last)s::int) n),
h AS (
    INSERT INTO job_hosts (id, tenant_id, name, created_by, created_at, updated_at)
    SELECT 'h' || n, 'org' || n, 'host', 'bench', now(), now() FROM generate_series(0, %(last)s::int) n)
INSERT INTO job_servers (id, tenant_id, host_id, name, created_by, created_at, updated_at)
SELECT 's' || n, 'org' || n, 'h' || n, 'server', 'bench', now(), now() FROM generate_series(0, %(last)s::int) n
"""
FILL = """
WITH s AS (
    INSERT INTO schedules (tenant_id, flow, name, unique_name, overlap, cron, timezone, input, next_due_at, zone_rules,
                           handled_until, created_at, updated_at)
    SELECT 'org' || n %% %(orgs)s, 'jobs', %(name)s, false, 'allow', %(cron)s, 'Europe/Paris', '{}',
           %(due)s::timestamptz, %(rules)s, %(due)s::timestamptz - interval '1 minute', now(), now()
    FROM generate_series(1, %(count)s::int) n RETURNING id, tenant_id)
INSERT INTO job_schedules (id, tenant_id, schedule_id, server_instance_id, job_type, payload, max_retries, backoff_ms,
                           backoff_type, created_by_id)
SELECT 'c' || s.id, s.tenant_id, s.id, replace(s.tenant_id, 'org', 's'), 'noop', '{"command": "backup --all"}', 2, 1000,
       'fixed', 'bench'
FROM s RETURNING schedule_id
"""
# As autovacuum does: of the tables that were filled.
ANALYZE = "ANALYZE tenants, job_hosts, job_servers, schedules, job_schedules"
# Job and JobRun are made in the transaction that stores this; ONCE counts them. Cheap, so that it can be repeated.
FIRED = "SELECT count(*) FROM schedules WHERE id BETWEEN %s AND %s AND last_fired_at IS NOT NULL"
ONCE = """
SELECT (SELECT count(*) FROM jobs), (SELECT count(DISTINCT key) FROM jobs), (SELECT count(*) FROM job_runs),
       (SELECT count(DISTINCT reference) FROM schedule_slots WHERE state = 'fired'),
       (SELECT sum(run_count) FROM job_schedules)
"""
NOW = 'SELECT clock_timestamp() + "offset" FROM clock_offset'


async def replica(dsn: str) -> None:
    logging.configure("ERROR")
    kit = Kit(dsn, [FLOW])
    await kit.start()
    await asyncio.Event().wait()


async def empty_ticks(dsn: str) -> list[float]:
    found: list[float] = []
    async with open_pool(dsn, size=1) as pool:
        for _ in range(EMPTY_TICKS):
            began = time.perf_counter()
            done = await tick(pool, {FLOW.name: FLOW}, FiringLimits())
            found.append((time.perf_counter() - began) * 1000)
            assert not done
    return found


class World:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.db = psycopg.connect(dsn, autocommit=True)
        self.instant = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=2)
        self._ids: dict[str, tuple[int, int]] = {}  # the first and the last, by name

    def fill(self, name: str, count: int, orgs: int, cron: str, due: datetime) -> None:
        given = {"name": name, "count": count, "orgs": orgs, "cron": cron, "due": due, "rules": ZONE_RULES}
        ids = [row[0] for row in self.db.execute(FILL, given)]
        self._ids[name] = (min(ids), max(ids))

    def fired(self, name: str) -> int:
        (count,) = self.db.execute(FIRED, self._ids[name]).fetchone() or (0,)
        return int(count)

    def due(self, name: str, count: int, orgs: int = ORGANISATIONS, *, later: int = 1) -> datetime:
        """Add schedules that are due at the next instant, so many minutes later; return it."""
        instant = self.instant + timedelta(minutes=later)
        # The same instant in every time zone with an offset of whole hours.
        self.fill(name, count, orgs, f"{instant.minute} * * * *", instant)
        return instant

    def approach(self, instant: datetime, seconds: float) -> None:
        """Move the clock to that many seconds before the instant."""
        self.instant = instant
        before = instant - timedelta(seconds=seconds)
        self.db.execute('UPDATE clock_offset SET "offset" = %s - clock_timestamp()', (before,))

    def seconds_until(self, name: str, count: int, instant: datetime) -> float:
        """Wait for so many jobs; return the time since the instant, at which the last of them was found."""
        limit = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < limit:
            made = self.fired(name)
            (now,) = self.db.execute(NOW).fetchone() or (instant,)
            if made >= count:
                return float((now - instant).total_seconds())
            time.sleep(0.05)
        raise TimeoutError(f"{made} of {count} jobs after {LONGEST_SECONDS} s")

    def fire(self, name: str, count: int) -> float:
        instant = self.due(name, count)
        self.db.execute(ANALYZE)
        self.approach(instant, 2 + random.random())  # noqa: S311 - at any phase of the tick
        return self.seconds_until(name, count, instant)


@contextmanager
def replicas(dsn: str, count: int) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.jobs", "--replica", dsn]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(count)]
    try:
        with psycopg.connect(dsn, autocommit=True) as admin:
            while admin.execute("SELECT count(*) FROM replicas WHERE state = 'live'").fetchone() != (count,):
                time.sleep(0.1)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(dsn: str, schedules: int, due: int, flood: int) -> dict[str, Any]:
    upgrade(dsn, [FLOW])
    world = World(dsn)
    world.db.execute(PLACES, {"last": ORGANISATIONS - 1})
    world.fill("idle", schedules, ORGANISATIONS, "0 3 * * *", datetime.now(UTC) + timedelta(days=2))
    world.db.execute("ANALYZE")
    ticks = uvloop.run(empty_ticks(dsn))
    with replicas(dsn, 1):
        of_one = world.fire("one replica", due)
        singles = [world.fire(f"single {n}", 1) for n in range(SINGLES)]
        # One organisation has a flood, another a single schedule that is due while the flood is being fired.
        begun, alone = world.due("flood", flood, 1), world.due("alone", 1, 7, later=2)
        world.approach(begun, 1)
        while not world.fired("flood"):
            time.sleep(0.05)
        world.approach(alone, 1)
        delayed = world.seconds_until("alone", 1, alone)
        (left,) = world.db.execute("SELECT count(*) FROM schedules WHERE next_due_at < ecluse_now()").fetchone() or (0,)
        began = time.monotonic()
        world.seconds_until("flood", flood, begun)
        per_second = left / (time.monotonic() - began)
    world.db.execute("UPDATE replicas SET state = 'dead', ended_at = now()")
    with replicas(dsn, REPLICAS):
        of_three = world.fire("three replicas", due)
    jobs, keys, runs, slots, counted = world.db.execute(ONCE).fetchone() or (0, 0, 0, 0, 0)
    return {
        "schedules": schedules,
        "empty_tick_ms_median": round(statistics.median(ticks), 2),
        "empty_tick_ms_p99": round(sorted(ticks)[int(len(ticks) * 0.99)], 2),
        "due_at_once": due,
        "one_replica_s": round(of_one, 2),
        "three_replicas_s": round(of_three, 2),
        "single_s_median": round(statistics.median(singles), 2),
        "single_s_max": round(max(singles), 2),
        "flood": flood,
        "flood_left_when_alone_fired": left,
        "alone_in_flood_s": round(delayed, 2),
        "flood_fires_per_s": round(per_second),
        "exactly_once": jobs == keys == runs == slots == counted == 2 * due + SINGLES + flood + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.jobs", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--due", type=int, default=3_000)
    parser.add_argument("--flood", type=int, default=50_000)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--replica", metavar="DSN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.configure("ERROR")
    if options.replica:
        uvloop.run(replica(options.replica))
        return
    with server(None, None) as (dsn, _), fresh_database(dsn) as own:
        figures = measure(normalise(own), options.schedules, options.due, options.flood)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:>28}  {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
