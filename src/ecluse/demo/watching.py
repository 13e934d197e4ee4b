"""Progress display of a demonstration (bars at a terminal, lines elsewhere), and the kill of its server half-way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ecluse.base.errors import SetUpError
from ecluse.demo.scene import Scene

LOOK_SECONDS = 0.1
LINE_SECONDS = 3.0  # between two lines, without a terminal
PACE_SECONDS = 5.0  # window over which the rate is measured

# From the kill to the first claim by a replica that started after it.
BACK = """
SELECT extract(epoch FROM min(c.taken_at) - k.at)::float8 AS seconds FROM (SELECT %s::timestamptz AS at) k
JOIN replicas r ON r.started_at > k.at JOIN claims c ON c.replica_id = r.id GROUP BY k.at
"""


class Seen(NamedTuple):
    """Progress of the demonstration at one moment; `total` is None while it is unknown."""

    phase: str
    done: int
    total: int | None
    ended: bool


class Kill(NamedTuple):
    """The kill of the server: its instant, and the seconds until a worker claimed items again."""

    at: datetime
    idle_seconds: float  # until a worker claimed items again


def watch(
    console: Console, played: Scene, look: Callable[[], Seen], *, kill_when: Callable[[Seen], bool], longest: float
) -> Kill:
    """Display progress, as `look` returns it, until it has ended; kill and restart the server once, as soon as
    `kill_when` returns True. Return the kill. Raise SetUpError if it takes more than `longest` seconds, or ends before
    the kill."""
    killed_at, kill = None, None
    until = time.monotonic() + longest
    with _display(console) as display:
        while True:
            seen = look()
            display.show(seen)
            if killed_at is None and not seen.ended and kill_when(seen):
                played.kill_server()
                killed_at = datetime.now(UTC)
                display.print(
                    f"kill -9 of the server, on purpose: {seen.phase}, {seen.done} of {seen.total} done", "red"
                )
                display.print("starting the server again; its only remaining state is the database", "red")
                played.start_server()
            if killed_at is not None and kill is None:
                for row in played.query(BACK, killed_at):
                    kill = Kill(killed_at, row["seconds"])
                    display.print(f"work resumed {kill.idle_seconds:.1f} s after the kill", "green")
            if seen.ended:
                if killed_at is None:
                    raise SetUpError("The demonstration ended before the server was killed: it has too little work.")
                return kill or Kill(killed_at, (datetime.now(UTC) - killed_at).total_seconds())
            if time.monotonic() > until:
                far = f"{seen.phase}, {seen.done} of {seen.total} done"
                raise SetUpError(f"The demonstration did not end within {longest:.0f} s: {far}.")
            time.sleep(LOOK_SECONDS)


class _Counted(ProgressColumn):
    """A column with done and total."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}", style="progress.download")


class _Pace(ProgressColumn):
    """A column with the rate and the time left."""

    def render(self, task: Task) -> Text:
        return Text(_pace(task), style="progress.data.speed")


def _pace(task: Task) -> str:
    """Return the rate and the time left as text; empty if they are unknown."""
    if task.finished or not task.speed:
        return ""
    left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
    return f"{task.speed:.0f}/s{left}"


class _Display:
    """Progress display of a demonstration: a bar for each phase at a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            _Counted(),
            TimeElapsedColumn(),
            _Pace(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=PACE_SECONDS,
        )
        self._task: TaskID | None = None
        self._phase = ""
        self._began = time.monotonic()
        self._next_line = 0.0

    def show(self, seen: Seen) -> None:
        """Show this progress; a new phase completes the one before it."""
        if self._task is None or seen.phase != self._phase:
            self.end_phase()
            self._task, self._phase, self._next_line = self.progress.add_task(seen.phase, total=None), seen.phase, 0.0
        self.progress.update(self._task, completed=seen.done, total=seen.total)
        now = time.monotonic()
        if self.progress.disable and now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            counted = f"{seen.done} of {seen.total}" if seen.total else ""
            shown = ", ".join(part for part in (counted, _pace(self.progress.tasks[self._task])) if part)
            self.print(f"{now - self._began:5.1f} s  {seen.phase:<13} {shown}".rstrip())

    def end_phase(self) -> None:
        """Show the current phase as complete: it ended before the next began, even if its end was not observed."""
        if self._task is not None:
            total = self.progress.tasks[self._task].total or 1
            self.progress.update(self._task, completed=total, total=total)
            self.progress.stop_task(self._task)

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, style=f"bold {style}" if style else None, highlight=False, soft_wrap=True)


@contextmanager
def _display(console: Console) -> Iterator[_Display]:
    """Show a progress display for the duration of the context; at its end, the last phase is shown as complete."""
    display = _Display(console)
    with display.progress:
        yield display
        display.end_phase()
