"""What a flow is made of. A flow is data plus functions: its status words, its stages, and a story that takes a run
through them; the engine supplies durability, concurrency, retries and the count."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from ecluse.base.clock import Clock
from ecluse.base.ids import item_event_id
from ecluse.db.connect import Connection
from ecluse.engine.retry import RetryPolicy
from ecluse.engine.states import PLAIN, Words

if TYPE_CHECKING:
    from ecluse.engine.story import Story


@dataclass(frozen=True, slots=True)
class Run:
    id: int
    tenant_id: str
    flow: str
    event_key: str
    input: Mapping[str, Any]


class NewItem(NamedTuple):
    """A unit of work to be fanned out. `target` is the record the run answers for; the key is unique in its stage.
    Items of one `group` share the lane's cap per key."""

    key: str
    target: str | None = None
    payload: Any = None
    group: str | None = None


class Item(NamedTuple):
    """A unit of work in hand (a tuple: thousands a second are made). `executions` counts the finished ones before."""

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

    @property
    def event_id(self) -> str:
        return item_event_id(self.flow, self.run_id, self.stage, self.key, self.round)


@dataclass(frozen=True, slots=True)
class Done:
    """The item did what it should. `result` is stored with it (jsonb) and handed to the stage's `save`."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """The item can never finish and nobody is to blame (a record that is gone upstream): out of the denominator."""

    reason: str
    code: str = "IGNORED"


Result = Done | Ignored


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` gets: one per item whose result is being stored in this commit."""

    item: Item
    result: Any


@dataclass(frozen=True)
class WorkContext:
    """What work may use besides its item. No connection: no transaction is open while a vendor is called."""

    vendors: Any
    now: Callable[[], datetime]


Work = Callable[[WorkContext, Item], Awaitable[Result]]
Save = Callable[[Connection, Sequence[Saved]], Awaitable[None]]
Source = Callable[[Connection, Run], Awaitable[Sequence[NewItem]]]


@dataclass(frozen=True)
class Lane:
    """Where a stage's items wait. Caps hold over all replicas; None is no cap."""

    name: str
    max_in_flight: int | None = None
    max_per_key: int | None = None
    per_second: float | None = None
    burst: int = 1


@dataclass(frozen=True)
class Stage:
    name: str
    lane: Lane
    work: Work
    save: Save | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    time_limit: timedelta = timedelta(minutes=5)  # of one execution
    max_wait: timedelta = timedelta(minutes=10)  # of the gate
    poll: timedelta = timedelta(seconds=20)  # of the gate: the longest pause between looks, a third of a stall
    rounds: int = 0  # deliberate repetitions of what failed, on stall
    incomplete: str = "Not finished in time (timeout/stall)"


@dataclass(frozen=True)
class Flow:
    name: str
    stages: tuple[Stage, ...]
    story: Callable[[Story], Awaitable[None]] | None  # None: a run is only items, and closes itself
    input: type[BaseModel]
    words: Words = PLAIN
    schema: str = ""  # idempotent DDL of a flow that brings its own tables
    vendors: Callable[[Clock], AbstractAsyncContextManager[Any]] = lambda _: nullcontext()  # once per process

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)
