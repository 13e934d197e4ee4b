"""Models of a schedule as callers send it to the API: selection of fiches, the stages of a run, recipients of
notifications, and due times. DAILY, WEEKLY and MONTHLY with a time of day are other ways to write a cron expression."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from ecluse.base.masking import ORIGIN_ENDS
from ecluse.base.text import storable
from ecluse.base.validation import EitherSpelling, Partial, form, partial_of
from ecluse.flows.automation.selection_model import Override, Selection, merged
from ecluse.flows.connections.given import sendable
from ecluse.notify.rules import ONLY_SHOWN, MailAddress

ScheduleType = Literal["MANUAL", "DAILY", "WEEKLY", "MONTHLY", "CRON"]
Priority = Literal["low", "normal", "high"]
CatchUp = Literal["latest", "skip"]

NEEDED: dict[ScheduleType, tuple[str, ...]] = {
    "MANUAL": (),
    "DAILY": ("time_of_day",),
    "WEEKLY": ("time_of_day", "day_of_week"),
    "MONTHLY": ("time_of_day", "day_of_month"),
    "CRON": ("cron_expression",),
}
TIMES = ("cron_expression", "time_of_day", "day_of_week", "day_of_month")
DAYS = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
MOST_CONFIGS = 100
LARGEST_ID = 2**63 - 1


def _day_of_week(given: Any) -> Any:
    """Return the number of a day (0: Sunday) from its name or the first three letters of it; a value that is not text
    is returned unchanged. Raise ValueError for any other text."""
    if not isinstance(given, str):
        return given
    found = [n for n, day in enumerate(DAYS) if given.lower() in (day, day[:3])]
    if not found:
        raise ValueError(f"a day of the week is its name, such as monday, or its number, not {storable(given, 30)!r}")
    return found[0]


def _config_ids(given: Any) -> Any:
    """Return audit config ids as numbers, without duplicates; they may be given as numbers or as text (they have 64
    bits, which not every JSON reader keeps exactly). Raise ValueError for other values, or for more than MOST_CONFIGS
    ids."""
    if not isinstance(given, list) or not all(type(one) is int or isinstance(one, str) for one in given):
        raise ValueError('must be a list of audit config ids, such as ["3"]')
    if wrong := [one for one in given if not (str(one).isascii() and str(one).isdecimal())]:
        raise ValueError(f"an audit config id is a number, not {storable(str(wrong[0]), 30)!r}")
    found = [int(one) for one in given if len(str(one)) < 20]
    if len(found) < len(given) or not all(1 <= one <= LARGEST_ID for one in found) or len(found) > MOST_CONFIGS:
        raise ValueError(f"at most {MOST_CONFIGS} audit config ids, each from 1 to {LARGEST_ID}")
    return list(dict.fromkeys(found))


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S", examples=["Yesterday's calls"])]
CronText = Annotated[str | None, Field(max_length=200, examples=["30 2 * * 1-5"], description="With CRON only.")]
Zone = Annotated[str, Field(max_length=100, examples=["Europe/Paris"])]
TimeOfDay = Annotated[
    str | None,
    Field(
        pattern=form(r"^([01][0-9]|2[0-3]):[0-5][0-9]$", "a time of day from 00:00 to 23:59, such as 06:30"),
        examples=["06:30"],
        description="With DAILY, WEEKLY and MONTHLY.",
    ),
]
DayOfWeek = Annotated[
    Annotated[int, Field(ge=0, le=7)] | None,
    BeforeValidator(_day_of_week, json_schema_input_type=int | str | None),
    Field(examples=[1], description="With WEEKLY: its name, or its number: 0 is Sunday, and so is 7."),
    AfterValidator(lambda day: day and day % 7),
]
DayOfMonth = Annotated[
    int | None,
    Field(ge=1, le=31, examples=[1], description="With MONTHLY; in a month that is shorter, its last day."),
]
Configs = Annotated[list[int], BeforeValidator(_config_ids), Field(examples=[["3"]])]
Retries = Annotated[int, Field(ge=0, le=10)]
Url = Annotated[str | None, Field(min_length=1, max_length=2000, examples=["https://hooks.example.com/ecluse"])]


def _in_full(url: str | None) -> str | None:
    """Return the URL; raise ValueError if it is the shortened form in which a stored URL is shown."""
    if url is not None and url.endswith(ORIGIN_ENDS):
        raise ValueError(ONLY_SHOWN)
    return url


Emails = Annotated[
    list[MailAddress],
    Field(max_length=50, examples=[["ops@example.com"]]),
]
ApiKey = Annotated[
    SecretStr | None,
    Field(
        min_length=1,
        max_length=500,
        description="The CRM's key for this schedule, instead of CRM_API_KEY. Stored encrypted, never shown.",
        json_schema_extra={"writeOnly": True},
    ),
    AfterValidator(sendable),
]


EXAMPLES: list[Any] = [
    {
        "name": "Yesterday's calls",
        "schedule_type": "DAILY",
        "time_of_day": "06:30",
        "timezone": "Europe/Paris",
        "fiche_selection": {"mode": "date_range", "date_range": "yesterday", "only_with_recordings": True},
        "notify_emails": ["ops@example.com"],
    },
    {
        "name": "These two, by hand",
        "schedule_type": "MANUAL",
        "fiche_selection": {"mode": "manual", "fiche_ids": ["171234", "171235"]},
    },
]


class Work(EitherSpelling):
    """The plan of a schedule of automation: the selection of fiches, the stages of a run, and the recipients of
    notifications."""

    fiche_selection: Selection
    run_transcription: bool = True
    skip_if_transcribed: bool = True
    transcription_priority: Priority = "normal"
    run_audits: bool = True
    use_automatic_audits: bool = True
    specific_audit_configs: Configs = Field(default_factory=list)
    continue_on_error: bool = True
    retry_failed: bool = False
    max_retries: Retries = 0
    webhook_url: Url = None
    notify_emails: Emails = Field(default_factory=list)
    notify_on_complete: bool = False
    notify_on_error: bool = True
    external_api_key: ApiKey = None

    @model_validator(mode="before")
    @classmethod
    def _selects(cls, given: Any) -> Any:
        """Add an empty selection if none is given, so that its validation reports what is missing."""
        if isinstance(given, dict) and not given.keys() & {"fiche_selection", "ficheSelection"}:
            return {**given, "fiche_selection": {}}
        return given


class Plan(Work):
    """A schedule: its due times, the selection of fiches, the stages of a run, and the recipients of notifications."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES})

    name: Name
    schedule_type: ScheduleType = Field(
        "MANUAL", examples=["DAILY"], description="By default CRON with a `cron_expression`, otherwise MANUAL."
    )
    cron_expression: CronText = None
    timezone: Zone = "UTC"
    time_of_day: TimeOfDay = None
    day_of_week: DayOfWeek = None
    day_of_month: DayOfMonth = None
    is_active: bool = True
    catch_up: CatchUp = Field(
        "latest", description="After a downtime, run the `latest` missed due time, or `skip` all."
    )

    @model_validator(mode="before")
    @classmethod
    def _cron_is_a_type(cls, given: Any) -> Any:
        """Add the type CRON if a cron expression is given without a type."""
        if not isinstance(given, dict) or given.keys() & {"schedule_type", "scheduleType"}:
            return given
        has_cron = any(given.get(name) is not None for name in ("cron_expression", "cronExpression"))
        return {**given, "schedule_type": "CRON"} if has_cron else given

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        needed, kind = NEEDED[self.schedule_type], self.schedule_type
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"schedule_type {kind} needs {' and '.join(missing)}")
        if foreign := [name for name in TIMES if name not in needed and getattr(self, name) is not None]:
            kinds = [other for other, names in NEEDED.items() if foreign[0] in names]
            raise ValueError(f"{foreign[0]} goes with schedule_type {' or '.join(kinds)}, not with {kind}")
        return self

    @property
    def cron(self) -> str | None:
        return cron_of(self.schedule_type, *(getattr(self, name) for name in TIMES))


