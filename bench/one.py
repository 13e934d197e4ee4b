"""Run one candidate in this process: `python -m bench.one NAME --dsn …`. The last line of stdout is its JSON result."""

import argparse
import dataclasses
import importlib
import json
import resource
from pathlib import Path

import uvloop

from bench.harness import CANDIDATES, Measured


def peak_rss_mb() -> float:
    """Return the peak memory of this program alone: ru_maxrss would keep the parent's peak across fork and exec."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.one", description=__doc__)
    parser.add_argument("candidate", choices=sorted(CANDIDATES))
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--io-ms", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--probe", choices=["latencies", "idle"], help="a function of bench.ecluse_kit instead of run")
    parser.add_argument("--server-log", type=Path)
    options = parser.parse_args()
    module, function = CANDIDATES[options.candidate]
    if options.probe == "latencies":
        answer = uvloop.run(importlib.import_module(module).latencies(options.dsn))
        print(json.dumps(answer), flush=True)
        return
    if options.probe == "idle":
        answer = uvloop.run(importlib.import_module(module).idle(options.dsn, options.server_log))
        print(json.dumps(answer), flush=True)
        return
    run = getattr(importlib.import_module(module), function)
    # every candidate gets uvloop: pgqueuer's own benchmark uses it, and so does Ecluse
    measured: Measured = uvloop.run(run(options.dsn, options.items, options.io_ms, options.concurrency))
    print(dataclasses.replace(measured, peak_rss_mb=round(peak_rss_mb(), 1)).to_json(), flush=True)


if __name__ == "__main__":
    main()
