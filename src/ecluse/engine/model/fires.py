"""Types for flows that handle due instants without runs: arguments and results of `Flow.fire` and `Flow.on_unfired`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from ecluse.db.connect import Connection

Overlap = Literal["wait", "allow", "skip"]


class DueInstant(NamedTuple):
    """A due instant of a schedule that the flow is to fire. With overlap `skip`, the flow skips it while the work that
    an earlier instant led to is open."""

    schedule_id: int
    tenant_id: str
    due_at: datetime
    overlap: Overlap


class FiredAs(NamedTuple):
    """Result of `Flow.fire`: the instant was fired, and led to the flow's record with the id `reference`."""

    reference: str


class NotFired(NamedTuple):
    """Result of `Flow.fire`: the instant is used up without a record of the flow; `reason` says why."""

    state: Literal["skipped", "failed"]
    reason: str


class Unfired(NamedTuple):
    """Argument of `Flow.on_unfired`: the latest due instant of a schedule, which was decided and not fired."""

    schedule_id: int
    tenant_id: str
    due_at: datetime
    state: Literal["skipped", "missed", "failed"]
    reason: str


# Both run in the transaction that stores the slots. `Fire` returns its results by schedule id.
Fire = Callable[[Connection, Sequence[DueInstant]], Awaitable[Mapping[int, FiredAs | NotFired]]]
OnUnfired = Callable[[Connection, Sequence[Unfired]], Awaitable[None]]