@partial_of(Work)
class WorkChanges(Partial):
    """Changes to the plan of a schedule: only the given fields change, in the selection, too."""

    nullable: ClassVar[tuple[str, ...]] = ("webhook_url", "external_api_key")

    fiche_selection: Override | None = None
    webhook_url: Annotated[Url, AfterValidator(_in_full)] = Field(None, description="null: none any more.")
    external_api_key: ApiKey = Field(None, description="null: none any more.")


@partial_of(Plan)
class Changes(WorkChanges):
    """Changes to a schedule: only the given fields change, in the selection, too. A change of `schedule_type` clears
    the times that the new type does not use; `time_of_day` stays from DAILY to WEEKLY."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"is_active": False}, {"fiche_selection": {"groupes": ["Paris"]}}]}
    )
    nullable = (*TIMES, *WorkChanges.nullable)


def changed(plan: Plan, changes: WorkChanges) -> dict[str, Any]:
    """Return the fields of the changed plan, for `Plan` to validate. An API key that is not given is left out, so that
    the stored one stays."""
    known = {name: getattr(plan, name) for name in Plan.model_fields if name != "external_api_key"}
    given = {name: getattr(changes, name) for name in changes.model_fields_set}
    if "fiche_selection" in given:
        given["fiche_selection"] = merged(plan.fiche_selection, given["fiche_selection"])
    if "schedule_type" not in given and given.get("cron_expression") is not None:
        given["schedule_type"] = "CRON"
    if (kind := given.get("schedule_type", plan.schedule_type)) != plan.schedule_type:
        known |= dict.fromkeys((name for name in TIMES if name not in NEEDED[kind]), None)
    return {**known, **given}


def times_of(plan: Work, cron: str | None) -> dict[str, Any]:
    """Return the type and the times of a schedule with this `cron`: as the plan has them, if its cron is the same,
    otherwise as type CRON or MANUAL."""
    if isinstance(plan, Plan) and plan.cron == cron:
        return {name: getattr(plan, name) for name in ("schedule_type", *TIMES)}
    by_hand = {"schedule_type": "MANUAL" if cron is None else "CRON", **dict.fromkeys(TIMES, None)}
    return {**by_hand, "cron_expression": cron}


def cron_of(
    schedule_type: ScheduleType,
    cron_expression: str | None,
    time_of_day: str | None,
    day_of_week: int | None,
    day_of_month: int | None,
) -> str | None:
    """Return the cron expression of a schedule of this type with these times; None for type MANUAL, which is started by
    hand only."""
    if schedule_type == "MANUAL":
        return None
    if schedule_type == "CRON":
        return cron_expression
    hour, minute = (int(part) for part in str(time_of_day).split(":"))
    day = "*" if schedule_type != "MONTHLY" else str(day_of_month)
    if schedule_type == "MONTHLY" and day_of_month is not None and day_of_month > 28:
        day += "L"  # or the last day of a shorter month
    return f"{minute} {hour} {day} * {day_of_week if schedule_type == 'WEEKLY' else '*'}"
