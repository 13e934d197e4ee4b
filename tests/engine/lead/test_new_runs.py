"""New runs are taken at once, each by one worker, and after a crash by another one."""

from __future__ import annotations

import asyncio
import time

import psycopg

from ecluse.base.cron import ZONE_RULES
from ecluse.db.connect import Connection
from ecluse.db.connect import pool as open_pool
from ecluse.db.query import fetch_column
from ecluse.engine import Done, Item, Result, Run, Start, WorkContext, start_runs
from ecluse.engine.lead import new_runs
from ecluse.engine.lead.new_runs import TAKE
from ecluse.engine.lead.story import Story
from ecluse.insight.waiting import why_run
from tests.support.engine_flows import END_LISTENERS, PATIENCE, flow, given_targets, keys, run_to_end, stage, until
from tests.support.runs import start_run, wait_for_run

ALL = {"room": 2, "full": [], "after": ""}


async def test_a_run_that_another_process_starts_is_led_at_once(start_kit, one):
    """The next poll would be a minute later."""
    worker = await start_kit(f := flow(stage()), sweep_every=60)
    api = await start_kit(f, roles={"api"})
    began = time.monotonic()
    row = await run_to_end(api, f, ["a"])
    assert (row["status"], one("SELECT executor_id FROM dbos.workflow_status")) == ("completed", worker.replica)
    assert time.monotonic() - began < 10


async def test_a_run_whose_notification_was_lost_is_found_by_the_next_poll(start_kit, query):
    f = flow(stage())
    kit = await start_kit(f, sweep_every=0.3)
    query(END_LISTENERS)
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["status"] == "completed"


async def test_a_start_that_is_rolled_back_or_known_wakes_no_worker(dsn, query):
    f = flow(stage())
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as listener,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
    ):
        await listener.execute("LISTEN ecluse_runs")
        async with connection.transaction(force_rollback=True):
            await start_runs(connection, [Start(f, "rolled back")])
        await start_runs(connection, [Start(flow(stage(), "items", story=None), "no story")])
        assert [notice async for notice in listener.notifies(timeout=0.2)] == []
        await start_runs(connection, [Start(f, key) for key in ("one", "two")])
        assert len([notice async for notice in listener.notifies(timeout=0.2)]) == 1
        await start_runs(connection, [Start(f, "one")])
        assert [notice async for notice in listener.notifies(timeout=0.2)] == []


async def test_workers_take_different_runs_and_wait_for_none(dsn):
    f = flow(stage())
    async with open_pool(dsn, size=3) as pool, pool.connection() as one, pool.connection() as two:
        started = await start_runs(one, [Start(f, key) for key in keys(5)])
        async with one.transaction(), two.transaction():
            taken = [await fetch_column(each, TAKE, {**ALL, "flows": [f.name]}) for each in (one, two)]
        assert [*taken[0], *taken[1]] == [each.run.id for each in started[:4]]
        assert await fetch_column(one, TAKE, {**ALL, "flows": ["another flow"]}) == []


async def test_a_worker_leads_no_more_runs_than_it_may(start_kit, query, monkeypatch):
    """The others wait, queued, until there is room."""
    monkeypatch.setattr(new_runs, "RUNS_AT_ONCE", 3)
    go_on = asyncio.Event()

    async def work(_: WorkContext, __: Item) -> Result:
        await go_on.wait()
        return Done()

    f = flow(stage(work))
    kit = await start_kit(f, sweep_every=0.1)
    async with kit.pool.connection() as connection:
        started = await start_runs(connection, [Start(f, key, input={"targets": ["a"]}) for key in keys(8)])
    states = "SELECT state, count(*) FROM runs GROUP BY 1 ORDER BY 1"
    await until(lambda: query(states) == [("queued", 5), ("running", 3)])
    await asyncio.sleep(0.3)
    assert query(states) == [("queued", 5), ("running", 3)]
    go_on.set()
    for one in started:
        assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "completed"


async def test_tenants_take_turns(dsn):
    """A tenant that starts many runs at once delays those of others by a place in the line, not by all of its own."""
    f = flow(stage())
    async with open_pool(dsn, size=2) as pool, pool.connection() as one, pool.connection() as two:
        many = await start_runs(one, [Start(f, key, "loud") for key in keys(300)])
        few = await start_runs(one, [Start(f, key, "quiet") for key in keys(2)])
        loud, quiet = ([each.run.id for each in started] for started in (many, few))
        given = {"flows": [f.name], "full": [], "after": "", "room": 3}
        async with one.transaction(), two.transaction():
            assert await fetch_column(one, TAKE, given) == [loud[0], quiet[0], loud[1]]
            assert await fetch_column(two, TAKE, given) == [quiet[1], *loud[2:4]]
        assert await fetch_column(one, TAKE, {**given, "after": "loud", "room": 1}) == quiet[:1]
        assert await fetch_column(one, TAKE, {**given, "full": ["loud"]}) == quiet


