"""Five-field cron in a time zone. `cronsim` computes the wall-clock times that an expression names; this module alone
decides which instants those are when the clocks change (DST).

If the expression names fixed times, a time that does not exist is due at the first instant after the gap, and a time
that occurs twice is due once. If minute or hour begins with `*`, the expression follows the wall clock instead, as
Debian's cron does: nothing is due in the gap, and both passes of a doubled hour are.
"""

from __future__ import annotations

import difflib
import re
from calendar import monthrange
from collections import deque
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.resources import files
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from ecluse.base.errors import InvalidInput
from ecluse.base.text import count_of

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
ACCEPTED = (
    "Five fields are accepted: minute (0-59), hour (0-23), day of month (1-31, L, LW, 30L), month (1-12, JAN-DEC), "
    "day of week (0-7, SUN-SAT, 5L, 5#2), each as *, */n, a, a-b, a-b/n or a list of these; or "
    f"{', '.join(ALIASES)}."
)
ZONE_RULES = version("tzdata")
LONGEST = 200
MINUTE = timedelta(minutes=1)
SOME_DAY = datetime(2000, 1, 1)  # noqa: DTZ001 - wall-clock time has no zone
DAY_OR_LAST = re.compile("(29|30|31)L", re.IGNORECASE)


@cache
def zone(name: str) -> ZoneInfo:
    """Load a time zone from the package `tzdata`, never from the machine, so that all replicas of one version compute
    the same instants. Raise InvalidInput, with a suggestion, if the name is unknown."""
    known = files("tzdata").joinpath("zones").read_text().split()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else "Europe/Paris is one."
        raise InvalidInput(f"timezone: there is no time zone {name!r}; {hint}")
    with files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


class Named(CronSim):
    """Iterator over the wall-clock times that an expression names, beginning after `start`. Adds to cronsim one form of
    the day of month: `30L` is the 30th, or the last day of a month without one, so that a monthly schedule is due every
    month."""

    def __init__(self, text: str, start: datetime) -> None:
        fields = text.split()
        given = DAY_OR_LAST.fullmatch(fields[2])
        self._or_last = int(given[1]) if given else None
        super().__init__(" ".join([*fields[:2], "L", *fields[3:]]) if given else text, start)

    def match_dom(self, d: date) -> bool:
        if self._or_last is None:
            return super().match_dom(d)
        return d.day == min(self._or_last, monthrange(d.year, d.month)[1])

    def explain(self) -> str:
        text = super().explain()
        if self._or_last is None:
            return text
        return text.replace("the last day of", f"day {self._or_last}, or the last day, of")


class Cron:
    """A parsed cron expression or alias. Raises InvalidInput, which lists the accepted forms, if the expression cannot
    be parsed or never matches. Use `parse`, which caches."""

    def __init__(self, text: str) -> None:
        self.text = ALIASES.get(text.strip().lower(), text.strip())
        fields = self.text.split()
        if self.text.startswith("@"):
            raise InvalidInput(f"Cron expression {text!r}: no such alias. {ACCEPTED}")
        if len(self.text) > LONGEST or len(fields) != 5:
            given = count_of(len(fields), "field")
            raise InvalidInput(f"Cron expression {text[:LONGEST]!r}: {given}; a cron expression has 5. {ACCEPTED}")
        try:
            self._fields = Named(self.text, SOME_DAY)
            next(Named(self.text, SOME_DAY))
        except CronSimError as error:
            raise InvalidInput(
                f"Cron expression {text!r}: {str(error).lower()} (out of range, or never). {ACCEPTED}"
            ) from error
        except StopIteration:
            raise InvalidInput(f"Cron expression {text!r}: no such day in fifty years. {ACCEPTED}") from None
        self._follows_the_clock = fields[0].startswith("*") or fields[1].startswith("*")

    def explain(self) -> str:
        """Return the expression in words, such as "At 02:30"."""
        return self._fields.explain()

    def names(self, local: datetime) -> bool:
        """Return True if the expression names this wall-clock time, to the minute."""
        return local.minute in self._fields.minutes and local.hour in self._fields.hours and self.names_day(local)

    def names_day(self, local: datetime) -> bool:
        """Return True if the expression names the day of this wall-clock time, at any hour and minute."""
        return local.month in self._fields.months and self._fields.match_day(local.date())

    def minutes_of_day(self) -> set[int]:
        """Return the times of day that the expression names, as minutes since midnight."""
        return {60 * hour + minute for hour in self._fields.hours for minute in self._fields.minutes}

    def days_between(self, first: datetime, last: datetime) -> int:
        """Count the days from `first` to `last`, both included, that the expression names."""
        return sum(self.names_day(first + timedelta(days=n)) for n in range((last.date() - first.date()).days + 1))

    def due(self, after: datetime, zone: ZoneInfo) -> Iterator[datetime]:
        """Yield every due instant later than `after`, in UTC and in order; `zone` is the time zone in which the
        expression is read."""
        local = after.astimezone(zone)
        start = local.replace(tzinfo=None, fold=0)
        if not local.fold:  # in the first pass of a doubled hour, earlier times occur again in the second
            first, second = passes(start, zone)
            start -= second - first
        last = after
        again: deque[datetime] = deque()  # instants of the second pass of a doubled hour, due after the first pass
        for label in Named(self.text, start):
            first, second = passes(label, zone)
            while again and again[0] < first:
                last = again.popleft()
                yield last
            if first > second:  # a gap: no clock shows this time
                if self._follows_the_clock:
                    continue
                first = second = after_the_gap(label, zone)
            if first < second and self._follows_the_clock and second > after:
                again.append(second)
            if first > last:
                last = first
                yield last
        yield from again


def passes(label: datetime, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Return the instants at which clocks in the zone show `label` for the first and for the second time: equal, unless
    it is in a doubled hour. In a gap, where no clock shows it, the first is later than the second."""
    first = label.replace(tzinfo=zone, fold=0).astimezone(UTC)
    return first, label.replace(tzinfo=zone, fold=1).astimezone(UTC)


def after_the_gap(label: datetime, zone: ZoneInfo) -> datetime:
    """Return the first instant after the gap in which the wall-clock time `label` lies; outside a gap, the instant of
    `label`."""
    while True:
        first, second = passes(label, zone)
        if first <= second:
            return first
        label += MINUTE


parse = lru_cache(maxsize=10_000)(Cron)
