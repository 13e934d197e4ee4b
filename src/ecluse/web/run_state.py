"""The state of a run for the top of its page: one sentence, whether it makes progress, and its time limit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_value
from ecluse.insight.stalls import is_quiet
from ecluse.insight.waiting import RunWaits
from ecluse.web.figures import Bar

ENOUGH = 5  # units that are done before their pace predicts the rest


@dataclass(frozen=True)
class RunState:
    """The state of an open run. `why`: what it waits for. `ends_by`: the expected start of its last call; None if that
    is not known for every waiting group."""

    why: str
    stuck: bool  # the run makes no progress
    quiet_since: datetime | None  # since when nothing was done; None if the run makes progress
    progress_at: datetime
    limited: Row | None  # the open stage, whose deadline limits the run
    clock_stopped: bool  # a paused lane has stopped the clock of that stage
    ends_by: datetime | None
    ends_about: datetime | None  # at its present pace, its open stage ends then; to the minute

    @property
    def too_late(self) -> bool:
        late = self.ends_by is not None and self.limited is not None and self.ends_by > self.limited["deadline_at"]
        return late and not self.clock_stopped


async def of(connection: Connection, run: Row, now: datetime, waits: RunWaits | None) -> RunState | None:
    """Return the state of an open run. `waits`: what it waits for; None if the run has ended, and then None is
    returned."""
    if waits is None or waits.progress_at is None:
        return None
    quiet = run["orchestrated"] and is_quiet(waits.progress_at, now)
    one = waits.groups[0] if len(waits.groups) == 1 else None
    said = waits.summary if one is None else f"{one.count:,} waiting: {one.detail}" if one.lane else one.detail
    open_ = [stage for stage in run["stages"] if stage["ended_at"] is None]
    lasts = [group.last_at for group in waits.groups if group.last_at is not None]
    return RunState(
        said,
        waits.blocked or quiet,
        waits.progress_at if quiet else None,
        waits.progress_at,
        open_[-1] if open_ else None,
        bool(open_) and await _is_stopped(connection, run["id"], open_[-1]["stage"]),
        max(lasts) if lasts and len(lasts) == len(waits.groups) else None,
        _at_this_pace(open_[-1], now) if open_ and not (waits.blocked or quiet) else None,
    )


def _at_this_pace(stage: Row, now: datetime) -> datetime | None:
    done = sum(stage[name] for name in ("done", "failed", "ignored"))
    if done < ENOUGH or done >= stage["expected"]:
        return None
    left: timedelta = (now - stage["started_at"]) * ((stage["expected"] - done) / done)
    # Rounded to the minute, so that a stream does not send another estimate at each rendering.
    return (now + left + timedelta(seconds=30)).replace(second=0, microsecond=0)


def sentence(run: Row, progress: tuple[str, Bar] | None, stuck: bool) -> str:
    """Describe the state of a run in one sentence: its progress if it is open, else its result."""
    if run["ended_at"] is None:
        if progress is None:
            return "Waiting to be started." if run["state"] == "queued" else "Running; no stage has begun yet."
        stage, bar = progress
        failed = f", {bar.failed:,} failed" if bar.failed else ""
        verb = "Waiting at" if stuck else "Running,"
        return f"{verb} {bar.percent} %: {stage} {bar.finished:,} of {bar.total:,}{failed}."
    ended = "Cancelled" if run["state"] == "cancelled" else f"Ended {run['status']}"
    if not run["selected"]:
        return f"{ended}: no targets."
    counts = {
        "failed": run["failed"] - run["cancelled"],
        "cancelled": run["cancelled"],
        "ignored": run["ignored"],
    }
    wrong = [f"{count:,} {name}" for name, count in counts.items() if count]
    if not wrong:
        return f"{ended}: all {run['successful']:,} successful."
    return f"{ended}: {', '.join(wrong)} of {run['selected']:,}."


def title(run: Row, name: str, progress: tuple[str, Bar] | None) -> str:
    """Return the title of the document, with the progress or the result first, so that a browser tab shows it."""
    if run["ended_at"] is None:
        return f"{progress[1].percent if progress else 0} % · {name}"
    failed = run["failed"] - run["cancelled"]
    ended = "cancelled" if run["state"] == "cancelled" else run["status"]
    return f"{ended} · {failed:,} failed · {name}" if failed else f"{ended} · {name}"


async def _is_stopped(connection: Connection, run_id: int, stage: str) -> bool:
    return bool(await fetch_value(connection, "SELECT clock_stopped(%s, %s)", (run_id, stage)))
