"""Payloads of the events of a transcription run, and the states of its recordings: pure decisions, by tables."""

from __future__ import annotations

from datetime import date

import pytest

from ecluse.base.ids import retry_id
from ecluse.flows.fiches.ids import in_names
from ecluse.flows.transcriptions import rules
from ecluse.flows.transcriptions.queries import assembled, functions
from ecluse.flows.transcriptions.rules import Attempt, Counts, End
from ecluse.vendors.elevenlabs import Speech

DONE = Counts(total_recordings=5, already_transcribed=2, target_total=3, processed=3, cached=1, failed=1)


@pytest.mark.req("TRX-48")
def test_locks_are_named_as_they_always_were():
    assert rules.fiche_lock("12") == "lock:transcription:fiche:12"
    assert rules.recording_lock("12", "call-7") == "lock:transcription:recording:12:call-7"


def test_names_made_of_ids_are_never_those_of_another_fiche():
    assert rules.recording_lock("a:b", "c") != rules.recording_lock("a", "b:c")
    assert retry_id(in_names("9"), 1) != in_names("9-retry-1")
    assert in_names("FR/9 é") == "FR/9 é"


@pytest.mark.req("TRX-08", "TRX-10", "G-81")
def test_a_click_is_named_by_its_millisecond_and_a_batch_by_its_day():
    assert rules.click_id("12", 1772445600123) == "transcribe-12-1772445600123"
    assert rules.day_id("12", date(2026, 3, 2)) == "transcribe-12-2026-03-02"


@pytest.mark.req("G-23")
@pytest.mark.parametrize(
    ("total", "transcribed", "shown"), [(0, 0, 100), (3, 0, 0), (3, 1, 33), (3, 2, 66), (1000, 999, 99), (3, 3, 100)]
)
def test_a_percentage_is_rounded_down_and_full_only_where_nothing_is_pending(total, transcribed, shown):
    assert rules.percentage(total, transcribed) == shown


def test_a_result_is_paid_for_once_whatever_signs_its_url():
    key = rules.speech_key("c1", "https://calls.test/a.mp3?sig=1", Speech())
    assert key == rules.speech_key("c1", "https://calls.test/a.mp3?sig=2&x=3", Speech())
    others = [
        ("c2", "https://calls.test/a.mp3", Speech()),
        ("c1", "https://calls.test/b.mp3", Speech()),
        ("c1", "https://other.test/a.mp3", Speech()),
        ("c1", "https://calls.test/a.mp3", Speech(model="scribe_v2")),
        ("c1", "https://calls.test/a.mp3", Speech(diarize=False)),
    ]
    assert len({key, *(rules.speech_key(*other) for other in others)}) == 6


@pytest.mark.req("TRX-89")
def test_what_signs_a_url_or_names_a_user_stays_out_of_the_log():
    assert rules.without_query("https://u:p@calls.test/a.mp3?X-Amz-Signature=abc") == "https://calls.test/a.mp3?***"
    assert rules.without_query("https://calls.test/a.mp3") == "https://calls.test/a.mp3"


@pytest.mark.req("TRX-98", "TRX-60", "ENG-77", "TRX-19")
def test_every_payload_says_at_least_what_the_contract_wants():
    end = End("partial", "normal", True, None, None)
    payloads = {
        "status_check": rules.status_check("12", 7, DONE),
        "started": rules.started("12", 7, DONE, "high"),
        "recording": rules.recording_over("12", 7, "call-1"),
        "recording failed": rules.recording_over("12", 7, "call-1", code="NO_URL", error="none"),
        "progress": rules.progress("12", 7, DONE),
        "completed": rules.completed("12", 7, DONE, end),
        "failed": rules.failed("12", 7, DONE, end),
    }
    assert all((payload["fiche_id"], payload["run_id"]) == ("12", "7") for payload in payloads.values())
    wanted = {
        "status_check": {"is_complete", "total_recordings", "already_transcribed"},
        "started": {"is_complete", "total_recordings", "already_transcribed", "target_total"},
        "recording": {"call_id"},
        "recording failed": {"call_id", "error"},
        "progress": {"processed", "cached", "failed", "target_total"},
        "completed": {"processed", "cached", "failed", "target_total"},
        "failed": {"reason"},
    }
    assert {name: fields - payloads[name].keys() for name, fields in wanted.items()} == {name: set() for name in wanted}
    assert payloads["failed"]["reason"]


@pytest.mark.req("TRX-60")
@pytest.mark.parametrize(("total", "already", "complete"), [(3, 3, True), (3, 2, False), (0, 0, True)])
def test_a_check_says_whether_all_is_there(total, already, complete):
    assert rules.status_check("12", 7, Counts(total, already))["is_complete"] is complete


@pytest.mark.req("TRX-60")
def test_before_the_plan_nothing_is_complete_and_nothing_counted():
    check = rules.status_check("12", 7, None)
    assert (check["is_complete"], check["total_recordings"], check["already_transcribed"]) == (False, None, None)


@pytest.mark.req("TRX-97", "TRX-24")
def test_a_recording_that_is_over_says_how_whichever_way_it_went():
    assert rules.recording_over("12", 7, "c", cached=True) == {
        "fiche_id": "12",
        "run_id": "7",
        "call_id": "c",
        "ok": True,
        "cached": True,
    }
    failed = rules.recording_over("12", 7, "c", code="NO_URL", error="none")
    assert (failed["ok"], failed["cached"], failed["error"], failed["error_code"]) == (False, False, "none", "NO_URL")


