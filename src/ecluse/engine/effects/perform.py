"""One execution of a write, as far as the protocol (`protocol.py`) allows: record the intent, send, or read back.

The items of one call take these steps together: one read, one commit of their intents, one send. Each has its own
effect and its own answer; most calls have a single item."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

from ecluse.base.crash import crashpoint
from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.base.ids import effect_id
from ecluse.base.text import span
from ecluse.engine.effects.protocol import (
    KEY_LIFE,
    LATER,
    OPEN,
    SEND_WITHIN,
    EffectEnd,
    EffectState,
    Fenced,
    Intent,
    State,
    after_failure,
    agrees,
    as_stored_json,
    conclude,
    first_look,
)
from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.item import ClaimedItem, ClaimKey, Done, Item
from ecluse.engine.model.writes import KeyedWrite, Order, ReadableWrite, Write


class Performed(NamedTuple):
    """The result of one execution of a write, and the new state of its effect, which is stored with the item; `effect`
    None: there is no new state to store."""

    outcome: Done | VendorError | datetime  # an instant: execute again then
    effect: EffectEnd | None = None


Phase = Literal["recording", "asking", "sending"]
# The results of the items that have one, by claim key; None: the claim was lost.
Answers = dict[ClaimKey, Performed | None]


@dataclass(slots=True)
class ItemOfCall:
    """An item of a call. `spent`: its write may not be sent again, and fails with this error unless it turns out to
    have been applied. `doubt`: the state of its effect, if an earlier send of it is unresolved."""

    claimed: ClaimedItem
    effect: UUID
    spent: VendorError | None
    doubt: EffectState | None = None

    @property
    def item(self) -> Item:
        return self.claimed.item


class WriteExecutor:
    """Takes writes through the protocol, each as far as one execution can. `intend` commits an intent and returns the
    state of its effect; `may_send` returns whether this process may still send a write of an item."""

    def __init__(
        self,
        intend: Callable[[Intent], Awaitable[EffectState]],
        may_send: Callable[[Item], bool],
        now: Callable[[], datetime],
    ) -> None:
        self._intend = intend
        self._may_send = may_send
        self._now = now
        # Kept while the worker holds the item: after an interruption it says how far the write had come.
        self.phase: dict[ClaimKey, Phase] = {}

    async def perform(
        self,
        write: Write,
        context: WorkContext,
        batch: Sequence[tuple[ClaimedItem, VendorError | None]],
        answers: Answers,
    ) -> None:
        """Start or continue the writes of the claimed items in one call. `batch` has each item with the error with
        which it fails if its write may not be sent again (None: it may). The result of each item is put into `answers`
        as soon as it is known, so that an interruption leaves only the other items without an answer."""
        call = WriteCall(self, write, context, answers)
        items = [ItemOfCall(claimed, _effect_of(claimed.item), spent) for claimed, spent in batch]
        items = await call.look_up(items)
        while items:
            items = await call.go(items)

    async def record(self, intent: Intent) -> EffectState:
        """Commit the intent and return the state of its effect. Raise Fenced if the claim was lost, a VendorError if
        the intent cannot be stored."""
        self.phase[intent.claimed.claim_key] = "recording"
        recorded = await self._intend(intent)
        self.phase[intent.claimed.claim_key] = "asking" if recorded.state in OPEN else "recording"
        return recorded

    def may_send(self, item: Item, asked_at: float) -> bool:
        """Return True if a write of the item, whose intent was asked for at `asked_at` (on the loop's clock), may be
        sent now: at most SEND_WITHIN seconds have passed, its run has not ended, and this process is neither stopping
        nor possibly declared dead."""
        return asyncio.get_running_loop().time() - asked_at <= SEND_WITHIN and self._may_send(item)

    def now(self) -> datetime:
        return self._now()


class WriteCall:
    """One call of a write, with its items. The answers of the items are put into `answers`."""

    def __init__(self, executor: WriteExecutor, write: Write, context: WorkContext, answers: Answers) -> None:
        self._executor = executor
        self._write = write
        self._context = context
        self._answers = answers

    async def look_up(self, items: list[ItemOfCall]) -> list[ItemOfCall]:
        """Look up the effects of items that were executed before, and answer those that need no further send or read.
        Return the items without an answer."""
        known = [one for one in items if one.spent is not None or one.item.executions or one.item.crashes]
        for one, recorded in await self._record([(one, self._intent(one, send=None)) for one in known]):
            if recorded.state != "planned":
                self._continue(one, recorded)
            elif one.spent is not None:
                self._answer(one, one.spent)
        return self._unanswered(items)

    async def go(self, items: list[ItemOfCall]) -> list[ItemOfCall]:
        """Read the states at the vendor (for a write that can be read back), then send the writes that are not applied.
        Return the items without an answer: their writes turned out to be in doubt, and are read once more."""
        write, found = self._write, dict[str, Any]()
        if isinstance(write, ReadableWrite):
            try:
                found = as_stored_json(await write.read_all(self._context, [one.item for one in items]))
            except VendorError as error:
                for one in items:
                    self._answer(one, error, one.doubt and one.doubt.ended("unknown"))
                return []
        intents = [(one, self._decide(one, found.get(one.item.key))) for one in items]
        wanted = [(one, intent) for one, intent in intents if intent is not None]
        if isinstance(write, ReadableWrite) and any(intent.send for _, intent in wanted):
            # The read used the first permit; the second is awaited here, not between the intent and its send.
            await self._context.permit(wanted[0][0].item)
        sending = []
        for one, recorded in await self._record(wanted):
            if recorded.went and recorded.state == "sending":
                sending.append((one, recorded))
            elif one.doubt is not None:
                self._answer(one, recorded.quiet_until or self._executor.now() + LATER)
            else:
                self._continue(one, recorded)
        await self._send(sending)
        return self._unanswered(items)

    def _continue(self, one: ItemOfCall, recorded: EffectState) -> None:
        """Answer for a write whose effect was recorded before, depending on its present state. If it is in doubt and
        its quiet period is over, it gets no answer here: it is to be read back."""
        if recorded.state == "planned":  # by a concurrent transaction: its row is not visible yet
            self._answer(one, self._executor.now() + LATER)
        elif recorded.state == "applied":
            self._answer(one, Done(recorded.result if isinstance(self._write, KeyedWrite) else recorded.wanted))
        elif recorded.state not in OPEN:
            message = recorded.error or f"The write is {recorded.state}"
            self._answer(one, PermanentError(message, code="NOT_APPLIED"))
        elif not recorded.quiet_over and recorded.quiet_until is not None:
            self._answer(one, recorded.quiet_until)
        else:
            one.doubt = recorded

    def _decide(self, one: ItemOfCall, found: Any) -> Intent | None:
        """Return the intent that follows from the state `found` at the vendor; None if that state answers the item."""
        write, doubt = self._write, one.doubt
        if doubt is not None:
            return self._decide_again(one, doubt, found)
        wanted = as_stored_json(write.wanted(one.item))
        if not isinstance(write, ReadableWrite):
            return self._intent(one, wanted)
        look = first_look(write, one.item, found, wanted)
        if look == "conflict":
            message = f"The vendor has {json.dumps(found)}, neither as wanted nor as expected; nothing was sent"
            self._answer(one, PermanentError(message, code=write.conflict))
            return None
        return self._intent(one, wanted, found, send=look == "send")

    def _decide_again(self, one: ItemOfCall, doubt: EffectState, found: Any) -> Intent | None:
        """Find out from the state `found` whether the last send was applied. Return the intent to send again; None if
        the item is answered: the send was applied, is in conflict, or may not be repeated."""
        write, spent, before = self._write, one.spent, doubt.before
        state: State = "unknown"
        if isinstance(write, ReadableWrite):
            verdict = conclude(found, doubt.wanted, doubt.before)
            if verdict == "applied":
                self._answer(one, Done(doubt.wanted), doubt.ended("applied"))
                return None
            if verdict == "conflict":
                message = (
                    f"The vendor has {json.dumps(found)}, neither as wanted nor as before: {json.dumps(doubt.before)}"
                )
                failed = PermanentError(message, code=write.conflict)
                self._answer(one, failed, doubt.ended("conflict", error=message))
                return None
            before, state = found, "not_applied"
        elif isinstance(write, KeyedWrite) and doubt.age is not None and doubt.age > KEY_LIFE * write.remembered:
            spent = PermanentError(f"Sent {span(doubt.age)} ago: the vendor may have forgotten its key", ambiguous=True)
        if spent is not None:
            self._answer(one, spent, doubt.ended(state, error=spent.message))
            return None
        return self._intent(one, doubt.wanted, before, again_after=doubt.sends)

    async def _send(self, sending: list[tuple[ItemOfCall, EffectState]]) -> None:
        """Send the writes, whose intents have just been committed. Writes whose commit took too long, or that may not
        be sent any more, are put off instead."""
        in_time = []
        for one, recorded in sending:
            if self._executor.may_send(one.item, recorded.asked_at):
                in_time.append((one, recorded))
            else:
                state: State = "unknown" if self._doubtful(one) else "planned"
                self._answer(one, self._executor.now() + LATER, recorded.ended(state, error="not sent: too late"))
        if not in_time:
            return
        crashpoint("before send")
        for one, _ in in_time:
            self._executor.phase[one.claimed.claim_key] = "sending"
        orders = [(one.item, Order(str(it.id), it.wanted, it.before)) for one, it in in_time]
        try:
            answers = await self._write.send_all(self._context, orders)
        except VendorError as error:
            for one, recorded in in_time:
                self._refused(one, recorded, error)
            return
        crashpoint("after send")
        for one, recorded in in_time:
            self._sent(one, recorded, answers)

    def _sent(self, one: ItemOfCall, recorded: EffectState, answers: Mapping[str, Any] | None) -> None:
        """Answer for the write of this item from the vendor's answers to the call."""
        result = None if answers is None else answers.get(one.item.key, NOT_NAMED)
        if result is NOT_NAMED:
            result = TransientError("The vendor's answer does not name it", code="NOT_NAMED")
        if isinstance(result, VendorError):
            self._refused(one, recorded, result)
            return
        if isinstance(self._write, ReadableWrite):
            if result is not None and not agrees(got := as_stored_json(result), recorded.wanted):
                message = f"The vendor stored {json.dumps(got)}, not the wanted {json.dumps(recorded.wanted)}"
                failed = PermanentError(message, code="NOT_AS_WANTED")
                self._answer(one, failed, recorded.ended("conflict", error=message))
                return
            result = recorded.wanted
        self._answer(one, Done(result), recorded.ended("applied", result))

    def _refused(self, one: ItemOfCall, recorded: EffectState, error: VendorError) -> None:
        state = after_failure(error, doubtful=self._doubtful(one))
        self._answer(one, error, recorded.ended(state, error=error.message))

    def _doubtful(self, one: ItemOfCall) -> bool:
        """Return True if an earlier send of the write is unresolved. It never is for a C2 write, whose read-back
        resolved it."""
        return one.doubt is not None and isinstance(self._write, KeyedWrite)

    def _intent(self, one: ItemOfCall, wanted: Any = None, before: Any = None, **options: Any) -> Intent:
        return Intent(one.claimed, one.effect, self._write, wanted, before, **options)

    async def _record(self, wanted: Sequence[tuple[ItemOfCall, Intent]]) -> list[tuple[ItemOfCall, EffectState]]:
        """Commit the intents together; return the items with the states of their effects. Items whose claim was lost,
        or whose intent cannot be stored, are answered and left out."""
        record = self._executor.record
        results = await asyncio.gather(*(record(intent) for _, intent in wanted), return_exceptions=True)
        recorded = []
        for (one, _), result in zip(wanted, results, strict=True):
            if isinstance(result, Fenced):
                self._answers[one.claimed.claim_key] = None
            elif isinstance(result, VendorError):
                self._answer(one, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                recorded.append((one, result))
        return recorded

    def _answer(self, one: ItemOfCall, outcome: Done | VendorError | datetime, effect: EffectEnd | None = None) -> None:
        self._answers[one.claimed.claim_key] = Performed(outcome, effect)
        self._executor.phase.pop(one.claimed.claim_key, None)

    def _unanswered(self, items: list[ItemOfCall]) -> list[ItemOfCall]:
        return [one for one in items if one.claimed.claim_key not in self._answers]


NOT_NAMED = object()


def _effect_of(item: Item) -> UUID:
    return effect_id(item.tenant_id, item.event_key, item.stage, item.key, item.round)
