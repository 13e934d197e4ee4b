"""Work that takes its whole process with it, whenever it comes to certain keys: a segmentation fault in a parser, or
the kernel's answer to too much memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from datetime import timedelta

from pydantic import BaseModel

from ecluse.db.connect import Connection
from ecluse.engine import Done, Flow, Item, Lane, NewItem, Result, Run, Stage, WorkContext
from ecluse.engine.lead.story import Story

KILLS_AFTER = 0.05


class Input(BaseModel):
    keys: list[str]
    poisoned: list[str]
    seconds: float = KILLS_AFTER  # that the others take


async def chosen(_: Connection, run: Run) -> Sequence[NewItem]:
    seconds = run.input["seconds"]
    return [
        NewItem(key, payload=None if key in run.input["poisoned"] else {"seconds": seconds})
        for key in run.input["keys"]
    ]


async def work(_: WorkContext, item: Item) -> Result:
    if item.payload is None:
        await asyncio.sleep(KILLS_AFTER)
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(item.payload["seconds"])
    return Done()


WORK = Stage("work", Lane("poison"), work, max_wait=timedelta(minutes=5), poll=timedelta(seconds=5))


async def story(run: Story) -> None:
    await run.select(chosen)
    await run.fan_out(WORK, chosen)
    await run.gate(WORK)


FLOW = Flow(name="poison", stages=(WORK,), story=story, input=Input)
