"""What a flow is made of. A flow is data plus functions: its status words, its stages, and a story that takes a run
through them; the engine supplies durability, concurrency, retries and the count."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel

from ecluse.base.clock import Clock
from ecluse.base.ids import item_event_id
from ecluse.base.trace import Tracer
from ecluse.db.connect import Connection, Pool
from ecluse.engine.model.breaker import Breaker
from ecluse.engine.model.retry import RetryPolicy
from ecluse.engine.model.states import PLAIN, StatusMap
from ecluse.engine.outbox.events import Event

if TYPE_CHECKING:
    from ecluse.engine.lead.story import Story
    from ecluse.engine.runs.units import CountUnits


GRACE = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Run:
    id: int
    tenant_id: str
    flow: str
    event_key: str
    input: Mapping[str, Any]
    correlation_id: str | None = None
    schedule_id: int | None = None

    @property
    def trace(self) -> Tracer:
        """Says what happens in this run, under its ids."""
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
        )


class NewItem(NamedTuple):
    """A unit of work to be fanned out. `target` is the record the run answers for: the key, unless said otherwise; an
    empty one is for work that only prepares the run. The key is unique in its stage. Items of one `group` share the
    lane's cap per key."""

    key: str
    target: str | None = None
    payload: Any = None
    group: str | None = None


class Item(NamedTuple):
    """A unit of work in hand (a tuple: thousands a second are made). `executions` counts the finished ones before,
    `crashes` how many workers have died with it in hand."""

    id: int
    run_id: int
    tenant_id: str
    flow: str
    stage: str
    key: str
    target: str
    payload: Any
    round: int
    executions: int
    crashes: int
    event_key: str
    correlation_id: str | None = None

    @property
    def event_id(self) -> str:
        return item_event_id(self.flow, self.run_id, self.stage, self.key, self.round)

    @property
    def log_fields(self) -> dict[str, Any]:
        """What a log line says of it."""
        return {
            "area": self.flow.upper(),
            "run_id": self.run_id,
            "tenant_id": self.tenant_id,
            "correlation_id": self.correlation_id or self.event_key,
            "stage": self.stage,
            "event_id": self.event_id,
        }


@dataclass(frozen=True, slots=True)
class Done:
    """The item did what it should. `result` is stored with it (jsonb) and handed to the stage's `save`; so is `kept`,
    which is not stored with the item: what is large and has a table of its own."""

    result: Any = None
    kept: Any = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """The item can never finish and nobody is to blame (a record that is gone upstream): out of the denominator."""

    reason: str
    code: str = "IGNORED"


@dataclass(frozen=True, slots=True)
class Postponed:
    """Not now, through no fault of its own: it begins anew then, and no execution is counted. `why` is shown while it
    waits; the cause is `lease` where another run or process has the record in hand."""

    until: datetime
    why: str
    cause: Literal["lease", "postponed"] = "postponed"


Result = Done | Ignored | Postponed


class EphemeralEvent(NamedTuple):
    """An ephemeral event: for whoever looks on at this moment, kept nowhere, lost without harm."""

    tenant_id: str
    event: str
    payload: Mapping[str, Any]


