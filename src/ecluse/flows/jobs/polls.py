"""Long polls of this process. They wait in memory: one LISTEN wakes those of a host, and one statement a second finds
what a lost notification, or an attempt that has become due, has left waiting. A poll itself queries nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from fastapi import Request

from ecluse.db.connect import Pool
from ecluse.db.query import fetch_column
from ecluse.engine import Job, Role
from ecluse.flows.jobs import states

LOOK_SECONDS, SWEEP_SECONDS = 1.0, 2.0
API: frozenset[Role] = frozenset({"api"})
SWEEPERS: frozenset[Role] = frozenset({"worker", "scheduler"})

WAITED_FOR = """
SELECT h FROM unnest(%s::text[]) AS h
WHERE EXISTS (SELECT FROM job_runs r WHERE r.host_id = h AND r.status = 'pending' AND r.due_at <= ecluse_now())
"""


class Polls:
    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.stopping = False

    @contextmanager
    def one(self, host: str) -> Iterator[asyncio.Event]:
        """A poll of this host; the event is set when there may be a job for it, or its agent was revoked."""
        woken = asyncio.Event()
        self._waiting.setdefault(host, set()).add(woken)
        try:
            yield woken
        finally:
            self._waiting[host].discard(woken)
            if not self._waiting[host]:
                del self._waiting[host]

    def hear(self, host: str) -> None:
        """Wake the polls of a host; without one, all: notifications may have been lost."""
        for woken in self._waiting.get(host, ()) if host else [one for all_ in self._waiting.values() for one in all_]:
            woken.set()

    def stop(self) -> None:
        """End all polls: the server stops."""
        self.stopping = True
        self.hear("")

    async def look(self, pool: Pool) -> None:
        if self._waiting:
            async with pool.connection() as connection:
                found = await fetch_column(connection, WAITED_FOR, (list(self._waiting),))
            for host in found:
                self.hear(host)


@dataclass(frozen=True)
class Leasing:
    """What the agents of this process have in common: the duration of a lease, and the polls that wait."""

    lease: timedelta
    polls: Polls


async def woken_within(request: Request, woken: asyncio.Event, seconds: float) -> bool:
    """Wait for the event; return False after `seconds`, or if the client has gone meanwhile."""
    waiting, gone = asyncio.ensure_future(woken.wait()), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({waiting, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done() and not gone.done()
    finally:
        for one in (waiting, gone):
            one.cancel()
            with suppress(asyncio.CancelledError):
                await one


class Sweep:
    """Ends attempts whose lease is over or that no agent claims. After a start or an outage it waits for a third of a
    lease: while server or database were away, no agent could renew, or report what has ended meanwhile."""

    def __init__(self, lease: timedelta, longest_pending: timedelta) -> None:
        self._patience, self._longest = lease.total_seconds() / 3, longest_pending
        self._last, self._hold_until = float("-inf"), 0.0

    async def run(self, pool: Pool) -> None:
        now = asyncio.get_running_loop().time()
        async with pool.connection() as connection:
            if now - self._last > self._patience + SWEEP_SECONDS:
                self._hold_until = now + self._patience
            if now >= self._hold_until:
                while await states.end_lost(connection) == states.BATCH:
                    pass
            while await states.end_unclaimed(connection, self._longest) == states.BATCH:
                pass
        self._last = now


def periodic(polls: Polls, lease: timedelta, longest_pending: timedelta) -> list[Job]:
    return [
        Job("jobs: waking long polls", LOOK_SECONDS, polls.look, roles=API),
        Job("jobs: lost leases", SWEEP_SECONDS, Sweep(lease, longest_pending).run, roles=SWEEPERS),
    ]
