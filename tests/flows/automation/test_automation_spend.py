"""Budgets of a schedule and of a run: they hold the calls that count against them, also those of runs that were started
for their transcripts, and no others."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest

from ecluse.base.errors import Conflict
from ecluse.engine import Budget, set_budget
from ecluse.insight.waiting import why_run
from tests.support.automation_scenes import NO_AUDITS, held_up
from tests.support.transcription_world import LANE, TWELVE, until

OTHER = "9401"  # a fiche with twelve recordings, too
PRICES = {"prices": {"scribe_v1": Decimal(1)}}  # a minute; a recording has at most ten and a half
ONE_BY_ONE = {"recording_concurrency": 1}  # no refused call is tried again because another one has cost less
SPENT = "SELECT spent::text FROM spend_totals WHERE scope = %s AND subject_id = %s AND period <> 'month'"
SOON = """
SELECT count(*) FROM items WHERE status = 'open' AND stage = 'recordings' AND due_at < ecluse_now() + interval '1 min'
"""


async def put(world, scope, subject, amount):
    period = "all" if scope == "run" else "day"
    async with world.kit.pool.connection() as connection, connection.transaction():
        await set_budget(connection, Budget("default", scope, subject, period, Decimal(amount)))


async def why(world, run_id):
    async with world.kit.pool.connection() as connection:
        return await why_run(connection, "default", run_id)


def paid(world, fiche):
    calls = [one["ref"] for one in world.sandbox.ledger(vendor=LANE, kind="paid")]
    return sum(one.startswith(f"{fiche}-") for one in calls)


@pytest.mark.parametrize("scope", ["schedule", "run"])
async def test_a_budget_holds_the_calls_of_its_schedule_or_run_and_no_others_until_it_is_raised(automate, query, scope):
    world = await automate(speech=PRICES | ONE_BY_ONE)
    mine, other = [await world.schedule(fiche, **NO_AUDITS) for fiche in (TWELVE, OTHER)]
    async with held_up(world, LANE):
        held, free = await world.trigger(mine), await world.trigger(other)
        subject = held if scope == "run" else mine
        await put(world, scope, subject, "15")

    async def waits():
        told = await why(world, held)
        return told if told.blocked and not told.in_flight and told.groups[0].cause == "budget" else None

    told = await until(waits)
    name = f"budget of run {held}" if scope == "run" else f"day's budget of schedule {mine}"
    assert name in told.summary
    assert (await world.ended(free))["status"] == "completed"
    assert paid(world, OTHER) == 12
    assert 1 <= paid(world, TWELVE) < 12
    await until(lambda: query(SOON) == [(0,)])  # a call that was refused beside one in flight is tried once more
    ((spent,),) = query(SPENT, scope, subject)
    assert 0 < Decimal(spent) <= 15
    await put(world, scope, subject, "200")
    assert (await world.ended(held))["status"] == "completed"
    assert paid(world, TWELVE) == 12


async def test_a_start_of_a_schedule_whose_budget_is_used_up_is_refused_and_of_another_one_is_not(automate, query):
    world = await automate(speech=PRICES)
    mine, other = [await world.schedule(fiche, **NO_AUDITS) for fiche in (TWELVE, OTHER)]
    assert (await world.ended(await world.trigger(mine)))["status"] == "completed"
    ((spent,),) = query(SPENT, "schedule", mine)
    await put(world, "schedule", mine, spent)
    with pytest.raises(
        Conflict, match=f"day's budget of schedule {mine} is used up: .* Nothing was started"
    ) as refused:
        await world.trigger(mine)
    assert refused.value.code == "BUDGET_EXCEEDED"
    assert query("SELECT count(*) FROM runs WHERE schedule_id = %s", mine) == [(1,)]
    assert (await world.ended(await world.trigger(other)))["status"] == "completed"
    await put(world, "schedule", mine, str(Decimal(spent) + 200))
    assert await world.trigger(mine)


async def test_transcriptions_of_a_run_that_has_ended_stay_open_and_pay_once_its_budget_is_raised(automate, query):
    world = await automate(speech=PRICES | ONE_BY_ONE, transcription_wait=timedelta(seconds=2))
    schedule = await world.schedule(TWELVE, **NO_AUDITS)
    await put(world, "schedule", schedule, "1")
    run = await world.trigger(schedule)
    await put(world, "run", run, "1")
    assert (await world.ended(run))["failed_fiches"] == 1
    assert query("SELECT count(*) FROM runs WHERE parent_run_id = %s AND ended_at IS NULL", run) == [(1,)]
    assert paid(world, TWELVE) == 0
    await put(world, "schedule", schedule, "200")
    await put(world, "run", run, "200")
    await until(lambda: paid(world, TWELVE) == 12)
    await until(lambda: query("SELECT 1 FROM runs WHERE parent_run_id = %s AND ended_at IS NOT NULL", run))
    with pytest.raises(Conflict, match=f"Run {run} has ended") as refused:
        await put(world, "run", run, "300")
    assert refused.value.code == "ALREADY_ENDED"
