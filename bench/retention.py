"""Cost of retention, and the size that a database reaches: `python -m bench.retention`.

1,000,000 items of ended runs are inserted (half of them in runs of 10,000, half in runs of 20, with stages, claims,
outcomes, log and events, as the auditor expects them), beside young runs. Then all old runs are deleted at the pace of
a server, while the young runs are read as pages and API read them, 50 times a second; before that, they are read
without deleting. At the end the auditor checks the remaining rows.

rows_s               rows deleted per second, pauses included (goal: at least 20,000)
items_s              items among them
read_max_ms          the slowest read during the deletion (goal: at most 50); read_p99_ms, and both without it (idle_…)
batch_max_ms         the longest transaction of the sweep
others               cores that other programs used meanwhile: above 0.1, measure again

The year: an automation run over `--fiches` fiches (5 recordings and 2 audits each) is made by a real server against
simulated vendors, then the size of each group of tables is divided by the fiches. Multiplied with 10,000 fiches a day
and the days that the default knobs keep, plus 30 % for dead rows between two vacuums, that is the size after a year.

bytes_per_fiche      of each group of tables
steady_gb            size of rows that are deleted by age, for 10,000 fiches a day
lasting_gb_a_year    size of rows that are kept for ever by default: fiches, transcripts, audits
year_gb              both, after a year
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import uvloop

from bench.automation import run_ecluse
from bench.ecluse_kit import FLOW
from bench.harness import fresh_database
from bench.reads import quantile
from bench.server import server
from bench.serving import cpu_of_machine, cpu_of_server, postmaster
from ecluse.db.connect import Connection, Pool, normalise, pool
from ecluse.insight import run_queries
from ecluse.migrations.runner import upgrade
from ecluse.retention import sweep
from ecluse.retention.growth import GROUPS
from ecluse.retention.pace import Pace
from ecluse.retention.sweep import OldRuns, Rule
from ecluse.settings import Settings
from ecluse.verify import audit

READS_A_SECOND = 50
IDLE_SECONDS = 10.0
YEAR, A_DAY, SLACK = 365, 10_000, 1.3
GB = 1e9

# Insert the runs as open and end them last: the outcomes of an ended run are final.
STATEMENTS = (
    """
WITH made AS (
    INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, selected, created_at, started_at, input)
    SELECT 'default', 'bench', %(name)s || n, false, 'running', 'running', %(items)s, now() - %(ago)s, now() - %(ago)s,
           '{"items": 1}' FROM generate_series(1, %(runs)s) AS n RETURNING id)
INSERT INTO mine SELECT id FROM made ORDER BY id
""",
    """
INSERT INTO stages (run_id, stage, expected, fanned_out_at, started_at, deadline_at, progress_at, ended_at, end_cause)
SELECT id, 'work', %(items)s, now() - %(ago)s, now() - %(ago)s, now(), now() - %(ago)s, now() - %(ago)s, 'done'
FROM mine
""",
    """
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, succeeded, taken_at)
SELECT 'bench', id, 'work', 1, %(items)s, %(items)s, now() - %(ago)s FROM mine
""",
    """
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, claim_id, status, executions, payload,
                   result, finished_at)
SELECT 'default', r.id, 'bench', 'work', n, n, 1, now() - %(ago)s, c.id, 'succeeded', 1, '{"n": 1}', '{"n": 1}',
       now() - %(ago)s
FROM mine r JOIN claims c ON c.run_id = r.id, generate_series(1, %(items)s) AS n
""",
    """
INSERT INTO outcomes (run_id, target, outcome)
SELECT id, n, 'successful' FROM mine, generate_series(1, %(items)s) AS n
""",
    """
INSERT INTO run_log (run_id, at, level, message)
SELECT id, now() - %(ago)s, 'info', m FROM mine, unnest(ARRAY['queued -> running', 'running -> completed']) AS m
""",
    """
INSERT INTO events_outbox (tenant_id, event_key, event_type, aggregate, correlation_id, producer, occurred_at, payload,
                           published_seq, published_at)
SELECT 'default', 'bench:' || id || what, 'bench/' || what, 'run:' || id, 'bench', 'ecluse', now() - %(ago)s,
       jsonb_build_object('run_id', id::text, 'selected', %(items)s, 'status', 'completed', 'successful', %(items)s,
           'failed', 0, 'ignored', 0, 'end_cause', 'normal'), nextval('events_published'), now() - %(ago)s
FROM mine, unnest(ARRAY['started', 'selected', 'completed']) AS what ORDER BY id
""",
    """
UPDATE runs SET status = 'completed', state = 'succeeded', successful = selected, failed = 0, ignored = 0,
    end_cause = 'normal', ended_at = now() - %(ago)s WHERE id IN (SELECT id FROM mine)
