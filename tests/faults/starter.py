"""A process that starts a run and leads it itself, as whoever has an engine in it does: FLOW KEY INPUT."""

from __future__ import annotations

import asyncio
import json
import sys

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.db.connect import normalise
from ecluse.engine import Start


async def main(name: str, key: str, given: str) -> None:
    known = settings.load()
    logging.configure(known.ECLUSE_LOG_LEVEL, known.ECLUSE_LOG_FORMAT)
    flow = bootstrap.load_flows(known, [name])[-1]
    kit = bootstrap.bootstrap(known, normalise(known.DATABASE_URL or ""), [flow])
    await kit.start()
    await kit.start_run(Start(flow, key, input=json.loads(given)))
    await kit.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
