"""Knobs that a demonstration changes from their defaults, mostly to take less time; each is printed with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from ecluse.settings import Settings


class Override(NamedTuple):
    """A knob, the value that the demonstration gives it, and the reason."""

    knob: str
    value: str
    why: str


HEARTBEAT = Override("ECLUSE_HEARTBEAT_SECONDS", "0.5", "a dead replica is noticed sooner")
DEAD_AFTER = Override("ECLUSE_DEAD_AFTER_SECONDS", "2", "its work is taken over sooner")
QUIET = Override("ECLUSE_LOG_LEVEL", "WARNING", "failures are part of the demonstration")


VENDORS = {
    "CRM_BASE_URL": "{vendor}/crm",
    "CRM_API_KEY": "demo",
    "ELEVENLABS_BASE_URL": "{vendor}/elevenlabs",
    "ELEVENLABS_API_KEY": "demo",
    "LLM_BASE_URL": "{vendor}/llm/v1",
    "LLM_API_KEY": "demo",
    "LLM_MODEL": "sandbox",
}


def environment(overrides: Sequence[Override]) -> dict[str, str]:
    """Return the overrides, and the addresses of the simulated vendors, as environment variables."""
    return {**VENDORS, **{one.knob: one.value for one in overrides}}


def show(console: Console, overrides: Sequence[Override]) -> None:
    """Print each override with the default it replaces and its reason."""
    console.print("knobs that differ in this demonstration, default → value:", style="dim")
    rows = [(one.knob, f"{_default(one.knob)} → {one.value}", one.why) for one in overrides]
    knob, change = (max(len(row[column]) for row in rows) for column in (0, 1))
    for row in rows:
        line = f"  {row[0]:<{knob}}  {row[1]:<{change}}  {row[2]}"
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def _default(knob: str) -> str:
    default = Settings.model_fields[knob].default
    return "unset" if default is None else str(default)
