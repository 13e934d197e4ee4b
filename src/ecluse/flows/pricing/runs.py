"""Rules and their runs, as rows. A changed rule is the next version; runs keep the rule that their plan was made with.
Of runs: their creation, their plan, their queueing, the manual retry of failed targets, and the dead letters, which are
the failed targets. Each is a part of the caller's transaction; executions call the shop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from psycopg.types.json import Jsonb
from pydantic import BaseModel, Field, ValidationError

from ecluse.access.envelope import Refused
from ecluse.access.records import Records, show
from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_column, fetch_row, fetch_rows, fetch_value
from ecluse.flows.connections import projects
from ecluse.flows.pricing import states
from ecluse.flows.pricing.rules import Plan, Terms
from ecluse.flows.pricing.states import By, Hop, Move, move_runs, move_targets
from ecluse.insight.waiting import why_run
from ecluse.retention.kinds import Aged

CHUNK, QUEUED_AT_ONCE = 5_000, 500
RULES = Records("pricing rule", "pricing_rules")
TERMS = tuple(Terms.model_fields)
require_run = partial(show, noun="rule run", table="rule_runs")
KEPT = Aged(
    "rule runs",
    "rule_runs",
    "coalesce(t.rolled_back_at, t.finished_at, t.created_at)",
    where="t.status NOT IN ('QUEUED', 'APPLYING')",
    began="t.created_at",
)
CHANGING = "SELECT id FROM rule_runs WHERE project_id = %s AND status IN ('QUEUED', 'APPLYING') ORDER BY id LIMIT 1"
DELETE_RULES = """
UPDATE pricing_rules SET deleted_at = ecluse_now(), updated_at = ecluse_now(), updated_by = %s
WHERE project_id = %s AND deleted_at IS NULL
"""
INSERT_RUN = """
INSERT INTO rule_runs (tenant_id, project_id, rule_id, rule, currency, status, corrects_id, actor, correlation_id,
                       source, created_at)
VALUES (%(tenant)s, %(project)s, %(rule_id)s, %(rule)s, %(currency)s, 'PREVIEW', %(corrects)s, %(actor)s,
        %(correlation_id)s, %(source)s, ecluse_now())
RETURNING id
"""
PLAN_RUN = """
UPDATE rule_runs SET plan_hash = %(hash)s, totals = %(totals)s
WHERE id = %(run)s AND status = 'PREVIEW' AND plan_hash IS NULL RETURNING tenant_id
"""
INSERT_PLANNED = """
WITH planned AS MATERIALIZED (
    SELECT v.*, t.before, t.after, t.reason
    FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(variant jsonb, before bigint, after bigint, reason text),
         jsonb_to_record(t.variant) AS v(id text, product text, sku text, title text, price bigint)),
excluded AS (
    INSERT INTO rule_exclusions (tenant_id, rule_run_id, variant_id, sku, title, amount, reason)
    SELECT %(tenant)s, %(run)s, id, sku, title, price, reason FROM planned WHERE reason IS NOT NULL)
INSERT INTO rule_targets (tenant_id, rule_run_id, variant_id, product_id, sku, title, status, before_amount,
                          after_amount)
SELECT %(tenant)s, %(run)s, id, product, sku, title, 'PREVIEW', before, after
FROM planned WHERE reason IS NULL ORDER BY product, id RETURNING id
"""
OPEN = """
SELECT x.kind, x.run_id FROM rule_executions x JOIN runs r ON r.id = x.run_id AND r.ended_at IS NULL
WHERE x.rule_run_id = %s AND x.run_id <> %s AND x.kind <> 'reconcile'
"""
# Dead letters by cause; targets that were never sent are no failures of the shop, and shown apart.
CAUSES = """
SELECT rule_run_id::text AS run_id, error_code, count(*) AS targets, min(error) AS example
FROM rule_target_list WHERE tenant_id = %s AND project_id = %s AND status = 'FAILED'
GROUP BY rule_run_id, error_code ORDER BY rule_run_id DESC, count(*) DESC, error_code
"""
SHOW_COUNTS = """
SELECT status, error_code, count(*), count(rollback_error_code) FROM rule_targets WHERE rule_run_id = %s
GROUP BY status, error_code ORDER BY 3 DESC, 2
"""
EXECUTIONS = """
SELECT x.run_id::text, x.kind, x.number, e.status, coalesce(e.error_message, f.error) AS error, e.created_at, e.ended_at
FROM rule_executions x LEFT JOIN runs e ON e.id = x.run_id LEFT JOIN LATERAL (
    SELECT format('%%s (%%s times): %%s', error_code, count(*), min(error)) AS error FROM items
    WHERE run_id = e.id AND e.ended_at IS NOT NULL AND status = 'failed'
    GROUP BY error_code ORDER BY count(*) DESC LIMIT 1) f ON true
