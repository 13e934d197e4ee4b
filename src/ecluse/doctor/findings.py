"""Findings of `ecluse doctor`: each is ok, warn or fail, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    what: str
    says: str
    do: str = ""


def graded(value: float, warn: float, fail: float) -> Literal["ok", "warn", "fail"]:
    """Grade a value by two upper limits. For lower limits, negate the value and both limits."""
    return "fail" if value > fail else "warn" if value > warn else "ok"
