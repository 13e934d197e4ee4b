"""The parts of a flow. A flow is data plus functions: its status words, its stages, and a story that takes a run
through them; the engine supplies durability, concurrency, retries and the counting of outcomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel

from ecluse.base.clock import Clock
from ecluse.base.trace import Tracer, named_in
from ecluse.db.connect import Connection
from ecluse.engine.model.alerts import Alerts
from ecluse.engine.model.breaker import Breaker
from ecluse.engine.model.context import EphemeralEvent, WorkContext
from ecluse.engine.model.fires import Fire, OnUnfired
from ecluse.engine.model.item import Item, Result
from ecluse.engine.model.retry import RetryPolicy
from ecluse.engine.model.states import PLAIN, StatusMap
from ecluse.engine.model.writes import BatchWrite, ReadableWrite, Write
from ecluse.engine.outbox.events import Event

if TYPE_CHECKING:
    from ecluse.engine.lead.story import Story
    from ecluse.engine.runs.redrive import Redrive
    from ecluse.engine.runs.units import CountUnits
    from ecluse.engine.schedule.plans import Plans


GRACE = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as stories, stages and hooks of a flow get it: the values that are fixed at its start."""

    id: int
    tenant_id: str
    flow: str
    event_key: str
    input: Mapping[str, Any]
    correlation_id: str | None = None
    schedule_id: int | None = None

    @property
    def trace(self) -> Tracer:
        """The tracer that logs the steps and events of this run, under its ids."""
        return Tracer(
            area=self.flow.upper(),
            workflow=self.flow,
            entity=(f"{self.flow}_run", str(self.id)),
            ids=f"run-{self.id}" if self.schedule_id is None else f"schedule-{self.schedule_id}",
            tenant_id=self.tenant_id,
            correlation_id=self.correlation_id or self.event_key,
            run_id=self.id,
            function_id=f"run-{self.flow}",
            event_id=self.event_key,
            named=named_in(self.input),
        )


class NewItem(NamedTuple):
    """A unit of work to be fanned out. `key` is unique in its stage. `target` is the record that the run must give an
    outcome: by default the key; empty for work that only prepares the run. Items of one `group` share the lane's cap
    per key, and the calls of a `BatchWrite`. `lane`: the lane made for the credential (and model) that the item is
    called with, beneath the stage's lane; None: the stage's own lane."""

    key: str
    target: str | None = None
    payload: Any = None
    group: str | None = None
    lane: Lane | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """Argument of `Stage.save`: an item whose result is stored in this commit, with the `result` and `kept` of its
    `Done`."""

    item: Item
    result: Any
    kept: Any = None


class ItemEnd(NamedTuple):
    """Argument of `Stage.on_end`: the end of an execution, as this commit stores it. Status `open`: the item is
    executed again, at `retry_at` or later. `executions`: the executions counted against its retry budget, this one
    included. `result` and `kept` are the fields of its `Done`."""

    item: Item
    status: Literal["succeeded", "failed", "ignored", "open"]
    executions: int
    result: Any = None
    kept: Any = None
    error_code: str | None = None
    error: str | None = None
    retry_at: datetime | None = None
    http_status: int | None = None


class FinishedItem(NamedTuple):
    """Argument of `Stage.news`: a finished item, as it was committed. `result` is None unless it succeeded."""

    item: Item
    status: Literal["succeeded", "failed", "ignored"]
    result: Any
    error_code: str | None
    error: str | None


Work = Callable[[WorkContext, Item], Awaitable[Result]]
# Runs in the commit's transaction, a pipelined `together`: results must be fetched, and rowcount is not known.
Save = Callable[[Connection, Sequence[Saved]], Awaitable[None]]
OnEnd = Callable[[Connection, Sequence[ItemEnd]], Awaitable[None]]  # in the same transaction as `Save`
Source = Callable[[Connection, Run], Awaitable[Sequence[NewItem]]]
News = Callable[[Connection, Sequence[FinishedItem]], Awaitable[Sequence[EphemeralEvent]]]


