from __future__ import annotations

import asyncio

from ecluse.base.tasks import stopped


async def test_a_task_that_loses_one_cancellation_is_stopped_all_the_same():
    cancelled = 0

    async def hard_of_hearing() -> None:
        nonlocal cancelled
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
                if cancelled > 1:
                    raise

    task = asyncio.create_task(hard_of_hearing())
    await asyncio.sleep(0)
    await stopped([task], again_after=0.01)
    assert task.cancelled()


async def test_nothing_to_stop_is_fine():
    await stopped([])
