"""The flow `pricing`: its runs are the executions of rule runs. A schedule starts one with a rule: it is previewed,
queued and applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ecluse.base.clock import Clock
from ecluse.db.connect import Connection
from ecluse.engine import BatchWrite, Breaker, Event, Flow, Item, Lane, NewItem, RetryPolicy, Run, Stage
from ecluse.flows.connections.projects import lane_name
from ecluse.flows.pricing import executions, reconciliations, runs, work
from ecluse.flows.pricing.executions import targets
from ecluse.flows.pricing.metrics import ALERTS
from ecluse.flows.pricing.rules import RETRY, RecordId
from ecluse.flows.pricing.runs import Limits
from ecluse.flows.pricing.states import APPLIED, PREVIEW, QUEUED, SCHEDULER

if TYPE_CHECKING:
    from ecluse.engine.lead.story import Story

FLOW = "pricing"
MOST = 250  # variants in one call
PATIENCE = timedelta(days=14)  # waiting for the rate limit of a shop is no stall


@dataclass(frozen=True)
class Config:
    """Knobs of the flow. `call`: time limit of a call to a shop; `target`: of all executions of a target."""

    per_second: float = 2.0
    burst: int = 40
    call: timedelta = timedelta(seconds=30)
    target: timedelta = timedelta(seconds=900)
    retry: RetryPolicy = RETRY
    pause: timedelta = timedelta(seconds=60)
    poll: timedelta = timedelta(seconds=20)
    soon: timedelta = timedelta(minutes=1)  # until the first reconciliation


class RuleToRun(Limits):
    """The plan of a schedule: the rule to preview, queue and apply."""

    rule_id: RecordId


class Execution(Limits):
    """Input of a run; `rule_id`: a schedule has started it, and there is no rule run yet."""

    rule_id: RecordId | None = None
    kind: Literal["preview", "apply", "rollback", "reconcile"] = "preview"
    rule_run_id: RecordId | None = None
    target_ids: list[int] | None = None
    forced: bool = False


class Pricing:
    """The flow, built from its settings."""

    def __init__(self, config: Config, vendors: Callable[[Clock], AbstractAsyncContextManager[Any]]) -> None:
        breaker = Breaker(failures=5, pause=config.pause)  # opens at the 6th consecutive 429
        self.config = config
        self.base = Lane("shop", max_per_key=1, per_second=config.per_second, burst=config.burst, breaker=breaker)
        common: dict[str, Any] = {"lane": self.base, "retry": config.retry, "max_wait": PATIENCE, "poll": config.poll}
        brief = {**common, "time_limit": 3 * config.call + timedelta(seconds=30)}
        before, after = _amount("before"), _amount("after")
        apply: dict[str, Any] = {"work": self._write(before, after), "on_end": executions.applied, "opens": True}
        self.catalogue = Stage("catalogue", work=work.preview, time_limit=timedelta(hours=1), **common)
        self.canary, self.apply = (Stage(name, **apply, **brief, last=True) for name in executions.APPLY_STAGES)
        undo = self._write(lambda item: {} if item.payload["forced"] else after(item), before)
        self.rollback = Stage("rollback", work=undo, on_end=executions.rolled_back, **brief, last=True)
        self.reconcile = Stage("reconcile", work=work.fetch_external_prices, on_end=reconciliations.compared, **brief)
        self.flow = Flow(
            FLOW,
            (self.catalogue, self.canary, self.apply, self.rollback, self.reconcile),
            self._lead,
            Execution,
            vendors=vendors,
            plan=RuleToRun,
            watch=self._watch,
            alerts=ALERTS,
            ended=self._ended,
            not_by_hand="Preview a rule with POST /api/pricing/runs, then queue the run.",
        )

    def _write(self, expected: Callable[[Item], Any], wanted: Callable[[Item], Any]) -> BatchWrite:
        # A request that has arrived may still be applied as long after the call's deadline as a call may take.
        quiet = 2 * self.config.call + timedelta(seconds=2)
        return BatchWrite(
            most=MOST,
            wanted=wanted,
            expected=expected,
            conflict="PRICE_CONFLICT",
            quiet=quiet,
            read=work.read,
            send=work.send,
        )

    def lane(self, tenant: str, project: int) -> Lane:
        """Return the lane of a project, which has the caps of the declared one for itself."""
        return replace(self.base, name=lane_name(tenant, project), tenant=tenant)

    async def _lead(self, story: Story) -> None:
        given: Execution = story.input
        run = await story.step("open", executions.opened)
        if given.kind == "preview":
            await self._preview(story, run)
        elif given.kind == "apply":
            await self._apply(story, run)
        elif given.kind == "rollback":
            source = partial(targets, self.lane, APPLIED)
            await story.select(source)
            await story.fan_out(self.rollback, source)
            await story.gate(self.rollback)
        else:
            project = await story.step("project", executions.project_of, run)
            source = partial(reconciliations.parts, self.lane(story.run.tenant_id, project))
            await story.select(source)
            await story.fan_out(self.reconcile, source, priority="low")
            await story.gate(self.reconcile)

    async def _preview(self, story: Story, run: int) -> None:
        async def catalogue(connection: Connection, execution: Run) -> Sequence[NewItem]:
            project = await executions.project_of(connection, execution, run)
            payload = {"rule_run": run, "project": project}
            return [NewItem("catalogue", "", payload, lane=self.lane(execution.tenant_id, project))]

        await story.fan_out(self.catalogue, catalogue)
        await story.gate(self.catalogue)
        if story.input.rule_run_id is None:
            await story.step("queue", self._queue, run)

    async def _queue(self, connection: Connection, execution: Run, run: int) -> None:
        """Queue the whole plan of a schedule's run, unless it changes nothing or could not be made."""
        async with connection.transaction():
            tenant, given = execution.tenant_id, execution.input
            found = await runs.require_run(connection, tenant, run, lock=True)
            if found["status"] != PREVIEW or not found["totals"] or not found["totals"]["changed"]:
                return
            limits = Limits(canary=given["canary"], max_failure_rate=given["max_failure_rate"])
            await runs.queue_for_processing(connection, tenant, run, found["plan_hash"], None, SCHEDULER, limits)
            await executions.start(connection, self.flow, tenant, run, "apply", SCHEDULER, within=execution.id)

    async def _apply(self, story: Story, run: int) -> None:
        canary = await story.step("begin-apply", executions.begin_apply, run)
        source = partial(targets, self.lane, QUEUED)
        await story.select(source)
        if canary is not None:
            await story.fan_out(self.canary, partial(source, limit=canary))
            await story.gate(self.canary)
            if not await story.step("judge-canary", executions.may_go_on, run):
                return
        await story.fan_out(self.apply, source)
        await story.gate(self.apply)

    async def _watch(self, connection: Connection) -> None:
        await executions.give_up_overdue(connection, self.config.target)
        await reconciliations.start_due(connection, self.flow)

    async def _ended(self, connection: Connection, ended: Sequence[Run]) -> Sequence[Event]:
        ids = [run.id for run in ended]
        over = await executions.ended(connection, ids)
        await reconciliations.ended(connection, ids, over, self.config.soon)
        return ()


def _amount(name: str) -> Callable[[Item], Any]:
    return lambda item: {"amount": item.payload[name]}
