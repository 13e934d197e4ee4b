"""Periodic work on jobs: waking the long polls of agents, and ending attempts that no agent works on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

from ecluse.access.polls import Polls
from ecluse.db.connect import Pool
from ecluse.db.query import fetch_rows
from ecluse.engine import Job, Role
from ecluse.flows.jobs import states

LOOK_SECONDS, SWEEP_SECONDS = 1.0, 2.0
API, SWEEPERS = frozenset[Role]({"api"}), frozenset[Role]({"worker", "scheduler"})

# The first attempt at or after each host in the index (host, due): found whatever the planner expects of a host.
WAITED_FOR = """
SELECT h FROM unnest(%(hosts)s::text[]) AS h CROSS JOIN LATERAL (
    SELECT r.host_id, r.due_at FROM job_runs r WHERE r.status = 'pending' AND r.host_id >= h
    ORDER BY r.host_id, r.due_at LIMIT 1) AS first
WHERE first.host_id = h AND first.due_at <= (SELECT ecluse_now())
UNION ALL
SELECT x.id FROM job_hosts x JOIN tenants t ON t.id = x.tenant_id
WHERE t.disabled_at IS NOT NULL AND x.id = ANY(%(hosts)s)
"""


@dataclass(frozen=True)
class Leasing:
    """Settings and state that the agent routes of this process share: durations, and the waiting polls by host."""

    lease: timedelta
    longest_pending: timedelta
    polls: Polls

    async def look(self, pool: Pool) -> None:
        """Wake the polls of hosts for which an attempt has become due, whose notification was lost, or whose tenant was
        disabled: one statement for all of them."""
        if hosts := self.polls.keys:
            async with pool.connection() as connection:
                # Not prepared: a plan made while no attempt was pending would read all of them, for each host.
                found = await fetch_rows(connection, WAITED_FOR, {"hosts": hosts}, prepare=False)
            for (host,) in found:
                self.polls.wake(host)


class Sweep:
    """Ends attempts whose lease is over or that no agent claims. After a start or an outage it ends no leases for a
    third of a lease: while server or database were away, no agent could renew its lease or report a result."""

    def __init__(self, lease: timedelta, longest_pending: timedelta) -> None:
        self._patience, self._longest = lease.total_seconds() / 3, longest_pending
        self._last, self._hold_until = float("-inf"), 0.0

    async def run(self, pool: Pool) -> None:
        now = asyncio.get_running_loop().time()
        async with pool.connection() as connection:
            if now - self._last > self._patience + SWEEP_SECONDS:
                self._hold_until = now + self._patience
            while await states.end_overdue(connection, self._longest, leases=now >= self._hold_until):
                pass
        self._last = now


def periodic(leasing: Leasing) -> list[Job]:
    return [
        Job("jobs: waking long polls", LOOK_SECONDS, leasing.look, roles=API),
        Job("jobs: lost leases", SWEEP_SECONDS, Sweep(leasing.lease, leasing.longest_pending).run, roles=SWEEPERS),
    ]