EmitLive = Callable[[Sequence[EphemeralEvent]], None]  # never waits, never raises


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` gets: one per item whose result is being stored in this commit."""

    item: Item
    result: Any
    kept: Any = None


class FinishedItem(NamedTuple):
    """What `news` gets: an item that is over, as it was committed."""

    item: Item
    status: Literal["succeeded", "failed", "ignored"]
    result: Any
    error_code: str | None
    error: str | None


@dataclass(frozen=True)
class WorkContext:
    """What work may use besides its item. No transaction is open while a vendor is called."""

    vendors: Any
    now: Callable[[], datetime]
    reserve: Callable[[Item, int | None], Awaitable[None]] | None = None
    tell: EmitLive = lambda _: None  # at once, whatever becomes of the item
    payer: Callable[[Item, str | None], Awaitable[None]] | None = None
    pool: Pool | None = None

    async def pay(self, item: Item, lock: str | None = None) -> None:
        """Said right before a call that costs money (`Stage.paid`): from here on it is let finish, whatever becomes of
        its run, and `lock`, a lease of that run, is then held by this process until the call is over. If it may have
        been paid for before, that is noted."""
        if self.payer is not None:
            await self.payer(item, lock)

    @asynccontextmanager
    async def database(self) -> AsyncIterator[Connection]:
        """For a brief look before the vendor is called; given back before the call."""
        assert self.pool is not None  # noqa: S101 - the kit gives it
        async with self.pool.connection() as connection:
            yield connection

    async def permit(self, item: Item, weight: int | None = None) -> None:
        """An item's first call has its permit already; each further one of the same item awaits its own, for as long as
        the lane's rate wants. None weighs what its stage says. If the lane is closed meanwhile, the item is given back
        and begins anew later."""
        if self.reserve is not None:
            await self.reserve(item, weight)


class Order(NamedTuple):
    """What a write is to do. `key` names it at the vendor, the same however often it is sent; `before` is what was read
    there just before."""

    key: str
    wanted: Any
    before: Any


@dataclass(frozen=True)
class Write:
    """A write at a vendor, instead of plain work: the engine records it before it sends it, and finds out what became
    of it when the answer got lost. `wanted` and what is read are JSON. `quiet` is counted from the last send: at least
    the call's own deadline, plus two seconds, plus the longest time in which the vendor may still apply what it has
    received."""

    wanted: Callable[[Item], Any]
    send: Callable[[WorkContext, Item, Order], Awaitable[Any]]
    quiet: timedelta


@dataclass(frozen=True)
class KeyedWrite(Write):
    """Class C1: the vendor remembers the key and does the same thing once. The answer is the item's result."""

    remembered: timedelta = timedelta(hours=24)


@dataclass(frozen=True)
class AbsoluteWrite(Write):
    """Class C2: sets a state that can be read back. What is read must have the wanted fields, spelled alike ("12.5" is
    not "12.50"); a state that is neither the wanted one nor the former is somebody else's, and is not overwritten.
    `send` may return the state that the vendor answered: one that is not as wanted is found at once then. The item's
    result is what was wanted."""

    read: Callable[[WorkContext, Item], Awaitable[Any]] = field(kw_only=True)


Work = Callable[[WorkContext, Item], Awaitable[Result]]
# In the commit's transaction, which is a `together`: what is wanted back is fetched, a rowcount is not known.
Save = Callable[[Connection, Sequence[Saved]], Awaitable[None]]
Source = Callable[[Connection, Run], Awaitable[Sequence[NewItem]]]
News = Callable[[Connection, Sequence[FinishedItem]], Awaitable[Sequence[EphemeralEvent]]]


@dataclass(frozen=True)
class Lane:
    """Where a stage's items wait. Caps hold over all replicas; None is no cap. Calls are spaced evenly; `burst` is how
    many an idle lane may start at once, and is to be raised only where the vendor says so. Where not one vendor is
    behind it but many, what one of them asks for (Retry-After) holds for its own item only."""

    name: str
    max_in_flight: int | None = None
    max_per_key: int | None = None
    per_second: float | None = None
    burst: int = 1
    breaker: Breaker | None = None
    one_vendor: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a lane needs a name: the vendor's, and what tells its credentials apart")
        for cap in ("max_in_flight", "max_per_key", "per_second"):
            if (value := getattr(self, cap)) is not None and not 0 < value < inf:
                raise ValueError(f"lane {self.name}: {cap} is {value}; give a number above 0, or None for no cap")
        if self.burst < 1:
            raise ValueError(
                f"lane {self.name}: burst is {self.burst}; 1 spaces calls evenly, more lets some go at once"
            )

    @staticmethod
    def per_minute(calls: float) -> float:
        """`Lane("speech", per_second=Lane.per_minute(10))`: one every six seconds."""
        return calls / 60


@dataclass(frozen=True)
class Stage:
    name: str
    lane: Lane
    work: Work | Write
    save: Save | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    time_limit: timedelta = timedelta(minutes=5)  # of one execution
    max_wait: timedelta = timedelta(minutes=10)  # of the gate
    poll: timedelta = timedelta(seconds=20)  # of the gate: the longest pause between looks, a third of a stall
    rounds: int = 0  # deliberate repetitions of what failed, on stall
    incomplete: str = "Not finished in time (timeout/stall)"
    weight: int = 1  # permits that one call takes of its lane's rate
    last: bool = False  # a target that has been through it is done; unless one says so, it is the last one of the flow
    opens: bool = False  # its `save` opens the next stage of its run, in the same commit
    # A call costs money, and changes nothing outside: one in flight is let finish although its run has ended, and its
    # result goes to `save` whatever becomes of the item; a repetition that may have been paid twice is noted.
    paid: bool = False
    news: News | None = None  # what to tell, after the commit, of items that are over
    event: str = ""  # what its fan-out is called in logs; by default flow/stage
    gate: str = ""  # what its gate is called there; by default the stage's name
    signal: str = ""  # what its gate looks for there

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise ValueError(f"stage {self.name}: weight is {self.weight}; a call takes at least 1 permit")
        if min(self.time_limit, self.max_wait, self.poll) <= timedelta(0) or self.rounds < 0:
            raise ValueError(f"stage {self.name}: time limits are above 0, rounds are not negative")


@dataclass(frozen=True)
class Flow:
    name: str
    stages: tuple[Stage, ...]
    story: Callable[[Story], Awaitable[None]] | None  # None: a run is only items, and closes itself
    input: type[BaseModel]
    words: StatusMap = PLAIN
    schema: str = ""  # idempotent DDL of a flow that brings its own tables
    tables: tuple[str, ...] = ()  # tables of its own with a column `run_id`: their rows are deleted with the run
    vendors: Callable[[Clock], AbstractAsyncContextManager[Any]] = lambda _: nullcontext()  # once per process
    longest: timedelta | None = None  # what a run may take; by default all its stages may, and a grace
    # Names what a schedule starts: taken twice, the decision is one run. `due` is in milliseconds.
    slot_key: str = "schedule:{schedule}:{due}"
    not_by_hand: str = ""  # of a flow whose runs nobody asks for one by one: what to use instead
    about: Callable[[Run], Mapping[str, Any]] = lambda _: {}  # what a run's first log line says of it
    # Of a flow without a story: opens the first stage of runs that have just been inserted, in the same transaction.
    begin: Callable[[Connection, Sequence[Run]], Awaitable[None]] | None = None
    # Of every replica that works, now and then: what the engine cannot know to be wrong. Twice must be harmless.
    watch: Callable[[Connection], Awaitable[None]] | None = None
    units: CountUnits | None = None  # of a flow with a stage whose work is done by other runs
    # In the transaction that ends these runs, however they end: the flow's own rows, and what is to be told.
    ended: Callable[[Connection, Sequence[Run]], Awaitable[Sequence[Event]]] | None = None

    @property
    def stale_after(self) -> timedelta:
        """A gate ends at its `max_wait`: a run that takes longer than all of them together is not one any more."""
        return self.longest or sum((stage.max_wait for stage in self.stages), GRACE)

    @property
    def last_stages(self) -> list[str]:
        return [stage.name for stage in self.stages if stage.last] or [self.stages[-1].name]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)
