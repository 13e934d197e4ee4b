"""One execution of a claimed item: wait for its start, call the work with no transaction open, judge the answer, and
return the result for the committer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

import structlog

from ecluse.base.clock import Clock
from ecluse.base.errors import EcluseError, TransientError, VendorError
from ecluse.db.outage import is_unavailable
from ecluse.engine.effects.paid import OverBudget, PaidCalls
from ecluse.engine.effects.perform import WriteExecutor
from ecluse.engine.effects.protocol import LATER, EffectEnd, Fenced
from ecluse.engine.lanes.registry import Closed, Lanes
from ecluse.engine.model import counters
from ecluse.engine.model.flow import Stage, WorkContext, Write
from ecluse.engine.model.item import ClaimedItem, Done, Ignored, Item, Postponed, Result
from ecluse.engine.work import verdict
from ecluse.engine.work.committer import Committer
from ecluse.engine.work.suspects import Suspicion
from ecluse.engine.work.verdict import ItemResult, release
from ecluse.engine.work.worker_slots import WorkerSlot

log = structlog.get_logger(__name__)

IN_DOUBT = "its last write is in doubt: whether it was applied is checked first"
UNAVAILABLE = "the database is unavailable"

Answer = Result | VendorError | datetime


class Executor:
    """Executes the claimed items of a worker, each in a slot, and judges their answers. `contexts`: the work contexts
    of the flows, by name; `chance`: the source of the jitter of retries."""

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
        self._contexts = {name: replace(context, reserve=self._reserve) for name, context in contexts.items()}
        self._lanes = lanes
        self._writes = WriteExecutor(committer.intend, self._may_send, clock.now)
        self._paid = paid
        self._clock = clock
        self._chance = chance
        self._alive = alive  # the heartbeat is recent: no replica can have declared this one dead
        self._stopping = False
        self._ended_runs: set[int] = set()  # that ended while this worker held items of them
        self._awaiting_permit: set[int] = set()  # items

    async def execute(self, slot: WorkerSlot, claimed: ClaimedItem) -> ItemResult | None:
        """Execute the item; return the result to be stored, or None if the item is no longer this worker's."""
        result = await self._execute(slot, claimed)
        if result is not None and self._paid.may_be_reserved(claimed.item.id):
            return result._replace(settlement=verdict.settlement(result))
        return result

    async def _execute(self, slot: WorkerSlot, claimed: ClaimedItem) -> ItemResult | None:
        stage = self._lanes.stages[claimed.item.flow, claimed.item.stage]
        try:
            if claimed.start_at is not None:
                await asyncio.sleep((claimed.start_at - self._clock.now()).total_seconds())
            if self._lanes.is_closed(claimed.item.lane_id):
                self._lanes.refresh(claimed.item.lane_id)  # the NOTIFY that it was opened may have been lost
                return release(stage, claimed)
            slot.deadline = asyncio.get_running_loop().time() + stage.time_limit.total_seconds()
            with counters.timed(claimed.item.flow, stage.name):
                answer, effect = await self._call(stage, claimed)
            return self._judge(stage, claimed, answer, effect)
        except Closed:
            return release(stage, claimed)
        except OverBudget as over:
            return self._judge(stage, claimed, over.postponed, None)
        except asyncio.CancelledError as error:
            return self._interrupted(slot, stage, claimed, error)
        except Fenced:
            log.warning("execution: fenced out, nothing sent", **claimed.item.log_fields)
            return None
        except Exception as error:  # work may raise anything: it is this item's error
            called = claimed.item.id in self._paid or claimed.claim_key in self._writes.phase
            if is_unavailable(error) and not called:
                return self._judge(stage, claimed, Postponed(self._clock.now() + LATER, UNAVAILABLE), None)
            if not isinstance(error, EcluseError) and not claimed.item.executions:  # log it once per item
                log.exception("execution: work raised an unexpected error", **claimed.item.log_fields)
            return self._failed(stage, claimed, error)

    async def _call(self, stage: Stage, claimed: ClaimedItem) -> tuple[Answer, EffectEnd | None]:
        """Call the work, or perform the write, of the item; return the answer, and the new state of the write's effect.
        An item that is given up is not executed, but its write is still read back if it is in doubt."""
        item, context = claimed.item, self._contexts[claimed.item.flow]
        spent = verdict.give_up_reason(stage, claimed) if item.crashes or item.executions else None
        if spent is not None and (claimed.suspicion == Suspicion.DEADLY or not isinstance(stage.work, Write)):
            return spent, None
        if isinstance(stage.work, Write):
            return await self._writes.perform(stage.work, context, claimed, spent)
        if stage.paid:
            context = replace(context, begin_paid=partial(self._paid.begin, context, claimed))
        return await stage.work(context, item), None

    def _judge(self, stage: Stage, claimed: ClaimedItem, answer: Answer, effect: EffectEnd | None) -> ItemResult:
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
                return self._failed(stage, claimed, error, effect)
            case Postponed(at, _):
                return release(stage, claimed, at, effect)._replace(postponed=answer)
            case datetime() as at:
                return release(stage, claimed, at, effect)._replace(postponed=Postponed(at, IN_DOUBT))
            case other:
                return self._failed(stage, claimed, TypeError(f"work returned {other!r}, not Done or Ignored"))

    def _interrupted(
        self, slot: WorkerSlot, stage: Stage, claimed: ClaimedItem, error: asyncio.CancelledError
    ) -> ItemResult | None:
        """Return the result of a call that was cancelled: because it exceeded its time limit, because its run has ended
        (None), or by its own code. If the process stops, the error is raised."""
        match slot.reset():
            case "late" if claimed.item.id in self._awaiting_permit:
                return release(stage, claimed)  # waiting for the lane's rate is no execution
            case "late" if self._writes.phase.get(claimed.claim_key) == "recording":
                return release(stage, claimed, self._clock.now() + LATER)  # the database was slow, not the vendor
            case "late":
                limit = f"{stage.time_limit.total_seconds():g} s"
                return self._failed(stage, claimed, TransientError(f"No answer within {limit}", code="TIMEOUT"))
            case "dropped":
                return None
            case _ if slot.is_stopping:
                self._paid.cut_off(claimed.item)
                raise error
            case _:
                cancelled = RuntimeError(f"something inside the work was cancelled: {error!r}")
                return self._failed(stage, claimed, cancelled)

    def _failed(
        self, stage: Stage, claimed: ClaimedItem, error: Exception, effect: EffectEnd | None = None
    ) -> ItemResult:
        spared = self._lanes.record_result(claimed, error, called=self._called(stage, claimed.item))
        in_doubt = self._writes.phase.get(claimed.claim_key) in ("asking", "sending")
        now, chance = self._clock.now(), self._chance
        return verdict.failed(stage, claimed, error, effect, in_doubt=in_doubt, now=now, chance=chance, spared=spared)

    def _called(self, stage: Stage, item: Item) -> bool:
        """Return True if the vendor was called: paid work announces its call (`pay`), other work always calls."""
        return not stage.paid or item.id in self._paid

    async def _reserve(self, item: Item) -> None:
        self._awaiting_permit.add(item.id)  # stays in it when interrupted: `_interrupted` reads the cause
        await self._lanes.reserve(item)
        self._awaiting_permit.discard(item.id)

    def _may_send(self, item: Item) -> bool:
        return self._alive() and not self._stopping and item.run_id not in self._ended_runs

    def stop_sending(self) -> None:
        """Refuse to send further writes, because this process stops."""
        self._stopping = True

    def runs_ended(self, ended: set[int], held: set[int], executing: Sequence[ClaimedItem]) -> None:
        """Refuse to send further writes of the runs in `ended`, and keep the leases of their paid calls in flight, so
        that no other run pays for the same. `held`: the runs of which this worker holds items; `executing`: the items
        that are being executed."""
        self._ended_runs = self._ended_runs & held | ended
        self._paid.run_ended([claimed.item for claimed in executing if claimed.item.run_id in ended])

    async def note_cut_off(self) -> None:
        """Record the paid calls that the stop of this process has interrupted."""
        await self._paid.note_cut_off()

    def is_worth_its_answer(self, claimed: ClaimedItem) -> bool:
        """Return True for a write or a paid call in flight: it may finish although its run has ended."""
        return claimed.item.id in self._paid or self._writes.phase.get(claimed.claim_key) == "sending"

    def forget(self, one: ClaimedItem | ItemResult) -> None:
        """Drop the state kept for an item whose result is stored, or whose claim is lost."""
        if self._writes.phase:
            self._writes.phase.pop(one.claim_key, None)
        self._awaiting_permit.discard(one.item.id)
        self._paid.forget(one.item.id)
