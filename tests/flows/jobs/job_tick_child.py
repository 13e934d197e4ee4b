"""One tick of job schedules in a process of its own, to be killed in the middle of it."""

from __future__ import annotations

import asyncio
import sys

from ecluse.db.connect import pool as open_pool
from ecluse.engine.schedule.slot_decisions import FiringLimits
from ecluse.engine.schedule.ticks import tick
from ecluse.flows.jobs.flow import FLOW


async def main(dsn: str) -> None:
    async with open_pool(dsn, size=2) as pool:
        await tick(pool, {"jobs": FLOW}, FiringLimits())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