WHERE x.rule_run_id = %s ORDER BY x.run_id DESC LIMIT 100
"""


@dataclass(frozen=True)
class NewRun:
    """A rule run to create: the rule as it is now and, if it is made already, its plan. `corrects`: the run whose
    mismatches it corrects."""

    tenant: str
    project: int
    currency: str
    rule_id: int | None
    rule: Mapping[str, Any]
    plan: Plan | None = None
    status: Literal["PREVIEW", "QUEUED"] = "PREVIEW"
    corrects: int | None = None


class Limits(BaseModel, extra="forbid"):
    """What stops an apply."""

    canary: int | None = Field(
        None, ge=1, le=100_000, description="So many targets are applied first, the others only if those succeed."
    )
    max_failure_rate: float | None = Field(
        None, ge=0, lt=1, examples=[0.05], description="Nothing more is sent once a larger share has failed."
    )


async def create_rule(connection: Connection, tenant: str, project: int, name: str, terms: Terms, by: str) -> Row:
    """Insert a rule of a project and return its row. Raise NotFound if there is no such project, or Refused
    NAME_TAKEN."""
    await projects.show(connection, tenant, project, lock=True)
    given = {"project_id": project, "name": name, **terms.model_dump(include=set(TERMS))}
    return await RULES.insert(connection, tenant, given, by)


async def change_rule(connection: Connection, tenant: str, rule: int, given: Mapping[str, Any], by: str) -> Row:
    """Change fields of a rule; new terms make a new version. Raise InvalidInput if the whole rule makes no sense."""
    known = await RULES.show(connection, tenant, rule, lock=True)
    try:
        terms = Terms.model_validate({one: given.get(one, known[one]) for one in TERMS}).model_dump()
    except ValidationError as error:
        raise InvalidInput(readable(error)) from error
    # Only given fields: one that was stored before it had all of its present fields is no new value.
    new = {one: value for one, value in {**given, **terms}.items() if one in given and value != known[one]}
    version = known["version"] + any(one in TERMS for one in new)
    return await RULES.update(connection, known, {**new, "version": version}, by) if new else known


async def delete_rules(connection: Connection, project: int, by: str) -> None:
    """Mark the rules of a project as deleted. Raise Conflict while one of its runs changes prices."""
    if (run := await fetch_value(connection, CHANGING, (project,))) is not None:
        raise Conflict(f"Rule run {run} of pricing project {project} is not finished: wait for its end.")
    await connection.execute(DELETE_RULES, (by, project))


async def create_rule_run(connection: Connection, new: NewRun, by: By) -> int:
    """Create a run as PREVIEW or, with both changes in its history, as QUEUED. Return its id. Raise InvalidInput for
    another status, and if its plan changes nothing."""
    if new.status not in (states.PREVIEW, states.QUEUED):
        raise InvalidInput(f"status: a run is created as PREVIEW or QUEUED, not as {new.status}")
    if new.plan is not None and not new.plan.targets:
        raise InvalidInput("rule: it changes no price: see the reasons of what it selects, or widen its selection")
    given = {**vars(new), **asdict(by), "rule": Jsonb(dict(new.rule))}
    run: int = await fetch_value(connection, INSERT_RUN, given)
    await states.record(connection, [Hop(run, None, None, states.PREVIEW, 0)], by)
    if new.plan is not None:
        await store_plan(connection, run, new.plan, by)
        if new.status == states.QUEUED:
            await queue_for_processing(connection, new.tenant, run, new.plan.hash, None, by)
    return run


async def store_plan(connection: Connection, run: int, plan: Plan, by: By) -> None:
    """Store the plan of a run with its targets and exclusions; the first plan of a run is final."""
    given = {"run": run, "hash": plan.hash, "totals": Jsonb(plan.totals)}
    if (tenant := await fetch_value(connection, PLAN_RUN, given)) is None:
        return
    decided = [one._asdict() for part in (plan.targets, plan.excluded) for one in part]
    for start in range(0, len(decided), CHUNK):
        part = {"tenant": tenant, "run": run, "rows": as_json(decided[start : start + CHUNK])}
        targets = await fetch_column(connection, INSERT_PLANNED, part)
        await states.record(connection, [Hop(run, one, None, states.PREVIEW, 0) for one in targets], by)


async def queue_for_processing(
    connection: Connection,
    tenant: str,
    run: int,
    plan_hash: str,
    targets: Sequence[int] | None,
    by: By,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> None:
    """Queue a run with all of its targets, or only these: exactly the plan with this hash. Raise Conflict for another
    hash and for a plan that is not made or changes nothing, ForbiddenTransition for a run that is not a preview,
    NotFound for a target of another run."""
    found = await require_run(connection, tenant, run, lock=True)
    states.RUNS.check(found["status"], states.QUEUED, f"rule run {run}")
    if found["plan_hash"] is None:
        again = found["stopped_reason"] or "wait for the end of its preview; if that has failed, preview the rule again"
        raise Conflict(f"Rule run {run} has no plan: {again}.", code="NO_PLAN")
    if found["plan_hash"] != plan_hash:
        raise Conflict(f"The plan of rule run {run} is another one: read its preview again, and queue that.")
    if targets is not None and not targets:
        raise InvalidInput("target_ids: name at least one target, or leave it out to queue all")
    chosen = sorted(set(targets)) if targets else await _of_status(connection, run, states.PREVIEW)
    if not chosen:
        raise Conflict(f"The plan of rule run {run} changes no price.", code="NO_PLAN")
    await move_runs(connection, {run: states.QUEUED}, by)
    sql = "UPDATE rule_runs SET canary = %s, max_failure_rate = %s, stopped_reason = NULL WHERE id = %s"
    await connection.execute(sql, (limits.canary, limits.max_failure_rate, run))
    await _queue(connection, run, chosen, by)


async def retry_failed(connection: Connection, tenant: str, run: int, targets: Sequence[int] | None, by: By) -> None:
    """Queue the failed targets of a run again, or only these, and begin its next round. Nothing is changed while an
    execution is open (Conflict), if one of them is not failed (ForbiddenTransition) or of another run (NotFound), or
    none is failed (Refused NOTHING_FAILED)."""
    await require_run(connection, tenant, run, lock=True)
    await require_idle(connection, run)
    await move_runs(connection, {run: states.APPLYING}, by)
    await connection.execute("UPDATE rule_runs SET canary = NULL, stopped_reason = NULL WHERE id = %s", (run,))
    chosen = await _of_status(connection, run, states.FAILED) if targets is None else sorted(set(targets))
    if not chosen:
        raise Refused(409, "NOTHING_FAILED", f"Rule run {run} has no failed targets to retry.")
    await _queue(connection, run, chosen, by)


async def require_idle(connection: Connection, run: int, within: int = 0) -> None:
    """Raise Conflict while an execution of a rule run is open, other than a reconciliation and `within`."""
    if (busy := await fetch_row(connection, OPEN, (run, within))) is not None:
        raise Conflict(f"The {busy[0]} of rule run {run} is under way (run {busy[1]}): wait for its end.")


async def check_rollback(connection: Connection, tenant: str, run: int, targets: Sequence[int] | None) -> None:
    """Lock a run, so that no other execution of it starts, and raise ForbiddenTransition if it, or one of these
    targets, cannot be rolled back, NotFound for a target of another run."""
    known = await require_run(connection, tenant, run, lock=True)
    states.RUNS.check(known["status"], states.ROLLED_BACK, f"rule run {run}")
    sql = "SELECT id, status FROM rule_targets WHERE rule_run_id = %s AND id = ANY(%s)"
    found = dict(await fetch_rows(connection, sql, (run, list(targets or ()))))
    for one in targets or ():
        if one not in found:
            raise NotFound(f"There is no target {one} of rule run {run}.")
        states.TARGETS.check(found[one], states.ROLLED_BACK, f"target {one}")


async def show_run(connection: Connection, tenant: str, run: int) -> Row:
    """Return a rule run with the counts of its targets, its executions, the latest first, and what the open one waits
    for."""
    found, counts = await require_run(connection, tenant, run), Counter[str]()
    counted = await fetch_rows(connection, SHOW_COUNTS, (run,))
    for status, _, targets, _ in counted:
        counts[status] += targets
    executions = await fetch_all(connection, dict, EXECUTIONS, (run,))
    open_ = next((int(one["run_id"]) for one in executions if one["created_at"] and not one["ended_at"]), None)
    return {
        **found,
        "counts": dict(counts),
        "errors": {code: targets for status, code, targets, _ in counted if status == states.FAILED},
        "not_rolled_back": sum(unrestored for status, *_, unrestored in counted if status == states.APPLIED),
        "executions": executions,
        "waiting": (await why_run(connection, tenant, open_)).summary if open_ else None,
    }


async def drain_dlq(connection: Connection, tenant: str, project: int) -> Row:
    """Report the dead letters of a project by run and cause. Changes nothing."""
    rows = await fetch_all(connection, dict, CAUSES, (tenant, project))
    total = sum(row["targets"] for row in rows)
    unsent = sum(row["targets"] for row in rows if row["error_code"] == states.NOT_ATTEMPTED)
    return {"project_id": project, "total": total, "not_attempted": unsent, "causes": rows}


async def _queue(connection: Connection, run: int, targets: Sequence[int], by: By) -> None:
    """Queue targets of a run, given by id in ascending order; between two chunks the event loop is free."""
    for start in range(0, len(targets), QUEUED_AT_ONCE):
        moves = [Move(one, (states.QUEUED,)) for one in targets[start : start + QUEUED_AT_ONCE]]
        await move_targets(connection, moves, by, run=run)


async def _of_status(connection: Connection, run: int, status: str) -> Sequence[int]:
    sql = "SELECT id FROM rule_targets WHERE rule_run_id = %s AND status = %s ORDER BY id"
    return await fetch_column(connection, sql, (run, status))
