"""The interface of a flow's story: durable steps, selection, fan-out, gates. The story itself is ordinary code that is
replayed after a crash, so all its side effects go through a step here; results are ids and counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import psycopg

from ecluse.base.crash import after_step, crashpoint
from ecluse.base.errors import EcluseError, ForbiddenTransition
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import is_unavailable
from ecluse.engine.lead import durable, gate
from ecluse.engine.model import counters
from ecluse.engine.model.flow import EmitLive, Flow, Run, Source, Stage
from ecluse.engine.runs import finalize, lifecycle, run_log, targets
from ecluse.engine.runs.fan_out import Priority, fan_out
from ecluse.engine.runs.units import Counted

P = ParamSpec("P")
R = TypeVar("R")
DATABASE_AWAY_SECONDS = 0.5
# What child runs have done is shown at their parent as its gate counted it last.
UNITS_POLL_SECONDS = 5.0


Seen = Callable[[Connection, Run, gate.StageProgress, gate.GateEnded | gate.Redispatch | gate.Wait], Awaitable[None]]


class Units(Protocol):
    """The units of a stage whose work is done by other runs: `count` reads their progress, `again` repeats the failed
    ones. `again` runs before the round is marked as opened, so it may run twice and must be idempotent."""

    async def count(self, connection: Connection, run: Run) -> Counted: ...

    async def again(self, connection: Connection, run: Run, round_: int) -> None: ...


def gate_topic(stage: str) -> str:
    return f"gate:{stage}"


class Story:
    def __init__(self, pool: Pool, flow: Flow, run: Run, *, chunk: int, tell: EmitLive = lambda _: None) -> None:
        self._pool = pool
        self._chunk = chunk
        self.tell = tell  # ephemeral events: a repeated step emits them again
        self.flow = flow
        self.run = run

    @property
    def input(self) -> Any:
        return self.flow.input.model_validate(self.run.input)

    async def step(
        self,
        name: str,
        function: Callable[Concatenate[Connection, Run, P], Awaitable[R]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> R:
        """Run `function(connection, run, …)` once and log it; its small result is stored under this place in the
        story."""

        async def told(connection: Connection, run: Run) -> R:
            began = time.monotonic()
            run.trace.step(name)
            result = await function(connection, run, *args, **kw)
            run.trace.done(name, time.monotonic() - began)
            return result

        return await self.once(name, told)

    async def once(
        self,
        name: str,
        function: Callable[Concatenate[Connection, Run, P], Awaitable[R]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> R:
        """Run a step without logging it. It is retried while the database is unavailable."""

        async def patiently() -> R:
            while True:
                try:
                    async with self._pool.connection() as connection:
                        result = await function(connection, self.run, *args, **kw)
                    crashpoint(after_step(name))
                    return result
                except psycopg.Error as error:
                    if not is_unavailable(error):
                        raise
                    self.run.trace.warn("step: database away, trying again", step=name, error=str(error))
                    await asyncio.sleep(DATABASE_AWAY_SECONDS)

        return await durable.step(name, patiently)

    async def patched(self, change: str) -> bool:
        """Return False for runs that began before this change to the story was deployed: they go on as they began."""
        return await durable.patched(change)

    async def phase(self, name: str) -> None:
        await self.once(f"phase-{name}", lifecycle.set_phase, name)

    async def select(self, source: Source) -> int:
        """Fix the targets that this run answers for; return how many. Payloads are not kept: `fan_out` gives items
        theirs."""

        async def chosen(connection: Connection, run: Run) -> int:
            await targets.select(connection, {run.id: await source(connection, run)})
            return await targets.how_many_selected(connection, run.id)

        count = await self.step("select", chosen)
        crashpoint("after select")
        return count

    async def fan_out(self, stage: Stage, source: Source = targets.open_targets, priority: Priority = "normal") -> int:
        """Dispatch the stage's items: those of `source`, or one without a payload for every open target."""

        async def dispatched(connection: Connection, run: Run) -> int:
            items = await source(connection, run)
            return await fan_out(connection, run, stage, items, chunk=self._chunk, priority=priority)

        count = await self.once(f"fan-out-{stage.name}", dispatched)
        crashpoint("after fan-out")
        return count

    async def open(self, stage: Stage) -> None:
        """Open a stage whose work is done by other runs; its time begins here."""
        await self.once(f"open-{stage.name}", gate.open_units, stage)

    async def gate(self, stage: Stage, *, seen: Seen | None = None, units: Units | None = None) -> str:
        """Wait for the stage's items, or for its `units`. Return how the gate ended: done or timeout. `seen` is called
        with the progress and the decision of every poll, before the decision is carried out."""
        looks = 0
        while True:
            verdict, seconds = await self.once(f"poll-{stage.name}-{looks}", _look, stage, looks == 0, seen, units)
            if verdict == "run ended":
                raise lifecycle.RunEnded
            if verdict != "wait":
                crashpoint("after gate end")
                return verdict
            crashpoint("at gate")
            await durable.receive(gate_topic(stage.name), seconds)
            looks += 1


