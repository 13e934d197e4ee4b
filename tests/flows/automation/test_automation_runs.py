"""Runs from their first step to their end, with the real engine and the sandbox as CRM, provider and model."""

from __future__ import annotations

import pytest


@pytest.mark.req("AUT-01", "AUT-02")
async def test_a_run_takes_its_fiches_through_all_stages(automate):
    world = await automate()
    await world.config()
    schedule = await world.schedule("1000", "1001", "1002")
    run_id = await world.trigger(schedule)
    run = await world.ended(run_id)
    assert (run["status"], run["phase"]) == ("completed", None), (run, world.logs(run_id))
    assert world.results(run_id) == dict.fromkeys(("1000", "1001", "1002"), ("successful", None))
