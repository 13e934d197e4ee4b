"""The findings of an audit, as text for operators and as JSON for scripts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

SHOWN = 20  # violations of one invariant that are listed


class About(NamedTuple):
    """The keys of the rows that explain a violation."""

    run_id: int | None = None
    target: str | None = None
    item_id: int | None = None
    effect_id: str | None = None
    ref: str | None = None  # the record's name at the vendor
    aggregate: str | None = None  # of events; prefixed with its tenant, as is `lease`
    lease: str | None = None
    schedule_id: int | None = None
    seqs: tuple[int, ...] = ()  # lines of the ledger


@dataclass
class Violation:
    """One finding: the violated invariant, the subject (such as a run), and a message that says what is wrong; `story`
    has lines that show how it came about."""

    invariant: str
    subject: str
    message: str
    story: list[str] = field(default_factory=list)
    about: About = field(default_factory=About)

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.message}"


@dataclass
class Report:
    """The result of an audit. `checked` counts the examined rows, in total and per invariant: a check that examined
    nothing proves nothing."""

    violations: list[Violation] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def by_invariant(self) -> dict[str, list[Violation]]:
        """The violations by invariant, in the order of their numbers."""
        names = sorted({violation.invariant for violation in self.violations})
        return {name: [violation for violation in self.violations if violation.invariant == name] for name in names}

    @property
    def shown(self) -> list[Violation]:
        """The violations that are listed: the first few (SHOWN) of each invariant."""
        return [violation for found in self.by_invariant.values() for violation in found[:SHOWN]]

    def text(self) -> str:
        """Return the report for people, with the verdict in the last line."""
        lines: list[str] = []
        for name, found in self.by_invariant.items():
            for violation in found[:SHOWN]:
                lines += [str(violation), *(f"    {line}" for line in violation.story)]
            if len(found) > SHOWN:
                lines.append(f"{name} … and {len(found) - SHOWN} more")
        lines += [f"note: {note}" for note in self.notes]
        counts = dict(self.checked)
        whole = (
            f"{counts.pop('runs')} runs, {counts.pop('items')} items, {counts.pop('effects')} effects, "
            f"{counts.pop('ledger_effects')} ledger effects checked"
        )
        each = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        verdict = "clean"
        if self.violations:
            numbers = ", ".join(f"{name}: {len(found)}" for name, found in self.by_invariant.items())
            verdict = f"{len(self.violations)} violation{'s' if len(self.violations) > 1 else ''} ({numbers})"
        return "\n".join(one_line(line) for line in [*lines, f"{verdict}: {whole} ({each})"])

    def json(self) -> str:
        """Return the report as one JSON object."""
        found = [{"invariant": v.invariant, "subject": v.subject, "message": v.message} for v in self.violations]
        return json.dumps({"verify": found or "clean", "checked": self.checked})


def one_line(text: str) -> str:
    """Escape control characters of a line: keys and records may hold anything, terminal commands included."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
