"""Bodies and answers of the routes of schedules."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from ecluse.access.wire import Body, Fire, Shape, SlotRow
from ecluse.base.validation import fields_of, partial_of
from ecluse.engine import State

Cron = Annotated[
    Annotated[str, Field(max_length=200)] | None,
    Field(examples=["30 2 * * 1-5"], description="Five fields, or @hourly … @yearly; null: started by hand only."),
]
Zone = Annotated[str, Field(max_length=100, examples=["Europe/Paris"])]
TimeOfDay = Annotated[Annotated[str, Field(max_length=5)] | None, Field(examples=["08:00"])]


class Timing(Body):
    cron: Cron = None
    timezone: Zone = "UTC"
    window_start: TimeOfDay = Field(None, description="Execution window: no run starts before; with `window_end`.")
    window_end: TimeOfDay = None


class ScheduleSettings(Timing):
    name: str = Field(min_length=1, max_length=200, pattern=r"\S", examples=["nightly"])
    overlap: Literal["wait", "allow", "skip"] = Field(
        "wait",
        description="While a former run is open: `wait` for its end, `allow` both at once, or `skip` the due time.",
    )
    catch_up: Literal["latest", "skip"] = Field(
        "latest", description="After a downtime, run the `latest` missed due time, or `skip` all."
    )
    enabled: bool = True


class ScheduleBody(ScheduleSettings):
    flow: str = Field(max_length=200, examples=["automation"])
    plan: dict[str, Any] = Field(
        default_factory=dict,
        description="What its runs do, in the format of its flow; for most flows the input of the runs.",
    )


@partial_of(ScheduleSettings)
class ChangedSchedule(Body):
    """Changes to a schedule: fields that are left out stay as they are, within `plan`, too."""

    cron: Cron = Field(None, description="null: started by hand only.")
    window_start: TimeOfDay = None
    window_end: TimeOfDay = None
    plan: dict[str, Any] | None = None


class PreviewedTimetable(Timing):
    cron: str = Field(max_length=200, examples=["30 2 * * 1-5"])
    count: int = Field(50, ge=1, le=100)


class RunNow(Body):
    plan: dict[str, Any] | None = Field(
        None,
        description="The fields of the schedule's plan that differ for this run.",
        examples=[{"fiche_selection": {"fiche_ids": ["171234"]}}],
    )


@fields_of(ScheduleSettings)
class ScheduleRow(Shape):
    id: str = Field(examples=["7"])
    tenant_id: str
    flow: str
    next_due_at: datetime | None = Field(description="The next due time; null: disabled, or started by hand only.")
    overdue: bool = Field(description="It is past its due time, and no scheduler has handled it.")
    failures: int = Field(description="Number of consecutive failures to fire it.")
    error: str | None
    holding_run_id: str | None = Field(description="The run that later due times wait for, while it is open.")
    last_run_id: str | None
    last_run_state: State | None
    last_fired_at: datetime | None
    created_at: datetime
    updated_at: datetime


class ScheduleInFull(ScheduleRow):
    plan: dict[str, Any]
    next_fires: list[Fire]
    slots: list[SlotRow] = Field(description="The decisions on its latest due times, the newest first.")


class ChangedScheduleInFull(ScheduleInFull):
    once: dict[str, Any] = Field(description="Secrets that were created for it. Not shown again.")


class Timetable(Shape):
    in_words: str | None = Field(examples=["At 02:30 on weekdays"], description="null: started by hand only.")
    timezone: str
    fires: list[Fire]


class FiredRun(Shape):
    run_id: str
    event_key: str
    warnings: list[str] = Field(description="Foreseeable problems of the run.")
