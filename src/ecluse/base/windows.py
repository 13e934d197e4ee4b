"""Execution windows: the times of day between which work may begin, both ends included, to the minute.

A time outside moves to the next start of the window, whether the cron names that minute or not. When the clocks change,
a start that does not exist moves to the first instant after the gap, if the window is still open then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from ecluse.base.cron import after_the_gap, passes
from ecluse.base.errors import InvalidInput

TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Window:
    """A window in minutes since midnight; if the start is later than the end, it spans midnight."""

    start: int
    end: int

    def holds(self, minute: int) -> bool:
        """Return True if a time of day, in minutes since midnight, is inside."""
        if self.start <= self.end:
            return self.start <= minute <= self.end
        return minute >= self.start or minute <= self.end

    def contains(self, instant: datetime, zone: ZoneInfo) -> bool:
        """Return True if the instant is inside the window, by the wall-clock time of the zone."""
        local = instant.astimezone(zone)
        return self.holds(60 * local.hour + local.minute)

    def clamp(self, instant: datetime, zone: ZoneInfo) -> datetime:
        """Return the instant if it is inside the window, by the wall-clock time of the zone, else the instant at which
        the window opens next; both in UTC."""
        if self.contains(instant, zone):
            return instant.astimezone(UTC)
        midnight = instant.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
        while True:
            label = midnight + timedelta(minutes=self.start)
            first, second = passes(label, zone)
            for opens in (first, second) if first <= second else (after_the_gap(label, zone),):
                if opens > instant and self.contains(opens, zone):
                    return opens
            midnight += DAY


def parse(start: str | None, end: str | None) -> Window | None:
    """Return the window from `HH:MM` to `HH:MM`; None if neither is given. Raise InvalidInput if only one is given, if
    they are equal, or if one cannot be parsed."""
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise InvalidInput("Execution window: give both start and end, or neither")
    if start == end:
        raise InvalidInput(f"Execution window: from {start} to {end} is empty, start and end must differ")
    return Window(_minute(start), _minute(end))


def _minute(text: str) -> int:
    if (found := TIME.fullmatch(text)) is None:
        raise InvalidInput(f"Execution window: {text!r} is not a time of day, HH:MM from 00:00 to 23:59")
    return 60 * int(found[1]) + int(found[2])
