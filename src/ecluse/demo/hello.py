"""The first demonstration: an embedded PostgreSQL, a flaky simulated vendor, a server that is killed half-way, and at
the end a report in which every selected article has exactly one outcome, and an auditor's word for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ecluse.base.errors import SetUpError
from ecluse.db import embedded

ARTICLES = 2_000
EXAMPLES = Path(__file__).parents[3] / "examples"
FAULTS = [
    {"kind": "not_found", "ids": ["SKU-00013", "SKU-00666", "SKU-01313"]},
    {"kind": "unauthorized", "ids": ["SKU-00042"]},
    {"kind": "throttle", "rate": 0.003, "retry_after": 1, "per_id_times": 1},
    {"kind": "server_error", "rate": 0.05, "status": 503},
    {"kind": "reset", "rate": 0.01},
    {"kind": "latency", "seconds": 0.25},
]
OVERRIDES = {
    "ECLUSE_HANDS": "100",
    "ECLUSE_HEARTBEAT_SECONDS": "0.5",
    "ECLUSE_DEAD_AFTER_SECONDS": "2",
    "ECLUSE_LOG_LEVEL": "ERROR",
}


@dataclass
class Server:
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ecluse", "serve", "--flow", "hello_flow:FLOW", "--port", "0"],
            env=self.environment,
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=20)


def run(*, keep: bool, as_json: bool) -> int:
    # However it is told to go, it goes through `finally`: nothing may stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not (EXAMPLES / "hello_flow").is_dir():
        raise SetUpError("The demonstration needs the examples folder: run it from a checkout of the project.")
    console = Console(stderr=as_json)
    data = Path(tempfile.mkdtemp(prefix="ecluse-demo-"))
    # The account that runs PostgreSQL must get through, nobody else may look.
    data.chmod(0o711)
    with _sandbox() as vendor:
        environment = {
            **os.environ,
            **OVERRIDES,
            "ECLUSE_DATA_DIR": str(data / "postgres"),
            "PYTHONPATH": str(EXAMPLES),
            "PRICE_LIST_URL": f"{vendor}/price-list",
        }
        environment.pop("DATABASE_URL", None)
        console.print(
            f"[bold]Ecluse[/] reads {ARTICLES} prices at a vendor that throttles, fails and resets connections"
        )
        console.print("overrides: " + ", ".join(f"{name}={value}" for name, value in OVERRIDES.items()), style="dim")
        database = embedded.start(data / "postgres")  # the server joins it
        server = Server(environment)
        server.start()
        try:
            report = _watch(console, server, environment, database.dsn(), vendor)
            _print(console, report)
            if as_json:
                sys.stdout.write(json.dumps(report) + "\n")
            if keep:
                console.print(f"\nserver and sandbox stay up until Ctrl-C. The vendor is at {vendor}; look inside with")
                console.print(f"  ECLUSE_DATA_DIR={data}/postgres .venv/bin/ecluse psql", soft_wrap=True)
                _wait_for_interrupt()
        finally:
            server.stop()
            database.release()
            shutil.rmtree(data, ignore_errors=True)
    return 0 if report["status"] in ("completed", "partial") and report["verify"] == "clean" else 1


@contextmanager
def _sandbox() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ecluse.sandbox", "--port", "0", "--seed", "7"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        url = line.rsplit(" ", 1)[-1].strip()
        _post(f"{url}/_sandbox/faults", FAULTS)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=10)


def _watch(console: Console, server: Server, environment: dict[str, str], dsn: str, vendor: str) -> dict[str, Any]:
    started = time.monotonic()
    command = [sys.executable, "-m", "ecluse", "runs", "start", "hello_flow:FLOW", "--key", "hello-demo"]
    _migrated(dsn, server)
    answer = subprocess.run(  # noqa: S603 - our own program
        [*command, "--input", json.dumps({"articles": ARTICLES})],
        env=environment,
        capture_output=True,
        check=True,
    )
    run_id = int(json.loads(answer.stdout)["run_id"])
    killed_at: float | None = None
    took_over: float | None = None
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        bar = progress.add_task("reading prices", total=ARTICLES)
        done = done_at_kill = 0
        while True:
            row = _query(dsn, PROGRESS, run_id)
            done = int(row["done"])
            progress.update(bar, completed=done)
            if killed_at is None and done > ARTICLES * 0.4:
                server.kill()
                killed_at, done_at_kill = time.monotonic(), done
                progress.console.print(
                    f"kill -9 of the server at {done} of {ARTICLES}; starting it again", style="bold red"
                )
                server.start()
            if killed_at and took_over is None and row["done"] > done_at_kill + 100:
                took_over = time.monotonic() - killed_at
                progress.console.print(f"work goes on {took_over:.1f} s after the kill", style="bold green")
            if row["ended_at"] is not None:
                break
            if time.monotonic() - started > 180:
                raise SetUpError(
                    f"The demonstration did not end within three minutes: run {run_id} is {row['status']}."
                )
            time.sleep(0.1)
    report = _query(dsn, REPORT, run_id)
    stats = json.loads(_get(f"{vendor}/_sandbox/stats"))["price_list"]
    return {
        **report,
        "verify": _audit(dsn, vendor),
        "run_id": str(run_id),
        "seconds": round(time.monotonic() - started, 1),
        "kills": 1,
        "took_over_after_s": round(took_over or 0.0, 1),
        "vendor_calls": stats["calls"],
        "throttled": int(stats["by_status"].get("429", 0)),
    }


def _audit(dsn: str, vendor: str) -> str | list[dict[str, str]]:
    """ "clean", or the violations."""
    command = [sys.executable, "-m", "ecluse.verify", "--database-url", dsn, "--ledger", vendor, "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own program
    if not answer.stdout:
        raise SetUpError(f"The auditor could not look: {answer.stderr.strip()}")
    verdict: str | list[dict[str, str]] = json.loads(answer.stdout.splitlines()[-1])["verify"]
    return verdict


PROGRESS = """
SELECT r.status, r.ended_at, (SELECT coalesce(sum(succeeded + failed + ignored), 0) FROM claims c WHERE c.run_id = r.id)
    AS done FROM runs r WHERE r.id = %s
