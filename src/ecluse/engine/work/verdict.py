"""The result of an execution as the committer stores it, and the verdict on an execution that failed or was
interrupted: a release, a retry or a failure."""

from __future__ import annotations

import random
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import structlog
from pydantic_core import to_json

from ecluse.base.errors import EcluseError, PermanentError, TransientError, VendorError
from ecluse.base.text import storable
from ecluse.engine.effects.protocol import EffectEnd, again_or_never
from ecluse.engine.model import counters
from ecluse.engine.model.breaker import Spared
from ecluse.engine.model.budget import Settlement
from ecluse.engine.model.flow import Stage
from ecluse.engine.model.item import ClaimedItem, ClaimKey, Item, Postponed
from ecluse.engine.model.retry import Retry, decide
from ecluse.engine.model.writes import Write
from ecluse.engine.work.suspects import Suspicion

log = structlog.get_logger(__name__)


class ItemResult(NamedTuple):
    """The result of one execution, ready to be stored. Status `open`: the item is executed again, at `due_at` (None: as
    soon as its lane permits); the execution is then counted only if it has an error that is not an `outage`.
    `order_at`: a new position in the queue. `cost`: the cost of a paid call, if it is known; `settlement`: the end of
    the reservation for it."""

    item: Item
    stage: Stage
    claim_id: int
    fence: int
    status: Literal["succeeded", "failed", "ignored", "open"]
    result: Any = None
    permanent: bool = False
    error_code: str | None = None
    error: str | None = None
    http_status: int | None = None
    ambiguous: bool = False
    due_at: datetime | None = None
    effect: EffectEnd | None = None
    kept: Any = None
    postponed: Postponed | None = None
    outage: bool = False
    order_at: datetime | None = None
    cost: Decimal | None = None
    settlement: Settlement | None = None

    @property
    def claim_key(self) -> ClaimKey:
        return self.item.id, self.claim_id

    @property
    def is_heard(self) -> bool:
        """True if a hook of the stage gets this result: `save` gets a success, `on_end` every end of an execution."""
        if self.stage.on_end is not None and (self.status != "open" or self.error_code is not None):
            return True
        return self.stage.save is not None and self.status == "succeeded"

    def row(self) -> bytes:
        """Return this result as JSON: an input row of the committer's statement STORE."""
        stored: dict[str, Any] = {"id": self.item.id, "claim_id": self.claim_id, "status": self.status}
        if self.result is not None:
            stored["result"] = self.result
        if self.error_code is not None:
            stored |= {
                "permanent": self.permanent,
                "error_code": self.error_code,
                "error": storable(self.error or ""),
                "http_status": self.http_status,
                "event_id": self.item.event_id,
                "ambiguous": self.ambiguous,
                "maybe_paid": self.ambiguous and self.stage.paid,
            }
        if self.outage:
            stored |= {"outage": True, "order_at": self.order_at}
        if self.due_at is not None:
            stored["due_at"] = self.due_at
        if self.postponed is not None:
            stored |= {"postponed_cause": self.postponed.cause, "postponed_why": storable(self.postponed.why)}
        return to_json(stored)

    def unstorable(self, why: str) -> ItemResult:
        """Return the failed result (STORE_FAILED) that replaces this one because it could not be stored. `why`: the
        error of the attempt to store it."""
        return self._replace(
            status="failed",
            result=None,
            kept=None,
            permanent=True,
            error_code="STORE_FAILED",
            error=f"The result could not be stored: {why}",
            ambiguous=self.status == "succeeded",
            due_at=None,
            postponed=None,
            outage=False,
            order_at=None,
            effect=None if self.effect is None else self.effect._replace(result=None),
        )


def release(
    stage: Stage, claimed: ClaimedItem, at: datetime | None = None, effect: EffectEnd | None = None
) -> ItemResult:
    """Return the result that puts the item back into the queue in its old position, without counting an execution.
    `at`: when it is due again; None: as soon as its lane permits. `effect`: the present state of its write."""
    return ItemResult(claimed.item, stage, claimed.claim_id, claimed.fence, "open", due_at=at, effect=effect)


