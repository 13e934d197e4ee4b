"""A sweep of retention in a process of its own, to be killed in the middle of it."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import psycopg

from ecluse.retention.sweep import OldRuns, Rule, prune
from tests.support.engine_flows import flow, stage


async def main(dsn: str) -> None:
    rules = [Rule(OldRuns("runs", ("test",)), timedelta(days=90))]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        print(await prune(connection, {"test": flow(stage())}, rules))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
