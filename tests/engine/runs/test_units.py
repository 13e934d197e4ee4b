"""A stage whose work is done by other runs: its gate looks at what the flow counts, is woken by the end of the last of
them, and lets the flow repeat what failed. And targets that are settled before the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import BaseModel

from ecluse.base.errors import PermanentError, TransientError
from ecluse.db.connect import Connection
from ecluse.engine import (
    Counted,
    Done,
    Flow,
    Item,
    Lane,
    NewItem,
    NewSchedule,
    Result,
    Run,
    Settled,
    Stage,
    Start,
    WorkContext,
    create_schedule,
    fire_by_hand,
    note_errors,
    open_stage,
    settle_targets,
    start_runs,
)
from ecluse.engine.lead.story import Story
from ecluse.engine.schedule.ticks import tick
from tests.support.engine_flows import PATIENCE, QUICK, Targets, given_targets, stage
from tests.support.runs import start_run, wait_for_run

COUNT = """
SELECT count(DISTINCT input ->> 'target')::int, count(*) FILTER (WHERE status = 'completed')::int,
       count(DISTINCT input ->> 'target') FILTER (WHERE status = 'failed')::int, 0
FROM runs WHERE parent_run_id = %s
"""
FAILED = "SELECT input ->> 'target' FROM runs WHERE parent_run_id = %s AND status = 'failed'"
COMPLETED = "SELECT input ->> 'target' FROM runs WHERE parent_run_id = %s AND status = 'completed'"


class Child(BaseModel):
    target: str
    round: int = 0


async def first_time_bad(_: WorkContext, item: Item) -> Result:
    if item.key.startswith("bad") and item.payload["round"] == 0:
        raise PermanentError("the first time it fails", code="BAD")
    if item.key.startswith("never"):
        raise TransientError("it never works", code="NEVER", ambiguous=False)
    return Done()


WORK = Stage("work", Lane("children"), first_time_bad, retry=QUICK)


async def begin(connection: Connection, runs: Sequence[Run]) -> None:
    wanted = [(run, [NewItem(run.input["target"], payload={"round": run.input["round"]})]) for run in runs]
    await open_stage(connection, WORK, wanted, select=True)


CHILD = Flow("child", (WORK,), None, Child, begin=begin)


@dataclass(frozen=True)
class Children:
    async def count(self, connection: Connection, run: Run) -> Counted:
        row = await (await connection.execute(COUNT, (run.id,))).fetchone()
        assert row
        return Counted(row[0], row[1], max(row[2] - max(row[1] + row[2] - row[0], 0), 0), row[3])

    async def again(self, connection: Connection, run: Run, round_: int) -> None:
        rows = await (await connection.execute(FAILED, (run.id,))).fetchall()
        await start(connection, run, [row[0] for row in rows], round_)


async def start(connection: Connection, run: Run, targets: Sequence[str], round_: int) -> None:
    starts = [
        Start(CHILD, f"{run.id}-{target}-{round_}", input={"target": target, "round": round_}, parent_run_id=run.id)
        for target in targets
    ]
    await start_runs(connection, starts)


def parent(seen: list[Any] | None = None, **options: Any) -> Flow:
    waits = replace(stage(), name="children", **{"poll": timedelta(seconds=20), **options})

    async def look(_: Connection, __: Run, look: Any, decision: Any) -> None:
        if seen is not None:
            seen.append((look.succeeded, look.expected, type(decision).__name__))

    async def dispatch(connection: Connection, run: Run) -> int:
        await start(connection, run, run.input["targets"], 0)
        return 1

    async def settle(connection: Connection, run: Run) -> int:
        rows = await (await connection.execute(f"{FAILED} EXCEPT {COMPLETED}", (run.id, run.id))).fetchall()
        failed = [Settled(row[0], "failed", "CHILD", "its run failed") for row in rows]
        first = await settle_targets(connection, run, failed)
        left = [Settled(target, "successful") for target in run.input["targets"]]
        await note_errors(connection, run, {"noticed": first})
        return first + await settle_targets(connection, run, left)

    async def story(run: Story) -> None:
        await run.select(given_targets)
        await run.open(waits)
        await run.step("dispatch", dispatch)
        await run.gate(waits, units=Children(), seen=look)
        await run.step("settle", settle)

    return Flow("parent", (stage(),), story, Targets)


async def test_the_end_of_the_last_run_opens_the_gate(start_kit, query):
    seen: list[Any] = []
    flow = parent(seen)
    kit = await start_kit(flow, CHILD)
    started = await start_run(kit, Start(flow, "k", input={"targets": ["a", "b", "c"]}))
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 3)
    (shown,) = row["stages"]
    assert (shown["stage"], shown["expected"], shown["done"], shown["end_cause"]) == ("children", 3, 3, "done")
    assert seen[-1] == (3, 3, "GateEnded")
    assert query("SELECT error_details FROM runs WHERE id = %s", started.run.id) == [({"noticed": 0},)]


async def test_what_failed_is_repeated_once_nothing_moves_any_more(start_kit, query):
    seen: list[Any] = []
    flow = parent(seen, rounds=1, poll=timedelta(seconds=0.2))
    kit = await start_kit(flow, CHILD)
    started = await start_run(kit, Start(flow, "k", input={"targets": ["a", "bad", "never"]}))
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 2, 1)
    assert query("SELECT target, outcome, error_code FROM outcomes WHERE run_id = %s ORDER BY 1", started.run.id) == [
        ("a", "successful", None),
        ("bad", "successful", None),
        ("never", "failed", "CHILD"),
    ]
    assert [name for *_, name in seen].count("Redispatch") == 1
    assert query("SELECT round FROM stages WHERE run_id = %s", started.run.id) == [(1,)]


async def test_the_first_word_on_a_target_is_the_last(start_kit, query):
    async def settle(connection: Connection, run: Run) -> list[int]:
        first = [Settled("a", "ignored", "GONE", "it is gone\x00"), Settled("nobody", "failed")]
        then = [Settled("a", "failed", "LATE", "too late"), Settled("b", "successful")]
        return [await settle_targets(connection, run, first), await settle_targets(connection, run, then)]

    settled: list[list[int]] = []

    async def story(run: Story) -> None:
        await run.select(given_targets)
        settled.append(await run.step("settle", settle))

    flow = Flow("settling", (stage(),), story, Targets)
    kit = await start_kit(flow)
    started = await start_run(kit, Start(flow, "k", input={"targets": ["a", "b"]}))
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], row["successful"], row["ignored"]) == ("completed", 1, 1)
    assert settled == [[1, 1]]
    ((reason,),) = query("SELECT reason FROM outcomes WHERE run_id = %s AND target = 'a'", started.run.id)
    assert reason.startswith("it is gone")
    assert "\x00" not in reason
    async with kit.pool.connection() as connection:
        assert await settle_targets(connection, started.run, [Settled("a", "failed")]) == 0


class Dated(Targets):
    due_at: datetime | None = None


async def test_a_flow_names_what_its_schedules_start_and_is_told_when_it_was_due(start_kit, query):
    flow = replace(parent(), input=Dated, slot_key="mine-{schedule}-{due}", longest=timedelta(minutes=70))
    assert flow.stale_after == timedelta(minutes=70)
    kit = await start_kit(flow, CHILD, roles=frozenset({"api"}))
    async with kit.pool.connection() as connection:
        await create_schedule(connection, NewSchedule(flow, "often", "* * * * *"))
        query("UPDATE schedules SET handled_until = now() - interval '5 minutes', next_due_at = now()")
        await tick(kit.pool, {"parent": flow}, kit.due)
        ((key, given, due),) = query("SELECT r.event_key, r.input, s.due_at FROM runs r JOIN schedule_slots s"
                                     " ON s.run_id = r.id")  # fmt: skip
        assert key == f"mine-1-{int(due.timestamp() * 1000)}"
        assert datetime.fromisoformat(given["due_at"]) == due
        by_hand = await fire_by_hand(connection, "default", 1, flow, input={"targets": ["x"]})
        assert by_hand.run.event_key.startswith("mine-1-manual-")
        assert (by_hand.run.input["targets"], by_hand.run.schedule_id) == (["x"], 1)

        def linked(start: Start) -> Start:
            return replace(start, event_key="again", parent_run_id=by_hand.run.id, again=True)

        first = await fire_by_hand(connection, "default", 1, flow, start=linked)
        second = await fire_by_hand(connection, "default", 1, flow, start=linked)
        assert (first.run.id, first.deduplicated, second.deduplicated) == (second.run.id, False, True)
    assert query("SELECT parent_run_id FROM runs WHERE id = %s", first.run.id) == [(by_hand.run.id,)]
