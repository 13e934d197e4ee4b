"""Runs that people ask for: what is checked before there is one, what it is given, and the fiches that failed again."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.flows.automation import events, schedules
from ecluse.flows.automation.plan import Changes
from ecluse.flows.automation.selection_model import Override
from ecluse.flows.automation.start import start
from ecluse.realtime.channels import channels_of
from ecluse.vendors.guarded import GuardedHttp
from tests.support.automation_rows import FLOW, end_run, new_schedule, redriven


async def switch(connection, schedule_id, **changes):
    guard = GuardedHttp(())
    await schedules.update(connection, FLOW, "default", schedule_id, Changes(**changes), secrets=None, guard=guard)


@pytest.mark.req("AUT-04", "AUT-06", "G-41")
async def test_a_run_and_the_event_that_says_so_are_there_together(connection, one):
    schedule = await new_schedule(connection)
    override = Override.model_validate({"mode": "manual", "ficheIds": "7 8", "maxFiches": None})
    started = await start(connection, FLOW, "default", schedule["id"], override, correlation_id="me")
    run, given = started.run, {"mode": "manual", "fiche_ids": ["7", "8"], "max_fiches": None}
    assert run.event_key.startswith("automation-manual-")
    assert one("SELECT schedule_id, correlation_id, parent_run_id, input->'override_fiche_selection' FROM runs") == (
        schedule["id"], "me", None, given,
    )  # fmt: skip
    assert one(
        "SELECT event_key, aggregate, correlation_id, payload FROM events_outbox WHERE event_type = 'automation/run'"
    ) == (
        f"{run.event_key}:automation/run",
        f"run:{run.id}",
        "me",
        {
            "schedule_id": str(schedule["id"]),
            "run_id": str(run.id),
            "job_id": f"automation-run-{run.id}",
            "due_at": None,
            "override_fiche_selection": given,
        },
    )


@pytest.mark.req("AUT-07")
async def test_subscribers_of_a_schedule_get_its_new_run_at_once(connection, query):
    schedule = (await new_schedule(connection))["id"]
    run = (await start(connection, FLOW, "default", schedule, None)).run
    await events.begun(connection, run)
    ((payload,),) = query("SELECT payload FROM events_outbox WHERE event_type = 'automation.schedule.run_created'")
    assert payload["run_id"] == str(run.id)
    assert f"private-job-automation-schedule-{schedule}" in channels_of(payload, private=True)
    written = query("SELECT count(*) FROM events_outbox WHERE event_type = 'automation/run'")
    assert written == [(1,)], "the run itself writes it under the same key"


@pytest.mark.req("AUT-17", "G-41")
async def test_what_cannot_be_started_leaves_no_row(connection, one):
    schedule = (await new_schedule(connection))["id"]
    for tenant, number in (("default", 4711), ("acme", schedule)):
        with pytest.raises(NotFound):
            await start(connection, FLOW, tenant, number, None)
    with pytest.raises(InvalidInput, match="fiche_ids go with mode 'manual'"):
        await start(connection, FLOW, "default", schedule, Override(fiche_ids=["1"]))
    await switch(connection, schedule, is_active=False)
    with pytest.raises(Conflict) as refused:
        await start(connection, FLOW, "default", schedule, None)
    assert refused.value.code == "SCHEDULE_INACTIVE"
    await schedules.delete(connection, "default", schedule)
    with pytest.raises(NotFound):
        await start(connection, FLOW, "default", schedule, None)
    assert one("SELECT (SELECT count(*) FROM runs) + (SELECT count(*) FROM events_outbox)") == 0


async def test_the_fiches_that_failed_are_run_again_as_they_were_asked_for(connection, query):
    schedule = (await new_schedule(connection))["id"]
    override = Override.model_validate({"useRlm": True, "dateRange": "today", "maxFiches": 1})
    first = (await start(connection, FLOW, "default", schedule, override)).run.id
    await end_run(connection, first, f5="failed", f6="successful", f7="ignored", f4="failed")
    again = await redriven(connection, first)
    ((parent, given),) = query(
        "SELECT parent_run_id, input->'override_fiche_selection' FROM runs WHERE id <> %s", first
    )
    assert parent == first
    assert given == {"mode": "manual", "fiche_ids": ["4", "5"], "max_fiches": None, "use_rlm": True}
    while_open = await redriven(connection, first)
    assert (while_open.run.id, while_open.deduplicated) == (again.run.id, True)
    await end_run(connection, again.run.id, f4="successful", f5="failed")
    once_more = await redriven(connection, first)
    assert (once_more.deduplicated, once_more.run.id != again.run.id) == (False, True)
    deeper = await redriven(connection, again.run.id)
    assert dict(deeper.run.input)["override_fiche_selection"]["fiche_ids"] == ["5"]
    written = query("SELECT count(*) FROM events_outbox WHERE event_type = 'automation/run'")
    assert written == [(4,)]


async def test_two_redrives_at_once_are_one_run(dsn, connection, one):
    schedule = (await new_schedule(connection))["id"]
    first = (await start(connection, FLOW, "default", schedule, None)).run.id
    await end_run(connection, first, f5="failed")

    async def again():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as own:
            return (await redriven(own, first)).run.id

    assert len(set(await asyncio.gather(*(again() for _ in range(5))))) == 1
    assert one("SELECT count(*) FROM runs") == 2


@pytest.mark.parametrize(
    ("how", "code"),
    [("open", "RUN_NOT_ENDED"), ("nothing failed", "NOTHING_FAILED"), ("deleted", "SCHEDULE_GONE"),
     ("off", "SCHEDULE_INACTIVE")],
)  # fmt: skip
async def test_what_cannot_be_redriven_is_refused(connection, one, how, code):
    schedule = (await new_schedule(connection))["id"]
    run = (await start(connection, FLOW, "default", schedule, None)).run.id
    if how != "open":
        await end_run(connection, run, f5="ignored" if how == "nothing failed" else "failed")
    if how == "deleted":
        await schedules.delete(connection, "default", schedule)
    if how == "off":
        await switch(connection, schedule, is_active=False)
    with pytest.raises(Conflict) as refused:
        await redriven(connection, run)
    assert refused.value.code == code
    assert one("SELECT count(*) FROM runs") == 1


@pytest.mark.req("AUT-85", "AUT-86", "AUT-124", "AUT-40", "AUT-59")
async def test_a_schedule_says_how_its_last_run_ended_and_how_often_it_ran(automate, query):
    """Without any fiche no vendor is called."""
    world = await automate()
    schedule = await world.schedule()
    stands = "SELECT last_run_status, total_runs, successful_runs, partial_runs, failed_runs FROM automation_schedules"
    assert query(stands) == [(None, 0, 0, 0, 0)]
    run = await world.ended(await world.trigger(schedule))
    assert (run["status"], run["result_summary"]["reason"]) == ("completed", "no_fiches_manual")
    assert query(stands) == [("success", 1, 1, 0, 0)]
    assert query("SELECT s.last_run_at >= r.created_at FROM automation_schedules s JOIN runs r ON true") == [(True,)]


@pytest.mark.req("AUT-84", "AUT-85", "G-29", "AUT-135")
async def test_a_run_beside_the_one_that_holds_the_schedule_does_not_free_it(connection, one):
    schedule = (await new_schedule(connection))["id"]
    holder, beside = [(await start(connection, FLOW, "default", schedule, None)).run for _ in range(2)]
    assert one("SELECT holding_run_id, last_run_id FROM automation_schedules") == (holder.id, beside.id)
    for run in (holder, beside):
        await events.begun(connection, run)
    assert one("SELECT last_run_status FROM automation_schedules") == "running"
    await end_run(connection, beside.id, f1="failed")
    await events.ended(connection, [beside])
    assert one("SELECT last_run_status, failed_runs FROM automation_schedules") == ("running", 1)
    await end_run(connection, holder.id, f1="successful", f2="failed")
    await events.ended(connection, [holder])
    assert one("SELECT last_run_status, total_runs, partial_runs FROM automation_schedules") == ("partial", 2, 1)
