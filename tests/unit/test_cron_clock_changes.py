"""Due instants around every change of the clocks, against an oracle that looks at each minute (TM-01)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile

import pytest

from ecluse.base import cron
from tests.unit.cron_oracle import Expression, Shown, changes, minutes

ZONES = [
    "America/New_York",
    "Europe/Paris",
    "Europe/London",
    "Australia/Lord_Howe",
    "America/Sao_Paulo",
    "Asia/Tehran",
    "Africa/Casablanca",
    "Pacific/Apia",
    "Asia/Kathmandu",
    "Antarctica/Troll",
    "UTC",
    "America/Havana",
]
YEARS = range(2009, 2019)  # Apia leaves out 30 December 2011
AT_MOST_HOURLY = [
    "0 0 * * *",
    "30 0 * * *",
    "59 23 * * *",
    "30 1 * * *",
    "0 2 * * *",
    "30 2 * * *",
    "45 2 * * *",
    "0 3 * * *",
    "15 2-4 * * *",
    "0 0-23 * * *",
    "30 0-23/2 * * *",
    "15 * * * *",
    "0 * * * *",
    "0 */2 * * *",
    "30 */3 * * *",
    "0 1,2,3 * * *",
    "0 12 1 * *",
    "0 0 L * *",
    "30 2 LW * *",
    "0 2 * * 0",
    "30 1 * * 7",
    "0 0 * * 5L",
    "30 2 * * 0#2",
    "0 3 1 * 1",
    "0 0 13 * 5",
    "0 0 */2 * 5",
    "30 2 1-7 * sun",
    "0 0 29 2 *",
    "0 0 31 12 *",
    "15 1 * mar,oct,nov *",
]
OFTENER = [
    "* * * * *",
    "*/15 * * * *",
    "*/15 2 * * *",
    "*/15 3 * * *",
    "*/10 0,1 * * *",
    "*/30 */2 * * *",
    "0,30 2 * * *",
    "0-59/20 1-3 * * *",
    "5,35 * * * 0",
    "0,20,40 2,3 * * mon-fri",
]


class Minutes:
    """Every minute of a time, filed by what the minute hand shows: most expressions name few of them."""

    def __init__(self, name: str, start: datetime, end: datetime) -> None:
        self.zone, self.start, self.end = cron.zone(name), start, end
        self.filed: dict[int, list[Shown]] = {n: [] for n in range(60)}
        self.after_gaps: list[Shown] = []
        for shown in minutes(self.zone, start, end):
            (self.after_gaps if shown.left_out else self.filed[shown.label.minute]).append(shown)

    def differences(self, expression: str) -> list[datetime]:
        oracle = Expression(expression)
        shown = [*self.after_gaps, *(each for minute in oracle.minutes for each in self.filed[minute])]
        expected = {each.at for each in shown if oracle.due(each)}
        due = cron.parse(expression).due(self.start - timedelta(seconds=1), self.zone)
        found = list(takewhile(lambda at: at < self.end, due))
        assert found == sorted(set(found)), "each later than the one before"
        return sorted(expected ^ set(found))

    def check(self, expressions: list[str]) -> None:
        wrong = {one: self.differences(one) for one in expressions}
        assert {one: found for one, found in wrong.items() if found} == {}


def around(name: str, years: range, days: int) -> list[tuple[datetime, datetime]]:
    span = timedelta(days=days)
    return [(change - span, change + span) for year in years for change in changes(cron.zone(name), year)]


@pytest.mark.req("G-28", "G-86", "AUT-154", "AUT-155", "AUT-156", "AUT-153")
@pytest.mark.parametrize(
    ("name", "year"),
    [("Europe/Paris", 2026), ("Australia/Lord_Howe", 2026), ("America/Havana", 2018), ("Pacific/Apia", 2011)],
)
def test_around_a_change_every_instant_is_as_the_clock_says(name, year):
    spans = around(name, range(year, year + 1), 1)
    assert len(spans) >= 2
    for start, end in spans:
        Minutes(name, start, end).check(AT_MOST_HOURLY + OFTENER)


@pytest.mark.req("G-28")
@pytest.mark.parametrize(("name", "year"), [("Europe/Paris", 2026), ("Australia/Lord_Howe", 2026)])
@pytest.mark.parametrize("expression", ["30 2 * * *", "*/15 * * * *", "45 1 * * *", "15 2-4 * * *"])
def test_wherever_one_begins_what_follows_is_the_same(name, year, expression):
    """Also in the middle of a doubled hour, in its first or its second pass."""
    zone = cron.zone(name)
    for change in changes(zone, year):
        start, end = change - timedelta(hours=4), change + timedelta(hours=4)
        oracle = Expression(expression)
        expected = [each.at for each in minutes(zone, start, end) if oracle.due(each)]
        for n in range(0, 480, 7):
            after = start + timedelta(minutes=n, seconds=n % 3)
            found = list(takewhile(lambda at, end=end: at < end, cron.parse(expression).due(after, zone)))
            assert found == [at for at in expected if at > after], after


@pytest.mark.req("G-86", "G-69")
@pytest.mark.parametrize(
    ("expression", "day", "fires"),
    [
        ("30 2 * * *", (3, 29), ["03:00"]),
        ("0 */2 * * *", (3, 29), ["00:00", "04:00", "06:00"]),
        ("*/15 2 * * *", (3, 29), []),
        ("15 2-4 * * *", (3, 29), ["03:00", "03:15", "04:15"]),
        ("30 2 * * *", (10, 25), ["02:30"]),
        ("15 2-4 * * *", (10, 25), ["02:15", "03:15", "04:15"]),
        ("*/15 2 * * *", (10, 25), ["02:00", "02:15", "02:30", "02:45"] * 2),
        ("15 * * * *", (10, 25), ["00:15", "01:15", "02:15", "02:15", "03:15", "04:15", "05:15", "06:15"]),
    ],
)
def test_the_nights_on_which_debians_cron_was_watched(expression, day, fires):
    """Europe/Paris, 2026, until seven in the morning."""
    zone = cron.zone("Europe/Paris")
    start, end = datetime(2026, *day, tzinfo=zone), datetime(2026, *day, 7, tzinfo=zone)
    found = takewhile(lambda at: at < end, cron.parse(expression).due(start - timedelta(seconds=1), zone))
    assert [f"{at.astimezone(zone):%H:%M}" for at in found] == fires


@pytest.mark.req("G-69", "AUT-152", "AUT-153", "AUT-201")
@pytest.mark.parametrize(
    ("expression", "days"),
    [("0 0 13 * 5", [6, 13, 20, 27]), ("0 0 */2 * 5", [13, 27]), ("0 0 * * 7", [1, 8, 15, 22, 29]),
     ("0 0 L * *", [30]), ("0 0 * * 5#2", [13]), ("0 0 * * 5L", [27])],
)  # fmt: skip
def test_days_of_month_and_of_week_are_either_or_both(expression, days):
    start, end = datetime(2026, 10, 31, 12, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
    found = takewhile(lambda at: at < end, cron.parse(expression).due(start, cron.zone("UTC")))
    assert [at.day for at in found] == days


def test_leap_days_are_found_for_forty_years():
    """TM-02"""
    found = islice(cron.parse("0 0 29 2 *").due(datetime(2026, 1, 1, tzinfo=UTC), cron.zone("UTC")), 10)
    assert [at.year for at in found] == [2028, 2032, 2036, 2040, 2044, 2048, 2052, 2056, 2060, 2064]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.req("G-28", "G-86", "AUT-155", "AUT-156")
@pytest.mark.parametrize("name", ZONES)
def test_in_ten_years_of_twelve_zones_no_instant_differs(name):
    for year in YEARS:
        Minutes(name, datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC)).check(AT_MOST_HOURLY)
    for start, end in around(name, YEARS, 3):
        Minutes(name, start, end).check(OFTENER)
