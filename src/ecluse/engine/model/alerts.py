"""Alerts of a flow, declared as data: measures of the records that it works on, and the limits beyond which a value
needs attention. `cluster/alerts.py` evaluates them; `tools/prometheus_rules.py` makes the rules for Prometheus from the
same declarations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ecluse.db.connect import Connection

Severity = Literal["warning", "critical"]


class Measured(NamedTuple):
    """The values of one record by measure, read at one instant. None: there is no value, which clears an alert. A
    measure that is left out is unknown at present: its alerts stay as they are. `facts`: data for the flow's own use,
    such as in `Alert.while_open`."""

    tenant: str
    id: str
    name: str  # for people
    values: Mapping[str, float | None]
    facts: Any = None


@dataclass(frozen=True)
class Measure:
    """A value of a record that alerts compare with their limits. `expr` is the same value as a Prometheus expression;
    where the value covers a time window (a count over 5 minutes, say), so does `expr`. `summary` is a format string
    with the fields `value` and `limit`."""

    name: str
    summary: str
    action: str  # what to do about it
    expr: str
    below: bool = False  # a value below the limit raises an alert, not one above
    until: float | None = None  # an open alert lasts until the value is back at this one; None: at the alert's limit

    def is_beyond(self, value: float, limit: float) -> bool:
        return value < limit if self.below else value > limit


@dataclass(frozen=True)
class Alert:
    """An alert of a severity, raised when its measure is beyond `limit`. `while_open` is called, in the same
    transaction, for each evaluation after which the alert is open."""

    name: str
    severity: Severity
    measure: Measure
    limit: float
    while_open: Callable[[Connection, Measured], Awaitable[None]] | None = None

    def lasts(self, value: float | None, *, is_open: bool) -> bool:
        """Return whether the alert is open after an evaluation that found this value; `is_open`: it was open before."""
        if value is None:
            return False
        until = self.limit if self.measure.until is None else self.measure.until
        return self.measure.is_beyond(value, self.limit) or (is_open and self.measure.is_beyond(value, until))


@dataclass(frozen=True)
class Alerts:
    """The alerts of a flow. `noun`: the kind of record that they are about; in events, the record's id is the field
    `{noun}_id`, and the aggregate is `{flow}_{noun}:{id}`. `read` is called by one replica at a time and returns every
    record: open alerts of records that it leaves out are cleared. `table` lists the most severe alert of a measure
    first: of the alerts of one measure, only the first that applies is open."""

    noun: str
    read: Callable[[Connection], Awaitable[Sequence[Measured]]]
    table: Sequence[Alert]


def decide(table: Sequence[Alert], values: Mapping[str, float | None], before: Collection[str]) -> list[Alert]:
    """Return the alerts of a record that are open after this evaluation, at most one per measure. `before`: the names
    of the alerts that were open."""
    after = dict[str, Alert]()
    for one in table:
        name, is_open = one.measure.name, one.name in before
        if one.lasts(values[name], is_open=is_open) if name in values else is_open:
            after.setdefault(name, one)
    return list(after.values())
