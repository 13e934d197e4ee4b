"""The interface of a flow's story: durable steps, selection, fan-out, gates. The story itself is ordinary code that is
replayed after a crash, so each of its side effects is a step here. Results of steps are small: ids and counts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from ecluse.base.crash import after_step, crashpoint
from ecluse.base.errors import EcluseError, ForbiddenTransition
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import until_back
from ecluse.engine.lead import durable, gate
from ecluse.engine.model.context import EmitLive
from ecluse.engine.model.flow import Flow, Run, Source, Stage
from ecluse.engine.model.states import NORMAL, RunEnd
from ecluse.engine.runs import finalize, lifecycle, stages, targets

P = ParamSpec("P")
R = TypeVar("R")


class Story:
    """One run on its way through its flow's story: the argument of `Flow.story`. `chunk`: rows per statement of a
    fan-out; `emit` sends ephemeral events."""

    def __init__(self, pool: Pool, flow: Flow, run: Run, *, chunk: int, emit: EmitLive = lambda _: None) -> None:
        self._pool = pool
        self._chunk = chunk
        self.emit = emit  # ephemeral events: a repeated step emits them again
        self.flow = flow
        self.run = run

    @property
    def input(self) -> Any:
        """The input of the run, as an instance of the flow's model."""
        return self.flow.input.model_validate(self.run.input)

    async def step(
        self,
        name: str,
        function: Callable[Concatenate[Connection, Run, P], Awaitable[R]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> R:
        """Run `function(connection, run, …)` as a step, and log it. Its result, which must be small, is stored under
        this place in the story; a replay returns the stored result without running the function again. It is retried
        while the database is unavailable, so it must be idempotent."""

        async def logged(connection: Connection, run: Run) -> R:
            began = time.monotonic()
            run.trace.step(name)
            result = await function(connection, run, *args, **kw)
            run.trace.done(name, time.monotonic() - began)
            return result

        return await self.once(name, logged)

    async def once(
        self,
        name: str,
        function: Callable[Concatenate[Connection, Run, P], Awaitable[R]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> R:
        """Run `function(connection, run, …)` as a step, like `step`, but without logging."""

        async def attempt() -> R:
            async with self._pool.connection() as connection:
                result = await function(connection, self.run, *args, **kw)
            crashpoint(after_step(name))
            return result

        async def patiently() -> R:
            return await until_back(f"run {self.run.id}: step {name}", attempt)

        return await durable.step(name, patiently)

    async def patched(self, change: str) -> bool:
        """Return whether the run takes a change to its story: True if the run reaches this line for the first time, or
        took the change before (a replay); False if it had passed this line when the change was deployed, and has to
        continue with the former code."""
        return await durable.patched(change)

    async def phase(self, name: str) -> None:
        """Store `name` as the run's phase, which is shown to people while the run is open."""
        await self.once(f"phase-{name}", lifecycle.set_phase, name)

    async def select(self, source: Source) -> int:
        """Fix the targets of this run: the targets of the items that `source` returns. Return their number. Payloads
        are not kept: the items of `fan_out` have their own."""

        async def chosen(connection: Connection, run: Run) -> int:
            await targets.select(connection, {run.id: await source(connection, run)})
            return await targets.how_many_selected(connection, run.id)

        count = await self.step("select", chosen)
        crashpoint("after select")
        return count

    async def fan_out(
        self, stage: Stage, source: Source = targets.open_targets, priority: stages.Priority = "normal"
    ) -> int:
        """Open the stage and dispatch the items that `source` returns; by default one item without a payload for every
        open target. Return the number of items of the stage."""

        async def dispatched(connection: Connection, run: Run) -> int:
            items = await source(connection, run)
            return await stages.fan_out(connection, run, stage, items, chunk=self._chunk, priority=priority)

        count = await self.once(f"fan-out-{stage.name}", dispatched)
        crashpoint("after fan-out")
        return count

    async def open(self, stage: Stage) -> None:
        """Open a stage whose work is done by other runs. The stage's `max_wait` begins here."""
        await self.once(f"open-{stage.name}", stages.open_units, stage)

    async def gate(self, stage: Stage, *, seen: gate.Seen | None = None, units: gate.Units | None = None) -> str:
        """Wait until the stage's items, or its `units`, are finished, and repeat failed ones in further rounds. Return
        how the gate ended: `done` or `timeout`. `seen` is called with the progress and the decision of every poll,
        before the decision is carried out. Raise RunEnded if the run was ended from outside."""
        polls = 0
        while True:
            verdict, seconds = await self.once(f"poll-{stage.name}-{polls}", gate.poll, stage, polls == 0, seen, units)
            if verdict == "run ended":
                raise lifecycle.RunEnded
            if verdict != "wait":
                crashpoint("after gate end")
                return verdict
            crashpoint("at gate")
            await durable.receive(gate.topic(stage.name), seconds)
            polls += 1


async def lead(story: Story, *, begun: bool) -> None:
    """Lead a run from its first step to its end. `begun`: the run was begun when it was taken (`NewRuns`). An error of
    the story ends the run as failed. A signal of DBOS, or a database outage inside DBOS, is raised, so that the
    workflow is continued later."""
    flow, run = story.flow, story.run
    try:
        try:
            if begun:
                await durable.step("begin", partial(_trace_begin, run, flow))
            else:
                await story.once("begin", lifecycle.begin, flow)
        except ForbiddenTransition as error:
            run.trace.warn("run was ended before it began", error=str(error))
            return
        crashpoint("after begin")
        if flow.story is not None:
            await flow.story(story)
        await story.once("finalize", _end, flow, NORMAL)
        crashpoint("after finalize")
    except lifecycle.RunEnded:
        run.trace.warn("the run was ended from outside")
    except Exception as error:  # the edge of the story: whatever went wrong in it, the run must record it
        if durable.is_dbos_or_outage(error):
            raise
        run.trace.error("run failed", exc_info=True)
        code = error.code if isinstance(error, EcluseError) else "BUG"
        why = str(error) or type(error).__name__
        await story.once("abort", _end, flow, RunEnd("catastrophic", code, why))


async def _trace_begin(run: Run, flow: Flow) -> None:
    lifecycle.trace_begin(run, flow)


async def _end(connection: Connection, run: Run, flow: Flow, end: RunEnd) -> int:
    return await finalize.end_runs(connection, flow, [run], end)
