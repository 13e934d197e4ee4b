"""Execution windows: borders, midnight, changes of the clocks (TM-09)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest

from ecluse.base import cron, windows
from ecluse.base.errors import InvalidInput
from ecluse.base.timetable import timetable

PARIS = cron.zone("Europe/Paris")


def at(text: str, fold: int = 0) -> datetime:
    return datetime.fromisoformat(f"2026-{text}").replace(tzinfo=PARIS, fold=fold).astimezone(UTC)


@pytest.mark.req("JOB-34", "JOB-35", "JOB-36")
@pytest.mark.parametrize(
    ("window", "instant", "clamped"),
    [
        (("02:00", "06:00"), "06-10 02:00:00", "06-10 02:00:00"),
        (("02:00", "06:00"), "06-10 04:30:15", "06-10 04:30:15"),
        (("02:00", "06:00"), "06-10 06:00:59", "06-10 06:00:59"),
        (("02:00", "06:00"), "06-10 06:01:00", "06-11 02:00:00"),
        (("02:00", "06:00"), "06-10 01:59:59", "06-10 02:00:00"),
        (("02:00", "06:00"), "06-10 23:00:00", "06-11 02:00:00"),
        (("22:00", "02:00"), "06-10 21:59:00", "06-10 22:00:00"),
        (("22:00", "02:00"), "06-10 23:30:00", "06-10 23:30:00"),
        (("22:00", "02:00"), "06-10 00:00:00", "06-10 00:00:00"),
        (("22:00", "02:00"), "06-10 02:00:30", "06-10 02:00:30"),
        (("22:00", "02:00"), "06-10 02:01:00", "06-10 22:00:00"),
        (("00:00", "23:59"), "06-10 12:00:00", "06-10 12:00:00"),
        # The clocks leave out 02:00 to 03:00.
        (("02:30", "05:00"), "03-29 01:00:00", "03-29 03:00:00"),
        (("02:00", "02:30"), "03-29 01:00:00", "03-30 02:00:00"),
        (("23:00", "02:30"), "03-29 03:00:00", "03-29 23:00:00"),
    ],
)
def test_an_instant_inside_stays_and_one_outside_moves_to_the_next_start(window, instant, clamped):
    parsed = windows.parse(*window)
    assert parsed is not None
    assert parsed.clamp(at(instant), PARIS) == at(clamped)
    assert parsed.contains(at(instant), PARIS) == (instant == clamped)
    assert parsed.contains(at(clamped), PARIS)


@pytest.mark.req("JOB-35")
def test_in_a_doubled_hour_a_window_opens_twice():
    parsed = windows.parse("02:30", "02:45")
    assert parsed is not None
    assert parsed.clamp(at("10-25 02:10:00"), PARIS) == at("10-25 02:30:00")
    assert parsed.clamp(at("10-25 02:50:00"), PARIS) == at("10-25 02:30:00", fold=1)
    assert parsed.clamp(at("10-25 02:50:00", fold=1), PARIS) == at("10-26 02:30:00")


@pytest.mark.req("JOB-37", "G-51")
@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        ("02:00", None, "give both start and end, or neither"),
        (None, "02:00", "give both start and end, or neither"),
        ("02:00", "02:00", "must differ"),
        ("2:00", "03:00", "HH:MM"),
        ("24:00", "03:00", "HH:MM"),
        ("02:00", "03:60", "HH:MM"),
        ("02:00\n", "03:00", "HH:MM"),
        ("٠٢:00", "03:00", "HH:MM"),
    ],
)
def test_half_a_window_or_an_empty_one_is_refused(start, end, said):
    with pytest.raises(InvalidInput, match=said):
        windows.parse(start, end)


@pytest.mark.req("JOB-37")
def test_without_a_window_nothing_moves():
    assert windows.parse(None, None) is None
    assert timetable("0 23 * * *", "Europe/Paris", None, None).next(at("06-10 12:00:00")) == at("06-10 23:00:00")


@pytest.mark.req("G-51", "G-52", "JOB-49")
def test_several_times_that_move_to_one_start_are_due_once():
    table = timetable("0 * * * *", "Europe/Paris", "02:00", "04:00")
    found = list(islice(table.due(at("06-10 03:30:00")), 5))
    assert found == [at(f"06-{day} 0{hour}:00:00") for day, hour in [(10, 4), (11, 2), (11, 3), (11, 4), (12, 2)]]


@pytest.mark.req("G-51")
@pytest.mark.parametrize("window", [("02:00", "02:30"), ("01:30", "03:15"), ("23:30", "02:15"), ("02:45", "01:10")])
@pytest.mark.parametrize("zone", ["Europe/Paris", "Australia/Lord_Howe", "Pacific/Apia", "America/Sao_Paulo"])
@pytest.mark.parametrize("expression", ["15 */3 * * *", "30 2 * * *"])
def test_across_all_changes_of_a_year_nothing_is_due_outside(expression, zone, window):
    table = timetable(expression, zone, *window)
    parsed = windows.parse(*window)
    assert parsed is not None
    begin = datetime(2011, 1, 1, tzinfo=UTC)
    last = begin
    for due in table.due(begin):
        if due > begin + timedelta(days=365):
            break
        assert due > last
        assert parsed.contains(due, cron.zone(zone))
        last = due
    assert last > begin + timedelta(days=360)
