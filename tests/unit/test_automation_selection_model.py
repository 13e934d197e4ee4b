"""Which fiches: what a selection may say, what an override makes of it, which days a preset is, what cannot fit."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ecluse.base import cron
from ecluse.base.errors import InvalidInput
from ecluse.base.validation import readable
from ecluse.flows.automation.selection_model import (
    Override,
    Selection,
    budget_warning,
    crm_date,
    dates_to_query,
    merged,
    truncation_warning,
)

RANGE = {"mode": "date_range", "date_range": "yesterday"}
CUSTOM = {"mode": "filter", "date_range": "custom", "start_date": "2026-01-30", "end_date": "2026-02-02"}


@pytest.mark.req("AUT-58")
@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("1, 2 3\n4\t5,,6 ,7,", ["1", "2", "3", "4", "5", "6", "7"]),
        (["3", " 1 ", "3", "2", "1"], ["3", "1", "2"]),
        ("3 1 3", ["3", "1"]),
        ("", []),
        (" , \n", []),
        ([], []),
        (["00000000000000000012"], ["00000000000000000012"]),
        ("A-17 FR/9", ["A-17", "FR/9"]),
        (["1 2", "Né, le 3", "١٢", "x" * 200], ["1 2", "Né, le 3", "١٢", "x" * 200]),
    ],
)
def test_ids_are_split_trimmed_and_taken_once_in_the_order_given(given, ids):
    for spelling in ("fiche_ids", "ficheIds"):
        assert Selection.model_validate({"mode": "manual", spelling: given}).fiche_ids == ids


@pytest.mark.parametrize("given", [[""], ["1", "  "], ["1" * 201], ["a\x00"], ["\ud800"], [1], [None], 7, {},
                                   ["1"] * 50_001])  # fmt: skip
def test_ids_that_are_none_are_refused(given):
    with pytest.raises(ValidationError):
        Selection.model_validate({"mode": "manual", "fiche_ids": given})


@pytest.mark.req("G-34")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "date_range"}, "needs a date_range"),
        ({"mode": "filter"}, "needs a date_range"),
        ({"mode": "weekly"}, "'date_range', 'manual' or 'filter'"),
        ({}, "mode"),
        ({"mode": "date_range", "date_range": "tomorrow"}, "date_range"),
        ({"mode": "date_range", "date_range": "custom", "start_date": "2026-01-01"}, "start_date and end_date"),
        ({**CUSTOM, "end_date": "2026-01-29"}, "backwards: it ends on 2026-01-29, before 2026-01-30"),
        ({**CUSTOM, "end_date": "2027-01-31"}, "366 days at most, and this one is 367"),
        ({**CUSTOM, "end_date": "30/01/2026"}, "YYYY-MM-DD"),
        ({**CUSTOM, "end_date": "2026-02-30"}, "end_date"),
        ({**CUSTOM, "end_date": 1769731200}, "YYYY-MM-DD"),
        ({**RANGE, "start_date": "2026-01-01", "end_date": "2026-01-02"}, "go only with date_range 'custom'"),
        ({**RANGE, "fiche_ids": ["1"]}, "fiche_ids go with mode 'manual'"),
        ({"mode": "manual", "date_range": "today"}, "go with mode 'date_range' or 'filter'"),
        ({**RANGE, "groupes": ["A", " "]}, "1 to 200 characters"),
        ({**RANGE, "groupes": "A"}, "a list of groupes"),
        ({**RANGE, "max_fiches": 0}, "max_fiches"),
        ({**RANGE, "max_fiches": 2**31}, "max_fiches"),
        ({**RANGE, "max_fiches": "10"}, "max_fiches"),
        ({**RANGE, "only_unaudited": "yes"}, "only_unaudited"),
        ({**RANGE, "max_recordings_per_fiche": -1}, "max_recordings_per_fiche"),
        ({**RANGE, "limit": 5}, "limit"),
        ({**RANGE, "use_rlm": True, "useRlm": True}, "both spellings"),
    ],
)
def test_what_makes_no_sense_is_refused_and_named(wrong, said):
    with pytest.raises(ValidationError) as refused:
        Selection.model_validate(wrong)
    assert said in readable(refused.value)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({"date_range": "today"}, "date_range"),
        ({"dateRange": "today", "groupes": ["A"]}, "date_range"),
        ({"fiche_ids": "1, 2"}, "manual"),
        ({"ficheIds": []}, "manual"),
        ({"mode": "filter", "date_range": "today"}, "filter"),
    ],
)
def test_the_mode_follows_from_a_range_or_a_list(given, mode):
    assert Selection.model_validate(given).mode == mode


def test_a_range_and_a_list_are_refused_together():
    with pytest.raises(ValidationError) as refused:
        Selection.model_validate({"date_range": "today", "fiche_ids": ["1"]})
    assert "fiche_ids go with mode 'manual'" in readable(refused.value)


@pytest.mark.req("AUT-34", "AUT-35", "AUT-36", "AUT-37")
def test_both_spellings_say_the_same():
    snake = {"mode": "filter", "date_range": "custom", "start_date": "2026-01-01", "end_date": "2026-01-31",
             "groupes": [" Paris ", "Lyon", "Paris"], "only_with_recordings": True, "only_unaudited": True,
             "use_rlm": True, "max_fiches": 10, "max_recordings_per_fiche": None}  # fmt: skip
    camel = {"mode": "filter", "dateRange": "custom", "startDate": "2026-01-01", "endDate": "2026-01-31",
             "groupes": ["Paris", "Lyon"], "onlyWithRecordings": True, "onlyUnaudited": True, "useRlm": True,
             "maxFiches": 10, "maxRecordingsPerFiche": None}  # fmt: skip
    assert Selection.model_validate(snake) == Selection.model_validate(camel)
    assert Selection.model_validate(snake).groupes == ["Paris", "Lyon"]


@pytest.mark.req("G-47")
@pytest.mark.parametrize(
    ("override", "differs"),
    [
        ({}, {}),
        ({"groupes": []}, {"groupes": []}),
        ({"maxFiches": None}, {"max_fiches": None}),
        ({"max_fiches": 3, "useRlm": False}, {"max_fiches": 3, "use_rlm": False}),
        ({"date_range": "today"}, {"date_range": "today", "start_date": None, "end_date": None}),
        ({"end_date": "2026-02-03"}, {"end_date": date(2026, 2, 3)}),
        ({"mode": "manual", "ficheIds": "9 8"},
         {"mode": "manual", "fiche_ids": ["9", "8"], "date_range": None, "start_date": None, "end_date": None}),
    ],
)  # fmt: skip
def test_keys_of_an_override_replace_the_same_keys_and_nothing_else(override, differs):
    known = Selection.model_validate({**CUSTOM, "groupes": ["A"], "max_fiches": 5, "use_rlm": True})
    found = merged(known, Override.model_validate(override))
    assert found.model_dump() == {**known.model_dump(), **differs}
    assert merged(known, None) == known


@pytest.mark.req("G-47")
def test_from_a_manual_list_to_a_range_the_list_is_dropped():
    known = Selection.model_validate({"mode": "manual", "fiche_ids": ["1"], "groupes": ["A"]})
    found = merged(known, Override.model_validate(RANGE))
    assert found == Selection.model_validate({**RANGE, "groupes": ["A"]})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"fiche_ids": ["1"]}, "fiche_ids go with mode 'manual'"),
        ({"end_date": "2026-01-01"}, "backwards"),
        ({"date_range": None}, "needs a date_range"),
        ({"mode": "manual", "date_range": "today"}, "go with mode 'date_range' or 'filter'"),
        ({"start_date": None}, "needs start_date"),
    ],
)
def test_an_override_that_does_not_fit_its_schedule_is_refused(override, said):
    with pytest.raises(InvalidInput, match=said):
        merged(Selection.model_validate(CUSTOM), Override.model_validate(override))


@pytest.mark.parametrize("override", [{"fiches": ["1"]}, {"mode": None}, {"groupes": None}, {"fiche_ids": None},
                                      {"only_unaudited": None}, {"maxFiches": 0}, {"ficheIds": [""]}])  # fmt: skip
def test_an_override_with_unknown_keys_or_none_where_there_must_be_one_is_refused(override):
    with pytest.raises(ValidationError):
        Override.model_validate(override)


@pytest.mark.req("G-90", "AUT-60")
@pytest.mark.parametrize(
    ("preset", "due", "first", "last"),
    [
        ("today", "2026-03-01T12:00", "2026-03-01", "2026-03-01"),
        ("today", "2026-03-01T23:30", "2026-03-02", "2026-03-02"),  # it is past midnight in Paris
        ("yesterday", "2026-03-01T12:00", "2026-02-28", "2026-02-28"),
        ("yesterday", "2028-02-29T23:30", "2028-02-29", "2028-02-29"),
        ("last_7_days", "2026-03-03T12:00", "2026-02-25", "2026-03-03"),
        ("last_30_days", "2026-03-30T12:00", "2026-03-01", "2026-03-30"),
        ("this_month", "2026-03-01T12:00", "2026-03-01", "2026-03-01"),
        ("this_month", "2026-03-31T21:59", "2026-03-01", "2026-03-31"),
        ("this_month", "2026-03-31T22:00", "2026-04-01", "2026-04-01"),  # summer time: two hours ahead
        ("last_month", "2026-03-31T12:00", "2026-02-01", "2026-02-28"),
        ("last_month", "2028-03-01T12:00", "2028-02-01", "2028-02-29"),
        ("last_month", "2025-12-31T23:00", "2025-12-01", "2025-12-31"),
        ("last_month", "2026-01-15T12:00", "2025-12-01", "2025-12-31"),
    ],
)
def test_presets_are_days_of_the_schedules_zone_around_the_due_time(preset, due, first, last):
    selection = Selection.model_validate({"mode": "date_range", "date_range": preset})
    found = dates_to_query(selection, datetime.fromisoformat(due).replace(tzinfo=UTC), "Europe/Paris")
    assert (str(found[0]), str(found[-1])) == (first, last)
    assert found == [found[0] + timedelta(days=n) for n in range(len(found))]


@pytest.mark.req("G-90", "AUT-60")
def test_a_custom_range_has_both_its_days_and_is_written_as_the_crm_writes_it():
    found = dates_to_query(Selection.model_validate(CUSTOM), datetime(2020, 1, 1, tzinfo=UTC), "UTC")
    assert [crm_date(day) for day in found] == ["30/01/2026", "31/01/2026", "01/02/2026", "02/02/2026"]
    year = Selection.model_validate({**CUSTOM, "start_date": "2028-01-01", "end_date": "2028-12-31"})
    assert len(dates_to_query(year, datetime(2020, 1, 1, tzinfo=UTC), "UTC")) == 366
    manual = Selection.model_validate({"mode": "manual", "fiche_ids": ["1"]})
    assert dates_to_query(manual, datetime(2020, 1, 1, tzinfo=UTC), "UTC") == []


@given(
    st.sampled_from(["today", "yesterday", "last_7_days", "last_30_days", "this_month", "last_month"]),
    st.integers(1_577_836_800, 1_956_528_000).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
    st.sampled_from(["UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Europe/Paris", "Australia/Lord_Howe"]),
)
def test_no_preset_asks_for_a_day_that_has_not_begun_there_or_misses_the_last_that_has(preset, due, zone):
    found = dates_to_query(Selection(mode="filter", date_range=preset), due, zone)

    def begun(day):
        return datetime.combine(day, time.min, cron.zone(zone)) <= due

    after = found[-1] + timedelta(days=1)
    if preset == "yesterday":
        assert begun(after)
        assert not begun(after + timedelta(days=1))
    elif preset == "last_month":
        assert begun(after)
        assert (found[0].day, after.day) == (1, 1)
        assert not begun((after + timedelta(days=31)).replace(day=1)), "the month after it is this one"
    else:
        assert begun(found[-1])
        assert not begun(after)
    days = {"last_7_days": 7, "last_30_days": 30, "this_month": found[-1].day, "last_month": found[-1].day}
    assert len(found) == days.get(preset, 1)


@pytest.mark.req("G-46")
@pytest.mark.parametrize(
    ("recordings", "per_minute", "minutes", "fits"),
    [(0, 10, 15, True), (150, 10, 15, True), (151, 10, 15, False), (1, 0.01, 15, False), (20, 1.5, 15, True),
     (23, 1.5, 15, False), (100_000, 10_000, 10, True)],
)  # fmt: skip
def test_recordings_that_cannot_all_be_there_in_time_are_warned_of(recordings, per_minute, minutes, fits):
    warning = budget_warning(recordings, per_minute, timedelta(minutes=minutes))
    assert (warning is None) == fits
    if warning is not None:
        assert warning.startswith(f"{recordings} recording")
        assert "AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS" in warning


@pytest.mark.req("AUT-58", "G-47")
def test_a_list_longer_than_its_limit_is_warned_of():
    ids = [str(n) for n in range(12)]
    assert truncation_warning(Selection(mode="manual", fiche_ids=ids, max_fiches=12)) is None
    assert truncation_warning(Selection(mode="manual", fiche_ids=ids)) is None
    assert "the first 10 are taken" in str(truncation_warning(Selection(mode="manual", fiche_ids=ids, max_fiches=10)))
