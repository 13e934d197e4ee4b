"""Models of a fiche selection (of a schedule, and as an override for one run), and the days that follow from it.

Presets count in days of the schedule's zone, the day of the due time included: `last_7_days` is that day and the six
before it, `this_month` ends with it, `last_month` is the whole calendar month before. A custom range includes both of
its days.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import date, datetime, timedelta
from math import ceil
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ecluse.base import cron
from ecluse.base.errors import InvalidInput
from ecluse.base.text import count_of
from ecluse.base.validation import EitherSpelling, Partial, partial_of, readable
from ecluse.flows.connections.records import Kind
from ecluse.flows.fiches.ids import why_not

Mode = Literal["date_range", "manual", "filter"]
DateRange = Literal["today", "yesterday", "last_7_days", "last_30_days", "this_month", "last_month", "custom"]

WAIT, AUDIT_WAIT = "AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS", "AUTOMATION_AUDIT_MAX_WAIT_MS"
LONGEST_RANGE = 366  # days
MOST_FICHES = 50_000
MOST_GROUPES = 200
LARGEST = 2**31 - 1
DATES = ("start_date", "end_date")
PRESETS = (
    "Days of the schedule's zone, seen from its due time; of a run by hand, from now. `last_7_days` and `last_30_days` "
    "end with that day, and so does `this_month`; `last_month` is the whole calendar month before. `custom` is from "
    f"`start_date` to `end_date`, both included, {LONGEST_RANGE} days at most."
)


def _ids(given: Any) -> Any:
    """Return fiche ids without duplicates, in the order given, from a list of texts or from one text with whitespace or
    commas in between. Raise ValueError if an id is not valid, or there are more than MOST_FICHES."""
    if isinstance(given, str):
        given = [one for one in re.split(r"[\s,]+", given) if one]
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError("must be a list of fiche ids, each as text, or one text with commas in between")
    if len(given) > MOST_FICHES:
        raise ValueError(f"at most {MOST_FICHES} fiches can be given, not {len(given)}")
    found = [one.strip() for one in given]
    if why := why_not(found):
        raise ValueError(why)
    return list(dict.fromkeys(found))


def _groupes(given: Any) -> Any:
    """Return a list of groupes without blanks around them and without duplicates, in the order given. Raise ValueError
    if it is not a list of at most MOST_GROUPES texts of 1 to 200 characters."""
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError("must be a list of groupes, each as text")
    found = [one.strip() for one in given]
    if len(found) > MOST_GROUPES or not all(1 <= len(one) <= 200 for one in found):
        raise ValueError(f"at most {MOST_GROUPES} groupes, each of 1 to 200 characters")
    return list(dict.fromkeys(found))


def _day(given: Any) -> Any:
    """Return the day that is given as YYYY-MM-DD; a `date` or None is returned unchanged. Raise ValueError for anything
    else."""
    if isinstance(given, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", given):
        return date.fromisoformat(given)
    if given is None or type(given) is date:
        return given
    raise ValueError("must be a day as YYYY-MM-DD")


FicheIds = Annotated[
    list[str],
    BeforeValidator(_ids, json_schema_input_type=list[str] | str),
    Field(examples=[["171234", "171235"]]),
]
Groupes = Annotated[list[str], BeforeValidator(_groupes), Field(examples=[["Paris"]])]
Day = Annotated[date | None, BeforeValidator(_day), Field(examples=["2026-03-01"])]
Most = Annotated[int | None, Field(ge=1, le=LARGEST)]


class Selection(EitherSpelling):
    """The selection of a run's fiches. Mode `filter` is another name for `date_range`, for callers that use its
    filters. A manual list may be empty: such a run completes with the reason `no_fiches_manual`."""

    mode: Mode = Field(
        examples=["date_range"], description="By default `manual` with `fiche_ids`, `date_range` with a `date_range`."
    )
    date_range: DateRange | None = Field(None, examples=["yesterday"], description=PRESETS)
    start_date: Day = None
    end_date: Day = None
    fiche_ids: FicheIds = Field(default_factory=list, description="With mode manual: the fiches, in this order.")
    groupes: Groupes = Field(default_factory=list)
    only_with_recordings: bool = False
    only_unaudited: bool = False
    use_rlm: bool = False
    max_fiches: Most = Field(None, description="Maximum number of fiches: the first ones of the selection; null: all.")
    max_recordings_per_fiche: Most = Field(
        None,
        description="A fiche with more recordings is ignored; null: the value of AUTOMATION_MAX_RECORDINGS_PER_FICHE.",
    )

    @model_validator(mode="before")
    @classmethod
    def _mode_follows(cls, given: Any) -> Any:
        """Add the mode if it is not given and follows from a list of fiches or a date range; raise ValueError if it
        does not follow."""
        if not isinstance(given, dict) or given.get("mode") is not None:
            return given
        if given.keys() & {"date_range", "dateRange"}:
            return {**given, "mode": "date_range"}
        if given.keys() & {"fiche_ids", "ficheIds"}:
            return {**given, "mode": "manual"}
        raise ValueError("select fiches by the days of their sales (date_range) or by id (fiche_ids), or give a mode")

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.mode == "manual":
            if self.date_range or self.start_date or self.end_date:
                raise ValueError("date_range, start_date and end_date go with mode 'date_range' or 'filter'")
            return self
        if self.fiche_ids:
            raise ValueError("fiche_ids go with mode 'manual'")
        if self.date_range is None:
            raise ValueError(f"mode {self.mode!r} needs a date_range: a preset, or custom with start_date and end_date")
        if self.date_range != "custom":
            if self.start_date or self.end_date:
                raise ValueError("start_date and end_date go only with date_range 'custom'")
        elif self.start_date is None or self.end_date is None:
            raise ValueError("date_range 'custom' needs start_date and end_date")
        elif self.end_date < self.start_date:
            raise ValueError(f"the range is backwards: it ends on {self.end_date}, before {self.start_date}")
        elif (days := (self.end_date - self.start_date).days + 1) > LONGEST_RANGE:
            raise ValueError(f"a range is {LONGEST_RANGE} days at most, and this one is {days}")
        return self


@partial_of(Selection)
class Override(Partial):
    """Changes to a selection: only the given fields change; null is refused unless it clears a field."""

    nullable = ("date_range", *DATES, "max_fiches", "max_recordings_per_fiche")

    def given(self) -> dict[str, Any]:
        """Return only the fields that were given."""
        return self.model_dump(exclude_unset=True)


def merged(selection: Selection, override: Override | None) -> Selection:
    """Return the selection with the fields of the override replaced. Stored fields that the resulting mode or range
    does not use are dropped. Raise InvalidInput if the result is not a valid selection."""
    if override is None:
        return selection
    given, known = override.given(), selection.model_dump()
    mode = given.get("mode", selection.mode)
    if mode == "manual":
        idle: tuple[str, ...] = ("date_range", *DATES)
    else:
        idle = ("fiche_ids", *(DATES if given.get("date_range", selection.date_range) != "custom" else ()))
    return parsed({**{name: value for name, value in known.items() if name not in idle}, **given})


def parsed(given: dict[str, Any]) -> Selection:
    """Return a selection from its fields; raise InvalidInput, naming the invalid fields, if it is not valid."""
    try:
        return Selection.model_validate(given)
    except ValidationError as error:
        raise InvalidInput(f"fiche_selection: {readable(error)}") from error


def dates_to_query(selection: Selection, due: datetime, timezone: str) -> list[date]:
    """Return the days that a selection covers, in order; none for a manual list. `due` is the instant from which
    presets count."""
    today = due.astimezone(cron.zone(timezone)).date()
    first, last = today, today
    match selection.date_range:
        case None:
            return []
        case "yesterday":
            first = last = today - timedelta(days=1)
        case "last_7_days":
            first = today - timedelta(days=6)
        case "last_30_days":
            first = today - timedelta(days=29)
        case "this_month":
            first = today.replace(day=1)
        case "last_month":
            last = today.replace(day=1) - timedelta(days=1)
            first = last.replace(day=1)
        case "custom":
            assert selection.start_date is not None and selection.end_date is not None  # noqa: S101, PT018 - validated
            first, last = selection.start_date, selection.end_date
    return [first + timedelta(days=n) for n in range((last - first).days + 1)]


def crm_date(day: date) -> str:
    """Return a day as the CRM writes it: DD/MM/YYYY."""
    return f"{day:%d/%m/%Y}"


def nothing_warning(selection: Selection) -> str | None:
    """Return a warning if the selection is an empty manual list; None otherwise."""
    if selection.mode != "manual" or selection.fiche_ids:
        return None
    return "No fiche is given: the run will complete without doing anything."


def kinds_needed(transcribes: bool, audits: bool) -> list[Kind]:
    """Return the kinds of connections that a run needs. Audits need transcripts, too."""
    wanted: dict[Kind, bool] = {"crm": True, "speech": transcribes or audits, "llm": audits}
    return [kind for kind, needed in wanted.items() if needed]


def missing_warning(unset: Sequence[str], kinds: Collection[Kind]) -> str | None:
    """Return a warning that names the `unset` knobs of connections of these kinds; None if all of them are set."""
    knobs: dict[Kind, str] = {"crm": "CRM_", "speech": "ELEVENLABS_", "llm": "LLM_"}
    missing = [name for name in unset if any(name.startswith(knobs[kind]) for kind in kinds)]
    return f"Not set on this server: {', '.join(missing)}. The run will fail without them." if missing else None


def truncation_warning(selection: Selection) -> str | None:
    """Return a warning if `max_fiches` cuts the list, which is known beforehand for a manual list only; None
    otherwise."""
    given, most = len(selection.fiche_ids), selection.max_fiches
    if most is None or given <= most:
        return None
    return f"{given} fiches are given and max_fiches is {most}: the first {most} are taken, the others are left out."


def budget_warning(recordings: int, per_minute: float, max_wait: timedelta, knob: str = WAIT) -> str | None:
    """Return a warning if this number of transcripts cannot be made within `max_wait`, even without any backoff; None
    if they can. `knob` is the setting of that wait."""
    minutes, budget = ceil(recordings / per_minute), max_wait / timedelta(minutes=1)
    if minutes <= budget:
        return None
    missing = count_of(recordings, "recording has", "recordings have")
    return (
        f"{missing} no transcript yet, which takes {minutes} min at {per_minute:g} a minute; the "
        f"run waits {budget:g} min ({knob}): about {int(budget * per_minute)} of them "
        "can be there in time, and the fiches of the others fail."
    )
