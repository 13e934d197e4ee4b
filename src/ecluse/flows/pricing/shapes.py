"""Rule runs as requests name them and answers show them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ecluse.access.wire import Body, Shape
from ecluse.flows.pricing.rules import REASONS, RecordId
from ecluse.flows.pricing.runs import Limits

RunStatus = Literal["PREVIEW", "QUEUED", "APPLYING", "APPLIED", "PARTIAL", "FAILED", "ROLLED_BACK"]
TargetStatus = Literal["PREVIEW", "QUEUED", "APPLYING", "APPLIED", "FAILED", "ROLLED_BACK"]
TargetIds = Annotated[
    list[RecordId], Field(min_length=1, max_length=10_000, description="Only these targets; by default all.")
]


class NewPreview(Body):
    rule_id: RecordId


class ChosenTargets(Body):
    target_ids: TargetIds | None = None

    @property
    def targets(self) -> list[int] | None:
        return None if self.target_ids is None else [int(one) for one in self.target_ids]


class ToRetry(ChosenTargets):
    model_config = ConfigDict(json_schema_extra={"examples": [{"target_ids": None}]})


class ToQueue(Limits, ChosenTargets):
    plan_hash: str = Field(pattern=r"^[0-9a-f]{64}$", examples=["0" * 64], description="Of the preview that was seen.")


class ToRollBack(ChosenTargets):
    model_config = ConfigDict(json_schema_extra={"examples": [{"forced": False}]})

    forced: bool = Field(False, description="Also overwrite prices that were changed since they were applied.")


class RuleRunRow(Shape):
    """Lists have no rules, which may name a thousand products."""

    id: str = Field(examples=["7"])
    tenant_id: str = Field(examples=["default"])
    project_id: str
    rule_id: str | None
    currency: str
    status: RunStatus
    round: int = Field(description="How often failed targets were retried by hand: 0 is the first round.")
    plan_hash: str | None = Field(description="Null until the catalogue is read.")
    totals: dict[str, Any] | None
    canary: int | None
    max_failure_rate: float | None
    stopped_reason: str | None = Field(description="Why nothing more was sent in this round, or why there is no plan.")
    corrects_id: str | None
    actor: str
    correlation_id: str
    source: str
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    rolled_back_at: datetime | None


class ExecutionRow(Shape):
    run_id: str = Field(description="The run of the engine.")
    kind: Literal["preview", "apply", "rollback", "reconcile"]
    number: int = Field(description="Of its kind, from 0; of an apply it is the round.")
    status: str | None = Field(description="Null: the run of the engine is deleted.")
    error: str | None = Field(description="Of the run, or the most frequent one of its items.")
    created_at: datetime | None
    ended_at: datetime | None


class RuleRunShown(RuleRunRow):
    """A rule run with its rule."""

    rule: dict[str, Any] = Field(description="As it was when the run was created.")
    counts: dict[str, int] = Field(examples=[{"APPLIED": 497, "FAILED": 3}], description="Targets by status.")
    errors: dict[str, int] = Field(examples=[{"PRICE_CONFLICT": 3}], description="Failed targets by error code.")
    not_rolled_back: int = Field(description="Targets whose last rollback failed.")
    executions: list[ExecutionRow]
    waiting: str | None = Field(description="What the open execution waits for. Null: none is open.")


class Started(Shape):
    id: str = Field(description="The rule run.")
    run_id: str = Field(description="The run of the engine that executes it.")
    status: RunStatus


class Corrected(Shape):
    id: str = Field(description="The new rule run, a preview with its plan.")
    corrects_id: str


class RuleTargetRow(Shape):
    id: str
    rule_run_id: str
    variant_id: str
    product_id: str
    sku: str
    title: str
    status: TargetStatus
    before_amount: int
    after_amount: int
    attempts: int
    round: int
    applied_at: datetime | None
    next_attempt_at: datetime | None
    error_code: str | None
    error: str | None
    rollback_error_code: str | None
    rollback_error: str | None


class DeadLetterRow(RuleTargetRow):
    project_id: str


class ExclusionRow(Shape):
    rule_run_id: str
    variant_id: str
    sku: str
    title: str
    amount: int
    reason: str = Field(examples=["UNCHANGED"], description="; ".join(f"`{k}`: {v}" for k, v in REASONS.items()))


class RuleHistoryRow(Shape):
    id: str
    rule_run_id: str
    rule_target_id: str | None = Field(description="Null: a change of the run.")
    from_status: str | None
    to_status: str
    round: int
    actor: str
    source: str
    correlation_id: str
    at: datetime


class Cause(Shape):
    run_id: str
    error_code: str
    targets: int
    example: str | None


class DeadLetterReport(Shape):
    project_id: str
    total: int
    not_attempted: int = Field(description="The part of `total` that was never sent.")
    causes: list[Cause]


class ReconciliationRow(Shape):
    id: str
    rule_run_id: str
    run_id: str | None = Field(description="The run of the engine; null until it is due.")
    kind: Literal["immediate", "delayed", "daily", "on_demand"]
    due_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    checked: int = Field(description="Applied targets. Failed ones with an unknown outcome are read by a retry.")
    mismatches: int
    unverified: int = Field(description="Targets whose price could not be read.")
    superseded: int = Field(description="Targets left out: a later run has changed their price, or is about to.")


class MismatchRow(Shape):
    id: str
    reconciliation_id: str
    rule_run_id: str
    rule_target_id: str
    expected: int
    actual: int | None = Field(description="Null: the shop does not have it any more.")
    difference: int | None
