"""The kit for authors of flows: every name that a flow imports, and `Package`, in which flows are delivered.

A package is found by its entry point in the group `ecluse.flows`, or named by ECLUSE_FLOWS or `--flow`. Its other parts
(routes, knobs, migrations, metrics, checks, pages) work as they do for the built-in flows. docs/write-a-flow.md shows
how to write one."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter
from pydantic import BaseModel
from pydantic_settings import BaseSettings

from ecluse.access.commands import Command
from ecluse.access.listing import Filters, Listing, Visible, Where, equal, every_row
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Body, Shape
from ecluse.base.clock import Clock
from ecluse.base.errors import Conflict, InvalidInput, NotFound, PermanentError, TransientError, VendorError
from ecluse.base.validation import fields_of, partial_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_column, fetch_one, fetch_row, fetch_rows, fetch_value
from ecluse.doctor.findings import Finding
from ecluse.engine import (
    PLAIN,
    VENDOR_DOWN,
    AbsoluteWrite,
    Alert,
    Alerts,
    Backoff,
    BatchedQuery,
    BatchWrite,
    Breaker,
    Charge,
    Done,
    EphemeralEvent,
    Event,
    FinishedItem,
    Flow,
    Ignored,
    Item,
    ItemEnd,
    KeyedWrite,
    Lane,
    Measure,
    Measured,
    NewItem,
    Order,
    Postponed,
    Priority,
    Result,
    RetryPolicy,
    Run,
    Saved,
    Settled,
    Stage,
    Start,
    Started,
    State,
    StatusMap,
    Throttle,
    Waiter,
    WorkContext,
    acquire_lease,
    give_up,
    hold_for_runs,
    keep_open,
    load_run,
    open_stage,
    open_targets,
    put_waiters,
    release_lease,
    restore_lane,
    select_targets,
    settle_targets,
    slow_lane,
    start_run,
    start_runs,
    still_mine,
    write_events,
    write_log,
)
from ecluse.engine.lead.story import Story
from ecluse.vendors.http import VendorHttp


class Gauge(NamedTuple):
    """A metric `ecluse_{name}` read from the database. `sql` returns rows of two columns: the values of `labels` as
    text[], and a number."""

    name: str
    meaning: str
    sql: str
    labels: Sequence[str] = ()


class Invariant(NamedTuple):
    """A check of `ecluse verify`: each of `statements` returns one row per violation, as `subject` and `message`;
    `counted` is a statement that returns the number of rows checked, as `n`."""

    name: str
    counted: str
    statements: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """Flows, with the routes, knobs, migrations, metrics, checks and pages that belong to them. `flows` makes the flows
    from an instance of `knobs`, or from None if the package has no knobs."""

    name: str
    flows: Callable[[Any], Sequence[Flow]] = lambda _: ()
    knobs: type[BaseSettings] | None = None
    surface: Surface | None = None
    migrations: Path | None = None  # directory of Alembic revisions, a tree of their own
    gauges: Sequence[Gauge] = ()
    invariants: Sequence[Invariant] = ()
    doctor: Callable[[Connection], Awaitable[Sequence[Finding]]] | None = None
    pages: APIRouter | None = None

    def made(self) -> list[Flow]:
        """Return the flows of the package, made from its knobs, which are read from the environment."""
        return list(self.flows(self.knobs() if self.knobs is not None else None))


def vendor(
    name: str, *, url: str, knob: str, deadline: float = 30.0, headers: dict[str, str] | None = None
) -> Callable[[Clock], AbstractAsyncContextManager[VendorHttp]]:
    """Return a function for `Flow.vendors` of a flow that calls one HTTP API: it makes a client whose base URL is the
    value of the environment variable `knob`, or `url` if that is unset or empty. A call that takes longer than
    `deadline` seconds fails."""

    def connected(clock: Clock) -> VendorHttp:
        return VendorHttp(name, os.environ.get(knob) or url, deadline=deadline, headers=headers, now=clock.now)

    return connected
