"""Latency of reads under load: `python -m bench.reads`.

One process serves the API (`--role api`), another works through a run of 20,000 items of 50 ms, and this one sends 200
requests a second: half `GET /api/runs`, half `GET /api/runs/{id}` of the open run. A request is timed from the instant
at which it was due, whether or not the one before had been answered. `inside` is the server's own measurement of the
same requests, as bounds of its histogram: the difference is the network, the caller, and waiting for a core.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import aiohttp
import psycopg
import uvloop

from bench.harness import ROOT, fresh_database
from bench.server import server
from ecluse.access import keys
from ecluse.db.connect import normalise
from ecluse.migrations.runner import upgrade

WARM_UP_SECONDS = 3.0
FLOW = "bench.ecluse_kit:FLOW"


@contextlib.contextmanager
def process(dsn: str, *roles: str, flow: str = FLOW, unlimited: bool = True, files: int | None = None) -> Iterator[int]:
    """Run a server with these roles; yield its port. `unlimited`: without limits on requests. `files`: how many files
    it may open."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    chosen = [word for role in roles for word in ("--role", role)]
    command = [sys.executable, "-m", "ecluse", "serve", "--port", str(port), "--flow", flow, *chosen]
    environment = {**os.environ, "DATABASE_URL": dsn, "ECLUSE_LOG_LEVEL": "WARNING", "PYTHONPATH": str(ROOT)}
    environment["ECLUSE_DATA_DIR"] = os.devnull  # the machine's own keeps its operator's key
    environment |= {"ECLUSE_LIMIT_KEY_REQUESTS": "0", "ECLUSE_LIMIT_TENANT_REQUESTS": "0"} if unlimited else {}
    limited = None if files is None else partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files))
    running = subprocess.Popen(command, env=environment, preexec_fn=limited)
    try:
        yield port
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(30)


class Caller:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.latencies: dict[str, list[float]] = {}
        self.wrong = 0

    async def ask(self, name: str, path: str, due: float) -> None:
        async with self.session.get(path) as answer:
            await answer.read()
            self.wrong += answer.status != 200
        self.latencies.setdefault(name, []).append((time.perf_counter() - due) * 1000)

    async def steadily(self, rate: float, run_id: str, stop: asyncio.Event) -> float:
        """Send requests at this rate until `stop`; return the requests per second that were really made."""
        paths = [("list", "/api/runs"), ("show", f"/api/runs/{run_id}")]
        began, asked, under_way = time.perf_counter(), 0, set()
        while not stop.is_set():
            due = began + asked / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self.ask(*paths[asked % 2], due))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            asked += 1
        seconds = time.perf_counter() - began
        await asyncio.gather(*under_way)
        return asked / seconds


async def inside(session: aiohttp.ClientSession) -> Counter[float]:
    """Return the server's histogram: bound in seconds -> number of reads that took at most as long."""
    async with session.get("/metrics") as answer:
        text = await answer.text()
    found: Counter[float] = Counter()
    for labels, count in re.findall(r"^ecluse_http_request_duration_seconds_bucket\{(.*)\} (\S+)$", text, re.MULTILINE):
        if 'route="/api/runs' in labels and 'method="GET"' in labels and (bound := re.search(r'le="(.*?)"', labels)):
            found[float(bound[1])] += int(float(count))
    return found


def within(before: Counter[float], after: Counter[float], share: float) -> float:
    """Return the bound in milliseconds under which this share of the requests between the two histograms lies."""
    counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
    return next(bound * 1000 for bound, count in counts.items() if count >= share * max(counts.values()))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/readyz") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.05)


async def start(session: aiohttp.ClientSession, items: int, io_ms: float) -> str:
    async with session.post("/api/runs", json={"flow": "bench", "input": {"items": items, "io_ms": io_ms}}) as answer:
        return str((await answer.json())["run_id"])


async def ended(session: aiohttp.ClientSession, run_id: str, stop: asyncio.Event | None = None) -> None:
    while True:
        async with session.get(f"/api/runs/{run_id}") as answer:
            run = await answer.json()
        if run["ended_at"]:
            assert run["successful"] == run["selected"], run
            break
        await asyncio.sleep(0.2)
    if stop is not None:
        stop.set()


async def measure(dsn: str, items: int, io_ms: float, rate: float, work: bool) -> dict[str, float]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        _, key = await keys.create(connection, "default", "operator", "bench")
    with process(dsn, "api") as api, process(dsn, "worker", "scheduler") as worker:
        url = f"http://127.0.0.1:{api}"
        connector = aiohttp.TCPConnector(limit=100)
        async with aiohttp.ClientSession(
            url, headers={"Authorization": f"Bearer {key}"}, connector=connector
        ) as session:
            await ready(session, url)
            await ready(session, f"http://127.0.0.1:{worker}")
            first = await start(session, 500, 0)
            await ended(session, first)
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(WARM_UP_SECONDS, stop.set)
            await Caller(session).steadily(rate, first, stop)
            gc.collect()
            gc.disable()  # no pauses of the caller that would count as the server's
            caller, stop = Caller(session), asyncio.Event()
            if work:
                run_id = await start(session, items, io_ms)
                began = time.perf_counter()
                over = asyncio.create_task(ended(session, run_id, stop))
            else:
                run_id, began = first, time.perf_counter()
                over = asyncio.create_task(asyncio.sleep(5))
                over.add_done_callback(lambda _: stop.set())
            before = await inside(session)
            asked_s = await caller.steadily(rate, run_id, stop)
            after = await inside(session)
            await over
            seconds = time.perf_counter() - began
    found = {"requests_s": asked_s, "wrong": float(caller.wrong), "run_seconds": seconds}
    found |= {f"inside_p{share * 100:.0f}_ms": within(before, after, share) for share in (0.5, 0.99)}
    everything = list(itertools.chain(*caller.latencies.values()))
    for name, values in {**caller.latencies, "all": everything}.items():
        for share in (0.5, 0.9, 0.99, 1.0):
            found[f"{name}_p{share * 100:.0f}_ms"] = round(quantile(values, share), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.reads", description=__doc__)
    parser.add_argument("--dsn")
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--io-ms", type=float, default=50)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--idle", action="store_true", help="nothing is worked on: what the reads alone take")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server(options.dsn, None) as (dsn, _), fresh_database(dsn) as own:
        upgrade(normalise(own))
        found = uvloop.run(measure(own, options.items, options.io_ms, options.rate, not options.idle))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<16} {value:10.1f}")


if __name__ == "__main__":
    main()
