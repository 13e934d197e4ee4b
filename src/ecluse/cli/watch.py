"""`ecluse runs watch ID`: follow a run until it ends. At a terminal one line is rewritten, elsewhere each change is a
line. While the database is unavailable, the command retries."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
import typer

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.base.clock import Clock
from ecluse.base.errors import NotFound
from ecluse.base.logging import harmless
from ecluse.cli import sums
from ecluse.db.connect import Connection, open_session
from ecluse.db.outage import is_unavailable, one_line
from ecluse.engine import State
from ecluse.insight import run_queries

PACE_SECONDS = 10.0  # window over which the rate is measured
NO_WORKER_SECONDS = 10.0  # longer than a failover; a restarting server may take as long
STILL_OPEN = 4  # exit code

# Check the heartbeat, too: a worker that crashed stays 'live' as long as no other replica declares it dead.
WORKER = """
SELECT 1 FROM replicas p, unnest(p.work) AS w(name) WHERE p.state = 'live' AND 'worker' = ANY(p.roles)
    AND starts_with(w.name, %s || '/') AND p.beat_at > clock_timestamp() - make_interval(secs => %s) LIMIT 1
"""


class StillOpen(Exception):
    """The run has not ended, but is not followed any longer."""


@dataclass
class Patience:
    """How long an open run is followed: as long as a worker of its flow is live, and at most `timeout` seconds."""

    dead_after: float
    timeout: float | None
    began: float
    worker_seen: float

    async def check(self, connection: Connection, run: Mapping[str, Any], now: float) -> None:
        cursor = await connection.execute(WORKER, (run["flow"], self.dead_after))
        if await cursor.fetchone() is not None:
            self.worker_seen = now
        name = f"run {run['id']} is {run['status']}"
        if now - self.worker_seen > NO_WORKER_SECONDS:
            raise StillOpen(f"{name}, but no worker of its flow is live: start one with `ecluse serve`")
        if self.timeout is not None and now - self.began > self.timeout:
            raise StillOpen(f"{name} after {self.timeout:g} s and continues")


@dataclass
class Pace:
    """Rate of a stage over the last PACE_SECONDS."""

    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def per_second(self, now: float, finished: int) -> float:
        self.seen.append((now, finished))
        while len(self.seen) > 2 and now - self.seen[1][0] >= PACE_SECONDS:
            self.seen.popleft()
        since, before = self.seen[0]
        return max(0.0, (finished - before) / (now - since)) if now > since else 0.0


def line(run: Mapping[str, Any], pace: dict[str, Pace], now: float) -> str:
    """Return the progress line of an open run."""
    said = [f"run {run['id']} {run['flow']} {run['status']}"]
    if run["phase"]:
        said.append(harmless(run["phase"]))
    for stage in run["stages"]:
        finished = stage["done"] + stage["failed"] + stage["ignored"]
        if stage["ended_at"] is not None:
            said.append(f"{stage['stage']} {stage['end_cause']} {finished}/{stage['expected']}")
            continue
        rate = pace.setdefault(stage["stage"], Pace()).per_second(now, finished)
        share = f" ({finished * 100 // stage['expected']} %)" if stage["expected"] else ""
        parts = [f"{stage['stage']} {finished}/{stage['expected']}{share}"]
        parts += [f"{stage[name]} {name.replace('_', ' ')}" for name in ("failed", "ignored", "in_flight", "waiting")]
        parts += [f"round {stage['round']}"] if stage["round"] else []
        parts.append(f"{rate:.0f}/s")
        if rate > 0 and (left := stage["in_flight"] + stage["waiting"]):
            parts.append(f"{timedelta(seconds=round(left / rate))} left")
        said.append(", ".join(parts))
    if expected := run["will_fail"]["count"]:
        codes = ", ".join(f"{count} {code}" for code, count in run["will_fail"]["codes"].items())
        said.append(harmless(f"{expected} will fail ({codes})"))
    return " | ".join(said)


def ending(run: Mapping[str, Any]) -> str:
    took = (run["ended_at"] - (run["started_at"] or run["created_at"])).total_seconds()
    how = sums.cancelled_by(run) if run["state"] == State.CANCELLED else run["status"]
    why = f" ({harmless(run['reason'])})" if run["reason"] else ""
    reasons = "".join(f"\n  {count:>8}  {code}" for code, count in sorted(run["outcomes"].items()))
    return f"run {run['id']} {run['flow']}: {how} in {took:.1f} s{why}: {sums.in_full(run)}{reasons}"


def watch(run_id: int, every: float, timeout: float | None = None) -> int:
    logging.configure("WARNING")
    given, now = settings.load(), Clock().monotonic()
    database = bootstrap.open_database(given)
    try:
        patience = Patience(given.ECLUSE_DEAD_AFTER_SECONDS, timeout, now, now)
        run = asyncio.run(_follow(database.dsn, run_id, every, patience))
    except StillOpen as error:
        if sys.stdout.isatty():
            typer.echo()
        typer.echo(f"{error}. Stopped following it; `ecluse runs watch {run_id}` follows it again.", err=True)
        return STILL_OPEN
    finally:
        database.release()
    typer.echo(ending(run))
    return 0 if run["state"] in (State.SUCCEEDED, State.SKIPPED) else 1


async def _follow(dsn: str, run_id: int, every: float, patience: Patience) -> run_queries.Row:
    clock, pace, last, unavailable = Clock(), dict[str, Pace](), "", False
    live = sys.stdout.isatty()
    while True:
        try:
            async with await open_session(dsn) as connection:
                while (run := await run_queries.show_run(connection, None, run_id))["ended_at"] is None:
                    if (said := line(run, pace, clock.monotonic())) != last:
                        typer.echo(f"\r\x1b[K{said}" if live else said, nl=not live)
                    last, unavailable = said, False
                    await patience.check(connection, run, clock.monotonic())
                    await asyncio.sleep(every)
                if live:
                    typer.echo("\r\x1b[K", nl=False)
                return run
        except psycopg.errors.UndefinedTable as error:
            raise NotFound(f"there is no run {run_id}") from error
        except psycopg.Error as error:
            if not is_unavailable(error):
                raise
            if not unavailable:
                typer.echo(f"database unavailable, retrying: {one_line(error)}", err=True)
            unavailable = True
            patience.worker_seen = clock.monotonic()  # heartbeats cannot be read without the database
            await asyncio.sleep(every)