@dataclass(frozen=True)
class Lane:
    """The queue in which a stage's items wait, with its caps. Caps hold over all replicas; None: no cap. Calls are
    spaced evenly; an idle lane may start `burst` calls at once, which should be raised only where the vendor allows it.
    `one_vendor` False: the lane leads to many vendors, so a Retry-After delays its own item only, and does not hold the
    lane.

    Flows declare the lanes of their stages. A lane for a single credential is made at run time, beneath a declared
    lane: its name is the name of the declared lane, a slash and a suffix. It has its own caps, and takes its breaker
    and `one_vendor` from the declared lane. `tenant` is its owner; None: shared by all tenants."""

    name: str
    max_in_flight: int | None = None
    max_per_key: int | None = None
    per_second: float | None = None
    burst: int = 1
    breaker: Breaker | None = None
    one_vendor: bool = True
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError(
                "a lane needs a name: the vendor and, with several credentials, a suffix, such as price-list:account-7"
            )
        for cap in ("max_in_flight", "max_per_key", "per_second"):
            if (value := getattr(self, cap)) is not None and not 0 < value < inf:
                raise ValueError(f"lane {self.name}: {cap} is {value}; give a number above 0, or None for no cap")
        if self.burst < 1:
            raise ValueError(
                f"lane {self.name}: burst is {self.burst}; 1 spaces calls evenly, more lets some go at once"
            )

    @property
    def base(self) -> str:
        """The name of the declared lane that this lane is beneath; for a declared lane, its own name."""
        return self.name.split("/", 1)[0]

    @staticmethod
    def per_minute(calls: float) -> float:
        """Convert calls per minute to calls per second: `Lane("speech", per_second=Lane.per_minute(10))` starts one
        every six seconds."""
        return calls / 60


@dataclass(frozen=True)
class Stage:
    """One phase of a flow: the work on an item, the lane in which items wait, the hooks that store results, and the
    limits."""

    name: str
    lane: Lane
    work: Work | Write
    save: Save | None = None
    # Called once per commit, in its transaction, with all executions of this stage that the commit stores: success,
    # failure, or a retry to come; not with items put back uncounted (postponed, closed lane). Items that fail without
    # an execution (time limit of the gate, `give_up`, end of the run) are not passed: they have failed when the run
    # ends at the latest, and `Flow.ended` runs in that transaction.
    on_end: OnEnd | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    time_limit: timedelta = timedelta(minutes=5)  # of one execution
    max_wait: timedelta = timedelta(minutes=10)  # of the gate
    poll: timedelta = timedelta(seconds=20)  # of the gate: the longest pause between polls; three of them are a stall
    rounds: int = 0  # deliberate repetitions of failed items, on stall
    incomplete: str = "Not finished in time (timeout/stall)"
    weight: int = 1  # permits that one call takes of its lane's rate
    last: bool = False  # a target that has passed this stage is done; if no stage sets it, the flow's last stage counts
    opens: bool = False  # its `save` or `on_end` opens the next stage of its run, in the same commit
    # A call costs money and changes nothing at the vendor: a call in flight may finish although its run has ended, and
    # its result goes to `save` and `on_end` whatever becomes of the item; a retry that may have been paid for twice is
    # recorded.
    paid: bool = False
    news: News | None = None  # the ephemeral events of finished items, emitted after the commit
    event: str = ""  # name of its fan-out in logs; by default flow/stage
    gate: str = ""  # name of its gate in logs; by default the stage's name
    signal: str = ""  # what its gate polls for, in logs

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise ValueError(f"stage {self.name}: weight is {self.weight}; a call takes at least 1 permit")
        if self.lane.name != self.lane.base:
            raise ValueError(f"stage {self.name}: lane {self.lane.name} is declared, so it has no slash")
        if min(self.time_limit, self.max_wait, self.poll) <= timedelta(0) or self.rounds < 0:
            raise ValueError(f"stage {self.name}: time limits are above 0, rounds are not negative")
        if isinstance(self.work, BatchWrite) and (self.work.most < 1 or self.lane.max_per_key != 1):
            raise ValueError(
                f"stage {self.name}: a BatchWrite has at least 1 item per call, and a lane with max_per_key=1"
            )

    @property
    def batch(self) -> int:
        """The largest number of items in one call."""
        return self.work.most if isinstance(self.work, BatchWrite) else 1

    @property
    def permits(self) -> int:
        """The number of permits that one execution takes of its lane's rate. A write that can be read back takes twice
        its weight: it is read before it is sent."""
        return 2 * self.weight if isinstance(self.work, ReadableWrite) else self.weight


