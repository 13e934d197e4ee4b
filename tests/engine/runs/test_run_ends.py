"""The wait for the end of a run: woken by its own end alone, with one look for all that wait."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta

import pytest

from ecluse.base.clock import Clock
from ecluse.db.connect import pool as open_pool
from ecluse.engine import Start
from ecluse.engine.runs.end_waits import RunEnds
from tests.support.engine_flows import flow, stage
from tests.support.runs import end_run, start_run

PATIENCE = timedelta(seconds=20)
END = """
UPDATE runs SET ended_at = now(), status = 'failed', state = 'failed', end_cause = 'operator', selected = 0,
    successful = 0, failed = 0, ignored = 0
"""


class Counting(RunEnds):
    """Counts its looks at rows."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.looks: Counter[int] = Counter()

    async def _has_ended(self, run_id: int) -> bool:
        self.looks[run_id] += 1
        return await super()._has_ended(run_id)


@pytest.fixture
async def ends(dsn):
    async with open_pool(dsn, size=2) as pool:
        yield Counting(pool, Clock())


async def test_a_thousand_waiters_share_the_looks(ends, query):
    waiting = [asyncio.create_task(ends.wait(run, PATIENCE)) for run in new_runs(query, 10) for _ in range(100)]
    await asyncio.sleep(0.05)
    query(END)
    for run, looks in list(ends.looks.items()):
        assert looks == 1
        ends.heard(run)
    assert await asyncio.gather(*waiting) == [True] * 1_000
    assert max(ends.looks.values()) <= 3  # the first, that after the wake-up, and a poll on a slow machine


async def test_the_end_of_another_run_wakes_nobody(ends, query):
    mine, other = new_runs(query, 2)
    waiting = asyncio.create_task(ends.wait(mine, timedelta(milliseconds=300)))
    await asyncio.sleep(0.05)
    for _ in range(50):
        ends.heard(other)
        await asyncio.sleep(0)
    assert ends.looks == {mine: 1}
    assert await waiting is False


async def test_a_lost_notification_is_made_up_for(ends, query):
    (run,) = new_runs(query, 1)
    waiting = asyncio.create_task(ends.wait(run, PATIENCE))
    await asyncio.sleep(0.05)
    query(END)
    ends.heard(None)
    assert await waiting is True


async def test_a_busy_pool_does_not_prolong_the_wait(dsn, query):
    (run,) = new_runs(query, 1)
    async with open_pool(dsn, size=1) as pool, pool.connection():
        began = time.monotonic()
        assert await RunEnds(pool, Clock()).wait(run, timedelta(milliseconds=100)) is False
        assert time.monotonic() - began < 2


async def test_a_kit_that_only_answers_hears_the_end(start_kit):
    made = flow(stage())
    kit = await start_kit(made, roles=frozenset({"api"}))
    run = (await start_run(kit, Start(made, "run"))).run.id
    waiting = asyncio.create_task(kit.wait_for_run(run, PATIENCE))
    await asyncio.sleep(0.05)
    assert await end_run(kit, run, "enough")
    async with asyncio.timeout(5):
        assert await waiting is True


def new_runs(query, count: int) -> list[int]:
    rows = query(
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, input, created_at)"
        " SELECT 't', 'f', 'run ' || n, false, 'running', 'running', '{}', now() FROM generate_series(1, %s) n"
        " RETURNING id",
        count,
    )
    return [run for (run,) in rows]