""",
)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fill(dsn: str, items: int) -> int:
    """Insert the rows; return the id of a young run to read."""
    old, young = timedelta(days=100), timedelta(days=1)
    kinds = [("large-", max(1, items // 20_000), 10_000, old), ("small-", items // 40, 20, old)]
    kinds += [("young-", 10, 10_000, young)]
    with psycopg.connect(dsn) as connection:
        connection.execute("INSERT INTO lanes (name) VALUES ('bench')")
        for name, runs, each, ago in kinds:
            connection.execute("CREATE TEMP TABLE mine (id bigint) ON COMMIT DROP")
            for statement in STATEMENTS:
                connection.execute(statement, {"name": name, "runs": runs, "items": each, "ago": ago})
            connection.commit()
            say(f"  {runs:,} runs of {each:,} items")
        connection.autocommit = True
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
        row = connection.execute("SELECT max(id) FROM runs").fetchone()
    assert row is not None
    return int(row[0])


async def read(connections: Pool, run: int, until: asyncio.Event) -> list[float]:
    """Read until the event is set; return the milliseconds of each read, from the instant at which it was due."""
    asked: list[Callable[[Connection], Awaitable[Any]]] = [
        lambda c: run_queries.list_runs(c, tenant="default", limit=50, offset=0),
        lambda c: run_queries.show_run(c, "default", run),
        lambda c: run_queries.list_log(c, "default", run, limit=50, offset=0),
        lambda c: run_queries.list_outcomes(c, "default", run, after=None, limit=50),
        run_queries.vitals,
    ]
    took: list[float] = []
    under_way: set[asyncio.Task[None]] = set()

    async def one(number: int, due: float) -> None:
        async with connections.connection() as connection:
            await asked[number % len(asked)](connection)
        took.append((time.perf_counter() - due) * 1000)

    began, number = time.perf_counter(), 0
    while not until.is_set():
        due = began + number / READS_A_SECOND
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(one(number, due))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        number += 1
    await asyncio.gather(*under_way)
    return took


async def prune(dsn: str, run: int) -> dict[str, float]:
    rules = [Rule(OldRuns("runs", ("bench",)), timedelta(days=90))]
    batches: list[float] = []

    class Watched(Pace):
        def paced(self, took: float) -> None:
            batches.append(took)
            super().paced(took)

    async with pool(dsn, size=4) as connections:
        idle, over = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().call_later(IDLE_SECONDS, idle.set)
        before = await read(connections, run, idle)
        reader = asyncio.create_task(read(connections, run, over))
        database, machine, own = postmaster(dsn), cpu_of_machine(), time.process_time()
        used, began = cpu_of_server(database), time.perf_counter()
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            (done,) = await sweep.prune(connection, {"bench": FLOW}, rules, pace=Watched())
        seconds = time.perf_counter() - began
        ours = cpu_of_server(database) - used + time.process_time() - own
        others = (cpu_of_machine() - machine - ours) / seconds
        over.set()
        during = await reader
    return {
        "rows": done.rows.total(),
        "items": done.rows["items"],
        "seconds": seconds,
        "rows_s": done.rows.total() / seconds,
        "items_s": done.rows["items"] / seconds,
        "batches": len(batches),
        "batch_max_ms": 1000 * max(batches),
        "reads": len(during),
        "read_p50_ms": quantile(during, 0.5),
        "read_p99_ms": quantile(during, 0.99),
        "read_max_ms": max(during),
        "idle_read_p99_ms": quantile(before, 0.99),
        "idle_read_max_ms": max(before),
        "others": others,
    }


def million(dsn: str, items: int) -> dict[str, float]:
    with fresh_database(dsn) as own:
        upgrade(normalise(own))
        say(f"inserting {items:,} ended items")
        run = fill(own, items)
        found = uvloop.run(prune(own, run))
        report = audit(own, None)
        assert report.violations == [], report.text()
    return found


SIZE = "SELECT sum(pg_total_relation_size(name::regclass))::bigint FROM unnest(%s::text[]) AS name"


def sizes(dsn: str) -> dict[str, int]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        rows = {one.name: connection.execute(SIZE, ([*one.tables],)).fetchone() for one in GROUPS}
    return {name: int(row[0]) for name, row in rows.items() if row is not None}


def year(dsn: str, fiches: int) -> dict[str, Any]:
    with fresh_database(dsn) as own:
        upgrade(normalise(own))
        empty = sizes(own)
        say(f"one automation run over {fiches:,} fiches")
        uvloop.run(run_ecluse(own, fiches))
        full = sizes(own)
    each = {name: (full[name] - empty[name]) / fiches for name in full}
    knobs = {one.name: getattr(Settings(), one.knob) for one in GROUPS}
    steady = SLACK * A_DAY * sum(each[name] * days for name, days in knobs.items())
    lasting = SLACK * A_DAY * YEAR * sum(each[name] for name, days in knobs.items() if not days)
    return {
        "fiches": fiches,
        "bytes_per_fiche": {name: round(value) for name, value in each.items()},
        "days_kept": knobs,
        "steady_gb": steady / GB,
        "lasting_gb_a_year": lasting / GB,
        "year_gb": (steady + lasting) / GB,
    }


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.retention", description=__doc__, formatter_class=raw)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--fiches", type=int, default=500, help="of the year's sample; 0 leaves the year out")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    parser.add_argument("--dsn", help="a superuser's URL, on this machine; else DATABASE_URL, else an embedded server")
    parser.add_argument("--server-log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with server(options.dsn, options.server_log) as (dsn, _):
        found: dict[str, Any] = million(dsn, options.items) if options.items else {}
        if options.fiches:
            found |= year(dsn, options.fiches)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        shown = f"{value:14,.2f}" if isinstance(value, float) else f"{value:14,}" if isinstance(value, int) else value
        print(f"{name:<20} {shown}")


if __name__ == "__main__":
    main()
