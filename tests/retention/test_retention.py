"""Retention on a real database: what is deleted, what is kept and why, and what a crash in the middle leaves."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from ecluse.base.crash import POINTS_OF_RETENTION
from ecluse.db.connect import Connection
from ecluse.db.connect import pool as open_pool
from ecluse.engine import (
    FiringLimits,
    Flow,
    Lane,
    Lease,
    NewSchedule,
    Start,
    acquire_lease,
    create_schedule,
    read_published,
    release_lease,
    start_run,
)
from ecluse.engine.schedule.ticks import tick
from ecluse.retention import sweep
from ecluse.retention.kinds import ATTEMPTS, EVENTS, LEASES, LOGS, SLOTS
from ecluse.retention.pace import Busy, Pace
from ecluse.retention.sweep import OldRuns, Rule, alone, foresee, limits, prune
from ecluse.retention.workflows import WORKFLOWS
from ecluse.verify import audit
from tests.support.engine_flows import Shop, flow, keys, run_to_end, stage, until

DAY = timedelta(days=1)
FLOW = flow(stage())
FLOWS = {"test": FLOW}
RUNS = Rule(OldRuns("runs", ("test",)), 90 * DAY, "RUNS")
RULES = [
    *(Rule(kind, 30 * DAY) for kind in (EVENTS, LOGS, ATTEMPTS, SLOTS, WORKFLOWS, LEASES)),
    RUNS,
]
AT_ONCE = Pace(rest=0)
WAITS = "INSERT INTO run_waiters (run_id, waiter_run_id) VALUES (%s, %s)"  # the second for the first
# Every table that says of which run a row is.
OF_RUNS = """
SELECT table_name FROM information_schema.columns c JOIN information_schema.tables t USING (table_schema, table_name)
WHERE column_name = 'run_id' AND table_schema = 'public' AND table_type = 'BASE TABLE'
"""


class World:
    """Rows made by hand; time is moved, never waited for."""

    def __init__(self, dsn: str, connection: Connection, query: Callable[..., list[Any]]) -> None:
        self.dsn, self.connection, self.query = dsn, connection, query

    def later(self, span: timedelta) -> None:
        self.query('UPDATE clock_offset SET "offset" = "offset" + %s', span)

    async def run(self, key: str, days: float = 100, **columns: Any) -> int:
        """One that ended so many days ago; `ended=False`: open."""
        given = {name: columns.pop(name) for name in ("parent_run_id", "schedule_id") if name in columns}
        run = (await start_run(self.connection, Start(FLOW, key, **given))).run
        if columns.pop("ended", True):
            self.query(
                "UPDATE runs SET status = 'completed', state = 'succeeded', selected = 0, successful = 0, failed = 0,"
                " ignored = 0, end_cause = 'normal', ended_at = ecluse_now() - %s WHERE id = %s",
                days * DAY,
                run.id,
            )
            self.query("UPDATE events_outbox SET published_seq = id, published_at = ecluse_now() WHERE aggregate = %s",
                       f"run:{run.id}")  # fmt: skip
        return run.id

    async def prune(self, *rules: Rule) -> dict[str, int]:
        done = await prune(self.connection, FLOWS, rules or RULES, pace=Pace(rest=0))
        return {one.rule.kind.name: one.rows.total() for one in done}

    @property
    def runs(self) -> list[int]:
        return [row[0] for row in self.query("SELECT id FROM runs ORDER BY id")]


@pytest.fixture
async def world(dsn, query) -> AsyncIterator[World]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield World(dsn, connection, query)


@pytest.mark.req("G-71")
async def test_an_old_run_goes_with_all_its_rows_and_the_auditor_finds_nothing(world, start_kit, query):
    shop = Shop({"t00001": ["refused"]})
    writes = flow(shop.absolute(), "writes")
    kit = await start_kit(FLOW, writes, trace_rows=True)
    await run_to_end(kit, FLOW, keys(50))
    await run_to_end(kit, writes, keys(5), "second")
    await until(lambda: query("SELECT count(*) FROM events_outbox WHERE published_seq IS NULL") == [(0,)])
    await kit.stop()
    tables = [row[0] for row in query(OF_RUNS)]
    filled = {table for table in tables if query(f"SELECT count(*) FROM {table}") != [(0,)]}  # noqa: S608
    assert filled >= {"items", "stages", "claims", "outcomes", "run_log", "effects", "attempts", "workflow_logs"}
    rules = [Rule(OldRuns("runs", ("test", "writes")), 90 * DAY)]
    flows = {"test": FLOW, "writes": writes}
    assert (await prune(world.connection, flows, rules, pace=AT_ONCE))[0].rows.total() == 0, "too young"
    world.later(91 * DAY)
    foreseen = (await foresee(world.connection, flows, rules))[0]
    assert (foreseen.rows["runs"], foreseen.rows["items"], foreseen.rows["outcomes"]) == (2, 55, 55)
    assert world.runs, "a look deletes nothing"
    done = (await prune(world.connection, flows, rules, pace=AT_ONCE))[0]
    assert {name: done.rows[name] for name in foreseen.rows} == foreseen.rows
    assert [table for table in tables if query(f"SELECT count(*) FROM {table}") != [(0,)]] == []  # noqa: S608
    for table in ("events_outbox", "dbos.workflow_status", "dbos.operation_outputs", "dbos.workflow_input"):
        assert query(f"SELECT count(*) FROM {table}") == [(0,)], table  # noqa: S608
    assert audit(world.dsn, None).violations == []
    assert (await prune(world.connection, flows, rules, pace=AT_ONCE))[0].rows.total() == 0


async def test_a_run_of_many_rows_is_deleted_in_batches(world, start_kit, query):
    kit = await start_kit(FLOW)
    await run_to_end(kit, FLOW, keys(1_000))
    await until(lambda: query("SELECT count(*) FROM events_outbox WHERE published_seq IS NULL") == [(0,)])
    await kit.stop()
    world.later(91 * DAY)
    left = [2_000]

    class Watched(Pace):
        def paced(self, took):
            left.extend(query("SELECT (SELECT count(*) FROM items) + (SELECT count(*) FROM outcomes)")[0])
            super().paced(took)

    await prune(world.connection, FLOWS, [RUNS], pace=Watched(rows=300, most=300, rest=0))
    assert (max(before - after for before, after in pairwise(left)), left[-1]) == (300, 0)
    assert (world.runs, query("SELECT count(*) FROM items"), query("SELECT count(*) FROM pruning")) == (
        [], [(0,)], [(0,)],
    )  # fmt: skip


@pytest.mark.parametrize("link", ["child", "waiter", "child of a child"])
@pytest.mark.parametrize("relative", [{"ended": False}, {"days": 10}], ids=["open", "young"])
async def test_a_run_stays_as_long_as_a_run_that_belongs_to_it(world, link, relative):
    first = await world.run("first")
    between = await world.run("between", parent_run_id=first) if link == "child of a child" else first
    parent = {"parent_run_id": between} if link.startswith("child") else {}
    other = await world.run("other", **parent, **relative)
    if link == "waiter":
        world.query(WAITS, first, other)
    alone = await world.run("alone")
    await world.prune()
    assert world.runs == sorted({first, between, other}), f"{alone} belongs to nobody"
    await end_all(world)
    await world.prune()
    assert world.runs == []
    assert world.query("SELECT count(*) FROM run_waiters") == [(0,)]


async def test_runs_that_overlap_and_share_children_go_one_after_the_other(world, query, dsn):
    """Each waits for a child of the run before it. Those that ended 205, 195 … 15 days ago."""
    days = range(205, 5, -10)
    families: list[list[int]] = []
    for number, age in enumerate(days):
        run = await world.run(f"run {number}", age)
        children = [await world.run(f"child {number}-{n}", age, parent_run_id=run) for n in range(2)]
        for child in children:
            query(WAITS, child, run)
        if families:
            query(WAITS, families[-1][1], run)
        families.append([run, *children])
    (foreseen,) = await foresee(world.connection, FLOWS, [RUNS])
    await world.prune(RUNS)
    kept = families[11:]  # that of 95 days ago has a child which a run of 85 days ago waited for
    assert world.runs == sorted(run for family in kept for run in family), "whole families"
    assert (foreseen.rows["runs"], dict(foreseen.kept)) == (33, {"waited for by a run that is kept": 1})
    assert query("SELECT count(*) FROM run_waiters WHERE run_id <> ALL(%s)", world.runs) == [(0,)]
    # These runs were ended by hand, and have not told it.
    assert [one for one in audit(dsn, None).violations if one.invariant != "I-09"] == []


async def test_a_run_goes_though_a_run_that_it_waited_for_is_kept(world, query):
    old, young = await world.run("old"), await world.run("young", 10)
    query(WAITS, young, old)
    await world.prune(RUNS)
    assert (world.runs, query("SELECT count(*) FROM run_waiters")) == ([young], [(0,)])


async def end_all(world: World) -> None:
    world.query(
        "UPDATE runs SET status = 'completed', state = 'succeeded', selected = 0, successful = 0, failed = 0,"
        " ignored = 0, end_cause = 'normal', ended_at = ecluse_now() WHERE ended_at IS NULL"
    )
    world.query("UPDATE events_outbox SET published_seq = id, published_at = ecluse_now() WHERE published_seq IS NULL")
    world.later(91 * DAY)


KEEPS = {
    "a write in doubt": """
        INSERT INTO effects (id, tenant_id, run_id, item_id, stage, key, target, round, class, state, wanted, sends,
            claim_id, quiet, first_send_at, last_send_at)
        SELECT gen_random_uuid(), 'default', %s, 1, 'work', 'a', 'a', 0, 'C1', 'unknown', '{}', 1, 1, '1s', now(),
               now()""",
    "an event not published yet": """
        UPDATE events_outbox SET published_seq = NULL, published_at = NULL WHERE aggregate = 'run:' || %s""",
    "its workflow is not over": """
        INSERT INTO dbos.workflow_status (workflow_uuid, status, created_at, updated_at, priority)
        SELECT tenant_id || '/' || event_key, 'PENDING', 0, 0, 0 FROM runs WHERE id = %s""",
}


@pytest.mark.parametrize("why", KEEPS)
async def test_a_run_with_something_unsettled_stays_and_the_reason_is_given(world, why):
    kept = await world.run("kept")
    world.query(KEEPS[why], kept)
    await world.run("other")
    (foreseen,) = [one for one in await foresee(world.connection, FLOWS, RULES) if one.rule is RUNS]
    assert (foreseen.rows["runs"], dict(foreseen.kept)) == (1, {why: 1})
    await world.prune()
    assert world.runs == [kept]


async def test_the_last_run_of_a_schedule_stays_and_no_instant_is_fired_twice(world, dsn, query):
    at = datetime(2030, 5, 6, 7, 30, tzinfo=UTC)

    async def ticked(now: datetime) -> None:
        query('UPDATE clock_offset SET "offset" = %s - clock_timestamp()', now)
        async with open_pool(dsn, size=2) as pool:
            await tick(pool, FLOWS, FiringLimits())

    query('UPDATE clock_offset SET "offset" = %s - clock_timestamp()', at)
    schedule = await create_schedule(world.connection, NewSchedule(FLOW, "hourly", "0 * * * *", overlap="allow"))
    for hour in (1, 2, 3):
        await ticked(at + timedelta(hours=hour))
    query("UPDATE runs SET started_at = ecluse_now()")
    query("DELETE FROM dbos.workflow_status")
    first, second, last = world.runs
    await end_all(world)
    await world.prune(RUNS)
    assert (world.runs, query("SELECT run_id FROM schedule_slots WHERE state = 'fired'")) == ([last], [(last,)])
    assert query("SELECT status, runs FROM pruned_runs WHERE schedule_id = %s", schedule) == [("completed", 2)]
    await ticked(at + timedelta(hours=1, minutes=1))
    await ticked(at + timedelta(hours=3, minutes=1))
    assert world.runs == [last], f"{first} and {second} are not fired again"
    assert [v for v in audit(world.dsn, None).violations if v.invariant == "I-08"] == []


async def test_skipped_instants_go_by_their_own_age_and_those_that_wait_stay(world, query):
    schedule = await create_schedule(world.connection, NewSchedule(FLOW, "hourly", "0 * * * *"))
    for number, (state, days) in enumerate([("skipped", 31), ("missed", 31), ("waiting", 31), ("skipped", 29)]):
        query(
            "INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, decided_at)"
            " VALUES (%s, now() - %s, 'default', %s, 'x', now() - %s)",
            schedule, number * DAY, state, days * DAY,
        )  # fmt: skip
    assert (await world.prune())["slots"] == 2
    assert query("SELECT state FROM schedule_slots ORDER BY due_at DESC") == [("waiting",), ("skipped",)]


async def test_the_first_run_of_a_key_stays_while_a_repetition_is_open(world):
    async def ask() -> tuple[str, bool]:
        started = await start_run(world.connection, Start(FLOW, "nightly", again=True))
        return started.run.event_key, started.deduplicated

    first = await world.run("nightly")
    assert await ask() == ("nightly-retry-1", False)
    await world.prune()
    assert first in world.runs
    assert await ask() == ("nightly-retry-1", True), "not a second run beside the open one"
    await end_all(world)
    await world.prune()
    assert world.runs == []
    assert await ask() == ("nightly", False), "the key is free again"


async def test_a_run_stays_as_long_as_its_vendor_remembers_its_keys():
    now = datetime(2030, 1, 1, tzinfo=UTC)
    keyed = flow(Shop().keyed(remembered=30 * DAY), "keyed")
    rules = [Rule(OldRuns("runs", ("keyed", "test")), 7 * DAY), Rule(EVENTS, DAY)]
    found = limits({"keyed": keyed, "test": FLOW}, rules, now)
    assert found.before == {"keyed": now - 30 * DAY, "test": now - 7 * DAY}


async def test_published_events_go_by_age_and_readers_keep_their_place(world, query):
    put = (
        "INSERT INTO events_outbox (tenant_id, event_key, event_type, aggregate, correlation_id, producer, occurred_at,"
        " published_seq, published_at) SELECT 'default', 'e' || n, 'x', 'thing:1', 'c', 'p', ecluse_now() - %s, n,"
        " CASE WHEN n IS NOT NULL THEN ecluse_now() - %s END FROM unnest(%s::bigint[]) AS n"
    )
    query(put, 31 * DAY, 31 * DAY, [1, 2, 3])
    query(put, 29 * DAY, 29 * DAY, [4, 5])
    query(put.replace("'e' || n", "'waits'"), 31 * DAY, 31 * DAY, [None])
    assert (await world.prune())["events"] == 3
    left = "SELECT published_seq FROM events_outbox ORDER BY published_seq NULLS LAST"
    assert query(left) == [(4,), (5,), (None,)]
    assert [event.seq for event in await read_published(world.connection, 2)] == [4, 5]


async def test_workflow_rows_of_ended_runs_go_before_their_run(world, start_kit, query):
    kit = await start_kit(FLOW)
    await run_to_end(kit, FLOW, keys(3))
    await until(lambda: query("SELECT status FROM dbos.workflow_status") == [("SUCCESS",)])
    await kit.stop()
    world.later(31 * DAY)
    query("UPDATE dbos.workflow_status SET status = 'PENDING'")
    assert (await world.prune(Rule(WORKFLOWS, 30 * DAY)))["workflows"] == 0
    query("UPDATE dbos.workflow_status SET status = 'SUCCESS'")
    assert (await world.prune(Rule(WORKFLOWS, 30 * DAY)))["workflows"] == 1
    for table in ("workflow_status", "operation_outputs", "workflow_input", "workflow_output", "notifications"):
        assert query(f"SELECT count(*) FROM dbos.{table}") == [(0,)], table  # noqa: S608
    assert len(world.runs) == 1
    assert audit(world.dsn, None).violations == []


async def test_the_numbers_of_a_lease_grow_on_after_its_rows_are_gone(world):
    async def take() -> int:
        lease = await acquire_lease(world.connection, "default", "door", owner="me", ttl=DAY)
        assert isinstance(lease, Lease)
        await release_lease(world.connection, lease)
        return lease.fence

    assert [await take(), await take()] == [1, 2]
    world.later(31 * DAY)
    assert (await world.prune())["leases"] == 2
    assert await take() == 3
    assert audit(world.dsn, None).violations == []


async def test_attempts_go_by_age_once_their_run_has_ended(world, query):
    open_run, ended = await world.run("open", ended=False), await world.run("ended", days=40)
    for run in (open_run, ended):
        query(
            "INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error,"
            " ambiguous) VALUES (%s, 1, 'x', 0, 1, ecluse_now() - interval '31 days', 'r', 'NO', 'no', false)",
            run,
        )
    assert (await world.prune())["attempts"] == 1
    assert query("SELECT run_id FROM attempts") == [(open_run,)]


@pytest.mark.parametrize("point", POINTS_OF_RETENTION)
async def test_killed_in_the_middle_it_loses_nothing_that_is_kept_and_the_next_sweep_goes_on(
    world, start_kit, query, point
):
    kit = await start_kit(FLOW)
    await run_to_end(kit, FLOW, keys(20), "old")
    await until(lambda: query("SELECT count(*) FROM events_outbox WHERE published_seq IS NULL") == [(0,)])
    world.later(91 * DAY)
    await run_to_end(kit, FLOW, keys(20), "new")
    await until(lambda: query("SELECT count(*) FROM events_outbox WHERE published_seq IS NULL") == [(0,)])
    await kit.stop()
    old, new = world.runs
    kept = "SELECT jsonb_agg(to_jsonb(i) ORDER BY i.id) FROM items i WHERE run_id = %s"
    before = query(kept, new)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.retention.prune_child", world.dsn, env={**os.environ, "ECLUSE_CRASH_AT": point}
    )
    assert await process.wait() == -9
    committed = point == "after prune"
    assert (world.runs, query("SELECT run_id FROM pruning")) == (([new], [(old,)]) if committed else ([old, new], []))
    assert query("SELECT count(*) FROM items WHERE run_id = %s", old) == [(20,)], "it died before that"
    assert audit(world.dsn, None).violations == []
    await world.prune()
    assert (world.runs, query("SELECT count(*) FROM pruning")) == ([new], [(0,)])
    for table in ("items", "outcomes", "claims", "run_log", "stages"):
        assert query(f"SELECT count(*) FROM {table} WHERE run_id = %s", old) == [(0,)], table  # noqa: S608
    assert query(kept, new) == before
    assert audit(world.dsn, None).violations == []


async def test_one_session_prunes_at_a_time(world, dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
        async with alone(world.connection) as mine, alone(other) as theirs:
            assert (mine, theirs) == (True, False)
        async with alone(other) as theirs:
            assert theirs


async def test_batches_follow_the_pace_of_the_database_and_stop_when_it_is_busy():
    now = [0.0]
    pace = Pace(rows=1_000, rest=0, clock=lambda: now[0])
    sizes = []
    for seconds in (0.01, 0.01, 0.08, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5):
        async with pace.batch() as rows:
            sizes.append(rows)
            now[0] += seconds
    assert sizes == [1_000, 1_500, 2_250, 2_250, 1_125, 562, 281, 200, 200]
    with pytest.raises(Busy):
        async with pace.batch():
            now[0] += 2.1


async def test_a_kind_that_the_database_refuses_to_delete_does_not_keep_the_others(world, query):
    run = await world.run("referred to")
    query("CREATE TABLE somebody_elses (run_id bigint REFERENCES runs)")
    query("INSERT INTO somebody_elses VALUES (%s)", run)
    query(LOG)
    assert await world.prune(RUNS, Rule(LOGS, 30 * DAY)) == {"logs": 1}
    assert world.runs == [run]


LOG = """
INSERT INTO workflow_logs (created_at, tenant_id, workflow, entity_type, entity_id, level, message)
VALUES (now() - interval '31 days', 'default', 'w', 't', 'i', 'info', 'm')
"""
REFUSES = """
CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {} RETURN OLD; END $$;
CREATE TRIGGER refuses BEFORE DELETE ON {} FOR EACH ROW EXECUTE FUNCTION refuses();
"""


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
async def test_a_kind_whose_batch_takes_too_long_does_not_keep_the_others(world, query, dsn, limit):
    await world.run("old")
    query(LOG)
    query(REFUSES.format("PERFORM pg_sleep(5);" if limit == "statement_timeout" else "", "workflow_logs"))
    await world.connection.execute(f"SET {limit} = '200ms'")
    pace = Pace(rows=1_000, most=1_000, rest=0)
    with psycopg.connect(dsn) as other:
        if limit == "lock_timeout":
            other.execute("SELECT 1 FROM workflow_logs FOR UPDATE")
        assert await prune(world.connection, FLOWS, [Rule(LOGS, 30 * DAY)], pace=pace) == []
        assert pace.rows == 500, "the next sweep tries fewer"
        assert await world.prune(Rule(LOGS, 30 * DAY), RUNS) == {"runs": 2}
    assert (world.runs, query("SELECT count(*) FROM workflow_logs")) == ([], [(1,)])


async def test_rows_of_a_deleted_run_that_cannot_be_deleted_do_not_keep_the_kinds(world, query):
    query(LOG)
    query("INSERT INTO pruning VALUES (7)")
    query("INSERT INTO run_log (run_id, at, level, message) VALUES (7, now(), 'info', 'm')")
    query(REFUSES.format("RAISE EXCEPTION 'no';", "run_log"))
    assert await world.prune(Rule(LOGS, 30 * DAY)) == {"logs": 1}
    assert query("SELECT run_id FROM pruning") == [(7,)]
    query("DROP TRIGGER refuses ON run_log")
    await world.prune()
    assert query("SELECT (SELECT count(*) FROM pruning), (SELECT count(*) FROM run_log)") == [(0, 0)]


async def test_tables_that_a_flow_names_go_with_its_runs(world, query):
    query("CREATE TABLE of_flow (run_id bigint NOT NULL)")
    old, young = await world.run("old"), await world.run("young", days=1)
    query("INSERT INTO of_flow VALUES (%s), (%s)", old, young)
    brings: Flow = flow(stage(lane=Lane("l")), tables=("of_flow",))
    await prune(world.connection, {"test": brings}, [RUNS], pace=AT_ONCE)
    assert query("SELECT run_id FROM of_flow") == [(young,)]


async def test_a_server_prunes_by_itself(world, start_kit):
    await world.run("old")
    young = await world.run("young", days=1)
    await start_kit(FLOW, jobs=[sweep.job({FLOW.name: FLOW}, [RUNS], first=0.05, every=0.05)])
    await until(lambda: world.runs == [young])
