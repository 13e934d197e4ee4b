"""Rule runs in the API and on the command line: preview, queue, retry, rollback; their targets, exclusions, history and
dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from ecluse.access.commands import Command, Result
from ecluse.access.listing import Listing, equal
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Shape
from ecluse.db.query import Row
from ecluse.flows.connections import projects
from ecluse.flows.connections.project_surface import READ, ProjectNumber
from ecluse.flows.pricing import executions, reconciliations, runs, shapes
from ecluse.flows.pricing.flow import FLOW
from ecluse.flows.pricing.rules import RecordId
from ecluse.flows.pricing.states import By
from ecluse.flows.pricing.surface import OF_PROJECT

surface = Surface("pricing")
RUN = Resource(surface, "/api/pricing/runs/{rule_run_id}", "pricing", "rule_run", "pricing runs", shapes.Started)
MOVES = ("CONFLICT", "FORBIDDEN_TRANSITION")
RunNumber = Annotated[int, Noun("rule run")]
OF_RULE = equal(OF_PROJECT, rule_id=RecordId, status=shapes.RunStatus)
RUNS = Listing("runs", shapes.RuleRunRow, "rule_runs", READ, filters=OF_RULE)
DEAD = "t.status = 'FAILED'"
DEAD_LETTERS = Listing("targets", shapes.DeadLetterRow, "rule_target_list", READ, filters=OF_PROJECT, where=DEAD)
PLANNED = ("id", "plan_hash", "counts", "totals")
PREVIEWED = Result("show_rule_run", PLANNED, "ecluse pricing runs queue {id} {plan_hash}", "stopped_reason")


async def _there(look: Look, rule_run_id: RunNumber) -> None:
    await runs.require_run(look.connection, look.tenant, rule_run_id)


def _part(name: str, shape: type[Shape], **options: Any) -> Listing:
    """Return the list of what belongs to a rule run."""
    return Listing(name, shape, f"rule_{name}", READ, within=("rule_run_id",), **options)


TARGETS = _part("targets", shapes.RuleTargetRow, filters=equal(status=shapes.TargetStatus), order=("id",))
EXCLUSIONS = _part("exclusions", shapes.ExclusionRow, order=("variant_id",))
RECONCILIATIONS = _part("reconciliations", shapes.ReconciliationRow, order=("due_at", "id"))
MISMATCHES = _part("mismatches", shapes.MismatchRow, filters=equal(reconciliation_id=RecordId))
HISTORY = _part("history", shapes.RuleHistoryRow, filters=equal(rule_target_id=RecordId), order=("id",))

RUN.lists(
    RUNS,
    list_rule_runs="List rule runs, the newest first.",
    columns=("id", "status", "project_id", "rule_id", "round", "actor", "created_at", "finished_at", "stopped_reason"),
)
for part, name, about in (
    (TARGETS, "list_rule_targets", "List the targets of a rule run with their prices before and after."),
    (EXCLUSIONS, "list_rule_exclusions", "List what a rule selects and leaves as it is, with reasons."),
    (RECONCILIATIONS, "list_reconciliations", "List the reconciliations of a rule run, by instant."),
    (MISMATCHES, "list_mismatches", "List the prices that are not as applied, the latest first."),
    (HISTORY, "list_rule_history", "List the changes of status of a rule run and its targets."),
):
    command = Command(f"pricing runs {part.name}")
    surface.listing(f"{RUN.one}/{part.name}", part, check=_there, command=command, **{name: about})
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
    answer=shapes.DeadLetterReport,
    command=Command("pricing dead-letters report"),
)
async def drain_dead_letters(look: Look, project_id: ProjectNumber) -> Row:
    """Report the failed targets of a project by run and cause. Changes nothing."""
    await projects.show(look.connection, look.tenant, project_id)
    return await runs.drain_dlq(look.connection, look.tenant, project_id)


@RUN.shows(answer=shapes.RuleRunShown)
async def show_rule_run(look: Look, rule_run_id: RunNumber) -> Row:
    """Show a rule run with its targets by status, its executions and its limits."""
    return await runs.show_run(look.connection, look.tenant, rule_run_id)


def _by(act: Act) -> By:
    return By(act.caller.name, "api", act.request_id)


async def _start(act: Act, run: int, start: Callable[..., Awaitable[int]], **given: Any) -> Row:
    started = await start(act.connection, act.kit.flow(FLOW), act.tenant, run, by=_by(act), **given)
    known = await runs.require_run(act.connection, act.tenant, run)
    return {"id": run, "run_id": started, "status": known["status"]}


@RUN.creates(verb="preview", refuses=["LIMIT_REACHED"], arguments=("rule_id",), follows="run_id", result=PREVIEWED)
async def preview_rule(act: Act, body: shapes.NewPreview) -> Row:
    """Create a run of a rule, and read the catalogue for its plan: prices before and after. Nothing is changed in the
    shop until the run is queued."""
    await act.require_room("rule_runs")
    run = await executions.new_preview(act.connection, act.tenant, int(body.rule_id), _by(act))
    return await _start(act, run, executions.start, kind="preview")


@RUN.does("queue", refuses=[*MOVES, "NO_PLAN"], arguments=("plan_hash",), preview="show_rule_run", follows="run_id")
async def queue_rule_run(act: Act, rule_run_id: RunNumber, body: shapes.ToQueue) -> Row:
    """Apply exactly the plan that was previewed, all of it or only some targets. A price that was changed since the
    preview is not overwritten."""
    given = (body.plan_hash, body.targets, _by(act), body)
    await runs.queue_for_processing(act.connection, act.tenant, rule_run_id, *given)
    return await _start(act, rule_run_id, executions.start, kind="apply")


@RUN.does("retry", refuses=[*MOVES, "NOTHING_FAILED"], preview="show_rule_run", follows="run_id")
async def retry_rule_run(act: Act, rule_run_id: RunNumber, body: shapes.ToRetry) -> Row:
    """Apply the failed targets of a run again, all of them or only some: its next round; the first one is round 0."""
    await runs.retry_failed(act.connection, act.tenant, rule_run_id, body.targets, _by(act))
    return await _start(act, rule_run_id, executions.start, kind="apply")


@RUN.does("rollback", refuses=MOVES, preview="show_rule_run", follows="run_id")
async def roll_back_rule_run(act: Act, rule_run_id: RunNumber, body: shapes.ToRollBack) -> Row:
    """Restore the former prices of applied targets, all of them or only some. A price that was changed since it was
    applied is reported and, unless `forced`, left as it is."""
    await runs.check_rollback(act.connection, act.tenant, rule_run_id, body.targets)
    given = {"kind": "rollback", "target_ids": body.targets, "forced": body.forced}
    return await _start(act, rule_run_id, executions.start, **given)


@RUN.does("reconcile", refuses=["CONFLICT"], follows="run_id")
async def reconcile_rule_run(act: Act, rule_run_id: RunNumber) -> Row:
    """Read the prices of applied targets from the shop, and report those that are not as applied."""
    return await _start(act, rule_run_id, reconciliations.reconcile_run)


@RUN.does("correct", refuses=["CONFLICT", "LIMIT_REACHED"], answer=shapes.Corrected)
async def correct_rule_run(act: Act, rule_run_id: RunNumber) -> Row:
    """Create a run with the mismatches of the latest reconciliation: from the price that the shop has to the applied
    one. It changes nothing until it is queued."""
    await act.require_room("rule_runs")
    made = await reconciliations.correct_run(act.connection, act.tenant, rule_run_id, _by(act))
    return {"id": made, "corrects_id": rule_run_id}
