"""Periodic jobs of a replica. Most of them find and continue work that a crash, a lost signal or a restart of the
database has left behind. A notification may run a job at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ecluse.db.connect import Pool
from ecluse.db.outage import ignoring_outage
from ecluse.engine.model.roles import ROLES, Role


@dataclass(frozen=True)
class Job:
    """A function that a replica calls periodically."""

    name: str  # of its task, and in the log
    every: float  # seconds from the end of one run to the next
    run: Callable[[Pool], Awaitable[object]]
    first: float | None = None  # seconds before the first run; None: `every`
    channels: Sequence[str] = ()  # a notification on one, or a reconnect of the listener, runs the job at once
    rest: float = 0.0  # least pause between two runs, where notifications are many
    prompt: bool = False  # has connections of its own: does not wait for connections that steps, sweeps and gates use
    roles: frozenset[Role] = ROLES  # replicas with one of these roles run it


async def repeat(job: Job, pool: Pool, wake: asyncio.Event) -> None:
    """Run the job periodically, and whenever `wake` is set, until cancelled. A database outage is logged and the job is
    run again; any other error is raised and ends it."""
    pause = job.every if job.first is None else job.first
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await wake.wait()
        wake.clear()
        with ignoring_outage(job.name):
            await job.run(pool)
        await asyncio.sleep(job.rest)
        pause = job.every
