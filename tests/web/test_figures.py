"""How figures are written, and how much of a bar they are."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ecluse.web import figures
from ecluse.web.render import elapsed, lasted, query


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (None, "\N{EN DASH}"),
        (-3, "0.0 s"),
        (0.04, "0.0 s"),
        (4.26, "4.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (187, "3 min 07 s"),
        (3_599.9, "59 min 59 s"),
        (7_500, "2 h 05 min"),
        (47 * 3_600, "47 h 00 min"),
        (76 * 3_600, "3 d 04 h"),
    ],
)
def test_a_duration_is_written_in_its_two_largest_units(seconds, written):
    assert lasted(None if seconds is None else timedelta(seconds=seconds)) == written


@pytest.mark.parametrize(
    ("seconds", "written"), [(-3, "0 s"), (4.96, "4 s"), (59.99, "59 s"), (60, "1 min 00 s"), (7_500.9, "2 h 05 min")]
)
def test_what_is_counted_on_is_written_in_whole_seconds(seconds, written):
    assert elapsed(timedelta(seconds=seconds)) == written


def test_what_says_nothing_is_not_in_the_address():
    assert query({"flow": None, "state": "", "all": False, "offset": 0}) == ""
    assert query({"flow": "a&b", "all": True, "offset": 25}, offset=50) == "?flow=a%26b&all=1&offset=50"


def stage(**counts):
    return {
        "stage": "work",
        "ended_at": None,
        "expected": 10,
        "done": 0,
        "failed": 0,
        "ignored": 0,
        "in_flight": 0,
        "unfinished": 0,
    } | counts


def test_the_parts_of_a_bar_follow_each_other_and_fill_no_more_than_there_is():
    bar = figures.of_stage(stage(done=4, failed=1, in_flight=2))
    assert [(part.kind, part.start, part.width) for part in bar.parts] == [
        ("done", 0, 40),
        ("failed", 40, 10),
        ("in flight", 50, 20),
    ]
    assert (bar.finished, bar.percent, bar.failed) == (5, 50, 1)
    assert bar.said == "5 of 10 finished: 4 done, 1 failed, 2 in flight"
    more = figures.of_stage(stage(expected=2, done=4))  # seen between two commits
    assert sum(part.width for part in more.parts) == 100
    assert figures.of_stage(stage(expected=0)).percent == 100


def test_an_open_run_is_as_far_as_the_stage_that_it_is_at():
    run = {"ended_at": None, "selected": 10, "successful": None, "failed": None, "ignored": None}
    first, second = stage(stage="first", done=10, ended_at="then"), stage(stage="second", done=3)
    assert figures.of_run(run, []) is None
    name, bar = figures.of_run(run, [first, second])
    assert (name, bar.finished) == ("second", 3)
    name, bar = figures.of_run(run, [first])
    assert (name, bar.finished) == ("first", 10)
    over = run | {"ended_at": "now", "successful": 7, "failed": 1, "ignored": 2, "cancelled": 0}
    name, bar = figures.of_run(over, [first])
    assert (name, bar.total, bar.finished, bar.percent) == ("targets", 10, 10, 100)


def test_what_was_cancelled_is_neither_finished_nor_failed():
    run = {"ended_at": "now", "selected": 10, "successful": 2, "failed": 7, "ignored": 1, "cancelled": 6}
    _, bar = figures.of_run(run, [])
    assert bar.said == "4 of 10 finished: 2 successful, 1 failed, 1 ignored, 6 cancelled"
    assert (bar.failed, bar.percent, sum(part.width for part in bar.parts)) == (1, 40, 100)
    undone = figures.of_stage(stage(done=3, failed=1, unfinished=6, ended_at="now"))
    assert undone.said == "4 of 10 finished: 3 done, 1 failed, 6 unfinished"
