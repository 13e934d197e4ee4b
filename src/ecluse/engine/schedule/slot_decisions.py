"""Decisions on due instants: one pure decision per schedule and tick.

An instant is fired, waits for the previous run, is skipped or was missed; in each case it becomes a row (a slot) with
that state. Of several due instants only the latest may fire: a schedule never catches up on more than one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from ecluse.base.timetable import Timetable, timetable
from ecluse.engine.model.fires import Overlap

# Slots per decision; earlier instants are only counted.
MOST_SLOTS = 100
SUPERSEDED = "superseded: a later instant was due"
OVERLAP = "overlap: the previous run was still open"
OUTSIDE = "outside the execution window"
DISABLED_TENANT = "the tenant is disabled"
NOT_RUNNING = "no scheduler was running in time"

SlotState = Literal["fired", "waiting", "skipped", "missed", "failed"]


@dataclass(frozen=True)
class FiringLimits:
    """Time limits of firing. An instant is on time up to the age `look_back`; after that, a schedule may catch up on it
    up to the age `catch_up_within`."""

    look_back: timedelta = timedelta(minutes=20)
    catch_up_within: timedelta = timedelta(hours=24)


@dataclass(frozen=True)
class Schedule:
    """A schedule as a tick reads it. `handled_until`: the latest instant that was decided; `failures`: the number of
    consecutive ticks that could not handle it; `held`: the run that holds it is open; `waiting`: the instant that waits
    for that run."""

    id: int
    tenant_id: str
    flow: str
    cron: str
    timezone: str
    window_start: str | None
    window_end: str | None
    input: Mapping[str, Any]
    overlap: Overlap
    catch_up: Literal["latest", "skip"]
    handled_until: datetime
    failures: int
    held: bool
    waiting: datetime | None
    tenant_disabled: bool

    @property
    def timetable(self) -> Timetable:
        return timetable(self.cron, self.timezone, self.window_start, self.window_end)


class Slot(NamedTuple):
    """The decision on one due instant: its state, and the reason where one is needed. `reference`: the id of the record
    that a flow made for it instead of a run."""

    due_at: datetime
    state: SlotState
    reason: str | None
    reference: str | None = None


@dataclass(frozen=True)
class Decision:
    """The decision on all instants due until now; the last slot is the latest instant, the only one that may fire.
    `uncounted`: the number of earlier instants that get no slot, because there are more than MOST_SLOTS."""

    slots: Sequence[Slot]
    uncounted: int
    handled_until: datetime
    next_due_at: datetime

    @property
    def fires(self) -> datetime | None:
        """The instant that is to be fired; None if none is."""
        return self.slots[-1].due_at if self.slots and self.slots[-1].state == "fired" else None

    def with_latest(self, **changed: Any) -> Decision:
        """Return the decision with these fields of its latest slot replaced."""
        *earlier, latest = self.slots
        return replace(self, slots=(*earlier, latest._replace(**changed)))


def event_key(pattern: str, schedule_id: int, due_at: datetime) -> str:
    """Return the event key of the run that is started for this instant. `pattern`: the `slot_key` of its flow."""
    return pattern.format(schedule=schedule_id, due=int(due_at.timestamp() * 1000))


def decide(schedule: Schedule, now: datetime, rules: FiringLimits) -> Decision:
    """Decide on the instants of a schedule that are due by `now` and not decided yet, and on the one that waits."""
    table = schedule.timetable
    due, uncounted = table.latest(schedule.handled_until, now, MOST_SLOTS)
    handled_until = due[-1] if due else schedule.handled_until
    next_due_at = table.next(handled_until)
    if schedule.waiting is not None:
        due.insert(0, schedule.waiting)
    if not due:
        return Decision((), uncounted, handled_until, next_due_at)
    *earlier, latest = due
    slots = [_passed_over(schedule, at, now, rules) for at in earlier]
    slots.append(_verdict(schedule, table, latest, now, rules))
    if slots[-1].state == "waiting":
        next_due_at = min(next_due_at, latest + rules.look_back)
    return Decision(slots, uncounted, handled_until, next_due_at)


def _passed_over(schedule: Schedule, due_at: datetime, now: datetime, rules: FiringLimits) -> Slot:
    """Decide on a due instant that is not fired because a later one is due, too."""
    if schedule.tenant_disabled:
        return Slot(due_at, "skipped", DISABLED_TENANT)
    if due_at == schedule.waiting:
        return Slot(due_at, "skipped", f"{OVERLAP}; {SUPERSEDED}")
    if now - due_at <= rules.look_back:
        return Slot(due_at, "skipped", SUPERSEDED)
    return Slot(due_at, "missed", NOT_RUNNING)


def _verdict(schedule: Schedule, table: Timetable, due_at: datetime, now: datetime, rules: FiringLimits) -> Slot:
    """Decide on the latest due instant, which may fire."""
    late = now - due_at > rules.look_back
    held = schedule.held and schedule.overlap != "allow"
    if schedule.tenant_disabled:
        return Slot(due_at, "skipped", DISABLED_TENANT)
    if late and (held or due_at == schedule.waiting):
        return Slot(due_at, "skipped", OVERLAP)
    if late and schedule.catch_up == "skip":
        return Slot(due_at, "missed", f"{NOT_RUNNING}, and catch_up is skip")
    if late and now - due_at > rules.catch_up_within:
        limit = f"{rules.catch_up_within / timedelta(hours=1):g} h (ECLUSE_CATCH_UP_HOURS)"
        return Slot(due_at, "missed", f"{NOT_RUNNING}, and the instant is older than the catch-up limit of {limit}")
    if table.window is not None and not table.window.contains(now, table.zone):
        return Slot(due_at, "skipped", OUTSIDE)
    if held:
        return Slot(due_at, "waiting" if schedule.overlap == "wait" else "skipped", OVERLAP)
    return Slot(due_at, "fired", "caught up" if late else None)
