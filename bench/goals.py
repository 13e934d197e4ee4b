"""The goals of `bench.fairness`, which of them are reached, and its figures as text."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Of what the victim notices: the figure, its quantile, and the most milliseconds that it may be. And no answer of 503.
GOALS = {
    "GET /api/me": ("p99", 250),
    "run taken up after": ("p100", 1_000),
    "schedule fired after": ("p100", 2_000),
}


def judged(milliseconds: dict[str, dict[str, int]], answers: Counter[str]) -> dict[str, str]:
    """Return each goal as reached or missed, or as not measured: a short run has no full minute."""
    verdicts = {}
    for name, (share, most) in GOALS.items():
        got = milliseconds.get(name, {}).get(share)
        reached = "not measured" if got is None else "reached" if got <= most else "missed"
        verdicts[f"{name} {share} <= {most} ms"] = reached
    refused = sum(count for answer, count in answers.items() if answer.endswith(" 503"))
    return verdicts | {"answers of 503: 0": "missed" if refused else "reached"}


def show(found: dict[str, Any]) -> None:
    for name, values in found["milliseconds"].items():
        print(f"{name:<28}" + "".join(f" {share} {value:7} ms" for share, value in values.items()))
    for whose in ("cores", "answers", "attacks"):
        print(f"{whose}: " + ", ".join(f"{name}: {count}" for name, count in found[whose].items()))
    for goal, verdict in found["goals"].items():
        print(f"goal {goal:<36} {verdict}")
