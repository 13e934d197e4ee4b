"""A flow before a change of its code (after it: `new_flow`). What is flaky fails once under it, and then has to wait
for longer than this code will live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from pydantic import BaseModel

from ecluse.base.errors import TransientError
from ecluse.db.connect import Connection
from ecluse.engine import Done, Flow, Item, Lane, NewItem, Result, RetryPolicy, Run, Stage, WorkContext
from ecluse.engine.lead.story import Story


class Input(BaseModel):
    keys: list[str]
    flaky: list[str] = []


async def chosen(_: Connection, run: Run) -> Sequence[NewItem]:
    return [NewItem(key, payload=key in run.input["flaky"]) for key in run.input["keys"]]


async def work(_: WorkContext, item: Item) -> Result:
    await asyncio.sleep(0.1)
    if item.payload:
        raise TransientError("busy", code="BUSY")
    return Done({"by": "old"})


FIRST = Stage(
    "first",
    Lane("changing"),
    work,
    retry=RetryPolicy(executions=2, base=4),
    max_wait=timedelta(minutes=2),
    poll=timedelta(seconds=5),
)


async def story(run: Story) -> None:
    await run.select(chosen)
    await run.fan_out(FIRST, chosen)
    await run.gate(FIRST)


FLOW = Flow(name="changing", stages=(FIRST,), story=story, input=Input)
