"""Work that nobody picks up is to be seen, and nothing else is taken for it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.base.errors import TransientError
from ecluse.engine import Flow, Item, Result, WorkContext
from ecluse.engine.lead.story import Story
from ecluse.engine.model.retry import RetryPolicy
from tests.support.engine_flows import PATIENCE, Targets, flow, given_targets, keys, stage, started, until
from tests.support.runs import wait_for_run


async def test_work_that_waits_for_its_next_attempt_is_not_taken_for_work_that_nobody_picks_up(start_kit, query):
    async def refuse(_: WorkContext, item: Item) -> Result:
        raise TransientError("not now", code="BUSY")

    slow = RetryPolicy(executions=2, base=60.0)
    short = stage(refuse, retry=slow, poll=timedelta(milliseconds=100), max_wait=timedelta(seconds=2))
    kit = await start_kit(f := flow(short))
    run = await started(kit, f, keys(1))
    assert (await wait_for_run(kit, run, PATIENCE))["failed"] == 1
    assert query("SELECT executions FROM items") == [(1,)]
    assert query("SELECT message FROM run_log WHERE message LIKE '%%no worker has claimed%%'") == []


@pytest.mark.req("ENG-18")
async def test_work_that_nobody_picks_up_is_to_be_seen(start_kit, query, one):
    known, unknown = stage(), stage(name="elsewhere", poll=timedelta(milliseconds=100), max_wait=timedelta(seconds=1))

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await run.fan_out(unknown, given_targets)
        await run.gate(unknown)

    kit = await start_kit(f := Flow("test", (known,), story, Targets))
    run = await started(kit, f, keys(3))
    warning = (
        "SELECT data ->> 'unclaimed' FROM run_log WHERE level = 'warning' AND message LIKE '%%no worker has claimed%%'"
    )
    await until(lambda: query(warning))
    ((event, lane, items, oldest, age),) = query("SELECT event, lane, items, oldest_due_at, age FROM unclaimed")
    assert (event, lane, items) == ("test/elsewhere", "lane", 3)
    assert timedelta(milliseconds=300) <= age < timedelta(seconds=5)
    assert oldest == one("SELECT min(due_at) FROM items")
    await wait_for_run(kit, run, PATIENCE)
    assert query(warning) == [("3",)], "said once"
    assert query("SELECT * FROM unclaimed") == []
