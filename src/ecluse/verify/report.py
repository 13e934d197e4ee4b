"""What an audit found, and how an operator, or a script, is told."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

SHOWN = 20  # violations of one invariant


class About(NamedTuple):
    """Which rows tell the story of a violation."""

    run_id: int | None = None
    target: str | None = None
    item_id: int | None = None
    effect_id: str | None = None
    ref: str | None = None  # the record, as the vendor calls it


@dataclass
class Violation:
    invariant: str
    subject: str
    message: str
    story: list[str] = field(default_factory=list)
    about: About = field(default_factory=About)

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.message}"


@dataclass
class Report:
    """`checked` is how much was looked at, in all and per invariant: a check that had nothing to look at proves
    nothing."""

    violations: list[Violation] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def shown(self) -> list[Violation]:
        """The first ones of each invariant, invariants in order."""
        seen: Counter[str] = Counter()
        first = []
        for violation in sorted(self.violations, key=lambda one: one.invariant):
            seen[violation.invariant] += 1
            if seen[violation.invariant] <= SHOWN:
                first.append(violation)
        return first

    def text(self) -> str:
        lines: list[str] = []
        found = Counter(violation.invariant for violation in self.violations)
        shown: Counter[str] = Counter()
        for violation in self.shown:
            lines += [str(violation), *(f"    {line}" for line in violation.story)]
            shown[violation.invariant] += 1
            hidden = found[violation.invariant] - SHOWN
            if shown[violation.invariant] == SHOWN and hidden > 0:
                lines.append(f"{violation.invariant} … and {hidden} more")
        lines += [f"note: {note}" for note in self.notes]
        counts = dict(self.checked)
        whole = (
            f"{counts.pop('runs')} runs, {counts.pop('items')} items, {counts.pop('effects')} effects, "
            f"{counts.pop('ledger_effects')} ledger effects checked"
        )
        each = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        if found:
            verdict = f"{len(self.violations)} violations ({', '.join(f'{n}: {found[n]}' for n in sorted(found))})"
        else:
            verdict = "clean"
        return "\n".join([*lines, f"{verdict}: {whole} ({each})"])

    def json(self) -> str:
        found = [{"invariant": v.invariant, "subject": v.subject, "message": v.message} for v in self.violations]
        return json.dumps({"verify": found or "clean", "checked": self.checked}, ensure_ascii=False)
