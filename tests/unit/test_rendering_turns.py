"""Open pages are rendered in turn, with pauses: they leave the event loop to requests."""

from __future__ import annotations

import asyncio
import time

from ecluse.web.live import RenderingTurns

RENDERING_SECONDS = 0.01


async def test_the_pages_of_one_tenant_wait_for_each_other_and_not_those_of_another() -> None:
    turns, rendered = RenderingTurns(), []

    async def render(tenant: str) -> None:
        async with turns.taken(tenant):
            time.sleep(RENDERING_SECONDS)  # noqa: ASYNC251 - as a template that is rendered
            rendered.append(tenant)

    began = time.monotonic()
    many = [asyncio.create_task(render("many")) for _ in range(20)]
    await asyncio.sleep(0)
    await render("one")
    assert rendered.count("many") <= 2
    await asyncio.gather(*many)
    assert len(rendered) == 21
    assert time.monotonic() - began >= 2 * 21 * RENDERING_SECONDS  # half of it belongs to others
