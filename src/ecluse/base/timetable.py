"""The due instants of a schedule, in UTC, computed from its cron, time zone and execution window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo

from ecluse.base import cron, windows
from ecluse.base.cron import Cron, passes
from ecluse.base.windows import Window


class Fire(NamedTuple):
    """One due instant in a preview. `mark`: a note about a clock change or a moved time; None for an ordinary
    instant."""

    at: datetime  # in the schedule's time zone
    mark: str | None


@dataclass(frozen=True)
class Timetable:
    """The times at which a schedule is due: a cron expression in a time zone and, if given, the window in which its
    runs must begin."""

    cron: Cron
    zone: ZoneInfo
    window: Window | None = None

    def due(self, after: datetime) -> Iterator[datetime]:
        """Yield every due instant later than `after`, in UTC and in order. Times that the cron names outside the window
        are due together, once, when the window opens next."""
        if self.window is None:
            yield from self.cron.due(after, self.zone)
            return
        while True:
            named = next(self.cron.due(after, self.zone))
            after = self.window.clamp(named, self.zone)
            yield after

    def next(self, after: datetime) -> datetime:
        """Return the first due instant later than `after`."""
        return next(self.due(after))

    def latest(self, after: datetime, until: datetime, most: int) -> tuple[list[datetime], int]:
        """Return the latest `most` due instants in (after, until], and the approximate number of due instants before
        them, counted by the calendar without clock changes. The cost stays small however long ago `after` was."""
        span = timedelta(hours=2)
        while True:
            start = max(after, until - span)
            found = list(takewhile(lambda at: at <= until, self.due(start)))
            if start == after or len(found) > most:
                break
            span *= 2
        listed = found[-most:]
        if start == after:
            return listed, len(found) - len(listed)
        return listed, self._about(after, listed[0])

    def _about(self, after: datetime, before: datetime) -> int:
        """Return the approximate number of instants due between `after` and `before`, counted by the calendar."""
        minutes = self.cron.minutes_of_day()
        if self.window is not None:
            minutes = {minute if self.window.holds(minute) else self.window.start for minute in minutes}
        first, last = after.astimezone(self.zone), before.astimezone(self.zone)
        begun = sum(minute <= 60 * first.hour + first.minute for minute in minutes) if self.cron.names_day(first) else 0
        left = sum(minute >= 60 * last.hour + last.minute for minute in minutes) if self.cron.names_day(last) else 0
        return max(0, self.cron.days_between(first, last) * len(minutes) - begun - left)

    def preview(self, after: datetime, count: int) -> list[Fire]:
        """Return the next `count` due instants after `after`, with marks where clocks change or a time was moved."""
        fires: list[Fire] = []
        offset = after.astimezone(self.zone).utcoffset()
        for instant in islice(self.due(after), count):
            at = instant.astimezone(self.zone)
            marks = [self._mark(at), f"clocks changed to {at:%z}" if at.utcoffset() != offset else None]
            fires.append(Fire(at, ", ".join(filter(None, marks)) or None))
            offset = at.utcoffset()
        return fires

    def _mark(self, at: datetime) -> str | None:
        """Explain why this due instant is not simply the time that the expression names; None if it is."""
        label = at.replace(tzinfo=None, fold=0)
        first, second = passes(label, self.zone)
        if first < second:
            return "second of a doubled hour" if at.fold else "first of a doubled hour"
        if self.cron.names(at):
            return None
        before, _ = passes(label - cron.MINUTE, self.zone)
        return "moved out of the gap" if before >= first else "moved to the start of the window"


def timetable(expression: str, zone: str, window_start: str | None, window_end: str | None) -> Timetable:
    """Build a timetable from its parts as text; raise InvalidInput if one of them is invalid."""
    return Timetable(cron.parse(expression), cron.zone(zone), windows.parse(window_start, window_end))
