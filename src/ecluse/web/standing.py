"""The state of an open run for the top of its page: whether it makes progress, since when not, and its time limit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ecluse.db.connect import Connection
from ecluse.insight.run_queries import Row
from ecluse.insight.stalls import is_quiet
from ecluse.insight.waiting import RunWaits


@dataclass(frozen=True)
class Standing:
    """The state of an open run. `why`: what it waits for. `ends_by`: when its last call starts, at the earliest."""

    why: str
    stuck: bool  # the run makes no progress
    quiet_since: datetime | None  # since when nothing was done; None if the run makes progress
    progress_at: datetime
    limited: Row | None  # the open stage, whose deadline limits the run
    clock_stopped: bool  # a paused lane has stopped the clock of that stage
    ends_by: datetime | None

    @property
    def too_late(self) -> bool:
        late = self.ends_by is not None and self.limited is not None and self.ends_by > self.limited["deadline_at"]
        return late and not self.clock_stopped


async def of(connection: Connection, run: Row, now: datetime, waits: RunWaits | None) -> Standing | None:
    """Return the state of a run; None if it has ended."""
    if waits is None or waits.progress_at is None:
        return None
    quiet = run["orchestrated"] and is_quiet(waits.progress_at, now)
    one = waits.groups[0] if len(waits.groups) == 1 else None
    said = waits.summary if one is None else f"{one.count:,} waiting: {one.detail}" if one.lane else one.detail
    open_ = [stage for stage in run["stages"] if stage["ended_at"] is None]
    lasts = [group.last_at for group in waits.groups if group.last_at is not None]
    return Standing(
        said,
        waits.blocked or quiet,
        waits.progress_at if quiet else None,
        waits.progress_at,
        open_[-1] if open_ else None,
        bool(open_) and await _is_stopped(connection, run["id"], open_[-1]["stage"]),
        max(lasts) if lasts and len(lasts) == len(waits.groups) else None,
    )


async def _is_stopped(connection: Connection, run_id: int, stage: str) -> bool:
    row = await (await connection.execute("SELECT clock_stopped(%s, %s)", (run_id, stage))).fetchone()
    return row is not None and bool(row[0])
