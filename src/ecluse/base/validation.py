"""What a model refuses, in words for whoever gave it. Pydantic puts its own words before those of our validators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

BEFORE_OURS = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}


def problem(error: Mapping[str, Any]) -> str:
    """Of one of a model's `errors()`."""
    return str(error["msg"]).removeprefix(BEFORE_OURS.get(error["type"], ""))


def readable(error: ValidationError) -> str:
    wrong = [(".".join(map(str, one["loc"])), problem(one)) for one in error.errors()]
    return "; ".join(f"{where}: {what}" if where else what for where, what in wrong)
