"""A publisher in a process of its own, to be killed or frozen: appends what it tells to a file, a line per event.

`--freeze` stops it, once, between telling and marking.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from psycopg.conninfo import make_conninfo

from ecluse.base import logging
from ecluse.db.listen import listen
from ecluse.engine import PublishedEvent
from ecluse.engine.outbox.events import OUTBOX_CHANNEL
from ecluse.engine.outbox.publisher import Publisher


async def main(dsn: str, name: str, told: Path, *, freeze: bool) -> None:
    async def append(events: Sequence[PublishedEvent]) -> None:
        nonlocal freeze
        lines = "".join(f"{name} {event.aggregate} {event.id} {event.event_key}\n" for event in events)
        file = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, lines.encode())
        os.close(file)
        if freeze:
            freeze = False
            os.kill(os.getpid(), signal.SIGSTOP)

    own = make_conninfo(dsn, application_name=name)
    publisher = Publisher(own, [append])
    await asyncio.gather(publisher.run(), listen(own, {OUTBOX_CHANNEL: lambda _: publisher.wake.set()}))


if __name__ == "__main__":
    logging.configure("ERROR")
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), freeze="--freeze" in sys.argv))
