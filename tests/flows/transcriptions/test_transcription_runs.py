"""Runs of transcription as a user sees them: real engine, real HTTP, the sandbox's ledger as the witness."""

from __future__ import annotations

from collections import Counter

import pytest

from ecluse.engine.model.retry import backoff
from ecluse.flows.transcriptions.config import Config
from ecluse.flows.transcriptions.flow import Transcription
from tests.support.seeded import seeded
from tests.support.transcription_world import FIVE, NONE, ONE_BLANK, TWELVE, UNKNOWN, until


def names(events):
    return [name for name, _ in events]


STORY = [
    "fiche/transcribe",
    "transcription.status_check",
    "transcription.started",
    "transcription.completed",
    "fiche/transcribed",
]


@pytest.mark.req("TRX-01", "TRX-04", "TRX-22", "TRX-25", "TRX-52", "TRX-53", "TRX-54", "TRX-65", "TRX-75", "TRX-84")
@pytest.mark.req("TRX-02", "TRX-23", "G-92", "TRX-45", "TRX-44", "TRX-41", "TRX-42", "ENG-11", "G-82", "G-93")
async def test_a_fiche_is_fetched_its_recordings_are_transcribed_and_events_are_emitted(world, query, one):
    w = await world()
    (started,) = await w.start(FIVE, priority="high")
    run = await w.ended(started)
    assert (run["status"], run["selected"], run["successful"], run["failed"]) == ("completed", 5, 5, 0)
    calls = [f"{FIVE}-{n}" for n in range(1, 6)]
    assert w.calls("crm") == [FIVE]
    assert w.paid() == calls
    rows = query(
        "SELECT r.call_id, has_transcription, transcription_id <> '', transcription_text <> '', transcription_data,"
        " transcribed_at IS NOT NULL, f.id::text = i.payload->>'fiche_cache_id', i.payload->>'fiche_id',"
        " i.payload->>'call_id' = i.key AND jsonb_typeof(i.payload->'fiche_cache_id') = 'string'"
        " FROM recordings r JOIN fiche_cache f ON f.id = r.fiche_cache_id"
        " JOIN items i ON i.stage = 'recordings' AND i.key = r.call_id ORDER BY r.call_id"
    )
    assert rows == [(call, True, True, True, None, True, True, FIVE, True) for call in calls]
    assert names(w.events(started.run_id)) == STORY
    payloads = dict(w.events(started.run_id))
    assert payloads["fiche/transcribe"] == {
        "fiche_id": FIVE,
        "run_id": str(started.run_id),
        "priority": "high",
        "wait_for_completion": False,
        "attached": False,
    }
    assert payloads["transcription.started"]["target_total"] == 5
    completed = payloads["transcription.completed"]
    assert (completed["processed"], completed["cached"], completed["failed"], completed["noop"]) == (5, 0, 0, False)
    assert payloads["fiche/transcribed"]["status"] == "completed"
    assert one("SELECT count(*) FROM leases WHERE ended_at IS NULL") == 0
    assert one("SELECT count(*) FROM effects") == 0, "reads and paid calls: nothing is written at a vendor"
    assert [stage.paid for stage in w.made.flow.stages] == [False, False, True]


