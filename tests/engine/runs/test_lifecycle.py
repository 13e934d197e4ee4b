"""A run from its start to its one truthful status, on the real engine."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import psycopg
import pytest

from ecluse.base.errors import InvalidInput, NonRetriableError, PermanentError, TransientError
from ecluse.engine import Done, Flow, Ignored, Item, NewItem, Result, RetryPolicy, Start, WorkContext
from ecluse.engine.lead.story import Story
from tests.support.engine_flows import PATIENCE, Targets, flow, given_targets, keys, run_to_end, stage
from tests.support.runs import start_items, start_run, wait_for_run

COUNTS = ("status", "selected", "successful", "failed", "ignored")


def counts(row):
    return tuple(row[name] for name in COUNTS)


async def by_name(_: WorkContext, item: Item) -> Result:
    if item.key.startswith("gone"):
        return Ignored("Not found (404)", code="NOT_FOUND")
    if item.key.startswith("bad"):
        raise PermanentError("refused", code="REFUSED")
    if item.key.startswith("down"):
        raise TransientError("down", code="DOWN")
    return Done({"key": item.key})


@pytest.mark.req("ENG-94", "ENG-44", "ENG-95", "ENG-96")
@pytest.mark.parametrize(
    ("targets", "expected", "reason"),
    [
        (["a", "b"], ("completed", 2, 2, 0, 0), None),
        (["a", "bad", "down"], ("partial", 3, 1, 2, 0), None),
        (["bad", "gone"], ("failed", 2, 0, 1, 1), "1 of 2 targets failed: REFUSED"),
        (["a", "gone"], ("completed", 2, 1, 0, 1), None),
        (["gone"], ("completed", 1, 0, 0, 1), "all_ignored"),
        ([], ("completed", 0, 0, 0, 0), "no_targets"),
    ],
    ids=["all well", "some failed", "none succeeded", "ignored do not count", "all ignored", "nothing to do"],
)
async def test_a_run_ends_with_the_status_its_outcomes_give(start_kit, query, targets, expected, reason):
    kit = await start_kit(f := flow(stage(by_name)))
    row = await run_to_end(kit, f, targets)
    assert counts(row) == expected
    assert (row["end_cause"], row["reason"]) == ("normal", reason)
    assert row["ended_at"] >= row["started_at"] >= row["created_at"]
    outcomes = dict(query("SELECT target, coalesce(error_code, 'ok') FROM outcomes"))
    codes = {"a": "ok", "b": "ok", "bad": "REFUSED", "down": "DOWN", "gone": "NOT_FOUND"}
    assert outcomes == {target: codes[target] for target in targets}


@pytest.mark.req("ENG-20", "ENG-21", "ENG-08")
async def test_the_same_event_key_starts_one_run_per_tenant_however_often_it_is_sent(start_kit, one):
    kit = await start_kit(f := flow(stage()))
    starts = [start_run(kit, Start(f, "due-1", input={"targets": ["a"]})) for _ in range(20)]
    answers = await asyncio.gather(*starts)
    assert sorted(answer.deduplicated for answer in answers) == [False] + [True] * 19
    assert len({answer.run.id for answer in answers}) == 1
    other = await start_run(kit, Start(f, "due-1", tenant_id="other", input={"targets": ["a"]}))
    assert not other.deduplicated
    await wait_for_run(kit, other.run.id, PATIENCE)
    await wait_for_run(kit, answers[0].run.id, PATIENCE)
    again = await start_run(kit, Start(f, "due-1", input={"targets": ["a", "b"]}))
    assert (again.run.id, again.deduplicated) == (answers[0].run.id, True)
    assert one("SELECT count(*) FROM runs") == 2
    assert one("SELECT count(*) FROM items") == 2
    with pytest.raises(psycopg.errors.UniqueViolation):
        one(
            "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)"
            " VALUES ('default', 'test', 'due-1', true, 'queued', 'queued', now()) RETURNING id"
        )


@pytest.mark.req("ENG-07")
async def test_a_non_retriable_error_in_the_story_ends_the_run_at_once(start_kit, query):
    async def story(run: Story) -> None:
        await run.select(given_targets)
        raise NonRetriableError("the schedule is gone", code="NO_SCHEDULE")

    kit = await start_kit(f := Flow("test", (stage(),), story, Targets))
    row = await run_to_end(kit, f, ["a", "b"])
    assert counts(row) == ("failed", 2, 0, 2, 0)
    assert (row["end_cause"], row["error_code"], row["error_message"]) == (
        "catastrophic",
        "NO_SCHEDULE",
        "the schedule is gone",
    )
    assert query("SELECT DISTINCT reason FROM outcomes") == [("Run stopped by an error: the schedule is gone",)]
    assert query("SELECT count(*) FROM dbos.workflow_status WHERE recovery_attempts > 1") == [(0,)]


async def test_a_bug_in_the_story_is_an_end_too(start_kit):
    async def story(_: Story) -> None:
        raise ZeroDivisionError("division by zero")

    kit = await start_kit(f := Flow("test", (stage(),), story, Targets))
    row = await run_to_end(kit, f, ["a"])
    assert (row["status"], row["end_cause"], row["error_code"]) == ("failed", "catastrophic", "BUG")


@pytest.mark.req("ENG-09", "ENG-10")
async def test_waiting_for_a_run_sees_an_end_that_came_first_and_is_always_bounded(start_kit):
    release = asyncio.Event()

    async def held(_: WorkContext, item: Item) -> Result:
        await release.wait()
        return Done()

    kit = await start_kit(f := flow(stage(held)))
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    early = await wait_for_run(kit, started.run.id, timedelta(milliseconds=100))
    assert early["ended_at"] is None
    release.set()
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["status"] == "completed"
    assert (await wait_for_run(kit, started.run.id, timedelta(0)))["status"] == "completed"


async def test_a_key_with_many_ended_runs_is_repeated_with_few_questions(start_kit, query):
    kit = await start_kit(f := flow(stage()), roles={"api"})
    query(
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, input, created_at, ended_at,"
        " end_cause, selected, successful, failed, ignored)"
        " SELECT 'default', 'test', 'key' || CASE n WHEN 0 THEN '' ELSE '-retry-' || n END, true, 'completed',"
        " 'succeeded', '{}', now(), now(), 'normal', 0, 0, 0, 0 FROM generate_series(0, 999) AS n"
    )
    again = (await start_run(kit, Start(f, "key", again=True))).run
    assert (again.event_key, again.id) == ("key-retry-1000", 1001), "each attempt would have drawn a number"


@pytest.mark.req("ENG-01")
async def test_a_finished_step_is_not_run_again_when_the_story_is_replayed(start_kit, dsn):
    """The story fails to return the first time (its replica goes), is recovered, and every finished step is stored."""
    seen: list[str] = []
    gate = asyncio.Event()

    async def story(run: Story) -> None:
        async def side_effect(_connection, _run) -> str:
            seen.append("side effect")
            return "stored"

        assert await run.step("side-effect", side_effect) == "stored"
        await run.select(given_targets)
        seen.append("reached")
        await gate.wait()

    f = Flow("test", (stage(),), story, Targets)
    kit = await start_kit(f)
    started = await start_run(kit, Start(f, "key", input={"targets": []}))
    while "reached" not in seen:
        await asyncio.sleep(0.01)
    await kit.stop()
    gate.set()
    kit = await start_kit(f)
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert row["status"] == "completed"
    assert seen == ["side effect", "reached", "reached"]


@pytest.mark.req("ENG-24")
async def test_selecting_and_fanning_out_twice_changes_nothing(start_kit, one):
    work = stage()

    async def story(run: Story) -> None:
        for _ in range(2):
            await run.select(given_targets)
            await run.fan_out(work, given_targets)
        await run.gate(work)
        await run.fan_out(work, given_targets)

    kit = await start_kit(f := Flow("test", (work,), story, Targets))
    row = await run_to_end(kit, f, keys(50))
    assert counts(row) == ("completed", 50, 50, 0, 0)
    assert one("SELECT count(*), sum(executions) FROM items") == (50, 50)


async def test_a_run_of_items_only_closes_itself(start_kit, dsn, one):
    work = stage(by_name)
    f = flow(work, story=None)
    kit = await start_kit(f)
    started = await start_items(kit, Start(f, "items-only"), work, [NewItem("a"), NewItem("bad")])
    again = await start_items(kit, Start(f, "items-only"), work, [NewItem("a"), NewItem("bad"), NewItem("c")])
    assert (again.run.id, again.deduplicated) == (started.run.id, True)
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert counts(row) == ("partial", 2, 1, 1, 0)
    assert one("SELECT count(*) FROM dbos.workflow_status") == 0


async def test_more_budget_means_more_executions(start_kit, query):
    kit = await start_kit(f := flow(stage(by_name, retry=RetryPolicy(executions=4, base=0.001))))
    await run_to_end(kit, f, ["down"])
    assert query("SELECT execution, error_code, retry_at IS NULL FROM attempts ORDER BY id") == [
        (1, "DOWN", False),
        (2, "DOWN", False),
        (3, "DOWN", False),
        (4, "DOWN", True),
    ]


@pytest.mark.parametrize(
    ("tenant", "key"),
    [("a/b", "k"), ("", "k"), ("a\x00", "k"), ("ten ant", "k"), ("t", ""), ("t", "k\x00"), ("t", "k" * 501)],
)
async def test_a_start_without_a_usable_name_is_refused_and_writes_nothing(start_kit, one, tenant, key):
    kit = await start_kit(f := flow(stage()))
    with pytest.raises(InvalidInput):
        await start_run(kit, Start(f, key, tenant_id=tenant, input={"targets": []}))
    assert one("SELECT count(*) FROM runs") == 0