@pytest.mark.req("TRX-97")
def test_the_end_event_has_status_counts_and_reason():
    end = End("failed", "catastrophic", False, "NOT_FOUND", "The CRM has no fiche 12 (404).")
    payload = rules.transcribed("12", 7, Counts(), end)
    assert payload["status"] == "failed"
    assert payload["reason"] == "NOT_FOUND: The CRM has no fiche 12 (404)."
    assert payload["counts"].keys() >= {"processed", "cached", "failed", "target_total"}


@pytest.mark.req("G-21", "TRX-86")
@pytest.mark.parametrize(
    ("end", "tried"),
    [
        (End("completed", "normal", True, None, None), True),
        (End("failed", "normal", True, None, None), True),  # each of them failed: all the same, each was tried
        (End("failed", "catastrophic", False, "NOT_FOUND", "404"), False),
        (End("failed", "operator", True, None, "wrong day"), False),
    ],
)
def test_a_run_is_completed_when_every_target_was_tried(end, tried):
    assert rules.tried(end) is tried


@pytest.mark.req("G-22", "TRX-59")
def test_a_run_with_nothing_to_do_says_so_in_its_completion():
    end = End("completed", "normal", True, None, "no_targets")
    assert rules.completed("12", 7, Counts(4, 4, 0), end)["noop"] is True
    assert rules.completed("12", 7, DONE, end)["noop"] is False


@pytest.mark.req("TRX-39", "TRX-74", "TRX-82")
@pytest.mark.parametrize(
    ("emitted", "processed", "target", "due"),
    [(0, 1, 7, False), (0, 3, 7, True), (3, 4, 7, False), (2, 7, 9, True), (6, 7, 7, True), (7, 7, 7, False)],
)
def test_progress_is_emitted_with_every_third_and_once_at_the_end(emitted, processed, target, due):
    assert rules.progress_due(emitted, Counts(target, 0, target, processed), 3) is due


@pytest.mark.req("TRX-14", "G-23")
@pytest.mark.parametrize(
    ("transcribed", "attempt", "waiting", "state"),
    [
        (True, Attempt("failed", False, "X", "x"), None, ("transcribed", None)),
        (False, None, None, ("not_tried", None)),
        (False, Attempt("failed", True, "NO_URL", "none"), None, ("failed", "NO_URL: none")),
        (
            False,
            Attempt("failed", True, "RUN_ENDED", "The run ended first"),
            None,
            ("not_tried", "The run ended first"),
        ),
        (False, Attempt("open", True, None, None), None, ("running", None)),
        (False, Attempt("open", False, None, None), ("throttled", "10 a minute"), ("throttled", "10 a minute")),
        (False, Attempt("open", False, "X", "x"), ("retry", "at noon"), ("throttled", "at noon")),
        (False, Attempt("open", False, None, None), ("no worker", "start one"), ("queued", "start one")),
        (False, Attempt("open", False, None, None), None, ("queued", None)),
    ],
)
def test_the_state_of_a_recording_distinguishes_tried_from_untried(transcribed, attempt, waiting, state):
    assert rules.state_of(transcribed, attempt, waiting) == state


@pytest.mark.req("TRX-81")
@pytest.mark.parametrize(("recordings", "minutes"), [(25, 3), (10, 1), (11, 2), (0, 0)])
def test_the_cap_says_how_long_it_takes_at_least(recordings, minutes):
    assert rules.minutes_needed(recordings, 10) == minutes


def stage(**counts):
    return {"waiting": 0, "in_flight": 0, "done": 0, "failed": 0} | counts


@pytest.mark.req("TRX-96")
@pytest.mark.parametrize(
    ("stages", "planned", "over", "states"),
    [
        ({"refresh": stage(waiting=1)}, False, False, ("queued", "waiting")),
        ({"refresh": stage(in_flight=1)}, False, False, ("running", "waiting")),
        ({"refresh": stage(failed=1)}, False, True, ("failed", "done")),
        ({"refresh": stage(done=1), "recordings": stage(waiting=2)}, True, False, ("done", "waiting")),
        ({"refresh": stage(done=1), "recordings": stage(done=2)}, True, False, ("done", "missing")),
        ({"refresh": stage(done=1), "recordings": stage(done=2)}, True, True, ("done", "done")),
    ],
)
def test_each_function_has_a_state_of_its_own(stages, planned, over, states):
    shown = functions(stages, planned=planned, over=over)
    assert (shown["transcribe-fiche"]["state"], shown["finalize-fiche-transcription"]["state"]) == states
    each = stages.get("recordings", stage())
    assert shown["transcribe-recording"]["queued"] == each["waiting"]
    assert shown["transcribe-recording"]["done"] == each["done"]


@pytest.mark.req("TRX-12", "TRX-76")
def test_coverage_counts_the_recordings_there_are_now():
    recordings = [{"has_transcription": n < 2} for n in range(3)]
    shown = assembled("12", "ready", recordings, None, (), None)
    assert (shown["total"], shown["transcribed"], shown["pending"], shown["percentage"]) == (3, 2, 1, 66)
    assert (shown["activeRun"], shown["run"], shown["processed"]) == (None, None, None)


@pytest.mark.req("G-23")
@pytest.mark.parametrize(
    ("details", "coverage"),
    [("ready", (True, 0, 0, 100)), ("missing", (False, None, None, None)), ("not_found", (False, None, None, None))],
)
def test_of_a_fiche_that_is_not_known_nothing_is_said_to_be_complete(details, coverage):
    shown = assembled("12", details, [], None, (), None)
    assert (shown["known"], shown["total"], shown["pending"], shown["percentage"]) == coverage
    assert (shown["details"], shown["transcribed"]) == (details, 0)
