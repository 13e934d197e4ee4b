"""How long a list takes that has many runs behind it: `python -m bench.lists`.

One process with all roles; `--runs` ended runs, copies of one that was really worked. All their pages of 50 are read
over HTTP, each with the cursor of the one before; then the first page with filters, and the pages for people.
Goals on two cores: list p99 at most 30 ms at any depth, a page for people at most 50 ms.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import psycopg
import uvloop

from bench.harness import fresh_database
from bench.reads import ended, process, quantile, ready, start
from bench.server import server
from ecluse.access import keys
from ecluse.db.connect import normalise
from ecluse.migrations.runner import upgrade
from ecluse.web.authentication import COOKIE

REPEATS = 100
FILTERED = ("flow=bench", "state=completed", "state=failed", "target=1", "since=2020-01-01T00:00:00Z")
PAGES = ("/ui/runs", "/ui/runs?state=failed", "/ui/runs/{run}", "/ui/schedules", "/ui/lanes")

# Rows of every table that a list or the page of a run reads; ids of runs go on after the first one. Outcomes are copied
# before runs: the database refuses an ended run whose outcomes do not add up.
COPIES: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("outcomes", "run_id", {}),
    ("runs", "id", {"event_key": "event_key || '-' || n"}),
    ("stages", "run_id", {}),
)


async def copy_run(connection: psycopg.AsyncConnection[Any], run: int, runs: int) -> None:
    """Insert copies of the run, so that there are `runs` of it."""
    for table, run_column, changed in COPIES:
        cursor = await connection.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s"
            " AND is_generated = 'NEVER' AND (is_identity = 'NO' OR column_name = %s)",
            (table, run_column),
        )
        columns = [row[0] for row in await cursor.fetchall()]
        values = {**dict(zip(columns, columns, strict=True)), run_column: f"{run_column} + n", **changed}
        await connection.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) OVERRIDING SYSTEM VALUE"  # noqa: S608 - our own names
            f" SELECT {', '.join(values.values())} FROM {table}, generate_series(1, %s) n WHERE {run_column} = %s",
            (runs - 1, run),
        )
    await connection.execute("ANALYZE")


async def timed(session: aiohttp.ClientSession, path: str) -> tuple[float, bytes]:
    began = time.perf_counter()
    async with session.get(path) as answer:
        body = await answer.read()
        assert answer.status == 200, (path, answer.status, body[:300])
    return 1000 * (time.perf_counter() - began), body


async def measure(dsn: str, runs: int) -> dict[str, list[float]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        _, key = await keys.create(connection, "default", "operator", "bench")
        with process(dsn, "api", "worker", "scheduler") as port:
            url = f"http://127.0.0.1:{port}"
            headers = {"Authorization": f"Bearer {key}", "Cookie": f"{COOKIE}={key}"}
            async with aiohttp.ClientSession(url, headers=headers) as session:
                await ready(session, url)
                run = await start(session, 5, 0)
                await ended(session, run)
                await copy_run(connection, int(run), runs)
                for path in ("/api/runs?limit=50", *PAGES):  # the first ones of a process
                    await timed(session, path.format(run=run))
                found: dict[str, list[float]] = {"all pages by cursor": []}
                cursor = ""
                while cursor is not None:
                    took, body = await timed(session, f"/api/runs?limit=50{cursor and f'&cursor={cursor}'}")
                    found["all pages by cursor"].append(took)
                    cursor = json.loads(body)["next_cursor"]
                assert len(found["all pages by cursor"]) == -(-runs // 50)
                for filters in FILTERED:
                    asked = f"/api/runs?limit=50&{filters}"
                    found[filters] = [(await timed(session, asked))[0] for _ in range(REPEATS)]
                for path in PAGES:
                    found[path] = [(await timed(session, path.format(run=run)))[0] for _ in range(REPEATS)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.lists", description=__doc__)
    parser.add_argument("--dsn")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server(options.dsn, None) as (dsn, _), fresh_database(dsn) as own:
        upgrade(normalise(own))
        found = uvloop.run(measure(own, options.runs))
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    figures = {name: {s: round(quantile(v, at), 1) for s, at in shares.items()} for name, v in found.items()}
    if options.json:
        print(json.dumps(figures))
        return
    for name, one in figures.items():
        print(f"{name:<32} " + "  ".join(f"{share} {value:7.1f}" for share, value in one.items()))


if __name__ == "__main__":
    main()
