"""The tables that docs/state_machines.md is drawn from are true: the database knows the same states, and whatever the
engine is seen to do is one of their moves."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta

import pytest

from ecluse.base.errors import PermanentError, TransientError
from ecluse.engine import Done, Flow, Ignored, Item, NewItem, Result, Start, WorkContext
from ecluse.engine.lead.story import Story
from tests.support.engine_flows import PATIENCE, Shop, Targets, given_targets, stage
from tests.support.runs import end_run, start_items, start_run, wait_for_run
from tools.state_machines import BEGIN, EFFECTS, ITEMS, LEASES, MACHINES, NEUTRAL, REPLICAS, RUNS, SLOTS, Machine

STATES = [
    ("runs", "state", set(NEUTRAL)),
    ("items", "status", set(ITEMS.meaning) - {"waiting", "in_flight"} | {"open"}),
    ("effects", "state", set(EFFECTS.meaning)),
    ("schedule_slots", "state", set(SLOTS.meaning)),
    ("leases", "end_cause", set(LEASES.meaning) - {"held"}),
    ("replicas", "state", set(REPLICAS.meaning)),
]


@pytest.mark.parametrize(("table", "column", "states"), STATES, ids=[table for table, _, _ in STATES])
def test_the_states_are_those_that_the_database_allows(one, table, column, states):
    constraint = one(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = %s::regclass AND conname = %s",
        table,
        f"{table}_{column}_check",
    )
    assert set(re.findall(r"'([^']+)'::text", constraint)) == states


def test_machines_have_names_of_their_own():
    assert len({machine.title for machine in MACHINES}) == len(MACHINES)


WATCHED: dict[str, tuple[Machine, str]] = {
    "runs": (RUNS, "{}.status"),
    "items": (
        ITEMS,
        "CASE WHEN {0}.status <> 'open' THEN {0}.status WHEN {0}.claim_id IS NULL THEN 'waiting' ELSE 'in_flight' END",
    ),
    "effects": (EFFECTS, "{}.state"),
    "replicas": (REPLICAS, "{}.state"),
}


@pytest.fixture
def moves(query):
    """Every move of every row, written down by the database itself."""
    query("CREATE TABLE moves (machine text, before text, after text)")
    for table, (_, state) in WATCHED.items():
        new, old = state.format("NEW"), state.format("OLD")
        query(
            f"CREATE FUNCTION moved_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE was text := '';"  # noqa: S608 - our own names
            f" BEGIN IF TG_OP = 'UPDATE' THEN was := {old}; END IF;"
            f" IF was <> ({new}) THEN INSERT INTO moves VALUES ('{table}', was, ({new})); END IF;"
            f" RETURN NEW; END $$"
        )
        query(f"CREATE TRIGGER moved AFTER INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION moved_{table}()")

    def seen(table):
        return {(before, after) for before, after in query("SELECT before, after FROM moves WHERE machine = %s", table)}

    return seen


def allowed(machine: Machine) -> set[tuple[str, str]]:
    return {(before, after) for before, to in machine.moves.items() for after in to}


async def every_way(_: WorkContext, item: Item) -> Result:
    match item.key.split("-")[0]:
        case "bad":
            raise PermanentError("refused", code="REFUSED")
        case "heals" if not item.round:
            raise TransientError("down", code="DOWN")
        case "gone":
            return Ignored("gone")
        case "slow":
            await asyncio.sleep(60)
    return Done()


async def test_whatever_the_engine_does_is_a_move_of_the_tables(start_kit, moves, query):
    read = stage(every_way, rounds=1, poll=timedelta(milliseconds=50), max_wait=timedelta(seconds=8))
    shop = Shop(
        {"well": ["well"], "lost": ["applied, 500"], "again": ["500"], "throttled": ["throttled"], "no": ["refused"]}
        | {"else": ["another client, 500"], "same": ["well"]}
    )
    write = shop.absolute(name="write")
    shop.prices["same"] = "2.00"

    async def story(run: Story) -> None:
        await run.select(given_targets)
        for one in (read, write):
            await run.fan_out(one)
            await run.gate(one)

    kit = await start_kit(f := Flow("test", (read, write), story, Targets), hands=20)
    targets = ["bad", "heals", "gone", "slow", "x" * 600, *shop.script, "same"]  # type: ignore[list-item]
    started = await start_run(kit, Start(f, "key", input={"targets": targets}))
    assert (await wait_for_run(kit, started.run.id, PATIENCE))["status"] == "partial"
    late = await start_items(kit, Start(f, "late"), read, [NewItem("slow-1")])
    await end_run(kit, late.run.id, "enough")
    await kit.stop()
    for table, (machine, _) in WATCHED.items():
        assert moves(table) <= allowed(machine), table
    assert moves("items") >= {
        *((BEGIN, "waiting"), ("waiting", "in_flight"), ("in_flight", "succeeded"), ("in_flight", "ignored")),
        *(("in_flight", "failed"), ("in_flight", "waiting"), ("failed", "waiting")),
    }
    assert moves("effects") >= {(BEGIN, "sending"), ("sending", "applied"), ("sending", "unknown")}
    assert moves("effects") >= {("sending", "rejected"), ("sending", "planned"), (BEGIN, "applied")}
    assert moves("replicas") == {(BEGIN, "live"), ("live", "left")}
