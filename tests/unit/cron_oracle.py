"""When an expression is due, found the slow way: minute after minute is asked what the clock shows, and whether the
expression names that. Shares no code with the program, nor with the library that it uses."""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
MONTHS = {calendar.month_abbr[n].upper(): n for n in range(1, 13)}
DAYS = {calendar.day_abbr[n - 1].upper(): n % 7 for n in range(1, 8)}


class Shown(NamedTuple):
    """A minute: the instant, what the clock shows, whether for the second time, and what it has just left out."""

    at: datetime
    label: datetime
    second: bool
    left_out: tuple[datetime, ...]


def minutes(zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[Shown]:
    at, expected = start, start.astimezone(zone).replace(tzinfo=None)
    while at < end:
        local = at.astimezone(zone)
        label = local.replace(tzinfo=None)
        left_out: tuple[datetime, ...] = ()
        while expected < label:
            left_out += (expected,)
            expected += MINUTE
        yield Shown(at, label, bool(local.fold), left_out)
        at += MINUTE
        expected = label + MINUTE


class Expression:
    def __init__(self, text: str) -> None:
        minute, hour, dom, month, dow = text.upper().split()
        self.fixed = not minute.startswith("*") and not hour.startswith("*")
        self.either = not dom.startswith("*") and not dow.startswith("*")
        self.minutes = numbers(minute, 0, 59)
        self.hours = numbers(hour, 0, 23)
        self.months = numbers(month, 1, 12, MONTHS)
        self.dom, self.dow = dom, dow
        self._days: dict[date, bool] = {}

    def names(self, label: datetime) -> bool:
        if label.minute not in self.minutes or label.hour not in self.hours:
            return False
        day = label.date()
        if day not in self._days:
            self._days[day] = self._names_day(day)
        return self._days[day]

    def _names_day(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        of_month = any(day.day in days_of_month(term, day) for term in self.dom.split(","))
        of_week = any(is_day_of_week(term, day) for term in self.dow.split(","))
        return of_month or of_week if self.either else of_month and of_week

    def due(self, shown: Shown) -> bool:
        if not self.fixed:
            return self.names(shown.label)
        return (not shown.second and self.names(shown.label)) or any(map(self.names, shown.left_out))


def numbers(field: str, low: int, high: int, names: dict[str, int] | None = None) -> set[int]:
    found: set[int] = set()
    for term in field.split(","):
        values, _, step = term.partition("/")
        if values == "*":
            first, last = low, high
        else:
            one, _, other = values.partition("-")
            first = (names or {}).get(one) if one in (names or {}) else int(one)  # type: ignore[assignment]
            last = (names or {}).get(other) if other in (names or {}) else int(other) if other else first  # type: ignore[assignment]
            if step and not other:
                last = high
        found |= set(range(first, last + 1, int(step or 1)))
    return found


def days_of_month(term: str, day: date) -> set[int]:
    last = calendar.monthrange(day.year, day.month)[1]
    if term == "L":
        return {last}
    if term == "LW":
        return {max(n for n in range(last - 2, last + 1) if date(day.year, day.month, n).weekday() < 5)}
    return numbers(term, 1, 31)


def is_day_of_week(term: str, day: date) -> bool:
    number = day.isoweekday() % 7
    if term.endswith("L"):
        return number == int(term[:-1]) % 7 and (day + timedelta(days=7)).month != day.month
    if "#" in term:
        which, nth = term.split("#")
        return number in numbers(which, 0, 7, DAYS) and (day.day - 1) // 7 + 1 == int(nth)
    return number in {n % 7 for n in numbers(term, 0, 7, DAYS)}


def changes(zone: ZoneInfo, year: int) -> list[datetime]:
    """The hours of the year in which the zone's offset changes."""
    hours = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(hours=n) for n in range(8784)]
    offsets = [hour.astimezone(zone).utcoffset() for hour in hours]
    return [hours[n] for n in range(1, len(hours)) if offsets[n] != offsets[n - 1]]
