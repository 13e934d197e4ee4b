"""Options of the automation commands, converted to the fields of the HTTP API, and validation errors that name options
instead of fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ecluse.base.errors import InvalidInput
from ecluse.base.validation import Spelling, as_sent, readable, respelled
from ecluse.cli.given import json_object

SPELLINGS_OF_TYPE = {"schedule_type", "scheduleType"}
SELECTION = "fiche_selection"
OPTIONS = {
    "name": "--name",
    "schedule_type": "--type",
    "time_of_day": "--at",
    "day_of_week": "--day-of-week",
    "day_of_month": "--day-of-month",
    "cron_expression": "--cron",
    "timezone": "--tz",
    "mode": "--mode",
    "date_range": "--range",
    "start_date": "--start-date",
    "end_date": "--end-date",
    "fiche_ids": "--fiches",
    "groupes": "--groupe",
    "max_fiches": "--max-fiches",
    "external_api_key": "--external-api-key-file",
}


class Type(StrEnum):
    MANUAL = "MANUAL"
    DAILY = "DAILY"
    WEEKLY = "WEEKLY"
    MONTHLY = "MONTHLY"
    CRON = "CRON"


class Mode(StrEnum):
    date_range = "date_range"
    manual = "manual"
    filter = "filter"


class Range(StrEnum):
    today = "today"
    yesterday = "yesterday"
    last_7_days = "last_7_days"
    last_30_days = "last_30_days"
    this_month = "this_month"
    last_month = "last_month"
    custom = "custom"


@contextmanager
def in_options(as_json: str | None, known: Mapping[str, str] = OPTIONS) -> Iterator[None]:
    """Name a refused field by its option, or as it is spelled in the JSON that was given beside the options."""
    spelled = _spelling(as_json, known)
    try:
        yield
    except ValidationError as error:
        raise InvalidInput(_without_group(readable(error, spelled))) from error
    except InvalidInput as error:
        raise InvalidInput(_without_group(respelled(error.message, spelled)), code=error.code) from error


def times(
    type_: Type | None,
    at: str | None,
    day_of_week: int | None,
    day_of_month: int | None,
    cron: str | None,
    timezone: str | None,
) -> dict[str, Any]:
    given = {
        "schedule_type": None if type_ is None else type_.value,
        "time_of_day": at,
        "day_of_week": day_of_week,
        "day_of_month": day_of_month,
        "cron_expression": cron,
        "timezone": timezone,
    }
    return {name: value for name, value in given.items() if value is not None}


def selection(
    mode: Mode | None,
    range_: Range | None,
    start_date: datetime | None,
    end_date: datetime | None,
    fiches: str | None,
    groupes: list[str] | None,
    max_fiches: int | None,
) -> dict[str, Any]:
    given = {
        "mode": None if mode is None else mode.value,
        "date_range": None if range_ is None else range_.value,
        "start_date": None if start_date is None else start_date.date(),
        "end_date": None if end_date is None else end_date.date(),
        "fiche_ids": fiches,
        "groupes": groupes or None,
        "max_fiches": max_fiches,
    }
    return {name: value for name, value in given.items() if value is not None}


def merged(given: dict[str, Any], more: str | None, key_file: Path | None) -> dict[str, Any]:
    """Merge options, --more and the key file into one request body. Options win over --more."""
    rest = json_object(more, "--more") if more is not None else {}
    if SELECTION in given and isinstance(rest.get(SELECTION), dict):
        given = {**given, SELECTION: {**rest[SELECTION], **given[SELECTION]}}
    key = {"external_api_key": _read(key_file)} if key_file is not None else {}
    both = {**rest, **given, **key}
    if "cron_expression" in given and not both.keys() & SPELLINGS_OF_TYPE:
        both["schedule_type"] = Type.CRON.value  # no other type uses it
    return both


def _spelling(as_json: str | None, known: Mapping[str, str]) -> Spelling:
    sent = {} if as_json is None else json_object(as_json, "--more")
    in_json = as_sent(sent, guess=False)
    inner = {*sent, *(name for part in sent.values() if isinstance(part, dict) for name in part)}

    def spelled(name: str) -> str:
        return in_json(name) if in_json(name) in inner or name not in known else known[name]

    return spelled


def _without_group(text: str) -> str:
    """Drop the group from the name of an option: `fiche_selection.--fiches` becomes `--fiches`."""
    return text.replace(f"{SELECTION}.--", "--").removeprefix(f"{SELECTION}: ")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"Cannot read the key from {file}: {error}.") from error
