"""What is accepted as a cron expression, a time zone, and what is said about the rest."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base import cron
from ecluse.base.errors import InvalidInput
from ecluse.base.timetable import timetable

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)


@pytest.mark.req("AUT-150", "AUT-151", "AUT-152", "AUT-201", "G-69", "ENG-105")
@pytest.mark.parametrize(
    "expression",
    ["* * * * *", "*/5 * * * *", "5 4 3 2 1", "0,15,30 * * * *", "0-30 * * * *", "0-30/10 * * * *", "0 0 * * 0",
     "0 0 * * 7", "0 0 * * 5-7", "0 0 1 JAN *", "0 0 * * mon-fri", "0 0 L * *", "0 0 LW * *", "0 0 * * 5L",
     "0 0 * * 5#2", "1,3-5,*/10 * * * *", "  0   0 * * *  ", "@hourly", "@daily", "@midnight", "@weekly", "@monthly",
     "@yearly", "@annually", "@Daily", "0 0 29 2 *", "0 0 31 2 1"],
)  # fmt: skip
def test_these_are_accepted_explained_and_due_some_day(expression):
    parsed = cron.parse(expression)
    assert parsed.explain()
    assert next(parsed.due(NOW, cron.zone("UTC"))) > NOW


@pytest.mark.req("AUT-150", "AUT-151", "AUT-201", "G-69")
@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "0 fields"),
        ("0 0 * *", "4 fields"),
        ("0 0 0 * * *", "6 fields"),
        ("@reboot", "no such alias"),
        ("@every 5m", "no such alias"),
        ("*/0 * * * *", "bad minute"),
        ("60 * * * *", "bad minute"),
        ("30-10 * * * *", "bad minute"),
        ("-1 * * * *", "bad minute"),
        ("0 24 * * *", "bad hour"),
        ("0 0 0 * *", "bad day-of-month"),
        ("0 0 32 * *", "bad day-of-month"),
        ("0 0 31 2 *", "bad day-of-month"),
        ("0 0 30 feb *", "bad day-of-month"),
        ("0 0 * 13 *", "bad month"),
        ("0 0 * * 8", "bad day-of-week"),
        ("0 0 * * 6-1", "bad day-of-week"),
        ("0 0 * * mon#6", "bad day-of-week"),
        ("? * * * *", "bad minute"),
        ("five past * * *", "bad minute"),
        ("0,, * * * *", "bad minute"),
        (f"{'1,' * 500}1 * * * *", "5 fields"),
    ],
)
def test_these_are_refused_saying_what_is_wrong_and_what_is_accepted(expression, said):
    with pytest.raises(InvalidInput) as refused:
        cron.parse(expression)
    assert said in refused.value.message
    assert "Five fields are accepted" in refused.value.message
    assert len(refused.value.message) < 900


@pytest.mark.parametrize(("name", "said"), [("Europe/Pari", "Europe/Paris"), ("../../etc/passwd", "Europe/"), ("", "'"),
                                            ("CET+1", "'CET+1'")])  # fmt: skip
def test_a_time_zone_that_does_not_exist_is_named(name, said):
    with pytest.raises(InvalidInput, match="no time zone") as refused:
        cron.zone(name)
    assert said in refused.value.message


def test_zones_do_not_come_from_the_machine(monkeypatch):
    monkeypatch.setenv("PYTHONTZPATH", "/nowhere")
    cron.zone.cache_clear()
    assert cron.zone("America/Argentina/Ushuaia").key == "America/Argentina/Ushuaia"


PARTS = st.sampled_from(["*", "/", "-", ",", "#", "L", "W", "0", "1", "5", "7", "59", "MON", "JAN", " ", "@", "?", "²"])
FIELD = st.lists(PARTS, min_size=1, max_size=4).map("".join)
TYPED = st.one_of(
    st.text(max_size=250),
    st.lists(PARTS, max_size=30).map("".join),
    st.lists(FIELD, min_size=5, max_size=5).map(" ".join),
)


@given(TYPED)
def test_whatever_is_typed_is_accepted_or_refused_and_soon(text):
    began = time.process_time()
    try:
        parsed = cron.parse(text)
    except InvalidInput:
        pass
    else:
        zone = cron.zone("Europe/Paris")
        fires = list(islice(parsed.due(NOW, zone), 2))
        assert fires[0] > NOW
        assert len(fires) == 1 or fires[0] < fires[1]
        assert parsed.explain()
    assert time.process_time() - began < 2


def test_what_is_typed_and_can_never_be_is_refused_soon():
    """TM-02: the slowest kinds there are."""
    for expression in ("0 0 30,31 2 *", "0 0 31 2,4,6,9,11 *"):
        began = time.process_time()
        with pytest.raises(InvalidInput):
            cron.parse(expression)
        assert time.process_time() - began < 0.5


@pytest.mark.req("G-28")
def test_a_preview_says_what_the_clocks_do_to_it():
    def preview(expression, start, window=(None, None)):
        fires = timetable(expression, "Europe/Paris", *window).preview(start, 3)
        return [(f"{fire.at:%d %H:%M %z}", fire.mark) for fire in fires]

    assert preview("30 2 * * *", datetime(2026, 3, 27, 12, tzinfo=UTC)) == [
        ("28 02:30 +0100", None),
        ("29 03:00 +0200", "moved out of the gap, clocks changed to +0200"),
        ("30 02:30 +0200", None),
    ]
    assert preview("30 * * * *", datetime(2026, 10, 24, 23, 45, tzinfo=UTC)) == [
        ("25 02:30 +0200", "first of a doubled hour"),
        ("25 02:30 +0100", "second of a doubled hour, clocks changed to +0100"),
        ("25 03:30 +0100", None),
    ]
    assert preview("0 12 * * *", datetime(2026, 11, 1, tzinfo=UTC), ("22:00", "02:00"))[0] == (
        "01 22:00 +0100",
        "moved to the start of the window",
    )


def exactly(table, after, until):
    count, at = 0, table.next(after)
    while at <= until:
        count, at = count + 1, table.next(at)
    return count


@pytest.mark.parametrize("window", [(None, None), ("02:00", "06:00"), ("22:00", "04:00")])
@pytest.mark.parametrize("expression", ["*/20 * * * *", "0 * * * *", "0 9 * * 1-5", "30 3 1 * *"])
def test_the_latest_are_listed_and_those_before_counted(expression, window):
    """Where no clock changed, the count is exact."""
    table = timetable(expression, "Europe/Paris", *window)
    for days in (1, 10, 60):
        until = datetime(2026, 3, 20, 4, 59, 30, tzinfo=UTC)
        after = until - timedelta(days=days)
        listed, before = table.latest(after, until, 10)
        assert abs(len(listed) + before - exactly(table, after, until)) <= (window[0] is not None), (expression, days)
        assert listed == sorted(set(listed))
        if listed:
            assert listed[-1] <= until < table.next(listed[-1])


@pytest.mark.req("G-27")
@pytest.mark.parametrize("window", [(None, None), ("02:00", "06:00")])
def test_years_of_downtime_are_not_walked_through(window):
    table = timetable("* * * * *", "America/New_York", *window)
    began = time.process_time()
    listed, before = table.latest(NOW - timedelta(days=3650), NOW, 100)
    assert len(listed) == 100
    assert before > 800_000
    assert time.process_time() - began < 1
