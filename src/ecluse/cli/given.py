"""Arguments that several commands share: a flow, a JSON object."""

from __future__ import annotations

import json
from typing import Any

from ecluse import bootstrap, settings
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.engine import Flow


def flow_named(name: str) -> Flow:
    """Return the flow with this name, if ECLUSE_FLOWS loads it, or the flow given as package:NAME."""
    known = {f.name: f for f in bootstrap.load_flows(settings.load(), [name] if ":" in name else [])}
    chosen = next(reversed(known.values())) if ":" in name else known.get(name)
    if chosen is None:
        raise NotFound(
            f"There is no flow {name!r} (known: {', '.join(known)}). Give it as package:NAME, or load it with"
            " ECLUSE_FLOWS."
        )
    return chosen


def json_object(text: str, option: str = "--input") -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, or nesting as deep
        raise InvalidInput(f"{option} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidInput(f"{option} must be a JSON object")
    return parsed
