"""Build what the committer stores of an execution without a result: a release, a retry or a failure."""

from __future__ import annotations

import random
from datetime import datetime

import structlog

from ecluse.base.errors import EcluseError, PermanentError, TransientError, VendorError
from ecluse.engine.effects.protocol import EffectEnd, again_or_never
from ecluse.engine.model import counters
from ecluse.engine.model.breaker import Spared
from ecluse.engine.model.flow import Stage, Write
from ecluse.engine.model.item import ClaimedItem
from ecluse.engine.model.retry import Retry, decide
from ecluse.engine.work.committer import ItemResult
from ecluse.engine.work.suspects import Suspicion

log = structlog.get_logger(__name__)


def release(
    stage: Stage, claimed: ClaimedItem, at: datetime | None = None, effect: EffectEnd | None = None
) -> ItemResult:
    """Return the item to the queue in its old position, without counting an execution. `at` None: it is claimable as
    soon as its lane permits."""
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
    """Decide what follows from an error: retry or failure. `in_doubt`: the execution was interrupted while a write was
    in flight. `spared`: the failure is the vendor's and uses up no execution; a write in doubt uses one all the
    same."""
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
    )
    if spared is not None:
        log.debug("vendor down", **item.log_fields, code=code, error=text)
        return result._replace(status="open", due_at=spared.due_at, order_at=spared.order_at, outage=True)
    if isinstance(verdict, Retry) and executions > stage.retry.executions:
        return release(stage, claimed, verdict.at, effect)  # it only asked about the last send, which is no execution
    if isinstance(verdict, Retry):
        log.debug("retry", **item.log_fields, code=code, error=text, execution=executions, retry_at=verdict.at)
        return result._replace(status="open", due_at=verdict.at)
    log.warning("execution failed", **item.log_fields, code=code, error=text, execution=executions)
    return result._replace(permanent=verdict.permanent)


def give_up_reason(stage: Stage, claimed: ClaimedItem) -> VendorError | None:
    """Return the error with which the item is given up on, or None if it may be executed (again)."""
    item = claimed.item
    if claimed.suspicion >= Suspicion.POISON:
        died = f"{item.crashes} workers died with this item in hand, {claimed.solo_deaths} of them while it ran alone"
        return PermanentError(died, code="WORKER_CRASHED")
    # Its executions are used up: it was claimed only to find out what became of its last send.
    if isinstance(stage.work, Write) and item.executions >= stage.retry.executions:
        return TransientError(
            "Sent, not answered for certain, and found not applied", code="NOT_APPLIED", ambiguous=False
        )
    return None
