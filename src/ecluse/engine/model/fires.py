"""Due instants of flows that fire them without runs: the arguments and results of `Flow.fire` and `Flow.on_unfired`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from ecluse.db.connect import Connection

Overlap = Literal["wait", "allow", "skip"]


class DueInstant(NamedTuple):
    """An instant of a schedule that is to be fired. Overlap `skip`: it is skipped while the work that an earlier
    instant led to is open."""

    schedule_id: int
    tenant_id: str
    due_at: datetime
    overlap: Overlap


class FiredAs(NamedTuple):
    """The instant led to the record `reference` of the flow."""

    reference: str


class NotFired(NamedTuple):
    """The instant is used up without a record of the flow; `reason` says why."""

    state: Literal["skipped", "failed"]
    reason: str


class Unfired(NamedTuple):
    """The latest due instant of a schedule, which was decided and not fired."""

    schedule_id: int
    tenant_id: str
    due_at: datetime
    state: Literal["skipped", "missed", "failed"]
    reason: str


# Both run in the transaction that stores the slots. What `Fire` returns is by schedule.
Fire = Callable[[Connection, Sequence[DueInstant]], Awaitable[Mapping[int, FiredAs | NotFired]]]
OnUnfired = Callable[[Connection, Sequence[Unfired]], Awaitable[None]]
