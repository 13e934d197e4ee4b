"""Rule runs in the API and on the command line: preview, queue, retry, rollback; their targets, exclusions, history and
dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ecluse.access.listing import Filters, Listing
from ecluse.access.surface import Act, Command, Look, Noun, Surface
from ecluse.access.wire import Body, Shape
from ecluse.db.query import Row
from ecluse.flows.pricing import executions, projects, queries, reconciliations, runs
from ecluse.flows.pricing.flow import FLOW, Canary, Rate
from ecluse.flows.pricing.rules import REASONS
from ecluse.flows.pricing.runs import Limits
from ecluse.flows.pricing.states import By
from ecluse.flows.pricing.surface import READ, WRITE, ProjectNumber, RecordId

surface = Surface("pricing")

ALL, ONE = "/api/pricing/runs", "/api/pricing/runs/{rule_run_id}"
RunNumber = Annotated[int, Noun("rule run")]
RunStatus = Literal["PREVIEW", "QUEUED", "APPLYING", "APPLIED", "PARTIAL", "FAILED", "ROLLED_BACK"]
TargetStatus = Literal["PREVIEW", "QUEUED", "APPLYING", "APPLIED", "FAILED", "ROLLED_BACK"]
TargetIds = Annotated[
    list[RecordId], Field(min_length=1, max_length=10_000, description="Only these targets; by default all.")
]


class NewPreview(Body):
    rule_id: RecordId


class ToQueue(Body):
    plan_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="Of the preview that was seen.")]
    target_ids: TargetIds | None = None
    canary: Canary | None = None
    max_failure_rate: Rate | None = None


class ToRetry(Body):
    target_ids: TargetIds | None = None


class ToRollBack(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"forced": False}]})

    target_ids: TargetIds | None = None
    forced: bool = Field(False, description="Also overwrite prices that were changed since they were applied.")


class RuleRunRow(Shape):
    id: str = Field(examples=["7"])
    tenant_id: str = Field(examples=["default"])
    project_id: str
    rule_id: str | None
    rule: dict[str, Any] = Field(description="As it was when the run was created.")
    currency: str
    status: RunStatus
    round: int = Field(description="How often failed targets were retried by hand.")
    plan_hash: str | None = Field(description="Null until the catalogue is read.")
    totals: dict[str, Any] | None
    canary: int | None
    max_failure_rate: float | None
    stopped_reason: str | None = Field(description="Why nothing more was sent in this round.")
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
    number: int
    status: str | None = Field(description="Null: the run of the engine is deleted.")
    error: str | None
    created_at: datetime | None
    ended_at: datetime | None


class RuleRunShown(RuleRunRow):
    counts: dict[str, int] = Field(examples=[{"APPLIED": 497, "FAILED": 3}], description="Targets by status.")
    errors: dict[str, int] = Field(examples=[{"PRICE_CONFLICT": 3}], description="Failed targets by error code.")
    not_rolled_back: int = Field(description="Targets whose last rollback failed.")
    executions: list[ExecutionRow]


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
    checked: int
    mismatches: int
    unverified: int = Field(description="Targets whose price could not be read.")
    superseded: int = Field(description="Targets left out, because a later run has changed their price.")


class MismatchRow(Shape):
    id: str
    reconciliation_id: str
    rule_run_id: str
    rule_target_id: str
    expected: int
    actual: int | None = Field(description="Null: the shop does not have it any more.")
    difference: int | None


class OfPass(Filters):
    reconciliation_id: RecordId | None = None


class RunFilters(Filters):
    project_id: RecordId | None = None
    rule_id: RecordId | None = None
    status: RunStatus | None = None


class OfStatus(Filters):
    status: TargetStatus | None = None


class OfProject(Filters):
    project_id: RecordId | None = None


class OfTarget(Filters):
    rule_target_id: RecordId | None = None


RUNS = Listing("runs", RuleRunRow, "rule_runs", READ, filters=RunFilters)
TARGETS = Listing(
    "targets", RuleTargetRow, "rule_targets", READ, filters=OfStatus, order=("id",), within=("rule_run_id",)
)
EXCLUSIONS = Listing(
    "exclusions", ExclusionRow, "rule_exclusions", READ, order=("variant_id",), within=("rule_run_id",)
)
HISTORY = Listing(
    "history", RuleHistoryRow, "rule_history", READ, filters=OfTarget, order=("id",), within=("rule_run_id",)
)
RECONCILIATIONS = Listing(
    "reconciliations", ReconciliationRow, "rule_reconciliations", READ, order=("due_at", "id"), within=("rule_run_id",)
)
MISMATCHES = Listing("mismatches", MismatchRow, "rule_mismatches", READ, filters=OfPass, within=("rule_run_id",))
DEAD_LETTERS = Listing("targets", DeadLetterRow, queries.DEAD_LETTERS, READ, filters=OfProject)
COLUMNS = ("id", "status", "project_id", "rule_id", "round", "actor", "created_at", "finished_at")

surface.listing(
    ALL, RUNS, list_rule_runs="List rule runs, the newest first.", command=Command("pricing runs list", columns=COLUMNS)
)


async def _there(look: Look, rule_run_id: RunNumber) -> None:
    await queries.require_run(look.connection, look.tenant, rule_run_id)


for path, listing, about in (
    ("targets", TARGETS, {"list_rule_targets": "List the targets of a rule run with their prices before and after."}),
    ("exclusions", EXCLUSIONS, {"list_rule_exclusions": "List what a rule selects and leaves as it is, with reasons."}),
    (
        "reconciliations",
        RECONCILIATIONS,
        {"list_reconciliations": "List the reconciliations of a rule run, by instant."},
    ),
    ("mismatches", MISMATCHES, {"list_mismatches": "List the prices that are not as applied, the latest first."}),
    ("history", HISTORY, {"list_rule_history": "List the changes of status of a rule run and its targets."}),
):
    surface.listing(f"{ONE}/{path}", listing, check=_there, command=Command(f"pricing runs {path}"), **about)
surface.listing(
    "/api/pricing/dead-letters",
    DEAD_LETTERS,
    list_dead_letters="List the failed targets of the tenant or of a project, the newest first.",
    command=Command(
        "pricing dead-letters list",
        columns=("id", "rule_run_id", "project_id", "sku", "error_code", "error", "before_amount", "after_amount"),
        empty="no failed targets",
    ),
)


@surface.read(
    "/api/pricing/projects/{project_id}/dead-letters",
    needs=READ,
    answer=DeadLetterReport,
    command=Command("pricing dead-letters report"),
)
async def drain_dead_letters(look: Look, project_id: ProjectNumber) -> Row:
    """Report the failed targets of a project by run and cause. Changes nothing."""
    await projects.show(look.connection, look.tenant, project_id)
    report = await runs.drain_dlq(look.connection, look.tenant, project_id)
    return {**report, "causes": [{**one, "run_id": str(one["run_id"])} for one in report["causes"]]}


@surface.read(ONE, needs=READ, answer=RuleRunShown, command=Command("pricing runs show"))
async def show_rule_run(look: Look, rule_run_id: RunNumber) -> Row:
    """Show a rule run with its targets by status, its executions and its limits."""
    return await queries.show_run(look.connection, look.tenant, rule_run_id)


def _by(act: Act) -> By:
    return By(act.caller.name, "api", act.request_id)


async def _start(act: Act, run: int, kind: str, **given: Any) -> Row:
    started = await executions.start(act.connection, act.kit.flow(FLOW), act.tenant, run, kind, _by(act), **given)
    status = (await runs.lock(act.connection, act.tenant, run))["status"]
    return {"id": run, "run_id": started, "status": status}


def _ids(given: list[str] | None) -> list[int] | None:
    return None if given is None else [int(one) for one in given]


@surface.operation(
    "POST",
    ALL,
    needs=WRITE,
    answer=Started,
    status=201,
    action="rule_run.preview",
    subject="rule_run:{id}",
    command=Command("pricing runs preview", arguments=("rule_id",), follows="run_id"),
)
async def preview_rule(act: Act, body: NewPreview) -> Row:
    """Create a run of a rule, and read the catalogue for its plan: prices before and after. Nothing is changed in the
    shop until the run is queued."""
    await act.require_room("rule_runs")
    run = await executions.new_preview(act.connection, act.tenant, int(body.rule_id), _by(act))
    return await _start(act, run, "preview")


@surface.operation(
    "POST",
    f"{ONE}/queue",
    needs=WRITE,
    answer=Started,
    action="rule_run.queue",
    subject="rule_run:{rule_run_id}",
    refuses=("CONFLICT", "FORBIDDEN_TRANSITION", "NO_PLAN"),
    command=Command("pricing runs queue", arguments=("plan_hash",), preview="show_rule_run", follows="run_id"),
)
async def queue_rule_run(act: Act, rule_run_id: RunNumber, body: ToQueue) -> Row:
    """Apply exactly the plan that was previewed, all of it or only some targets. A price that was changed since the
    preview is not overwritten."""
    limits, given = Limits(body.canary, body.max_failure_rate), _ids(body.target_ids)
    await runs.queue_for_processing(act.connection, act.tenant, rule_run_id, body.plan_hash, given, _by(act), limits)
    return await _start(act, rule_run_id, "apply")


@surface.operation(
    "POST",
    f"{ONE}/retry",
    needs=WRITE,
    answer=Started,
    action="rule_run.retry",
    subject="rule_run:{rule_run_id}",
    refuses=("CONFLICT", "FORBIDDEN_TRANSITION", "NOTHING_FAILED"),
    command=Command("pricing runs retry", preview="show_rule_run", follows="run_id"),
)
async def retry_rule_run(act: Act, rule_run_id: RunNumber, body: ToRetry) -> Row:
    """Apply the failed targets of a run again, all of them or only some: its next round."""
    await runs.retry_failed(act.connection, act.tenant, rule_run_id, _ids(body.target_ids), _by(act))
    return await _start(act, rule_run_id, "apply")


@surface.operation(
    "POST",
    f"{ONE}/rollback",
    needs=WRITE,
    answer=Started,
    action="rule_run.rollback",
    subject="rule_run:{rule_run_id}",
    refuses=("CONFLICT", "FORBIDDEN_TRANSITION"),
    command=Command("pricing runs rollback", preview="show_rule_run", follows="run_id"),
)
async def roll_back_rule_run(act: Act, rule_run_id: RunNumber, body: ToRollBack) -> Row:
    """Restore the former prices of applied targets, all of them or only some. A price that was changed since it was
    applied is reported and, unless `forced`, left as it is."""
    given = _ids(body.target_ids)
    await runs.check_rollback(act.connection, act.tenant, rule_run_id, given)
    return await _start(act, rule_run_id, "rollback", target_ids=given, forced=body.forced)


@surface.operation(
    "POST",
    f"{ONE}/reconcile",
    needs=WRITE,
    answer=Started,
    action="rule_run.reconcile",
    subject="rule_run:{rule_run_id}",
    refuses=("CONFLICT",),
    command=Command("pricing runs reconcile", follows="run_id"),
)
async def reconcile_rule_run(act: Act, rule_run_id: RunNumber) -> Row:
    """Read the prices of applied targets from the shop, and report those that are not as applied."""
    flow = act.kit.flow(FLOW)
    started = await reconciliations.reconcile_run(act.connection, flow, act.tenant, rule_run_id, _by(act))
    return {
        "id": rule_run_id,
        "run_id": started,
        "status": (await runs.lock(act.connection, act.tenant, rule_run_id))["status"],
    }


@surface.operation(
    "POST",
    f"{ONE}/correct",
    needs=WRITE,
    answer=Corrected,
    status=201,
    action="rule_run.correct",
    subject="rule_run:{id}",
    refuses=("CONFLICT",),
    command=Command("pricing runs correct"),
)
async def correct_rule_run(act: Act, rule_run_id: RunNumber) -> Row:
    """Create a run with the mismatches of the latest reconciliation: from the price that the shop has to the applied
    one. It changes nothing until it is queued."""
    await act.require_room("rule_runs")
    made = await reconciliations.correct_run(act.connection, act.tenant, rule_run_id, _by(act))
    return {"id": made, "corrects_id": rule_run_id}
