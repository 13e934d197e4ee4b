"""Every run tells its story: the same lines for people and collectors, and rows where they are wanted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from ecluse.base import trace
from ecluse.base.clock import Clock
from ecluse.base.errors import PermanentError, TransientError
from ecluse.db.connect import pool as open_pool
from ecluse.engine import Done, Item, Result, Start, WorkContext
from ecluse.engine.cluster.trace_rows import TraceRows
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from tests.engine.cluster import crash_child
from tests.support.engine_flows import PATIENCE, flow, given_targets, keys, run_to_end, stage
from tests.support.runs import start_run, wait_for_run


async def by_name(_: WorkContext, item: Item) -> Result:
    if item.key.startswith("bad"):
        raise PermanentError("refused", code="REFUSED")
    if item.key.startswith("down") and not item.round:
        raise TransientError("down", code="DOWN")
    return Done()


def told(logs):
    return [f"{line['verb']} {line['event']}" for line in logs if "verb" in line]


@pytest.mark.req("ENG-80", "ENG-85", "ENG-89", "ENG-23")
async def test_a_run_tells_its_story_under_its_ids(start_kit):
    kit = await start_kit(f := flow(stage(by_name)))
    with capture_logs() as logs:
        row = await run_to_end(kit, f, ["a", "b", "bad"], tenant_id="acme", correlation_id="req-7")
        while not any(line.get("verb") == "END:" for line in logs):
            await asyncio.sleep(0.01)
    story = [one for one in told(logs) if not one.startswith("WAITING")]  # fast work may be done at the first look
    assert story == [
        *("START: run-test", "STEP: select", "DONE: select", "FAN-OUT: test/work x3"),
        *("DONE: work-gate", "END: partial"),
    ]
    lines = [line for line in logs if "verb" in line]
    ids = {(one["area"], one["ids"], one["run_id"], one["tenant_id"], one["correlation_id"]) for one in lines}
    assert ids == {("TEST", f"run-{row['id']}", row["id"], "acme", "req-7")}
    dispatch = next(line for line in lines if line["verb"] == "FAN-OUT:")
    assert dispatch["items"] == 3
    assert dispatch["event_ids"] == [f"test-{row['id']}-work-{key}" for key in ("a", "b", "bad")]
    assert all(line["duration_ms"] >= 0 for line in lines if line["verb"] in ("DONE:", "END:"))
    failed = [line for line in logs if line["event"] == "execution: failed"]
    facts = [(line["event_id"], line["code"], line["correlation_id"], line["tenant_id"]) for line in failed]
    assert facts == [(f"test-{row['id']}-work-bad", "REFUSED", "req-7", "acme")]


@pytest.mark.req("ENG-85")
async def test_without_a_correlation_id_the_event_key_is_it(start_kit):
    kit = await start_kit(f := flow(stage()))
    with capture_logs() as logs:
        await run_to_end(kit, f, ["a"], key="monday")
    assert {line["correlation_id"] for line in logs if "verb" in line} == {"monday"}


@pytest.mark.req("ENG-23")
async def test_a_repetition_has_events_of_its_own(start_kit):
    """Same id: a replay. Another id: a second dispatch, on purpose."""
    kit = await start_kit(f := flow(stage(by_name, rounds=1, poll=timedelta(milliseconds=50))))
    with capture_logs() as logs:
        row = await run_to_end(kit, f, ["down"])
    assert row["status"] == "completed"
    first, again = [line for line in logs if line.get("verb") == "FAN-OUT:"]
    (execution,) = [line for line in logs if line["event"] == "execution: failed"]
    assert first["event_ids"] == [execution["event_id"]] == [f"test-{row['id']}-work-down"]
    assert again["event_ids"] == [f"test-{row['id']}-work-down-retry-1"]
    assert again["round"] == 1


@pytest.mark.req("ENG-80")
async def test_a_run_whose_replica_stopped_after_taking_it_tells_its_begin_after_the_take_over(start_kit, dsn, one):
    victim = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", crash_child.__name__, dsn, "the-run"),
        env={**os.environ, "ECLUSE_CRASH_AT": "after take"},
        stdout=subprocess.DEVNULL,
    )
    assert await victim.wait() == -signal.SIGKILL
    assert one("SELECT state, (SELECT count(*) FROM dbos.operation_outputs) FROM runs") == ("running", 0)
    with capture_logs() as logs:
        kit = await start_kit(crash_child.FLOW)
        await wait_for_run(kit, one("SELECT id FROM runs"), PATIENCE)
    assert [line for line in told(logs) if line.startswith("START:")] == ["START: run-test"]
    assert told(logs)[0] == "START: run-test"


async def test_succeeding_items_are_not_told_one_by_one(start_kit):
    kit = await start_kit(f := flow(stage()))
    with capture_logs() as logs:
        await run_to_end(kit, f, keys(300))
    assert len(logs) < 20


async def test_a_flow_s_own_steps_are_told_with_their_time(start_kit):
    async def story(run: Story) -> None:
        await run.select(given_targets)

        async def refresh(_connection, _run) -> int:
            return 3

        await run.step("force-refresh", refresh)

    kit = await start_kit(f := flow(stage(), story=story))
    with capture_logs() as logs:
        await run_to_end(kit, f, [])
        while "DONE: force-refresh" not in told(logs):
            await asyncio.sleep(0.01)
    assert told(logs).index("STEP: force-refresh") + 1 == told(logs).index("DONE: force-refresh")


@pytest.mark.req("ENG-81", "ENG-82")
async def test_traces_become_rows_in_their_order_when_they_are_switched_on(start_kit, query, dsn):
    kit = await start_kit(f := flow(stage(by_name)), trace_rows=True)
    row = await run_to_end(kit, f, ["a", "b"], correlation_id="req-7")
    await kit.stop()
    assert trace.listeners == []
    rows = query("SELECT created_at, message FROM workflow_logs WHERE run_id = %s ORDER BY id", row["id"])
    assert rows == sorted(rows, key=lambda line: line[0])
    messages = [message for _, message in rows if not message.startswith("WAITING")]
    assert (messages[0], messages[-1]) == ("START: run-test", "END: completed")
    assert "FAN-OUT: test/work x2" in messages
    assert query("SELECT DISTINCT workflow, entity_type, entity_id, run_id, trace_id, level FROM workflow_logs") == [
        ("test", "test_run", str(row["id"]), row["id"], "req-7", "info")
    ]
    assert query("SELECT inngest_event_id, data->>'items' FROM workflow_logs WHERE message LIKE 'FAN-OUT%%'") == [
        (f"test-{row['id']}-work-a", "2")
    ]


@pytest.mark.req("ENG-81")
async def test_no_rows_unless_they_are_asked_for(start_kit, one):
    kit = await start_kit(f := flow(stage()))
    await run_to_end(kit, f, ["a"])
    await kit.stop()
    assert one("SELECT count(*) FROM workflow_logs") == 0


TRACER = trace.Tracer(
    area="X", workflow="x", entity=("run", "1"), tenant_id="default", correlation_id="c\x00", run_id=1
)


def record(message="m", **data):
    return trace.Record(TRACER, "info", message, data, None)


@pytest.fixture
async def rows(dsn):
    async with open_pool(dsn, size=1) as pool:
        yield TraceRows(Clock()), pool


@pytest.mark.req("ENG-88")
async def test_any_data_can_be_stored(rows, query):
    rows, pool = rows
    rows.put(record("a\x00b\udcff", nul="\x00", deep={"x": ["\x00\udcff"]}))
    rows.put(record("after"))
    await rows.stop(pool)
    assert query("SELECT message FROM workflow_logs ORDER BY id") == [("a\ufffdb?",), ("after",)]
    assert query("SELECT data->>'nul', data->'deep'->'x'->>0 FROM workflow_logs ORDER BY id LIMIT 1") == [
        ("\ufffd", "\ufffd?")
    ]
    assert rows.dropped == 0


async def test_what_does_not_fit_is_dropped_and_counted(rows, monkeypatch, one):
    rows, pool = rows
    monkeypatch.setattr("ecluse.engine.cluster.trace_rows.MOST", 3)
    with capture_logs() as logs:
        for number in range(5):
            rows.put(record(str(number)))
    assert rows.dropped == 2
    assert [line["dropped"] for line in logs] == [1]
    await rows.stop(pool)
    assert one("SELECT string_agg(message, '' ORDER BY id) FROM workflow_logs") == "012"


async def test_rows_that_cannot_be_stored_hold_nobody_up(rows, query):
    rows, pool = rows
    query("ALTER TABLE workflow_logs ADD CONSTRAINT never CHECK (message <> 'bad')")
    rows.put(record("bad"))
    await rows.stop(pool)
    assert rows.dropped == 1


async def test_a_run_goes_on_though_its_traces_cannot_be_stored(start_kit, query):
    query("DROP TABLE workflow_logs CASCADE")
    kit: Kit = await start_kit(f := flow(stage()), trace_rows=True)
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["status"] == "completed"
    await kit.stop()
    assert not kit.broken.is_set()
