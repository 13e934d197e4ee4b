"""Gates of automation under trouble: what fails is tried again in rounds, what cannot heal ends a gate early, and a
gate whose time is up fails what is missing, whatever comes later. Time is moved, never waited for."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.engine import needing_lane, pause_lane, resume_lane
from ecluse.flows.transcriptions.start import start
from tests.support.automation_trouble import Deaf, failing, maker, move
from tests.support.fiche_rows import call, details, save
from tests.support.transcription_world import until

AGAIN = {"retry_failed": True, "max_retries": 2}
ONLY_FETCHED = {"run_transcription": False, "run_audits": False}
ONLY_TRANSCRIBED = {"run_audits": False}
PATIENT = timedelta(seconds=30)  # a gate that polls so rarely has to be woken
STAGES = "SELECT stage, round, end_cause FROM stages WHERE run_id = %s ORDER BY stage"


@pytest.fixture
def troubled(start_kit, sandbox, query):
    return maker(start_kit, sandbox, query)


def stages(world, run_id):
    return {stage: (round_, cause) for stage, round_, cause in world.query(STAGES, run_id)}


def attempts(world, run_id):
    return [event for (event,) in world.query("SELECT event_id FROM attempts WHERE run_id = %s ORDER BY id", run_id)]


# ── Details ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("AUT-97", "AUT-100", "AUT-78", "G-83", "G-79", "AUT-187")
async def test_fetches_that_failed_are_sent_again_when_nothing_moves_any_more(troubled, sandbox):
    world = await troubled()
    sandbox.set_faults([failing("crm", ["1001"], 4)])
    run_id = await world.trigger(await world.schedule("1000", "1001", **AGAIN, **ONLY_FETCHED))
    assert (await world.ended(run_id))["status"] == "completed"
    first, second = f"automation-{run_id}-fetch-1001", f"automation-{run_id}-fetch-1001-retry-1"
    assert attempts(world, run_id) == [first, first, first, second], "each round has three executions"
    assert stages(world, run_id) == {"fetch": (1, "done")}
    assert world.calls("crm").count("1000") == 1, "what is there is not fetched again"
    assert "Fiche details stalled; retrying incomplete fetches" in world.logs(run_id)
    lines = world.query("SELECT data FROM run_log WHERE run_id = %s AND message LIKE '%%(round 1)'", run_id)
    assert lines == [({"items": 1, "event_ids": [second]},)]


@pytest.mark.req("AUT-100", "AUT-106", "AUT-172", "G-30", "G-83")
async def test_fetches_are_sent_again_as_often_as_the_schedule_says_and_then_the_fiche_fails(troubled, sandbox):
    world = await troubled()
    sandbox.set_faults([failing("crm", ["1001"], 99)])
    run_id = await world.trigger(await world.schedule("1000", "1001", **AGAIN, **ONLY_FETCHED))
    assert (await world.ended(run_id))["status"] == "partial"
    assert len(attempts(world, run_id)) == 9
    assert stages(world, run_id) == {"fetch": (2, "done")}
    outcome, why = world.results(run_id)["1001"]
    assert (outcome, why.startswith("Fiche not found in cache: "), "503" in why) == ("failed", True, True)


@pytest.mark.req("AUT-100")
@pytest.mark.parametrize("how", [{"retry_failed": False, "max_retries": 5}, {"retry_failed": True, "max_retries": 0}])
async def test_without_both_a_wish_and_a_number_nothing_is_sent_again(troubled, sandbox, how):
    world = await troubled(details_poll=timedelta(seconds=20))
    sandbox.set_faults([failing("crm", ["1001"], 99)])
    run_id = await world.trigger(await world.schedule("1001", **how, **ONLY_FETCHED))
    assert (await world.ended(run_id))["status"] == "failed"
    assert (len(attempts(world, run_id)), stages(world, run_id)) == (3, {"fetch": (0, "done")})


@pytest.mark.req("G-30", "G-83", "AUT-171")
async def test_what_the_crm_refuses_for_good_ends_the_gate_though_rounds_are_left(troubled, sandbox):
    world = await troubled(details_poll=PATIENT)
    sandbox.set_faults([{"kind": "unauthorized", "vendor": "crm", "ids": ["1001"]}])
    run_id = await world.trigger(await world.schedule("1000", "1001", **AGAIN, **ONLY_FETCHED))
    assert (await world.ended(run_id))["status"] == "partial"
    assert (len(attempts(world, run_id)), stages(world, run_id)) == (1, {"fetch": (0, "done")})
    assert "401" in world.results(run_id)["1001"][1]


@pytest.mark.req("AUT-97", "AUT-106", "AUT-172", "G-82")
async def test_details_that_come_too_late_are_kept_and_change_no_outcome(troubled, query):
    fiches, model = Deaf("fiche", "1001"), Deaf("ask")
    world = await troubled(fiches=fiches, model=model, details_poll=PATIENT)
    await world.config()
    schedule = await world.schedule("1000", "1001")
    run_id = await world.trigger(schedule)
    await fiches.asked.wait()
    await until(lambda: query("SELECT 1 FROM fiche_cache WHERE fiche_id = '1000'"))
    move(query, timedelta(minutes=11))
    await model.asked.wait()
    late = ("failed", "Fiche not found in cache: Not finished in time (timeout/stall)")
    assert world.results(run_id) == {"1001": late}
    assert stages(world, run_id)["fetch"] == (0, "timeout")
    fiches.let.set()
    await until(lambda: query("SELECT 1 FROM fiche_cache WHERE fiche_id = '1001' AND fetched_at IS NOT NULL"))
    model.let.set()
    assert (await world.ended(run_id))["status"] == "partial"
    assert world.results(run_id) == {"1000": ("successful", None), "1001": late}
    assert query("SELECT DISTINCT fiche_id FROM audits") == [("1000",)]


@pytest.mark.req("AUT-97", "AUT-172", "G-30")
async def test_a_fiche_that_no_worker_reached_has_the_reason_it_waited_for(troubled, query):
    world = await troubled(details_poll=PATIENT)
    query("UPDATE lanes SET paused_at = now(), paused_by = 'ann', paused_reason = 'maintenance' WHERE name = 'crm'")
    run_id = await world.trigger(await world.schedule("1001", **AGAIN))
    await until(lambda: query("SELECT 1 FROM stages WHERE stage = 'fetch' AND fanned_out_at IS NOT NULL"))
    move(query, timedelta(minutes=11))
    assert (await world.ended(run_id))["status"] == "failed"
    why = world.results(run_id)["1001"][1]
    assert why.startswith("Fiche not found in cache: ")
    assert why.endswith(": lane crm was paused: maintenance")


# ── Transcripts ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("AUT-112", "AUT-79", "G-83", "AUT-188", "AUT-43", "G-88")
async def test_transcriptions_that_failed_are_started_again_under_a_name_of_their_own(troubled, sandbox, query):
    world = await troubled(speech={"attempts": 2})
    sandbox.set_faults([failing("elevenlabs", ["1001-2"], 2)])
    run_id = await world.trigger(await world.schedule("1000", "1001", **AGAIN, **ONLY_TRANSCRIBED))
    run = await world.ended(run_id)
    assert (run["status"], stages(world, run_id)["transcribe"]) == ("completed", (1, "done")), world.logs(run_id)
    children = query("SELECT event_key, status FROM runs WHERE parent_run_id = %s ORDER BY id", run_id)
    assert children == [
        (f"automation-{run_id}-transcribe-1000", "completed"),
        (f"automation-{run_id}-transcribe-1001", "partial"),
        (f"automation-{run_id}-transcribe-1001-retry-1", "completed"),
    ]
    assert "Retrying transcriptions (1/2)" in world.logs(run_id)
    assert run["transcriptions_run"] == 3, "whichever round they were written in"
    calls = [e["ref"] for e in sandbox.ledger(vendor="elevenlabs", kind="call")]
    assert sorted(calls) == ["1000-1", "1001-1", "1001-2", "1001-2", "1001-2"], "what is written is not paid for again"


@pytest.mark.req("AUT-177", "G-30", "AUT-112")
async def test_a_recording_without_an_address_is_named_and_ends_the_gate_though_rounds_are_left(troubled, query):
    world = await troubled(transcription_poll=PATIENT)
    run_id = await world.trigger(await world.schedule("1000", "9200", **AGAIN, **ONLY_TRANSCRIBED))
    assert (await world.ended(run_id))["status"] == "partial"
    assert stages(world, run_id)["transcribe"] == (0, "done")
    assert world.results(run_id)["9200"] == ("failed", "1 of 3 recordings has no URL in the CRM (9200-2)")
    assert "timeout/stall" not in " ".join(world.logs(run_id)), "it was not time that was missing"
    assert query("SELECT count(*) FROM runs WHERE parent_run_id = %s", run_id) == [(2,)]


@pytest.mark.req("AUT-113", "G-82", "G-30", "AUT-188")
async def test_a_transcript_that_comes_too_late_is_kept_and_changes_no_outcome(troubled, query):
    speech = Deaf("transcribe", "9200-1", "1001-1")
    world = await troubled(deaf_speech=speech, transcription_poll=PATIENT)
    run_id = await world.trigger(await world.schedule("1000", "1001", "9200", **ONLY_TRANSCRIBED))
    await speech.asked.wait()
    await until(lambda: query("SELECT count(*) FROM recordings WHERE has_transcription") == [(3,)])
    move(query, timedelta(minutes=16))
    ended = await world.ended(run_id)
    assert (ended["status"], stages(world, run_id)["transcribe"]) == ("partial", (0, "timeout"))
    results = world.results(run_id)
    assert results["1001"] == ("failed", "Transcription incomplete (timeout/stall)")
    first = "1 of 3 recordings has no URL in the CRM (9200-2); 1 more not transcribed in time"
    assert results["9200"] == ("failed", first), "the cause that was known first"
    assert ended["result_summary"]["reasons"] == {"TRANSCRIPTION_INCOMPLETE": 1, "NO_URL": 1}
    assert [line for line in world.logs(run_id) if "completed 3/6" in line] == [
        "Transcription failed (fiches): 1 × NO_URL - recordings completed 3/6",  # noqa: RUF001 - as it is known
        "Transcription timeout/stall - completed 3/6",
    ]
    child = "SELECT status FROM runs WHERE parent_run_id = %s AND event_key LIKE '%%-9200'"
    assert query(child, run_id) == [("running",)]
    speech.let.set()
    await until(lambda: query(child, run_id) == [("partial",)])
    assert query("SELECT has_transcription FROM recordings WHERE call_id = '9200-1'") == [(True,)]
    assert (world.run(run_id), world.results(run_id)) == (ended, results)


@pytest.mark.req("AUT-109", "AUT-110", "AUT-112", "G-82")
async def test_what_another_run_began_and_did_not_finish_is_done_by_the_run_itself(troubled, connection, query):
    speech = Deaf("transcribe")
    world = await troubled(deaf_speech=speech)
    await save(connection, ("1001", details(call("1001-1", f"{world.sandbox.url}/audio/recordings/1001-1.mp3"))))
    flow = world.kit.flow("transcription")
    (click,) = await start(connection, flow, "default", ["1001"], event_ids=["click"], refresh=False)
    await speech.asked.wait()
    # The CRM knows of two recordings; the run of the click has planned for one.
    run_id = await world.trigger(await world.schedule("1001", **ONLY_TRANSCRIBED))
    linked = "SELECT transcription_run_id FROM automation_run_fiches WHERE run_id = %s"
    await until(lambda: query(linked, run_id) == [(click.run_id,)])
    speech.let.set()
    run = await world.ended(run_id)
    assert (run["status"], run["transcriptions_run"]) == ("completed", 1), world.results(run_id)
    assert query("SELECT event_key, status FROM runs WHERE parent_run_id = %s", run_id) == [
        (f"automation-{run_id}-transcribe-1001", "completed")
    ]
    calls = [entry["ref"] for entry in world.sandbox.ledger(vendor="elevenlabs", kind="call")]
    assert sorted(calls) == ["1001-1", "1001-2"]


@pytest.mark.req("AUT-111", "AUT-164")
async def test_a_recording_that_comes_while_the_run_waits_is_not_waited_for(troubled, connection, query):
    speech = Deaf("transcribe")
    world = await troubled(deaf_speech=speech)
    run_id = await world.trigger(await world.schedule("1000", **ONLY_TRANSCRIBED))
    await speech.asked.wait()
    await save(connection, ("1000", details(call("1000-1"), call("1000-2"))))
    speech.let.set()
    assert (await world.ended(run_id))["status"] == "completed", world.results(run_id)
    assert query("SELECT call_id FROM recordings WHERE NOT has_transcription") == [("1000-2",)]


@pytest.mark.req("G-30", "AUT-175")
async def test_what_keeps_all_of_it_from_being_transcribed_is_part_of_each_error(troubled, query):
    world = await troubled(speech={"configured": False}, transcription_poll=PATIENT)
    run_id = await world.trigger(await world.schedule("1000", **ONLY_TRANSCRIBED))
    assert (await world.ended(run_id))["status"] == "failed"
    assert "ELEVENLABS_API_KEY" in world.results(run_id)["1000"][1]
    assert world.run(run_id)["result_summary"]["reasons"] == {"NOT_CONFIGURED": 1}


@pytest.mark.req("G-30", "AUT-113")
async def test_a_lane_that_was_paused_until_the_time_was_up_is_named(troubled, query):
    world = await troubled(transcription_poll=PATIENT)
    query("UPDATE lanes SET paused_at = now(), paused_by = 'a', paused_reason = 'no money' WHERE name = 'elevenlabs'")
    run_id = await world.trigger(await world.schedule("1000", **ONLY_TRANSCRIBED))
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings'"))
    move(query, timedelta(minutes=16))
    assert (await world.ended(run_id))["status"] == "failed"
    assert world.results(run_id)["1000"][1].endswith(": recording 1000-1: lane elevenlabs is paused: no money")


async def test_a_pause_that_stops_the_clock_fails_nothing_of_the_runs_that_wait_for_others(troubled, connection, query):
    """The items that wait are those of other runs; the deadline is ours."""
    world = await troubled(transcription_poll=PATIENT)
    await pause_lane(connection, "elevenlabs", reason="no money", by="ann", stop_clock=True)
    run_id = await world.trigger(await world.schedule("1000", "1001", **ONLY_TRANSCRIBED))
    await until(lambda: query("SELECT count(*) FROM items WHERE stage = 'recordings'") == [(3,)])
    (needs,) = await needing_lane(connection, "elevenlabs")
    assert (needs.run_id, needs.stage, needs.waiting) == (run_id, "transcribe", 3)
    move(query, timedelta(minutes=50))
    move(query, timedelta(minutes=50))
    (moved,) = await resume_lane(connection, "elevenlabs", reason="paid", by="ann")
    assert (moved.run_id, moved.stage, moved.by > timedelta(minutes=99)) == (run_id, "transcribe", True)
    assert moved.deadline_at == needs.deadline_at + moved.by
    assert (await world.ended(run_id))["status"] == "completed", world.results(run_id)
    assert stages(world, run_id)["transcribe"] == (0, "done")


# ── Audits ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("AUT-119", "AUT-80", "AUT-118", "G-30", "G-83")
async def test_only_the_audits_that_failed_are_sent_again(troubled, sandbox, query):
    world = await troubled()
    one, two = await world.config(), await world.config(name="Second")
    schedule = await world.schedule("1000", "1008", **AGAIN)
    sandbox.set_faults([failing("llm", [f"automation-1-audit-1008-{two}"], 3)])
    run_id = await world.trigger(schedule)
    assert run_id == 1
    assert (await world.ended(run_id))["status"] == "completed", world.results(run_id)
    names = [f"automation-{run_id}-audit-{fiche}-{config}" for fiche in ("1000", "1008") for config in (one, two)]
    calls = [entry["ref"] for entry in sandbox.ledger(vendor="llm", kind="call")]
    assert sorted(calls) == sorted([*names[:3], *[names[3]] * 3, f"{names[3]}-retry-1"])
    assert stages(world, run_id)["audit"] == (1, "done")
    assert query("SELECT DISTINCT status, is_latest FROM audits") == [("completed", True)]
    assert "Audits stalled; sending the missing ones again (round 1)" in world.logs(run_id)


@pytest.mark.req("AUT-121", "AUT-174", "AUT-118", "G-82", "G-30", "AUT-189")
async def test_an_audit_that_comes_too_late_is_kept_and_changes_no_outcome(troubled, query):
    model = Deaf("ask", "audit-1008")
    world = await troubled(model=model, audit_poll=PATIENT)
    await world.config()
    run_id = await world.trigger(await world.schedule("1000", "1008", **AGAIN))
    await model.asked.wait()
    await until(lambda: query("SELECT 1 FROM audits WHERE status = 'completed'"))
    move(query, timedelta(minutes=31))
    ended = await world.ended(run_id)
    assert (ended["status"], stages(world, run_id)["audit"]) == ("partial", (0, "timeout"))
    late = ("failed", "Audit incomplete (timeout/stall)")
    assert world.results(run_id) == {"1000": ("successful", None), "1008": late}
    assert query("SELECT status FROM audits WHERE fiche_id = '1008'") == [("failed",)]
    assert any(line.startswith("Audit timeout/stall - finished 1/2") for line in world.logs(run_id))
    model.let.set()
    await until(lambda: query("SELECT 1 FROM audits WHERE fiche_id = '1008' AND status = 'completed' AND is_latest"))
    assert (world.run(run_id), world.results(run_id)["1008"]) == (ended, late)


@pytest.mark.req("G-30", "AUT-113", "AUT-118", "G-82")
async def test_rounds_are_counted_for_each_stage(troubled, sandbox, query):
    world = await troubled(speech={"attempts": 1})
    config = await world.config()
    schedule = await world.schedule("1000", retry_failed=True, max_retries=1)
    sandbox.set_faults([
        failing("crm", ["1000"], 3),
        failing("elevenlabs", ["1000-1"], 1),
        failing("llm", [f"automation-1-audit-1000-{config}"], 3),
    ])  # fmt: skip
    run_id = await world.trigger(schedule)
    assert run_id == 1
    assert (await world.ended(run_id))["status"] == "completed", world.results(run_id)
    assert stages(world, run_id) == {"fetch": (1, "done"), "transcribe": (1, "done"), "audit": (1, "done")}
