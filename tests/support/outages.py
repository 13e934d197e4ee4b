"""Breakers as the built-in flows have them, with pauses of milliseconds and without `doubt`: a failure is the item's
own until more of them fail in a row than the breaker needs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from ecluse.engine import Stage

BRIEF = {"pause": timedelta(milliseconds=20), "longest": timedelta(milliseconds=100), "doubt": timedelta(0)}


def brief(stage: Stage, breaker: dict[str, Any] | None = None) -> Stage:
    """Return the stage with the breaker of its lane changed to BRIEF and to the given fields."""
    assert stage.lane.breaker is not None
    return replace(stage, lane=replace(stage.lane, breaker=replace(stage.lane.breaker, **{**BRIEF, **(breaker or {})})))