"""
REPORT = """
SELECT r.status, r.selected, r.successful, r.failed, r.ignored,
    (SELECT count(*) FROM attempts a WHERE a.run_id = r.id AND a.retry_at IS NOT NULL) AS retries,
    (SELECT count(*) FROM hello_prices p WHERE p.run_id = r.id) AS prices_stored,
    (SELECT coalesce(jsonb_object_agg(reason, n), '{}') FROM (SELECT coalesce(error_code, 'successful') AS reason,
     count(*) AS n FROM outcomes WHERE run_id = r.id GROUP BY 1) o) AS outcomes
FROM runs r WHERE r.id = %s
"""


def _migrated(dsn: str, server: Server) -> None:
    """Wait for the server to be there: it migrates its database and enters itself as a replica."""
    for _ in range(600):
        if server.process is not None and server.process.poll() is not None:
            break
        try:
            _query(dsn, "SELECT 1 AS one FROM replicas LIMIT %s", 1)
        except (psycopg.errors.UndefinedTable, LookupError):
            time.sleep(0.1)
        else:
            return
    raise SetUpError("The server did not come up: start it by hand with `ecluse serve` to see why.")


def _query(dsn: str, query: LiteralString, parameter: int) -> dict[str, Any]:
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as connection:
        row = connection.execute(query, (parameter,)).fetchone()
    if row is None:
        raise LookupError(query)
    return row


def _print(console: Console, report: dict[str, Any]) -> None:
    console.print(f"\n[bold]run {report['run_id']}: {report['status']}[/] in {report['seconds']} s")
    console.print(
        f"  selected {report['selected']} = successful {report['successful']} + failed {report['failed']}"
        f" + ignored {report['ignored']}"
    )
    for reason, count in sorted(report["outcomes"].items()):
        console.print(f"    {count:>6}  {reason}")
    console.print(
        f"  vendor calls {report['vendor_calls']}, throttled {report['throttled']}, retries {report['retries']};"
        f" prices stored {report['prices_stored']}"
    )
    console.print(f"  one kill -9: work went on {report['took_over_after_s']} s later")
    audit = report["verify"]
    console.print(f"  audited: {audit if audit == 'clean' else f'{len(audit)} violations: {audit}'}")


def _wait_for_interrupt() -> None:
    try:
        signal.pause()
    except KeyboardInterrupt:
        return


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:  # noqa: S310 - our own sandbox
        return bytes(response.read())


def _post(url: str, body: object) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request) as response:  # noqa: S310 - our own sandbox
        response.read()
