"""Which request starts a run and which is attached to one: clicks, batches, parents, tenants, and callers that wait."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ecluse.access.envelope import Refused
from ecluse.base.errors import InvalidInput
from ecluse.engine import Start, start_runs
from ecluse.flows.transcriptions.flow import FicheTranscribe
from ecluse.flows.transcriptions.rules import Counts
from ecluse.flows.transcriptions.wait import start_and_wait
from tests.support.fiche_rows import call, details, save
from tests.support.transcription_world import FIVE, UNKNOWN, World, until
from tests.support.vendor_clients import connect


@pytest.mark.req("TRX-57", "TRX-49", "G-20", "TRX-08", "TRX-83")
async def test_who_asks_while_a_run_is_at_work_is_attached_to_it(world, query):
    w = await world()
    await w.pause()
    (first,) = await w.start(FIVE)
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings'"))
    (second,) = await w.start(FIVE)
    assert (first.attached, second.attached, second.run_id) == (False, True, first.run_id)
    assert second.event_id != first.event_id
    assert query("SELECT count(*) FROM runs") == [(1,)]
    (check,) = [
        payload
        for name, payload in w.events(first.run_id)
        if name == "transcription.status_check" and payload.get("attached")
    ]
    assert (check["is_complete"], check["total_recordings"], check["run_id"]) == (False, 5, str(first.run_id))
    assert [name for name, _ in w.events(first.run_id)].count("transcription.started") == 1
    assert query("SELECT count(*) FROM run_log WHERE event_id = %s", second.event_id) == [(1,)]
    assert query("SELECT run_id, waiter_run_id FROM run_waiters") == [(first.run_id, None)]
    await w.resume()
    assert (await w.ended(first))["successful"] == 5
    assert len(w.paid()) == 5


@pytest.mark.req("G-19", "TRX-10", "TRX-11")
async def test_a_day_s_event_is_repeated_under_its_next_name_once_its_run_has_ended(world):
    w = await world()
    day = [f"transcribe-{UNKNOWN}-2026-03-02", f"transcribe-{FIVE}-2026-03-02"]
    await w.pause()
    gone, first = await w.start(UNKNOWN, FIVE, event_ids=day, again=True)
    await w.ended(gone)
    again = await w.start(UNKNOWN, FIVE, event_ids=day, again=True)
    assert [(one.event_id, one.attached) for one in again] == [(f"{day[0]}-retry-1", False), (day[1], True)]
    assert again[1].run_id == first.run_id
    await w.resume()
    await w.ended(first)
    await w.ended(again[0])
    third = await w.start(UNKNOWN, FIVE, event_ids=day, again=True)
    assert [one.event_id for one in third] == [f"{day[0]}-retry-2", f"{day[1]}-retry-1"]
    for one in third:
        await w.ended(one)


@pytest.mark.req("ENG-20")
async def test_a_repeated_event_gets_its_own_run_whichever_run_holds_the_fiche_now(world, query):
    w = await world()
    (first,) = await w.start("1000", event_ids=["first"])
    await w.ended(first)
    query("DELETE FROM speech_results")
    query("UPDATE recordings SET has_transcription = false")
    await w.pause()
    (second,) = await w.start("1000", event_ids=["second"])
    assert not second.attached
    (again,) = await w.start("1000", event_ids=["first"])
    assert (again.run_id, again.event_id, again.attached) == (first.run_id, "first", True)
    assert query("SELECT count(*) FROM runs") == [(2,)]
    await w.resume()
    await w.ended(second)


async def test_a_click_that_meets_a_batch_is_attached_and_the_other_way_round(world):
    w = await world()
    await w.pause()
    (click,) = await w.start(FIVE)
    (batch,) = await w.start(FIVE, event_ids=[f"transcribe-{FIVE}-2026-03-02"], again=True)
    assert (batch.run_id, batch.attached, batch.event_id) == (click.run_id, True, click.event_id)
    await w.resume()
    await w.ended(click)


@pytest.mark.req("TRX-57", "TRX-80")
async def test_of_many_who_ask_at_once_one_starts_a_run(world, query):
    w = await world()
    await w.pause()
    asked = await asyncio.gather(*(w.start(FIVE, "9001", event_ids=[f"a{n}", f"b{n}"]) for n in range(8)))
    assert query("SELECT count(*) FROM runs") == [(2,)]
    assert sum(not one.attached for started in asked for one in started) == 2
    assert len({(one.fiche_id, one.run_id) for started in asked for one in started}) == 2
    await w.resume()
    for one in asked[0]:
        await w.ended(one)


async def test_a_run_started_by_other_means_is_refused_while_the_fiche_is_taken(world, query):
    w = await world()
    await w.pause()
    (first,) = await w.start(FIVE)
    async with w.kit.pool.connection() as connection:
        with pytest.raises(Refused, match=f"run {first.run_id}") as refused:
            await start_runs(connection, [Start(w.made.flow, "other", input={"fiche_id": FIVE})])
        with pytest.raises(InvalidInput, match="priority"):
            await start_runs(connection, [Start(w.made.flow, "x", input={"fiche_id": "1", "priority": "urgent"})])
    assert refused.value.status == 409
    assert query("SELECT count(*) FROM runs") == [(1,)]
    await w.resume()
    await w.ended(first)


@pytest.mark.req("G-82")
async def test_a_fiche_that_its_parent_has_fetched_is_not_fetched_again(world, connection, query):
    w = await world()
    url = f"{w.sandbox.url}/audio/recordings/x-1.mp3"
    await save(connection, ("77", details(call("x-1", url), call("x-2", url))), ("78", details()))
    parent = await w.transcribe("1000")
    started = await w.start("77", "78", refresh=False, parent_run_id=parent["id"])
    assert [(await w.ended(one))["status"] for one in started] == ["completed", "completed"]
    assert w.calls("crm") == ["1000"]
    assert query("SELECT DISTINCT parent_run_id FROM runs WHERE parent_run_id IS NOT NULL") == [(parent["id"],)]
    payloads = dict(w.events(started[1].run_id))
    assert (payloads["transcription.completed"]["noop"], payloads["transcription.started"]["target_total"]) == (True, 0)


@pytest.mark.req("TRX-53", "G-82")
async def test_only_what_is_there_and_has_no_transcript_is_a_target(world, query):
    w = await world()
    await w.transcribe(FIVE)
    query("UPDATE recordings SET has_transcription = false WHERE call_id IN ('9000-2', '9000-3')")
    query("UPDATE recordings SET removed_at = ecluse_now() WHERE call_id IN ('9000-3', '9000-4')")
    (started,) = await w.start(FIVE, refresh=False)
    await w.ended(started)
    payloads = dict(w.events(started.run_id))["transcription.started"]
    assert (payloads["total_recordings"], payloads["already_transcribed"], payloads["target_total"]) == (3, 2, 1)
    assert query("SELECT key FROM items WHERE run_id = %s", started.run_id) == [("9000-2",)]


@pytest.mark.req("G-81")
async def test_the_same_fiche_of_two_tenants_is_two_fiches(world, query, connection, sandbox):
    await connect(connection, sandbox, "rival")
    w = await world(per_fiche=1)
    rival = World(w.kit, w.made, w.sandbox, query, tenant="rival")
    await w.pause()
    (mine,) = await w.start("1001")
    (theirs,) = await rival.start("1001")
    assert not theirs.attached
    await w.resume()
    for one in (mine, theirs):
        assert (await w.ended(one))["successful"] == 2
    # Nor does one tenant get what the other has paid for.
    assert w.paid() == ["1001-1", "1001-1", "1001-2", "1001-2"]
    assert query("SELECT tenant_id, count(*) FROM speech_results GROUP BY 1 ORDER BY 1") == [
        ("default", 2),
        ("rival", 2),
    ]


@pytest.mark.req("TRX-05", "TRX-55", "TRX-25", "G-45")
async def test_who_waits_has_the_transcripts_when_the_wait_is_over(world):
    w = await world()
    wanted = FicheTranscribe(fiche_id=FIVE)
    assert wanted.wait_for_completion
    done = await start_and_wait(w.kit, "default", wanted, max_wait=timedelta(seconds=60))
    assert (done.status, done.timed_out, done.total, done.transcribed, done.pending) == ("completed", False, 5, 5, 0)
    assert done.counts["processed"] == 5
    assert done.as_dict()["run_id"] == str(done.run_id)
    # Long over before the wait begins, and found all the same.
    again = await start_and_wait(w.kit, "default", wanted, max_wait=timedelta(seconds=60))
    assert (again.status, again.timed_out, again.reason) == ("completed", False, "no_targets")


@pytest.mark.req("TRX-56", "TRX-57", "G-74", "TRX-28")
async def test_an_attached_caller_waits_for_that_run_and_learns_when_the_time_is_up(world, query):
    w = await world()
    await w.pause()
    (first,) = await w.start(FIVE)
    at_once = FicheTranscribe(fiche_id=FIVE, wait_for_completion=False)
    looked = await start_and_wait(w.kit, "default", at_once, max_wait=timedelta(seconds=60))
    assert (looked.attached, looked.run_id, looked.status, looked.timed_out) == (True, first.run_id, None, False)
    wanted = FicheTranscribe(fiche_id=FIVE)
    late = await start_and_wait(w.kit, "default", wanted, max_wait=timedelta(seconds=0.05))
    assert (late.attached, late.timed_out, late.status, late.run_id) == (True, True, None, first.run_id)
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings'"))
    late = await start_and_wait(w.kit, "default", wanted, max_wait=timedelta(seconds=0.05))
    assert (late.timed_out, late.counts) == (True, Counts(total_recordings=5, target_total=5).as_dict())
    waiting = asyncio.create_task(start_and_wait(w.kit, "default", wanted, max_wait=timedelta(seconds=60)))
    await w.resume()
    done = await waiting
    assert (done.run_id, done.status, done.pending) == (first.run_id, "completed", 0)


@pytest.mark.req("TRX-55", "G-21")
async def test_a_caller_that_waits_for_a_fiche_that_is_gone_gets_that_as_the_reason(world):
    w = await world()
    done = await start_and_wait(w.kit, "default", FicheTranscribe(fiche_id=UNKNOWN), max_wait=timedelta(seconds=60))
    assert (done.status, done.timed_out, done.total) == ("failed", False, 0)
    assert "404" in (done.reason or "")


@pytest.mark.req("G-77")
async def test_what_is_urgent_goes_first_and_what_is_not_goes_last(world, query):
    w = await world()
    await w.pause()
    for fiche_id, priority in (("1000", "low"), ("1008", "normal"), ("1016", "high")):
        await w.start(fiche_id, priority=priority)
    await until(lambda: query("SELECT count(*) FROM items WHERE stage = 'recordings'") == [(3,)])
    assert query("SELECT key FROM items WHERE stage = 'recordings' ORDER BY order_at") == [
        ("1016-1",),
        ("1008-1",),
        ("1000-1",),
    ]