async def test_a_tenant_that_fills_its_share_of_the_runs_leaves_room_for_others(start_kit, query, monkeypatch):
    """Its runs wait at their gates for as long as a vendor is away."""
    monkeypatch.setattr(new_runs, "RUNS_AT_ONCE", 8)
    monkeypatch.setattr(new_runs, "TOGETHER", 1)
    go_on = asyncio.Event()

    async def work(_: WorkContext, __: Item) -> Result:
        await go_on.wait()
        return Done()

    f = flow(stage(work))
    kit = await start_kit(f, sweep_every=0.1, tenant_share=0.75)
    async with kit.pool.connection() as connection:
        loud = await start_runs(connection, [Start(f, key, "loud", {"targets": ["a"]}) for key in keys(9)])
        states = "SELECT tenant_id, count(*) FROM runs WHERE state = 'running' GROUP BY 1 ORDER BY 1"
        await until(lambda: query(states) == [("loud", 6)])
        quiet = await start_runs(connection, [Start(f, "key", "quiet", {"targets": ["a"]})])
    await until(lambda: query(states) == [("loud", 6), ("quiet", 1)])
    await asyncio.sleep(0.3)
    assert query(states) == [("loud", 6), ("quiet", 1)]
    async with kit.pool.connection() as connection:
        said = (await why_run(connection, "loud", loud[-1].run.id)).summary
    assert "runs of the tenant that are led: 6 (" in said
    go_on.set()
    for one in [*loud, *quiet]:
        assert (await wait_for_run(kit, one.run.id, PATIENCE))["status"] == "completed"


DUE = """
INSERT INTO schedules (tenant_id, flow, name, cron, timezone, input, next_due_at, zone_rules, handled_until, created_at,
                       updated_at)
SELECT 'default', %s, 'n', '* * * * *', 'UTC', '{"targets": ["a"]}', date_trunc('minute', now()), %s, at, at, at
FROM (VALUES (now() - interval '1 minute')) AS ago(at)
"""


async def test_new_runs_and_due_schedules_do_not_wait_for_connections_that_steps_use(start_kit, query, one):
    kit = await start_kit(f := flow(stage()), db_pool=2, sweep_every=60)
    api = await start_kit(f, roles={"api"}, sweep_every=60)
    async with kit.pool.connection(), kit.pool.connection():
        await start_run(api, Start(f, "key", input={"targets": ["a"]}))
        await until(lambda: one("SELECT state FROM runs") == "running", 2)
        query(DUE, f.name, ZONE_RULES)
        await until(lambda: query("SELECT state FROM schedule_slots") == [("fired",)], 3)


async def test_steps_of_one_tenant_leave_connections_for_those_of_others(start_kit, query):
    go_on = asyncio.Event()

    async def wait(_: Connection, run: Run) -> None:
        if run.tenant_id == "loud":
            await go_on.wait()

    async def story(run: Story) -> None:
        await run.step("wait", wait)
        await run.select(given_targets)
        await run.fan_out(one, given_targets)
        await run.gate(one)

    f = flow(one := stage(), story=story)
    kit = await start_kit(f, db_pool=2)
    loud = [await start_run(kit, Start(f, key, "loud", {"targets": ["a"]})) for key in keys(3)]
    await until(lambda: query("SELECT DISTINCT state FROM runs") == [("running",)])
    quiet = await start_run(kit, Start(f, "key", "quiet", {"targets": ["a"]}))
    assert (await wait_for_run(kit, quiet.run.id, PATIENCE))["status"] == "completed"
    async with kit.pool.connection() as connection:
        said = (await why_run(connection, "loud", loud[-1].run.id)).summary
    assert "or wait for steps of the 2 other runs of the tenant that are led" in said
    go_on.set()
    for each in loud:
        assert (await wait_for_run(kit, each.run.id, PATIENCE))["status"] == "completed"


async def test_a_run_whose_first_log_line_fails_ends_alone(start_kit):
    """The fields of the line are code of the flow."""
    kit = await start_kit(f := flow(stage(), about=lambda run: {"of": run.input["missing"]}))
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    ended = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (ended["status"], ended["error_code"]) == ("failed", "BUG")
    assert not kit.broken.is_set()
