"""Overhead of the automation flow above its vendor calls: `make bench-automation`.

10,000 fiches of 5 recordings, audited with 2 configs, are 80,000 calls at simulated vendors without latency. A bare
asyncio script (`bench.bare`) makes them and stores nothing; then a server makes them, in one run that is started and
polled over HTTP; then the script once more, because the speed of a machine varies. Each has a fresh sandbox of its own.
Both have at most 100 calls in flight.

tax                  seconds of the run divided by those of the script (goal: at most 2.0)
rss_mb               peak memory of the server (goal: 400)
statements_per_item  all statements of all connections, for a tenth of the fiches, in a separate run that is not timed
                     (goal: 0.5; an item is a call)
linear               seconds per fiche with all fiches divided by those with a tenth of them (goal: about 1)
poll_…_ms            `GET /api/automation/runs/{id}` during the run, twice a second (goal: 50)
cpu_…                milliseconds of CPU per call: the script, the server, its PostgreSQL and the sandbox beside it
others_…             cores used by other programs meanwhile: above 0.1, measure again

`--lanes 1000` adds lanes in which nothing waits, as connections of other tenants do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psycopg
import uvloop

from bench import bare
from bench.harness import ROOT, fresh_database
from bench.reads import quantile
from bench.server import server
from bench.serving import cpu_of_machine, cpu_of_server, cpu_seconds, peak_rss_mb, postmaster, sandbox, served
from bench.statements import count_statements
from ecluse.db.connect import normalise
from ecluse.engine import Lane, put_lanes
from ecluse.migrations.runner import upgrade

CONCURRENCY = 100
# A hundred calls in flight per lane, no effective rate limit; only errors are logged, because the log is not read.
KNOBS = {
    "CRM_CONCURRENCY": str(CONCURRENCY),
    "TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY": str(CONCURRENCY),
    "TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY": str(CONCURRENCY),
    "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": "1000000",
    "LLM_CONCURRENCY": str(CONCURRENCY),
    "ECLUSE_LOG_LEVEL": "ERROR",
}
POLL_SECONDS = 0.5


class Cost(NamedTuple):
    seconds: float
    cpu_s: dict[str, float]  # by process
    others: float  # cores


class Measured(NamedTuple):
    cost: Cost
    polls: list[float]  # milliseconds
    rss_mb: float


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def calls_of(fiches: int) -> int:
    return fiches * (1 + bare.RECORDINGS + len(bare.configs()))


def run_bare(fiches: int) -> Cost:
    with sandbox() as vendors:
        command = [sys.executable, "-m", "bench.bare", vendors.url, "--fiches", str(fiches)]
        before = cpu_of_machine()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        busy = cpu_of_machine() - before
        found = json.loads(done.stdout)
        at_sandbox = cpu_seconds(vendors.pid)
    others = (busy - found["all_cpu_s"] - at_sandbox) / found["seconds"]
    return Cost(found["seconds"], {"bare": found["cpu_s"], "sandbox": at_sandbox}, others)


async def add_lanes(dsn: str, lanes: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await put_lanes(connection, [Lane(f"crm/{n:05d}", max_in_flight=CONCURRENCY) for n in range(lanes)])


async def run_ecluse(dsn: str, fiches: int, lanes: int = 0) -> Measured:
    with sandbox() as vendors:
        async with served(dsn, vendors.url, KNOBS, 1, role="admin") as (session, replicas):
            await add_lanes(dsn, lanes)
            schedule = await prepare(session, fiches)
            pids = {"ecluse": replicas[0].pid, "sandbox": vendors.pid}
            database = postmaster(dsn)

            def used() -> dict[str, float]:
                return {name: cpu_seconds(pid) for name, pid in pids.items()} | {"postgres": cpu_of_server(database)}

            own, machine, before = time.process_time(), cpu_of_machine(), used()
            began = time.perf_counter()
            run_id = await ask(session, "POST", "/api/automation/trigger", {"schedule_id": schedule})
            polls = await watch(session, run_id["run_id"], fiches)
            seconds = time.perf_counter() - began
            after = used()
            spent = {name: after[name] - before[name] for name in after}
            ours = sum(spent.values()) + time.process_time() - own
            others = (cpu_of_machine() - machine - ours) / seconds
            await check(session, vendors.url, fiches)
            return Measured(Cost(seconds, spent, others), polls, peak_rss_mb(replicas[0].pid))


async def ask(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    async with session.request(method, path, json=body) as answer:
        assert answer.status < 300, f"{method} {path}: {answer.status} {await answer.text()}"
        return await answer.json()


async def prepare(session: aiohttp.ClientSession, fiches: int) -> str:
    """Create a schedule over these fiches that is fired by hand only; return its id."""
    configs = [(await ask(session, "POST", "/api/audit-configs", one))["id"] for one in bare.configs()]
    first = bare.FIRST_FICHE
    body = {
        "name": "bench",
        "schedule_type": "MANUAL",
        "fiche_selection": {"mode": "manual", "fiche_ids": [str(first + n) for n in range(fiches)]},
        "run_transcription": True,
        "run_audits": True,
        "use_automatic_audits": False,
        "specific_audit_configs": [int(one) for one in configs],
    }
    return str((await ask(session, "POST", "/api/automation/schedules", body))["id"])


async def watch(session: aiohttp.ClientSession, run_id: str, fiches: int) -> list[float]:
    """Poll the run until it has ended; return the milliseconds of each poll."""
    took = []
    while True:
        began = time.perf_counter()
        run = await ask(session, "GET", f"/api/automation/runs/{run_id}")
        took.append((time.perf_counter() - began) * 1000)
        if run["completed_at"]:
            assert run["status"] == "completed", run
            assert run["successful_fiches"] == fiches, run
            return took
        await asyncio.sleep(POLL_SECONDS)


async def check(session: aiohttp.ClientSession, vendors: str, fiches: int) -> None:
    """Check that every call was made exactly once."""
    async with session.get(f"{vendors}/_sandbox/stats") as answer:
        stats = await answer.json()
    made = {name: stats[name]["calls"] for name in ("crm", "elevenlabs", "llm")}
    assert list(made.values()) == [fiches, bare.RECORDINGS * fiches, len(bare.configs()) * fiches], made


def timed(dsn: str, fiches: int, lanes: int) -> Measured:
    with fresh_database(dsn) as own:
        upgrade(normalise(own))
        found = uvloop.run(run_ecluse(own, fiches, lanes))
    tell(f"ecluse, {fiches:,} fiches", found.cost, fiches)
    return found


def counted(dsn: str, log: Path, fiches: int) -> float:
    with fresh_database(dsn) as own:
        upgrade(normalise(own))
        with count_statements(own, log) as counted:
            uvloop.run(run_ecluse(own, fiches))
    return counted.count / calls_of(fiches)


def tell(what: str, cost: Cost, fiches: int) -> None:
    cpu = ", ".join(f"{name} {1000 * used / calls_of(fiches):.2f}" for name, used in cost.cpu_s.items())
    say(f"  {what}: {cost.seconds:.1f} s, {calls_of(fiches) / cost.seconds:,.0f} calls/s; CPU, ms per call: {cpu}")
    if cost.others > 0.1:
        say(f"  others used {cost.others:.2f} cores meanwhile")


def measure(dsn: str, log: Path | None, fiches: int, lanes: int) -> dict[str, Any]:
    few, calls = max(fiches // 10, 10), calls_of(fiches)
    scripts = [run_bare(fiches)]
    tell("bare", scripts[0], fiches)
    whole = timed(dsn, fiches, lanes)
    scripts.append(run_bare(fiches))
    tell("bare", scripts[1], fiches)
    part = timed(dsn, few, lanes)
    statements = counted(dsn, log, few) if log is not None else None
    bare_s = sum(one.seconds for one in scripts) / len(scripts)
    return {
        "tax": whole.cost.seconds / bare_s,
        "ecluse_s": whole.cost.seconds,
        "bare_s": bare_s,
        "rss_mb": whole.rss_mb,
        "statements_per_item": statements,
        "linear": (whole.cost.seconds / fiches) / (part.cost.seconds / few),
        "poll_p50_ms": quantile(whole.polls, 0.5),
        "poll_p99_ms": quantile(whole.polls, 0.99),
        "poll_max_ms": max(whole.polls),
        "polls": len(whole.polls),
        "fiches": fiches,
        "calls": calls,
        "calls_s": calls / whole.cost.seconds,
        "cpu_bare_ms": sum(1000 * one.cpu_s["bare"] / calls for one in scripts) / len(scripts),
        "cpu_ecluse_ms": 1000 * whole.cost.cpu_s["ecluse"] / calls,
        "cpu_postgres_ms": 1000 * whole.cost.cpu_s["postgres"] / calls,
        "cpu_sandbox_ms": 1000 * whole.cost.cpu_s["sandbox"] / calls,
        "others_bare": max(one.others for one in scripts),
        "others_ecluse": whole.cost.others,
    }


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.automation", description=__doc__, formatter_class=raw)
    parser.add_argument("--fiches", type=int, default=10_000)
    parser.add_argument("--lanes", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    parser.add_argument(
        "--dsn",
        help="a URL of a server on this machine and a role with CREATEDB; else DATABASE_URL, else an embedded server",
    )
    parser.add_argument("--server-log", type=Path, help="that server's log file, to count statements")
    options = parser.parse_args()
    say("knobs: " + " ".join(f"{name}={value}" for name, value in KNOBS.items()))
    with server(options.dsn, options.server_log) as (dsn, log):
        found = measure(dsn, log, options.fiches, options.lanes)
    if options.json:
        print(json.dumps({name: round(value, 3) if value is not None else None for name, value in found.items()}))
        return
    for name, value in found.items():
        print(f"{name:<22} {'-' if value is None else f'{value:10.2f}'}")


if __name__ == "__main__":
    main()
