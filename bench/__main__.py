"""Measure all candidates, one after another, on one Postgres: a table with ratios, and with --json one line of JSON."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.harness import CANDIDATES, CandidateError, Measured, median, run_candidate, run_probe
from bench.server import server

# candidates with a published ratio: interleaved, so that a slow minute of the machine affects all of them
REPEATED = ("ecluse", "pgqueuer", "pgqueuer_asyncpg")
ROUNDS = 3
IO_MS = 50.0
LARGE = 100_000

Runs = dict[str, list[Measured]]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(names: list[str], dsn: str, items: int, io_ms: float, concurrency: int, failed: set[str]) -> Runs:
    """Run every candidate; the repeated ones three times, in turn."""
    plan = [name for _ in range(ROUNDS) for name in names if name in REPEATED]
    plan += [name for name in names if name not in REPEATED]
    runs: Runs = {}
    for name in plan:
        try:
            measured = run_candidate(name, dsn, items, io_ms, concurrency)
        except CandidateError as error:
            say(f"  {error}")
            failed.add(name)
            continue
        say(f"  {name}, {io_ms:g} ms: {measured.items_s:,.0f} items/s ({measured.items:,} in {measured.seconds:.2f} s)")
        runs.setdefault(name, []).append(measured)
    return runs


def count(names: list[str], dsn: str, items: int, concurrency: int, log: Path, failed: set[str]) -> dict[str, float]:
    """Return the statements per item, counted in separate runs, because logging slows the server."""
    per_item: dict[str, float] = {}
    for name in names:
        try:
            counted = run_candidate(name, dsn, items, 0.0, concurrency, server_log=log)
        except CandidateError as error:
            say(f"  {error}")
            failed.add(name)
            continue
        assert counted.statements is not None
        per_item[name] = counted.statements / counted.items
        say(f"  {name}: {counted.statements:,} statements for {counted.items:,} items, program start included")
    return per_item


def probes(dsn: str, log: Path | None, concurrency: int, failed: set[str]) -> dict[str, float]:
    """Measure Ecluse alone: latencies(), idle() and a large run, all from bench.ecluse_kit."""
    found: dict[str, float] = {}
    try:
        found |= run_probe("latencies", dsn, log)
        found |= run_probe("idle", dsn, log)
        large = run_candidate("ecluse", dsn, LARGE, 0.0, concurrency)
        say(f"  ecluse, {LARGE:,} items: {large.items_s:,.0f} items/s, peak {large.peak_rss_mb} MB")
        if large.peak_rss_mb is not None:
            found["rss_mb_100k"] = large.peak_rss_mb
    except CandidateError as error:
        say(f"  {error}")
        failed.add("ecluse")
    return found


def rate(runs: Runs, name: str) -> float | None:
    return median(runs[name]).items_s if name in runs else None


def cell(runs: Runs, name: str) -> str:
    if name not in runs:
        return "-"
    rates = [run.items_s for run in runs[name]]
    spread = f" ({min(rates):,.0f}-{max(rates):,.0f})" if len(rates) > 1 else ""
    return f"{rate(runs, name):,.0f}{spread}"


def ratio(runs: Runs, name: str) -> str:
    ours, theirs = rate(runs, "ecluse"), rate(runs, name)
    return f"{ours / theirs:.2f}x" if ours and theirs else "-"


def table(names: list[str], noop: Runs, io: Runs, per_item: dict[str, float]) -> Table:
    shown = Table(title="items/s: median (range)")
    headings = ["no-op", "Ecluse is", f"{IO_MS:g} ms I/O", "Ecluse is", "peak RSS MB", "statements/item"]
    shown.add_column("candidate")
    for heading in headings:
        shown.add_column(heading, justify="right")
    for name in names:
        peak = median(noop[name]).peak_rss_mb if name in noop else None
        statements = f"{per_item[name]:.3f}" if name in per_item else "-"
        memory = f"{peak:.0f}" if peak is not None else "-"
        shown.add_row(name, cell(noop, name), ratio(noop, name), cell(io, name), ratio(io, name), memory, statements)
    return shown


def summary(noop: Runs, per_item: dict[str, float], found: dict[str, float]) -> dict[str, float | None]:
    """Return the figures that `make bench` promises; None where not measured."""
    rates = {f"{name}_items_s": rate(noop, name) for name in ("ecluse", "pgqueuer", "pgqueuer_asyncpg", "dbos", "raw")}
    own = ("gate_ms_median", "start_ms_median", "idle_statements_s", "idle_cpu_percent")
    figures: dict[str, float | None] = {**rates, **{key: found.get(key) for key in own}}
    figures["statements_per_item"] = per_item.get("ecluse")
    figures["rss_mb_100k"] = found.get("rss_mb_100k")
    return {key: None if value is None else round(value, 3) for key, value in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--io-items", type=int, default=5_000)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--only", help=f"of {','.join(CANDIDATES)}")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    parser.add_argument("--dsn", help="a superuser's URL; else DATABASE_URL, else an embedded server")
    parser.add_argument("--server-log", type=Path, help="that server's log file, to count statements")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CANDIDATES)
    if unknown := set(names) - set(CANDIDATES):
        parser.error(f"no such candidate: {', '.join(sorted(unknown))}")
    if importlib.util.find_spec("bench.ecluse_kit") is None:
        names = [name for name in names if name != "ecluse"]
        say("bench.ecluse_kit is not there: Ecluse itself is left out")
    failed: set[str] = set()
    with server(options.dsn, options.server_log) as (dsn, log):
        say("no-op items")
        noop = measure(names, dsn, options.items, 0.0, options.concurrency, failed)
        say(f"items of {IO_MS:g} ms")
        io = measure(names, dsn, options.io_items, IO_MS, options.concurrency, failed)
        say("statements" if log else "no server log: statements are not counted")
        per_item = count(names, dsn, options.items, options.concurrency, log, failed) if log else {}
        found = probes(dsn, log, options.concurrency, failed) if "ecluse" in names else {}
    Console(width=130).print(table(names, noop, io, per_item))
    if failed:
        say(f"failed: {', '.join(sorted(failed))}")
    if options.json:
        print(json.dumps(summary(noop, per_item, found)), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
