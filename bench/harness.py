"""The result of a candidate, and how a candidate is run: fresh database, own process, optional statement count."""

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from bench.statements import count_statements

ROOT = Path(__file__).resolve().parent.parent

# name -> module and coroutine function; `bench.one` looks them up so that only one candidate's imports are in memory
CANDIDATES: dict[str, tuple[str, str]] = {
    "ecluse": ("bench.ecluse_kit", "run"),
    "pgqueuer": ("bench.pgqueuer_peer", "run"),
    "pgqueuer_asyncpg": ("bench.pgqueuer_peer", "run_asyncpg"),
    "pgqueuer_shipped": ("bench.pgqueuer_peer", "run_shipped"),
    "dbos": ("bench.dbos_plain", "run"),
    "raw": ("bench.raw_sql", "run"),
}


@dataclass(frozen=True)
class Measured:
    """One run of one candidate; `seconds` is from the first insert until all items are known to be done."""

    name: str
    items: int
    seconds: float
    statements: int | None = None
    peak_rss_mb: float | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def items_s(self) -> float:
        return self.items / self.seconds

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class CandidateError(RuntimeError):
    """A candidate's process failed; its error is on stderr."""


def with_database(dsn: str, database: str) -> str:
    """Return the URL with another database name (a regex, because urlunsplit drops an empty host's slashes)."""
    changed, found = re.subn(r"^(postgres(?:ql)?://[^/?]*)(?:/[^?]*)?", rf"\g<1>/{database}", dsn)
    if not found:
        raise ValueError("the benchmark needs a DSN in URL form: postgresql://…")
    return changed


@contextmanager
def fresh_database(dsn: str) -> Iterator[str]:
    """Create an empty database, dropped at the end; yield its DSN."""
    name = f"bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        # start each run after a checkpoint: otherwise a candidate pays for writing the dirty pages of the one before it
        with suppress(psycopg.errors.InsufficientPrivilege):
            admin.execute("CHECKPOINT")
        try:
            yield with_database(dsn, name)
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _one(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.one", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise CandidateError(f"{arguments[0]} ended with status {done.returncode}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def run_candidate(
    name: str, dsn: str, items: int, io_ms: float, concurrency: int, server_log: Path | None = None
) -> Measured:
    """Run a candidate in its own process. With `server_log` its statements are counted: do not use that run's time."""
    with fresh_database(dsn) as own:
        arguments = [name, "--dsn", own, "--items", str(items), "--io-ms", str(io_ms)]
        arguments += ["--concurrency", str(concurrency)]
        if server_log is None:
            return Measured(**_one(arguments))
        with count_statements(own, server_log) as counted:
            measured = Measured(**_one(arguments))
        return dataclasses.replace(measured, statements=counted.count)


def run_probe(probe: str, dsn: str, server_log: Path | None) -> dict[str, float]:
    """Run `latencies` or `idle` of bench.ecluse_kit, in its own process and database."""
    with fresh_database(dsn) as own:
        arguments = ["ecluse", "--dsn", own, "--probe", probe]
        if server_log is not None:
            arguments += ["--server-log", str(server_log)]
        return _one(arguments)


def median(runs: list[Measured]) -> Measured:
    """Return the run with the median rate, so that its figures belong together; peak memory is the highest of all."""
    middle = statistics.median_low(run.items_s for run in runs)
    peaks = [run.peak_rss_mb for run in runs if run.peak_rss_mb is not None]
    chosen = next(run for run in runs if run.items_s == middle)
    return dataclasses.replace(chosen, peak_rss_mb=max(peaks, default=None))