@dataclass(frozen=True)
class Flow:
    """A kind of run: its status words, its stages, the story that leads a run, and functions that the engine calls."""

    name: str
    stages: tuple[Stage, ...]
    story: Callable[[Story], Awaitable[None]] | None  # None: a run is only items, and ends with its last item
    input: type[BaseModel]
    statuses: StatusMap = PLAIN
    schema: str = ""  # idempotent DDL of a flow that brings its own tables
    tables: tuple[str, ...] = ()  # its own tables with a column `run_id`: their rows are deleted with the run
    vendors: Callable[[Clock], AbstractAsyncContextManager[Any]] = lambda _: nullcontext()  # once per process
    longest: timedelta | None = None  # time limit of a run; by default the `max_wait` of all its stages, plus GRACE
    # Event key of the runs that a schedule starts, so that firing an instant twice gives one run. `due` is in ms.
    slot_key: str = "schedule:{schedule}:{due}"
    # For a flow whose schedules start no runs: makes the records of due instants, many schedules at once. If it raises,
    # the schedules are fired again in halves, and an instant that fails alone is used up, with the error as its reason.
    fire: Fire | None = None
    # Called with the schedules whose latest decided instant was skipped, missed or failed. Earlier instants of a
    # decision, and instants that wait, are not passed on.
    on_unfired: OnUnfired | None = None
    unique_names: bool = True  # of its schedules, per tenant
    not_by_hand: str = ""  # if its runs cannot be started one by one by API or command line: what to use instead
    about: Callable[[Run], Mapping[str, Any]] = lambda _: {}  # extra fields of a run's first log line
    # For a flow without a story: opens the first stage of runs that have just been inserted, in the same transaction.
    begin: Callable[[Connection, Sequence[Run]], Awaitable[None]] | None = None
    # Called periodically on every worker replica, to handle faults that the engine cannot detect. Must be idempotent.
    watch: Callable[[Connection], Awaitable[None]] | None = None
    units: CountUnits | None = None  # for a flow with a stage whose work is done by other runs
    # Called in the transaction that ends these runs, however they end: updates the flow's own rows and returns events.
    ended: Callable[[Connection, Sequence[Run]], Awaitable[Sequence[Event]]] | None = None
    plan: type[BaseModel] | None = None  # content of its schedules besides name and timetable; by default `input`
    plans: Plans | None = None  # where these plans are kept, if not in the input of the runs
    alerts: Alerts | None = None
    redrive: Redrive | None = None  # how failed targets of a run are repeated; None: they cannot be repeated

    @property
    def schedulable(self) -> bool:
        """Whether the flow may have schedules: it has a story, or fires due instants itself."""
        return self.story is not None or self.fire is not None

    @property
    def stale_after(self) -> timedelta:
        """The age at which a run counts as stale: every gate ends at its `max_wait`, so a run that takes longer than
        all of them together, plus GRACE, is stuck."""
        return self.longest or sum((stage.max_wait for stage in self.stages), GRACE)

    @property
    def last_stages(self) -> list[str]:
        """The names of the stages after which a target is done: the stages with `last`; if there are none, the flow's
        last stage."""
        return [stage.name for stage in self.stages if stage.last] or [self.stages[-1].name]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)
