"""The flow of `old_flow` after a change: other work, a larger budget, and one more stage at the end of the story."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ecluse.base.errors import TransientError
from ecluse.engine import Done, Item, Result, RetryPolicy, WorkContext
from ecluse.engine.lead.story import Story
from tests.faults import old_flow


async def work(_: WorkContext, item: Item) -> Result:
    await asyncio.sleep(0.05)
    if item.payload and item.executions < 3:
        raise TransientError("busy", code="BUSY")
    return Done({"by": "new"})


async def check(_: WorkContext, item: Item) -> Result:
    await asyncio.sleep(0.1)
    return Done({"checked": item.key})


FIRST = replace(old_flow.FIRST, work=work, retry=RetryPolicy(executions=4, base=0.05))
SECOND = replace(old_flow.FIRST, name="second", work=check)


async def story(run: Story) -> None:
    await run.select(old_flow.chosen)
    await run.fan_out(FIRST, old_flow.chosen)
    await run.gate(FIRST)
    # Asked at the place of the change: a run that is still before it takes part in it.
    if await run.patched("second"):
        await run.fan_out(SECOND)
        await run.gate(SECOND)


FLOW = replace(old_flow.FLOW, stages=(FIRST, SECOND), story=story)
