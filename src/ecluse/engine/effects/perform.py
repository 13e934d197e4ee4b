"""One execution of a write, as far as the protocol (`protocol.py`) allows: record the intent, send, or read back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Literal, NamedTuple

from ecluse.base.crash import crashpoint
from ecluse.base.errors import PermanentError, VendorError
from ecluse.base.ids import effect_id
from ecluse.engine.effects.protocol import (
    KEY_LIFE,
    LATER,
    OPEN,
    SEND_WITHIN,
    EffectEnd,
    Intent,
    Standing,
    State,
    after_failure,
    agrees,
    conclude,
    plain,
)
from ecluse.engine.model.flow import AbsoluteWrite, KeyedWrite, Order, WorkContext, Write
from ecluse.engine.model.item import ClaimedItem, ClaimKey, Done, Item


class Performed(NamedTuple):
    """The result of one execution of a write, and the new state of its effect, which is stored with the item; None if
    there is none to store."""

    outcome: Done | VendorError | datetime  # an instant: execute again then
    effect: EffectEnd | None = None


Phase = Literal["recording", "asking", "sending"]


class WriteExecutor:
    """Takes writes through the protocol, each as far as one execution can. `intend` commits an intent and returns the
    state of its effect; `may_send` returns whether this process may still send a write of this item."""

    def __init__(
        self,
        intend: Callable[[Intent], Awaitable[Standing]],
        may_send: Callable[[Item], bool],
        now: Callable[[], datetime],
    ) -> None:
        self._intend = intend
        self._may_send = may_send
        self._now = now
        # Kept while the worker holds the item: after an interruption it says how far the write had come.
        self.phase: dict[ClaimKey, Phase] = {}

    async def perform(
        self, write: Write, context: WorkContext, claimed: ClaimedItem, spent: VendorError | None = None
    ) -> Performed:
        """Start the write of the claimed item, or continue it. `spent`: it may not be sent again, and fails with this
        error unless it turns out to have been applied."""
        performed = await self._perform(write, context, claimed, spent)
        self.phase.pop(claimed.claim_key, None)
        return performed

    async def _perform(
        self, write: Write, context: WorkContext, claimed: ClaimedItem, spent: VendorError | None
    ) -> Performed:
        item = claimed.item
        name = effect_id(item.tenant_id, item.event_key, item.stage, item.key, item.round)
        if spent is not None or item.executions or item.crashes:
            standing = await self._record(Intent(claimed, name, write, send=None))
            if standing.state != "planned":
                return await self._go_on(write, context, claimed, standing, spent)
            if spent is not None:
                return Performed(spent)
        wanted, before = plain(write.wanted(item)), None
        if isinstance(write, AbsoluteWrite):
            try:
                before = plain(await write.read(context, item))
            except VendorError as error:
                return Performed(error)
        need = not isinstance(write, AbsoluteWrite) or not agrees(before, wanted)
        if need and isinstance(write, AbsoluteWrite):
            await context.permit(item)  # the read used the first one; not awaited between the intent and its send
        standing = await self._record(Intent(claimed, name, write, wanted, before, send=need))
        if standing.went and standing.state == "sending":
            return await self._send(write, context, claimed, standing, doubtful=False)
        return await self._go_on(write, context, claimed, standing, spent)

    async def _record(self, intent: Intent) -> Standing:
        self.phase[intent.claimed.claim_key] = "recording"
        standing = await self._intend(intent)
        self.phase[intent.claimed.claim_key] = "asking" if standing.state in OPEN else "recording"
        return standing

    async def _go_on(
        self, write: Write, context: WorkContext, claimed: ClaimedItem, standing: Standing, spent: VendorError | None
    ) -> Performed:
        """Continue a write whose effect was recorded before, depending on its present state."""
        if standing.state == "planned":  # by a concurrent transaction: its row is not visible yet
            return Performed(self._now() + LATER)
        if standing.state == "applied":
            return Performed(Done(standing.result if isinstance(write, KeyedWrite) else standing.wanted))
        if standing.state not in OPEN:
            return Performed(PermanentError(standing.error or f"the write is {standing.state}", code="NOT_APPLIED"))
        if not standing.quiet_over and standing.quiet_until is not None:
            return Performed(standing.quiet_until)
        return await self._ask(write, context, claimed, standing, spent)

    async def _ask(
        self, write: Write, context: WorkContext, claimed: ClaimedItem, standing: Standing, spent: VendorError | None
    ) -> Performed:
        """Find out whether the last send was applied, and send again unless it was or may not be repeated."""
        before, doubtful = standing.before, isinstance(write, KeyedWrite)
        if isinstance(write, AbsoluteWrite):
            try:
                before = plain(await write.read(context, claimed.item))
            except VendorError as error:
                return Performed(error, standing.ended("unknown"))
            verdict = conclude(before, standing.wanted, standing.before)
            if verdict == "applied":
                return Performed(Done(standing.wanted), standing.ended("applied"))
            if verdict == "conflict":
                message = f"found {json.dumps(before)}: not as wanted, nor as before, {json.dumps(standing.before)}"
                return Performed(PermanentError(message, code="CONFLICT"), standing.ended("conflict", error=message))
        elif isinstance(write, KeyedWrite) and standing.age is not None and standing.age > KEY_LIFE * write.remembered:
            spent = PermanentError(f"sent {standing.age} ago: the vendor may have forgotten its key", ambiguous=True)
        if spent is not None:
            state: State = "unknown" if doubtful else "not_applied"
            return Performed(spent, standing.ended(state, error=spent.message))
        if isinstance(write, AbsoluteWrite):
            await context.permit(claimed.item)
        again = await self._record(
            Intent(claimed, standing.id, write, standing.wanted, before, again_after=standing.sends)
        )
        if not again.went:
            return Performed(again.quiet_until or self._now() + LATER)
        return await self._send(write, context, claimed, again, doubtful=doubtful)

    async def _send(
        self, write: Write, context: WorkContext, claimed: ClaimedItem, standing: Standing, *, doubtful: bool
    ) -> Performed:
        """Send the write, whose intent has just been committed, unless that took too long or the item may not be sent
        any more. `doubtful`: an earlier send of it is unresolved."""
        item = claimed.item
        late = asyncio.get_running_loop().time() - standing.asked_at > SEND_WITHIN
        if late or not self._may_send(item):
            state: State = "unknown" if doubtful else "planned"
            return Performed(self._now() + LATER, standing.ended(state, error="not sent: too late"))
        crashpoint("before send")
        self.phase[claimed.claim_key] = "sending"
        try:
            result = await write.send(context, item, Order(str(standing.id), standing.wanted, standing.before))
        except VendorError as error:
            state = after_failure(error, doubtful=doubtful)
            return Performed(error, standing.ended(state, error=error.message))
        crashpoint("after send")
        if isinstance(write, AbsoluteWrite):
            if result is not None and not agrees(plain(result), standing.wanted):
                message = f"the vendor made it {json.dumps(plain(result))} of the wanted {json.dumps(standing.wanted)}"
                return Performed(
                    PermanentError(message, code="NOT_AS_WANTED"), standing.ended("conflict", error=message)
                )
            result = standing.wanted
        return Performed(Done(result), standing.ended("applied", result))