@pytest.mark.req("TRX-66", "TRX-24", "TRX-74", "TRX-39", "ENG-77", "TRX-19", "TRX-72", "TRX-73")
async def test_subscribers_get_events_of_each_recording_and_of_the_progress(world):
    w = await world(recording_concurrency=1)
    run = await w.transcribe(TWELVE)
    calls = sorted(f"{TWELVE}-{n}" for n in range(1, 13))
    await until(lambda: len(w.emitted("recording_completed")) == 12)
    assert sorted(event["call_id"] for event in w.emitted("recording_started")) == calls
    assert sorted(event["call_id"] for event in w.emitted("recording_completed")) == calls
    for live in w.lives:
        assert (live.payload["fiche_id"], live.payload["run_id"]) == (TWELVE, str(run["id"]))
    order = [(live.event.rpartition(".")[2], live.payload.get("call_id")) for live in w.lives]
    for call in calls:
        assert order.index(("recording_started", call)) < order.index(("recording_completed", call))
    counted = [event["processed"] for event in w.emitted("progress")]
    assert counted == sorted(set(counted))
    assert {count // 3 for count in counted} >= {1, 2, 3, 4}
    assert counted[-1] == 12


@pytest.mark.req("TRX-46", "TRX-47", "TRX-18")
async def test_a_transcript_is_stored_in_pieces_by_speaker_and_the_words_are_not_kept_twice(world, query, one):
    w = await world()
    await w.transcribe("1000")
    pieces = query(
        "SELECT position, speaker, start_s, end_s, text FROM recording_transcription_chunks ORDER BY position"
    )
    assert [piece[0] for piece in pieces] == list(range(len(pieces)))
    assert {piece[1] for piece in pieces} == {"speaker_0", "speaker_1"}
    assert all(start < end for _, _, start, end, _ in pieces)
    text, data = one("SELECT transcription_text, transcription_data FROM recordings")
    assert " ".join(piece[4] for piece in pieces) == text
    assert data is None
    assert one("SELECT result FROM items WHERE stage = 'recordings'").keys() == {
        "cached",
        "transcription_id",
        "characters",
    }


@pytest.mark.req("TRX-58", "TRX-59", "G-22", "G-20")
@pytest.mark.parametrize("fiche_id", [FIVE, NONE], ids=["all transcribed", "no recordings"])
async def test_where_nothing_is_to_be_done_the_run_says_so_and_ends(world, fiche_id):
    w = await world()
    await w.transcribe(fiche_id)
    paid = w.paid()
    (started,) = await w.start(fiche_id)
    assert (await w.ended(started))["status"] == "completed"
    assert w.paid() == paid
    assert names(w.events(started.run_id)) == STORY
    payloads = dict(w.events(started.run_id))
    assert payloads["transcription.status_check"]["is_complete"] is True
    assert payloads["transcription.completed"]["noop"] is True
    assert payloads["transcription.completed"]["target_total"] == 0


@pytest.mark.req("TRX-61", "G-21", "ENG-95", "TRX-86", "G-23")
@pytest.mark.parametrize("fiche_id", [UNKNOWN, str(int(UNKNOWN) + 1)], ids=["404", "200 that says so"])
async def test_a_fiche_that_is_gone_fails_its_run_at_once(world, query, fiche_id):
    w = await world()
    (started,) = await w.start(fiche_id)
    run = await w.ended(started)
    assert (run["status"], run["error_code"], run["selected"]) == ("failed", "NOT_FOUND", 0)
    assert w.calls("crm") == [fiche_id], "asked once: it is an answer"
    assert names(w.events(started.run_id)) == ["fiche/transcribe", "transcription.failed", "fiche/transcribed"]
    payloads = dict(w.events(started.run_id))
    assert "404" in payloads["transcription.failed"]["reason"]
    assert (payloads["fiche/transcribed"]["status"], payloads["fiche/transcribed"]["counts"]["target_total"]) == (
        "failed",
        0,
    )
    assert query("SELECT details_success, details_message FROM fiche_cache WHERE fiche_id = %s", fiche_id) == [
        (False, "NOT_FOUND")
    ]
    status = await w.status(fiche_id)
    assert (status["known"], status["pending"], status["percentage"]) == (False, None, None)


@pytest.mark.req("G-82", "G-23")
async def test_a_fiche_that_was_never_fetched_is_fetched_even_where_that_is_not_asked_for(world):
    """Otherwise a run would complete although the recordings of its fiche are unknown."""
    w = await world()
    (unknown, gone) = await w.start(FIVE, UNKNOWN, refresh=False)
    assert ((await w.ended(unknown))["successful"], w.calls("crm").count(FIVE)) == (5, 1)
    assert (await w.ended(gone))["error_code"] == "NOT_FOUND"


@pytest.mark.req("TRX-26", "G-21")
@pytest.mark.parametrize("refresh", [True, False])
async def test_without_a_key_a_run_fails_at_once_and_nothing_is_tried(world, refresh):
    w = await world(configured=False)
    (started,) = await w.start(FIVE, refresh=refresh)
    run = await w.ended(started)
    assert (run["status"], run["error_code"]) == ("failed", "NOT_CONFIGURED")
    assert "ELEVENLABS_API_KEY" in run["reason"]
    assert w.calls("crm") + w.calls() == []
    assert names(w.events(started.run_id))[-2:] == ["transcription.failed", "fiche/transcribed"]


@pytest.mark.req("G-83", "G-21")
async def test_a_crm_that_stays_down_is_asked_three_times_and_fails_the_run(world, sandbox):
    """Of one fiche, once that has lasted for longer than there is doubt: none, here."""
    sandbox.set_faults([{"kind": "server_error", "vendor": "crm"}])
    w = await world()
    (started,) = await w.start(FIVE)
    run = await w.ended(started)
    assert run["status"] == "failed"
    assert w.calls("crm") == [FIVE] * 3
    assert names(w.events(started.run_id))[-2:] == ["transcription.failed", "fiche/transcribed"]


@pytest.mark.req("TRX-43", "TRX-68", "TRX-70", "TRX-14", "TRX-94")
@pytest.mark.parametrize("fiche_id", [ONE_BLANK, str(int(ONE_BLANK) + 1)], ids=["blank", "null"])
async def test_a_recording_without_a_url_fails_without_a_call_and_the_others_do_not(world, fiche_id):
    w = await world()
    (started,) = await w.start(fiche_id)
    run = await w.ended(started)
    assert (run["status"], run["successful"], run["failed"]) == ("partial", 2, 1)
    assert w.calls() == w.paid() == [f"{fiche_id}-1", f"{fiche_id}-3"]
    await until(lambda: w.emitted("recording_failed"))
    (failed,) = w.emitted("recording_failed")
    assert (failed["call_id"], failed["error_code"]) == (f"{fiche_id}-2", "NO_URL")
    assert dict(w.events(started.run_id))["transcription.completed"]["failed"] == 1
    status = await w.status(fiche_id)
    assert (status["total"], status["transcribed"], status["pending"], status["percentage"]) == (3, 2, 1, 66)
    second = status["recordings"][1]
    assert (second["url_missing"], second["has_transcription"], second["state"]) == (True, False, "failed")
    assert second["reason"].startswith("NO_URL")


@pytest.mark.req("TRX-67", "TRX-36", "ENG-43")
async def test_what_may_heal_is_tried_six_times(world, sandbox, one):
    faults = [
        {"kind": "throttle", "retry_after": None},
        {"kind": "server_error", "status": 408},
        {"kind": "server_error"},
    ]
    sandbox.set_faults([{**fault, "vendor": "elevenlabs", "ids": [f"1003-{n}"]} for n, fault in enumerate(faults, 1)])
    w = await world()
    run = await w.transcribe("1003")
    assert (run["status"], run["successful"], run["failed"]) == ("partial", 1, 3)
    assert Counter(w.calls()) == {"1003-1": 6, "1003-2": 6, "1003-3": 6, "1003-4": 1}
    assert one("SELECT count(*) FROM attempts") == 18


@pytest.mark.req("TRX-67", "ENG-43", "G-21")
async def test_what_the_provider_refuses_is_tried_once(world, sandbox):
    sandbox.set_faults(
        [
            {"kind": "refused", "status": status, "code": "no", "vendor": "elevenlabs", "ids": [f"1003-{n}"]}
            for n, status in enumerate((400, 401, 403, 422), 1)
        ]
    )
    w = await world()
    (started,) = await w.start("1003")
    run = await w.ended(started)
    assert (run["status"], run["failed"]) == ("failed", 4)
    assert sorted(w.calls()) == [f"1003-{n}" for n in range(1, 5)]
    # Each was tried, and each failed: that is a completion.
    payloads = dict(w.events(started.run_id))
    assert (payloads["transcription.completed"]["failed"], payloads["fiche/transcribed"]["status"]) == (4, "failed")


@pytest.mark.req("TRX-67")
async def test_a_provider_that_says_when_is_left_alone_until_then(world, sandbox):
    sandbox.set_faults([{"kind": "throttle", "retry_after": 1, "vendor": "elevenlabs", "times": 1}])
    w = await world()
    assert (await w.transcribe("1000"))["status"] == "completed"
    first, second = (entry["at"] for entry in sandbox.ledger(vendor="elevenlabs", kind="call"))
    assert second - first >= 0.99


@pytest.mark.req("TRX-37", "TRX-36", "TRX-35", "G-83")
def test_budgets_pauses_and_pace_are_those_of_the_contract_by_default():
    made = Transcription(Config(), lambda _: None)
    speech, crm = made.recordings.retry, made.refresh.retry
    assert (speech.executions, speech.base, speech.multiplier, speech.longest, speech.jitter) == (6, 2, 2, 60, 0)
    assert [backoff(crm, n, seeded()) for n in (1, 2)] == [1, 4]
    assert crm.executions == 3
    assert made.recordings.lane.per_second == pytest.approx(10 / 60)


@pytest.mark.req("G-80")
async def test_a_call_whose_answer_got_lost_is_repeated_and_counted_as_maybe_paid(world, sandbox):
    sandbox.set_faults([{"kind": "applied_then_reset", "vendor": "elevenlabs", "times": 1}])
    w = await world()
    assert (await w.transcribe("1000"))["status"] == "completed"
    assert w.paid() == ["1000-1"] * 2
    assert (await w.status("1000"))["run"]["maybe_paid"] == 1


@pytest.mark.req("TRX-62", "TRX-63")
async def test_what_was_paid_for_is_not_paid_for_again_though_its_recording_was_lost(world, query):
    w = await world()
    await w.transcribe("1001")
    query("DELETE FROM recordings")
    (started,) = await w.start("1001")
    assert (await w.ended(started))["successful"] == 2
    assert w.paid() == ["1001-1", "1001-2"]
    completed = dict(w.events(started.run_id))["transcription.completed"]
    assert (completed["processed"], completed["cached"], completed["transcribed"]) == (2, 2, 0)
    assert query("SELECT count(*) > 2 FROM recording_transcription_chunks") == [(True,)]
    await until(lambda: len(w.emitted("recording_completed")) == 4)
    assert [event["cached"] for event in w.emitted("recording_completed")] == [False, False, True, True]


async def test_where_we_fetch_recordings_ourselves_the_provider_gets_the_file(world, sandbox):
    w = await world(access={"upload": True, "allowed_networks": ["127.0.0.0/8"]})
    assert (await w.transcribe("1001"))["status"] == "completed"
    assert sorted(w.calls("audio")) == ["1001-1", "1001-2"]
    assert {entry["value"]["by"] for entry in sandbox.ledger(vendor="elevenlabs", kind="paid")} == {"file"}


AUDIO_FAULTS = {
    "busy": ({"kind": "throttle", "retry_after": 100, "times": 1}, "AUDIO_UNAVAILABLE", "completed"),
    "broken off": ({"kind": "truncated", "times": 1}, "AUDIO_UNAVAILABLE", "completed"),
    "gone": ({"kind": "not_found"}, "NOT_FOUND", "failed"),
    "elsewhere": ({"kind": "redirect", "location": "http://169.254.169.254/"}, "FORBIDDEN_URL", "failed"),
}


@pytest.mark.req("G-80")
@pytest.mark.parametrize(("fault", "code", "status"), AUDIO_FAULTS.values(), ids=AUDIO_FAULTS)
async def test_what_is_wrong_where_recordings_are_kept_is_not_the_provider_s_fault(
    world, sandbox, query, fault, code, status
):
    sandbox.set_faults([{**fault, "vendor": "audio"}])
    w = await world(access={"upload": True, "allowed_networks": ["127.0.0.0/8"]})
    assert (await w.transcribe("1000"))["status"] == status
    assert query("SELECT DISTINCT error_code, ambiguous, maybe_paid FROM attempts") == [(code, False, False)]
    assert query("SELECT held_until FROM lanes WHERE name = 'elevenlabs'") == [(None,)]


@pytest.mark.req("ENG-74", "TRX-87")
async def test_every_fact_of_an_event_can_be_read_again_later(world):
    w = await world()
    (started,) = await w.start("9200")  # one of three recordings has no URL
    await w.ended(started)
    status = await w.status("9200")
    run, recordings = status["run"], {one["call_id"]: one for one in status["recordings"]}
    payloads = {name: payload for name, payload in w.events(started.run_id) if "." in name}
    assert set(payloads) == {"transcription.status_check", "transcription.started", "transcription.completed"}
    for payload in payloads.values():
        assert (payload["run_id"], payload["fiche_id"]) == (str(run["id"]), status["fiche_id"])
        for fact in ("total_recordings", "already_transcribed", "target_total"):
            assert payload.get(fact, run[fact]) == run[fact]
    for fact in ("processed", "cached", "failed", "status"):
        assert payloads["transcription.completed"][fact] == run[fact]
    for name, state in (("recording_completed", "transcribed"), ("recording_failed", "failed")):
        for payload in w.emitted(name):
            assert recordings[payload["call_id"]]["state"] == state
            assert (payload.get("error") or "") in (recordings[payload["call_id"]]["reason"] or "")
    assert {len(w.emitted(name)) for name in ("recording_completed", "recording_failed")} == {2, 1}
