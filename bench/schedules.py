"""The scheduler with 100,000 schedules: the duration of a tick with nothing due, and the time three replicas take for
1,000 schedules that are due at once, from the due time to the rows, and to the end of the runs.

`python -m bench.schedules [--schedules 100000] [--due 1000] [--json]`
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import uvloop

from bench.ecluse_kit import FLOW
from bench.harness import ROOT, fresh_database
from bench.server import server
from ecluse.base import logging
from ecluse.base.cron import ZONE_RULES
from ecluse.db.connect import normalise
from ecluse.db.connect import pool as open_pool
from ecluse.engine.kit import Kit
from ecluse.engine.schedule.slot_decisions import FiringLimits
from ecluse.engine.schedule.ticks import tick
from ecluse.migrations.runner import upgrade

REPLICAS = 3
EMPTY_TICKS = 200
LONGEST_SECONDS = 300

FILL = """
INSERT INTO schedules (tenant_id, flow, name, cron, timezone, input, next_due_at, zone_rules, handled_until, created_at,
                       updated_at)
SELECT 't' || n %% 50, %(flow)s, 'n' || n, %(cron)s, 'Europe/Paris', '{"items": 1}',
       %(due)s::timestamptz + n * %(apart)s::interval, %(rules)s, now(), now(), now()
FROM generate_series(%(first)s::int, %(last)s::int) n
"""
COUNTS = """
SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM runs WHERE ended_at IS NOT NULL)
"""
ONCE = """
SELECT count(*), count(DISTINCT r.event_key), count(DISTINCT s.schedule_id),
       (SELECT count(*) FROM events_outbox WHERE event_type LIKE '%/started')
FROM runs r JOIN schedule_slots s ON s.run_id = r.id AND s.state = 'fired'
"""


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


def measure(dsn: str, schedules: int, due: int) -> dict[str, Any]:
    upgrade(dsn, [FLOW])
    with psycopg.connect(dsn, autocommit=True) as admin:
        given = {"flow": FLOW.name, "rules": ZONE_RULES}
        far = datetime.now(UTC) + timedelta(days=1)
        rest = {"cron": "0 3 * * *", "due": far, "apart": timedelta(seconds=20), "first": due + 1, "last": schedules}
        admin.execute(FILL, given | rest)
        admin.execute("ANALYZE schedules")
        ticks = uvloop.run(empty_ticks(dsn))
        # Due at the next full minute that leaves the replicas 25 s to start.
        instant = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
        if (instant - datetime.now(UTC)).total_seconds() < 25:
            instant += timedelta(minutes=1)
        cron = f"{instant.minute} * * * *"  # the same instant in every time zone with an offset of whole hours
        admin.execute(FILL, given | {"cron": cron, "due": instant, "apart": timedelta(0), "first": 1, "last": due})
        command = [sys.executable, "-m", "bench.schedules", "--replica", dsn]
        replicas = [subprocess.Popen(command, cwd=ROOT) for _ in range(REPLICAS)]
        try:
            time.sleep((instant - datetime.now(UTC)).total_seconds())
            rows_s, ended = None, 0
            while ended < due and (since := datetime.now(UTC) - instant).total_seconds() < LONGEST_SECONDS:
                started, ended = admin.execute(COUNTS).fetchone() or (0, 0)
                if started >= due and rows_s is None:
                    rows_s = since.total_seconds()
                time.sleep(0.05)
            all_s = (datetime.now(UTC) - instant).total_seconds()
        finally:
            for process in replicas:
                process.kill()
                process.wait()
        runs, keys, fired, events = admin.execute(ONCE).fetchone() or (0, 0, 0, 0)
    return {
        "schedules": schedules,
        "empty_tick_ms_median": round(statistics.median(ticks), 2),
        "empty_tick_ms_p99": round(sorted(ticks)[int(len(ticks) * 0.99)], 2),
        "due_at_once": due,
        "rows_s": rows_s,
        "runs": runs,
        "exactly_once": runs == keys == fired == due,
        "started_events": events,
        "ended": ended,
        "runs_ended_per_s": round(ended / all_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.schedules", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--due", type=int, default=1_000)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--replica", metavar="DSN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.configure("ERROR")
    if options.replica:
        uvloop.run(replica(options.replica))
        return
    with server(None, None) as (dsn, _), fresh_database(dsn) as own:
        figures = measure(normalise(own), options.schedules, options.due)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:>22}  {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
