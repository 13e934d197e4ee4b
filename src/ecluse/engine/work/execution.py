"""One execution of a claimed item, or of the items of a batch: wait for its start, call the work with no transaction
open, judge the answer, and return the results for the committer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from time import monotonic

import structlog

from ecluse.base.clock import Clock
from ecluse.base.errors import EcluseError, TransientError, VendorError
from ecluse.db.outage import is_unavailable
from ecluse.engine.effects.paid_calls import OverBudget, PaidCalls
from ecluse.engine.effects.perform import WriteExecutor
from ecluse.engine.effects.protocol import LATER, EffectEnd
from ecluse.engine.lanes.registry import Closed, Lanes
from ecluse.engine.model import counters
from ecluse.engine.model.breaker import Spared
from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.flow import Stage
from ecluse.engine.model.item import ClaimedItem, ClaimKey, Done, Ignored, Item, Postponed, Result
from ecluse.engine.model.writes import Write
from ecluse.engine.work import verdict
from ecluse.engine.work.committer import Committer
from ecluse.engine.work.suspects import Suspicion
from ecluse.engine.work.verdict import ItemResult, release
from ecluse.engine.work.worker_slots import WorkerSlot

log = structlog.get_logger(__name__)

IN_DOUBT = "its last write is in doubt: whether it was applied is checked first"
UNAVAILABLE = "the database is unavailable"

Answer = tuple[Result | VendorError | datetime, EffectEnd | None]


@dataclass(slots=True)
class Call:
    """One call, and the state that its items share: the instant and the jitter of their retries, so that they are due
    together, and for each error whether its lane spared the items (`spared`). `answers`: the answers by claim key;
    None: the claim was lost."""

    stage: Stage
    answers: dict[ClaimKey, Answer | None] = field(default_factory=dict)
    failed_at: datetime | None = None
    jitter: float = 0.0
    spared: dict[int, Spared | None] = field(default_factory=dict)


class Executor:
    """Executes the claimed items of a worker, each in a slot, and judges their answers. `contexts`: the work contexts
    of the flows, by name; `chance`: the source of the jitter of retries; `alive`: returns whether the heartbeat is
    recent."""

    def __init__(
        self,
        *,
        contexts: Mapping[str, WorkContext],
        lanes: Lanes,
        committer: Committer,
        paid: PaidCalls,
        clock: Clock,
        chance: random.Random,
        alive: Callable[[], bool],
    ) -> None:
        self._contexts = {
            name: replace(context, reserve=self._reserve, heard=lanes.heard) for name, context in contexts.items()
        }
        self._lanes = lanes
        self._writes = WriteExecutor(committer.intend, self._may_send, clock.now)
        self._paid = paid
        self._clock = clock
        self._chance = chance
        self._alive = alive  # the heartbeat is recent: no replica can have declared this one dead
        self._stopping = False
        self._ended_runs: set[int] = set()  # runs that ended while this worker held items of them
        self._awaiting_permit: set[int] = set()  # ids of items

    async def execute(self, slot: WorkerSlot, claimed: ClaimedItem) -> list[ItemResult]:
        """Execute the item with its mates; return the results to be stored. Items whose claim was lost, or whose run
        has ended, have no result."""
        stage = self._lanes.stages[claimed.item.flow, claimed.item.stage]
        call = Call(stage)
        try:
            if claimed.start_at is not None:
                await asyncio.sleep((claimed.start_at - self._clock.now()).total_seconds())
            if self._lanes.is_closed(claimed.item.lane_id):
                self._lanes.refresh(claimed.item.lane_id)  # the NOTIFY that it was opened may have been lost
                return [release(stage, one) for one in claimed.batch]
            slot.deadline = asyncio.get_running_loop().time() + stage.time_limit.total_seconds()
            began = monotonic()
            try:
                await self._call(call, claimed)
            finally:
                counters.add_call(claimed.item.flow, stage.name, monotonic() - began)
            return self._results(call, claimed)
        except Closed:
            return self._results(call, claimed)
        except OverBudget as over:
            return self._results(call, claimed, over.postponed)
        except asyncio.CancelledError as error:
            return self._interrupted(slot, call, claimed, error)
        except Exception as error:  # work may raise anything: it is the error of its items
            open_ = [one for one in claimed.batch if one.claim_key not in call.answers]
            called = any(one.item.id in self._paid or one.claim_key in self._writes.phase for one in open_)
            if is_unavailable(error) and not called:
                return self._results(call, claimed, Postponed(self._clock.now() + LATER, UNAVAILABLE))
            if not isinstance(error, EcluseError) and not claimed.item.executions:  # log it once per item
                log.exception("execution: work raised an unexpected error", **claimed.item.log_fields)
            return self._results(call, claimed, error)

    async def _call(self, call: Call, claimed: ClaimedItem) -> None:
        """Call the work, or perform the write, of the items, and put their answers into `call`. An item that is given
        up is not executed; but the write of such an item is still read back, unless the item is DEADLY
        (`suspects.py`)."""
        stage, context, batch = call.stage, self._contexts[claimed.item.flow], []
        for one in claimed.batch:
            spent = verdict.give_up_reason(stage, one) if one.item.crashes or one.item.executions else None
            if spent is not None and (one.suspicion == Suspicion.DEADLY or not isinstance(stage.work, Write)):
                call.answers[one.claim_key] = spent, None
            else:
                batch.append((one, spent))
        if not batch:
            return
        if isinstance(stage.work, Write):
            await self._writes.perform(stage.work, context, batch, call.answers)  # type: ignore[arg-type]
            return
        if stage.paid:
            context = replace(context, begin_paid=partial(self._paid.begin, context, claimed))
        call.answers[claimed.claim_key] = await stage.work(context, claimed.item), None

    def _results(
        self, call: Call, claimed: ClaimedItem, otherwise: Postponed | datetime | Exception | None = None
    ) -> list[ItemResult]:
        """Judge the answers of the items, and return their results. `otherwise`, for items without an answer: an
        instant or a Postponed says when they are executed again, an Exception ended their execution; None: they are put
        back."""
        results = []
        for one in claimed.batch:
            if one.claim_key not in call.answers:
                results.append(self._without_answer(call, one, otherwise))
            elif (answer := call.answers[one.claim_key]) is not None:
                results.append(self._judge(call, one, *answer))
            else:
                log.warning("execution: fenced out, nothing sent", **one.item.log_fields)
        if self._paid.may_be_reserved(claimed.item.id):
            return [one._replace(settlement=verdict.settlement(one)) for one in results]
        return results

    def _without_answer(
        self, call: Call, claimed: ClaimedItem, otherwise: Postponed | datetime | Exception | None
    ) -> ItemResult:
        match otherwise:
            case None:
                return release(call.stage, claimed)
            case datetime() as at:
                return release(call.stage, claimed, at)
            case Postponed():
                return self._judge(call, claimed, otherwise, None)
            case error:
                return self._failed(call, claimed, error)

    def _judge(
        self, call: Call, claimed: ClaimedItem, answer: Result | VendorError | datetime, effect: EffectEnd | None
    ) -> ItemResult:
        stage = call.stage
        if self._lanes.counting and isinstance(answer, Done | Ignored):
            self._lanes.record_result(claimed, None, called=self._called(stage, claimed.item))
        item, claim_id, fence, *_ = claimed
        match answer:
            case Done(value, kept, cost):
                done = ItemResult(item, stage, claim_id, fence, "succeeded", result=value, effect=effect, kept=kept)
                return done if cost is None else done._replace(cost=cost)
            case Ignored(reason, code):
                return ItemResult(item, stage, claim_id, fence, "ignored", error_code=code, error=reason)
            case VendorError() as error:
                return self._failed(call, claimed, error, effect)
            case Postponed(at, _):
                return release(stage, claimed, at, effect)._replace(postponed=answer)
            case datetime() as at:
                return release(stage, claimed, at, effect)._replace(postponed=Postponed(at, IN_DOUBT))
            case other:
                return self._failed(call, claimed, TypeError(f"work returned {other!r}, not Done or Ignored"))

    def _interrupted(
        self, slot: WorkerSlot, call: Call, claimed: ClaimedItem, error: asyncio.CancelledError
    ) -> list[ItemResult]:
        """Return the results of a call that was cancelled: because it exceeded its time limit, because its run has
        ended (no results), or by its own code. If the process is stopping, raise `error`."""
        phases = {self._writes.phase.get(one.claim_key) for one in claimed.batch}
        match slot.reset():
            case "late" if any(one.item.id in self._awaiting_permit for one in claimed.batch):
                return self._results(call, claimed)  # waiting for the lane's rate is no execution
            case "late" if "recording" in phases and not phases & {"asking", "sending"}:
                return self._results(call, claimed, self._clock.now() + LATER)  # the database was slow, not the vendor
            case "late":
                limit = f"{call.stage.time_limit.total_seconds():g} s"
                return self._results(call, claimed, TransientError(f"No answer within {limit}", code="TIMEOUT"))
            case "dropped":
                return []
            case _ if slot.is_stopping:
                self._paid.cut_off(claimed.item)
                raise error
            case _:
                cancelled = RuntimeError(f"something inside the work was cancelled: {error!r}")
                return self._results(call, claimed, cancelled)

    def _failed(
        self, call: Call, claimed: ClaimedItem, error: Exception, effect: EffectEnd | None = None
    ) -> ItemResult:
        stage = call.stage
        if id(error) not in call.spared:  # one failed call, however many items it had
            called = self._called(stage, claimed.item)
            call.spared[id(error)] = self._lanes.record_result(claimed, error, called=called)
        if call.failed_at is None:
            call.failed_at, call.jitter = self._clock.now(), self._chance.random()
        return verdict.failed(
            stage,
            claimed,
            error,
            effect,
            in_doubt=self._writes.phase.get(claimed.claim_key) in ("asking", "sending"),
            now=call.failed_at,
            chance=random.Random(call.jitter),  # noqa: S311 - not cryptography
            spared=call.spared[id(error)],
        )

    def _called(self, stage: Stage, item: Item) -> bool:
        """Return True if the vendor was called: paid work announces its call (`pay`), other work is assumed to have
        called."""
        return not stage.paid or item.id in self._paid

    async def _reserve(self, item: Item) -> None:
        self._awaiting_permit.add(item.id)  # stays in it when interrupted: `_interrupted` reads the cause
        await self._lanes.reserve(item)
        self._awaiting_permit.discard(item.id)

    def _may_send(self, item: Item) -> bool:
        return self._alive() and not self._stopping and item.run_id not in self._ended_runs

    def stop_sending(self) -> None:
        """Refuse to send further writes from now on, because this process stops."""
        self._stopping = True

    def runs_ended(self, ended: set[int], held: set[int], executing: Sequence[ClaimedItem]) -> None:
        """Refuse to send further writes of the runs in `ended`, and keep the leases of their paid calls in flight, so
        that no other run pays for the same result. `held`: the ids of all runs with items in this worker; `executing`:
        the items that are being executed."""
        self._ended_runs = self._ended_runs & held | ended
        self._paid.run_ended([claimed.item for claimed in executing if claimed.item.run_id in ended])

    async def note_cut_off(self) -> None:
        """Record the paid calls that the stop of this process has interrupted as attempts."""
        await self._paid.note_cut_off()

    def is_worth_its_answer(self, claimed: ClaimedItem) -> bool:
        """Return True if a write or a paid call of the item is in flight: it may finish although its run has ended."""
        if claimed.item.id in self._paid:
            return True
        return any(self._writes.phase.get(one.claim_key) == "sending" for one in claimed.batch)

    def forget(self, ended: Sequence[ClaimedItem | ItemResult]) -> None:
        """Drop the state kept for items whose results are stored, or whose claims are lost."""
        if self._writes.phase:
            for one in ended:
                self._writes.phase.pop(one.claim_key, None)
        if self._awaiting_permit:
            self._awaiting_permit.difference_update([one.item.id for one in ended])
        self._paid.forget([one.item.id for one in ended])
