"""Decisions of an automation run, as pure functions: which fiches it picks, which it drops and why, its summary, who is
notified of its end, and how the knobs configure its stages."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from ecluse.base.errors import PermanentError, TransientError
from ecluse.bootstrap import automation_config
from ecluse.engine.lead.gate import StageProgress, Wait, decide
from ecluse.engine.model.retry import GiveUp, Retry
from ecluse.engine.model.retry import decide as decide_retry
from ecluse.flows.audits.flow import Config as AuditConfig
from ecluse.flows.automation.eligibility import judge
from ecluse.flows.automation.events import summary, wanted
from ecluse.flows.automation.flow import Automation
from ecluse.flows.automation.select import Listed, pick, why_none
from ecluse.flows.automation.selection_model import Selection, crm_date
from ecluse.flows.fiches.cache import FicheState
from ecluse.settings import Settings
from tests.support.seeded import seeded

NOW = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)


def selection(**given) -> Selection:
    return Selection.model_validate({"mode": "manual", **given})


def listed(fiche_id: str, groupe: str | None = None, *, audited: bool = False) -> Listed:
    return Listed(fiche_id, groupe, audited)


@pytest.mark.req("AUT-68", "AUT-69", "AUT-70", "AUT-71", "AUT-163", "G-47")
@pytest.mark.parametrize(
    ("found", "given", "picked", "dropped"),
    [
        ([listed("2"), listed("1"), listed("2")], {}, ["2", "1"], {}),
        ([listed("1", audited=True), listed("2")], {}, ["1", "2"], {}),
        ([listed("1", audited=True), listed("2")], {"only_unaudited": True}, ["2"], {"audited": 1}),
        ([listed("1", "A"), listed("2", "B"), listed("3")], {"groupes": ["A"]}, ["1", "3"], {"groupe": 1}),
        ([listed("1"), listed("2")], {"only_with_recordings": True, "max_recordings_per_fiche": 1}, ["1", "2"], {}),
        ([listed("1"), listed("1"), listed("2"), listed("3")], {"max_fiches": 2}, ["1", "2"], {"max_fiches": 1}),
        (
            [listed("1", "B"), listed("2", "A", audited=True), listed("3", "A"), listed("4", "A")],
            {"groupes": ["A"], "only_unaudited": True, "max_fiches": 1},
            ["3"],
            {"groupe": 1, "audited": 1, "max_fiches": 1},
        ),
        ([], {"max_fiches": 3}, [], {}),
    ],
)
def test_only_filters_on_the_sales_list_are_applied_at_selection(found, given, picked, dropped):
    assert pick(found, selection(**given)) == (picked, dropped)


@pytest.mark.req("AUT-59", "AUT-60", "G-42")
def test_a_selection_of_nothing_says_why():
    dated = selection(mode="filter", date_range="yesterday")
    assert why_none(selection(), []) == "no_fiches_manual"
    assert why_none(dated, []) == "no_dates"
    assert why_none(dated, [date(2026, 3, 1)]) == "no_fiches"
    assert crm_date(date(2026, 3, 1)) == "01/03/2026"


def state(details: str = "ready", **given) -> FicheState:
    known = {
        "fiche_id": "1",
        "fiche_cache_id": 1,
        "details": details,
        "groupe": "A",
        "recordings_count": 2,
        "has_recordings": True,
        "fetched_at": NOW,
        "sales_date": None,
        "total_recordings": 2,
        "transcribed": 0,
    }
    return FicheState(**{**known, **given})


EVERYTHING = {"groupes": ["B"], "only_with_recordings": True}


@pytest.mark.req("AUT-101", "AUT-102", "AUT-103", "AUT-105", "G-42")
@pytest.mark.parametrize(
    ("fiche", "given", "limit", "code", "reason"),
    [
        (state("not_found", recordings_count=0), EVERYTHING, 1, "NOT_FOUND", "Fiche not found (404)"),
        (state(), EVERYTHING, 1, "GROUPE", "Groupe 'A' is not among those selected"),
        (state(groupe=None), EVERYTHING, 1, "GROUPE", "It has no groupe"),
        (state(), {"only_with_recordings": True}, 1, "TOO_MANY_RECORDINGS", "2 recordings, and 1 is the most"),
        (
            state(recordings_count=0, has_recordings=False),
            {"only_with_recordings": True},
            1,
            "NO_RECORDINGS",
            "It has no recordings",
        ),
    ],
)
def test_the_first_filter_that_hits_names_the_reason(fiche, given, limit, code, reason):
    assert judge("1", fiche, selection(**given), limit, None) == ("1", "ignored", code, reason)


@pytest.mark.req("AUT-53", "AUT-102", "AUT-103", "AUT-104", "AUT-105", "G-47")
@pytest.mark.parametrize(
    ("fiche", "given", "limit"),
    [
        (state(), {}, None),
        (state(), {"groupes": ["A", "B"], "only_with_recordings": True}, 2),
        (state(groupe=None), {}, None),
        (state(recordings_count=0, has_recordings=False), {}, None),
        (state(recordings_count=500), {}, None),
        # Their number is unknown, but the CRM said that there are some; or there are rows of them.
        (state(recordings_count=None, total_recordings=0), {"only_with_recordings": True}, None),
        (state(recordings_count=None, has_recordings=None), {"only_with_recordings": True}, 2),
    ],
)
def test_whatever_no_filter_hits_goes_on(fiche, given, limit):
    assert judge("1", fiche, selection(**given), limit, None) is None


@pytest.mark.req("AUT-98", "AUT-106", "AUT-172")
@pytest.mark.parametrize(
    ("fiche", "text"),
    [
        (None, "Fiche not found in cache"),
        (
            state("missing", sales_date=date(2026, 3, 1), fetched_at=None),
            "Fiche details not fetched (still sales-list-only cache)",
        ),
        (state("missing", fetched_at=None), "Fiche details not fetched (cache incomplete)"),
        (state("missing", sales_date=date(2026, 3, 1)), "Fiche details not fetched (cache incomplete)"),
    ],
)
def test_a_fiche_without_details_fails_before_any_filter_and_says_what_is_known(fiche, text):
    assert judge("1", fiche, selection(**EVERYTHING), 1, None) == ("1", "failed", "DETAILS_NOT_FETCHED", text)
    because = judge("1", fiche, selection(), None, "crm GET /fiches/1: 503")
    assert because is not None
    assert because.reason == f"{text}: crm GET /fiches/1: 503"


def ended(**given):
    known = {
        "status": "completed",
        "end_cause": "normal",
        "error_code": None,
        "error_message": None,
        "error_details": None,
        "ended_by": None,
        "cancelled": 0,
        "successful": 2,
        "failed": 0,
        "ignored": 1,
        "seconds": 1.5004,
        "result_summary": None,
        "transcriptions_run": 3,
        "audits_run": 4,
        "reasons": {"NOT_FOUND": 1},
    }
    return summary({**known, **given})


@pytest.mark.req("AUT-30", "AUT-43", "AUT-46", "AUT-190", "G-42")
def test_a_summary_is_status_counters_and_duration_and_what_is_ignored_does_not_count():
    assert ended() == {
        "status": "completed",
        "total_fiches": 2,
        "successful_fiches": 2,
        "failed_fiches": 0,
        "ignored_fiches": 1,
        "transcriptions_run": 3,
        "audits_run": 4,
        "duration_ms": 1500,
        "reasons": {"NOT_FOUND": 1},
    }
    partial = ended(status="partial", failed=3)
    assert (partial["total_fiches"], partial["failed_fiches"], "reason" in partial) == (5, 3, False)


@pytest.mark.req("AUT-59", "AUT-60", "G-42")
@pytest.mark.parametrize(
    ("ignored", "known", "reason"),
    [
        (0, {"reason": "no_fiches_manual"}, "no_fiches_manual"),
        (0, {"reason": "no_dates"}, "no_dates"),
        (0, None, "no_fiches"),
        (3, None, "all_ignored"),
    ],
)
def test_an_end_without_successes_and_failures_has_a_reason(ignored, known, reason):
    summed_up = ended(successful=0, ignored=ignored, result_summary=known)
    assert (summed_up["reason"], summed_up["total_fiches"]) == (reason, 0)


@pytest.mark.req("AUT-45", "AUT-126")
def test_an_end_that_is_not_normal_says_what_happened():
    summed_up = ended(status="failed", end_cause="catastrophic", error_code="BUG", error_message="KeyError: 'x'")
    assert (summed_up["end_cause"], summed_up["error_code"], summed_up["error"]) == (
        "catastrophic",
        "BUG",
        "KeyError: 'x'",
    )
    assert not {"ended_by", "cancelled_fiches"} & set(summed_up)


@pytest.mark.req("G-89")
def test_an_end_on_request_says_who_asked_for_it_and_what_was_never_finished():
    given = {"end_cause": "operator", "error_message": "wrong day", "ended_by": "laptop"}
    summed_up = ended(status="partial", failed=3, cancelled=2, **given)
    assert (summed_up["end_cause"], summed_up["ended_by"], summed_up["error"]) == ("operator", "laptop", "wrong day")
    assert (summed_up["failed_fiches"], summed_up["cancelled_fiches"], summed_up["total_fiches"]) == (3, 2, 5)


@pytest.mark.req("AUT-127", "G-43")
@pytest.mark.parametrize(
    ("normal", "status", "incomplete", "asked_on_complete", "asked_on_error", "both"),
    [
        (True, "completed", False, True, False, True),
        (True, "completed", True, True, True, True),
        (True, "partial", False, True, True, True),
        (True, "failed", False, True, True, True),
        (False, "failed", False, False, True, True),
    ],
)
def test_notification_depends_on_how_the_run_ended_and_on_the_schedules_switches(
    normal, status, incomplete, asked_on_complete, asked_on_error, both
):
    assert wanted(normal, status, incomplete, True, False) is asked_on_complete
    assert wanted(normal, status, incomplete, False, True) is asked_on_error
    assert wanted(normal, status, incomplete, True, True) is both
    assert wanted(normal, status, incomplete, False, False) is False


def made_of(monkeypatch, **knobs: str) -> Automation:
    for name, value in knobs.items():
        monkeypatch.setenv(name, value)
    config = automation_config(Settings())
    return Automation(config, AuditConfig(), None, None)  # type: ignore[arg-type]  # not run here


@pytest.mark.req("AUT-87", "AUT-88", "AUT-89", "AUT-90", "AUT-94", "G-87")
def test_the_knobs_by_default(monkeypatch):
    made = made_of(monkeypatch)
    stages = [(stage.max_wait, stage.poll) for stage in (made.fetch, made.transcribe, made.audit)]
    minutes, seconds = (lambda n: timedelta(minutes=n)), (lambda n: timedelta(seconds=n))
    assert stages == [(minutes(10), seconds(20)), (minutes(15), seconds(30)), (minutes(30), seconds(60))]
    assert (made.config.chunk, made.config.max_recordings) == (200, None)
    assert Settings().FICHE_SALES_CACHE_CONCURRENCY == 10


@pytest.mark.req("AUT-87", "AUT-88", "AUT-89", "AUT-90", "AUT-94")
def test_each_knob_reaches_what_it_steers(monkeypatch):
    made = made_of(
        monkeypatch,
        AUTOMATION_SEND_EVENT_CHUNK_SIZE="7",
        AUTOMATION_FICHE_DETAILS_MAX_WAIT_MS="61000",
        AUTOMATION_FICHE_DETAILS_POLL_INTERVAL_SECONDS="1.5",
        AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS="62000",
        AUTOMATION_TRANSCRIPTION_POLL_INTERVAL_SECONDS="2.5",
        AUTOMATION_AUDIT_MAX_WAIT_MS="63000",
        AUTOMATION_AUDIT_POLL_INTERVAL_SECONDS="3.5",
        AUTOMATION_MAX_RECORDINGS_PER_FICHE="9",
    )
    stages = [(stage.max_wait, stage.poll) for stage in (made.fetch, made.transcribe, made.audit)]
    assert stages == [(timedelta(seconds=60 + n), timedelta(seconds=0.5 + n)) for n in (1, 2, 3)]
    assert (made.config.chunk, made.config.max_recordings) == (7, 9)


@pytest.mark.req("G-83")
@pytest.mark.parametrize("stage", ["revalidate", "fetch"])
def test_the_crm_is_asked_three_times_a_second_and_four_apart(monkeypatch, stage):
    policy = getattr(made_of(monkeypatch), stage).retry

    def after(executions: int, error: Exception) -> Retry | GiveUp:
        return decide_retry(error, executions=executions, policy=policy, now=NOW, chance=seeded(1))

    assert after(1, TransientError("503")) == Retry(NOW + timedelta(seconds=1))
    assert after(2, TransientError("503")) == Retry(NOW + timedelta(seconds=4))
    assert after(3, TransientError("503")) == GiveUp(permanent=False)
    assert after(1, PermanentError("403")) == GiveUp(permanent=True)


@pytest.mark.req("AUT-200", "G-45")
@pytest.mark.parametrize(("stage", "fixed"), [("fetch", 30), ("transcribe", 30), ("audit", 30)])
def test_a_gate_looks_soon_at_first_then_ever_more_rarely_up_to_its_interval(monkeypatch, stage, fixed):
    """`fixed`: how often it would look in all its time if it always waited for the interval."""
    gate = getattr(made_of(monkeypatch), stage)
    look = StageProgress(NOW, NOW, NOW + gate.max_wait, NOW, True, 0, 100, 50, 0, 0, 0, in_flight=50)
    pauses: list[float] = []
    while isinstance(decision := decide(look, gate), Wait):
        pauses.append(decision.seconds)
        look = StageProgress(*{**vars(look), "now": look.now + timedelta(seconds=decision.seconds)}.values())
    interval = gate.poll.total_seconds()
    assert pauses[0] == 1
    assert sorted(pauses[:-1]) == pauses[:-1]
    assert max(pauses) == interval
    assert fixed <= len(pauses) <= 3 * fixed