async def _look(
    connection: Connection, run: Run, stage: Stage, first: bool, told: Seen | None, units: Units | None
) -> tuple[str, float]:
    if units is None:
        seen = await gate.look(connection, run, stage)
    else:
        seen = await gate.look_at_units(connection, run, stage, await units.count(connection, run))
    counters.gate_looks[run.flow, stage.name] += 1
    if seen.run_ended:
        return "run ended", 0.0
    decision = gate.decide(seen, stage)
    if told is not None:
        await told(connection, run, seen, decision)
    stalled = seen.fanned_out and seen.waiting and seen.stalled(stage)
    if stalled and (unclaimed := await gate.unclaimed(connection, run, stage)):
        message = f"gate {stage.name}: stalled, and nobody has picked up {run.flow}/{stage.name}"
        facts: dict[str, Any] = {"unclaimed": unclaimed, "since": seen.progress_at.isoformat()}
        if await run_log.write_once(connection, run.id, message, **facts):
            run.trace.warn(message, **facts)
    match decision:
        case gate.GateEnded(cause):
            await gate.end(connection, run, stage, cause)
            return cause, 0.0
        case gate.Redispatch(round_):
            if units is None:
                await gate.redispatch(connection, run, stage, round_)
            else:
                await units.again(connection, run, round_)
                async with connection.transaction():
                    await gate.next_round(connection, run, stage, round_)
            return "wait", gate.FIRST_PAUSE.total_seconds()
        case gate.Wait(seconds):
            await gate.announce_round(connection, run, stage, gate.next_round_at(seen, stage))
            if first:
                name = f"{stage.gate or stage.name} gate"
                what = f"{name} (polling DB for {stage.signal})" if stage.signal else name
                run.trace.waiting(what, items=seen.expected, deadline=seen.deadline_at.isoformat())
            return "wait", seconds if units is None else min(seconds, UNITS_POLL_SECONDS)


async def lead(story: Story) -> None:
    """Lead a run from its first step to its end, whatever error the story raises."""
    flow, run = story.flow, story.run
    try:
        try:
            await story.once("begin", _begin, flow)
        except ForbiddenTransition as error:
            run.trace.warn("run has ended before it began", error=str(error))
            return
        crashpoint("after begin")
        if flow.story is not None:
            await flow.story(story)
        await story.once("finalize", _end, flow)
        crashpoint("after finalize")
    except lifecycle.RunEnded:
        run.trace.warn("the run was ended from outside")
    except Exception as error:  # the edge of the story: whatever went wrong in it, the run must record it
        if durable.not_the_storys(error):
            raise
        run.trace.error("run failed", exc_info=True)
        code = error.code if isinstance(error, EcluseError) else "BUG"
        await story.once("abort", _abort, flow, code, str(error) or type(error).__name__)


async def _begin(connection: Connection, run: Run, flow: Flow) -> bool:
    return await lifecycle.begin(connection, flow, run)


async def _end(connection: Connection, run: Run, flow: Flow) -> bool:
    return await finalize.end(connection, flow, run)


async def _abort(connection: Connection, run: Run, flow: Flow, code: str, reason: str) -> bool:
    return await finalize.end(connection, flow, run, cause="catastrophic", code=code, reason=reason)