def failed(
    stage: Stage,
    claimed: ClaimedItem,
    error: Exception,
    effect: EffectEnd | None,
    *,
    in_doubt: bool,
    now: datetime,
    chance: random.Random,
    spared: Spared | None = None,
) -> ItemResult:
    """Log a failed execution and return its result: a retry, a failure, or a release (if the execution only read back
    the last send of a write and the retry budget is used up). `error`: the error that ended the execution; `in_doubt`:
    it was interrupted while a write was in flight; `spared`: the failure is the vendor's fault, and the execution is
    not counted, unless a write is in doubt; `chance`: the source of the jitter of the backoff."""
    item = claimed.item
    executions = item.executions + 1
    verdict = decide(error, executions=executions, policy=stage.retry, now=now, chance=chance)
    code = error.code if isinstance(error, EcluseError) else "BUG"
    text = str(error) if isinstance(error, EcluseError) else f"{type(error).__name__}: {error}"
    if isinstance(error, VendorError):
        counters.vendor_errors[item.flow, item.stage, code] += 1
    if isinstance(stage.work, Write) and (in_doubt or (effect is not None and effect.state == "unknown")):
        spared = None
        verdict = again_or_never(stage.work, verdict, now)
        if not isinstance(verdict, Retry):
            code, text = "OUTCOME_UNKNOWN", f"The vendor may have applied it, and cannot be asked: {text}"
    result = ItemResult(
        item,
        stage,
        claimed.claim_id,
        claimed.fence,
        "failed",
        error_code=code,
        error=text,
        http_status=error.status if isinstance(error, VendorError) else None,
        ambiguous=isinstance(error, VendorError) and error.ambiguous,
        effect=effect,
        cost=error.cost if isinstance(error, VendorError) else None,
    )
    if spared is not None:
        log.debug("execution: vendor down, will retry", **item.log_fields, code=code, error=text)
        return result._replace(status="open", due_at=spared.due_at, order_at=spared.order_at, outage=True)
    if isinstance(verdict, Retry) and executions > stage.retry.executions:
        return release(stage, claimed, verdict.at, effect)  # it only asked about the last send, which is no execution
    if isinstance(verdict, Retry):
        log.debug(
            "execution: failed, will retry",
            **item.log_fields,
            code=code,
            error=text,
            execution=executions,
            retry_at=verdict.at,
        )
        return result._replace(status="open", due_at=verdict.at)
    log.warning("execution: failed", **item.log_fields, code=code, error=text, execution=executions)
    return result._replace(permanent=verdict.permanent)


def settlement(result: ItemResult) -> Settlement:
    """Return how the cost reserved for the call of this execution is settled. It is released only if the call was
    certainly not made, or not charged."""
    if result.status == "succeeded" or result.cost is not None:
        return Settlement("settled", result.cost)
    if result.ambiguous or result.error_code == "BUG" or result.status == "ignored":
        return Settlement("unknown")
    return Settlement("released")


def give_up_reason(stage: Stage, claimed: ClaimedItem) -> VendorError | None:
    """Return the error with which the item is given up before it is executed; None if it may be executed. For a write
    whose executions are used up, the error applies only if its last send turns out not to be applied."""
    item = claimed.item
    if claimed.suspicion >= Suspicion.POISON:
        died = (
            f"{item.crashes} workers died while they held this item, {claimed.solo_deaths} of them while it ran alone"
        )
        return PermanentError(died, code="WORKER_CRASHED")
    # Its executions are used up: it was claimed only to find out what became of its last send.
    if isinstance(stage.work, Write) and item.executions >= stage.retry.executions:
        return TransientError(
            "Sent, not answered for certain, and found not applied", code="NOT_APPLIED", ambiguous=False
        )
    return None
