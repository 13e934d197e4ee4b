"""Rule runs: their creation, their plan, their queueing, the manual retry of failed targets, and the dead letters,
which are the failed targets. Each is a part of the caller's transaction; executions call the shop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from psycopg.types.json import Jsonb
from pydantic import BaseModel, ConfigDict, Field

from ecluse.access.envelope import Refused
from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_column, fetch_row, fetch_rows, fetch_value
from ecluse.flows.pricing.queries import require_run
from ecluse.flows.pricing.rules import Excluded, Plan, Planned
from ecluse.flows.pricing.states import (
    APPLYING,
    FAILED,
    NOT_ATTEMPTED,
    PREVIEW,
    QUEUED,
    ROLLED_BACK,
    RUNS,
    TARGETS,
    By,
    Hop,
    TargetMove,
    move_runs,
    move_targets,
    record,
)
from ecluse.retention.kinds import Aged

CHUNK = 5_000
KEPT = Aged(
    "rule runs",
    "rule_runs",
    "coalesce(t.rolled_back_at, t.finished_at, t.created_at)",
    where="t.status NOT IN ('QUEUED', 'APPLYING')",
    began="t.created_at",
)
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
VARIANT = "jsonb_to_record(t.variant) AS v(id text, product text, sku text, title text, price bigint)"
INSERT_TARGETS = f"""
INSERT INTO rule_targets (tenant_id, rule_run_id, variant_id, product_id, sku, title, status, before_amount,
                          after_amount)
SELECT %(tenant)s, %(run)s, v.id, v.product, v.sku, v.title, 'PREVIEW', t.before, t.after
FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(variant jsonb, before bigint, after bigint), {VARIANT}
ORDER BY v.product, v.id RETURNING id
"""  # noqa: S608 - our own names
INSERT_EXCLUSIONS = f"""
INSERT INTO rule_exclusions (tenant_id, rule_run_id, variant_id, sku, title, amount, reason)
SELECT %(tenant)s, %(run)s, v.id, v.sku, v.title, v.price, t.reason
FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(variant jsonb, reason text), {VARIANT}
"""  # noqa: S608 - our own names
OPEN = """
SELECT x.kind, x.run_id FROM rule_executions x JOIN runs r ON r.id = x.run_id AND r.ended_at IS NULL
WHERE x.rule_run_id = %s AND x.run_id <> %s AND x.kind <> 'reconcile'
"""
# Of one project, by cause; targets that were never sent are no failures of the shop, and shown apart.
DEAD_LETTERS = """
SELECT t.rule_run_id AS run_id, t.error_code, count(*) AS targets, min(t.error) AS example
FROM rule_targets t JOIN rule_runs r ON r.id = t.rule_run_id
WHERE t.tenant_id = %(tenant)s AND t.status = 'FAILED' AND r.project_id = %(project)s
GROUP BY t.rule_run_id, t.error_code ORDER BY t.rule_run_id DESC, count(*) DESC, t.error_code
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


class Limits(BaseModel):
    """What stops an apply."""

    model_config = ConfigDict(extra="forbid")

    canary: int | None = Field(
        None, ge=1, le=100_000, description="So many targets are applied first, the others only if those succeed."
    )
    max_failure_rate: float | None = Field(
        None, ge=0, lt=1, examples=[0.05], description="Nothing more is sent once a larger share has failed."
    )


async def create_rule_run(connection: Connection, new: NewRun, by: By) -> int:
    """Create a run as PREVIEW or, with both changes in its history, as QUEUED. Return its id. Raise InvalidInput for
    another status, and if its plan changes nothing."""
    if new.status not in (PREVIEW, QUEUED):
        raise InvalidInput(f"status: a run is created as PREVIEW or QUEUED, not as {new.status}")
    if new.plan is not None and not new.plan.targets:
        raise InvalidInput("rule: it changes no price: see the reasons of what it selects, or widen its selection")
    given = {**vars(new), **asdict(by), "rule": Jsonb(dict(new.rule))}
    run: int = await fetch_value(connection, INSERT_RUN, given)
    await record(connection, [Hop(run, None, None, PREVIEW, 0)], by)
    if new.plan is not None:
        await store_plan(connection, run, new.plan, by)
        if new.status == QUEUED:
            await queue_for_processing(connection, new.tenant, run, new.plan.hash, None, by)
    return run


async def store_plan(connection: Connection, run: int, plan: Plan, by: By) -> None:
    """Store the plan of a run with its targets and exclusions; the first plan of a run is final."""
    given = {"run": run, "hash": plan.hash, "totals": Jsonb(plan.totals)}
    if (tenant := await fetch_value(connection, PLAN_RUN, given)) is None:
        return
    targets = await _insert(connection, INSERT_TARGETS, tenant, run, plan.targets)
    await _insert(connection, INSERT_EXCLUSIONS, tenant, run, plan.excluded)
    await record(connection, [Hop(run, one, None, PREVIEW, 0) for one in targets], by)


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
    if found["status"] == PREVIEW and found["plan_hash"] is None:
        raise Conflict(f"Rule run {run} has no plan: wait for the end of its preview.", code="NO_PLAN")
    if found["status"] == PREVIEW and found["plan_hash"] != plan_hash:
        raise Conflict(f"The plan of rule run {run} is another one: read its preview again, and queue that.")
    chosen = await _of_status(connection, run, PREVIEW) if targets is None else targets
    if targets is not None and not targets:
        raise InvalidInput("target_ids: name at least one target, or leave it out to queue all")
    if found["status"] == PREVIEW and not chosen:
        raise Conflict(f"The plan of rule run {run} changes no price.", code="NO_PLAN")
    await move_runs(connection, {run: QUEUED}, by)
    await connection.execute(
        "UPDATE rule_runs SET canary = %s, max_failure_rate = %s, stopped_reason = NULL WHERE id = %s",
        (limits.canary, limits.max_failure_rate, run),
    )
    await move_targets(connection, [TargetMove(one, (QUEUED,)) for one in chosen], by, run=run)


async def retry_failed(
    connection: Connection, tenant: str, run: int, targets: Sequence[int] | None, by: By
) -> Sequence[int]:
    """Queue the failed targets of a run again, or only these, and begin its next round; return them. Nothing is changed
    while an execution is open (Conflict), if one of them is not failed (ForbiddenTransition) or of another run
    (NotFound), or none is failed (Refused NOTHING_FAILED)."""
    await require_run(connection, tenant, run, lock=True)
    await require_idle(connection, run)
    await move_runs(connection, {run: APPLYING}, by)
    await connection.execute("UPDATE rule_runs SET canary = NULL, stopped_reason = NULL WHERE id = %s", (run,))
    chosen = await _of_status(connection, run, FAILED) if targets is None else sorted(set(targets))
    if not chosen:
        raise Refused(409, "NOTHING_FAILED", f"Rule run {run} has no failed targets to retry.")
    await move_targets(connection, [TargetMove(one, (QUEUED,)) for one in chosen], by, run=run)
    return chosen


async def require_idle(connection: Connection, run: int, within: int = 0) -> None:
    """Raise Conflict while an execution of a rule run is open, other than a reconciliation and `within`."""
    if (busy := await fetch_row(connection, OPEN, (run, within))) is not None:
        raise Conflict(f"The {busy[0]} of rule run {run} is under way (run {busy[1]}): wait for its end.")


async def check_rollback(connection: Connection, tenant: str, run: int, targets: Sequence[int] | None) -> None:
    """Lock a run, and raise ForbiddenTransition if it, or one of these targets, cannot be rolled back, NotFound for a
    target of another run."""
    known = await require_run(connection, tenant, run, lock=True)
    RUNS.check(known["status"], ROLLED_BACK, f"rule run {run}")
    if targets is not None:
        sql = "SELECT id, status FROM rule_targets WHERE rule_run_id = %s AND id = ANY(%s) ORDER BY id"
        found = dict(await fetch_rows(connection, sql, (run, list(targets))))
        if strangers := sorted(set(targets) - set(found)):
            raise NotFound(f"There is no target {strangers[0]} of rule run {run}.")
        for target, status in found.items():
            TARGETS.check(status, ROLLED_BACK, f"target {target}")


async def drain_dlq(connection: Connection, tenant: str, project: int) -> Row:
    """Report the dead letters of a project by run and cause. Changes nothing."""
    rows = await fetch_all(connection, dict, DEAD_LETTERS, {"tenant": tenant, "project": project})
    total = sum(row["targets"] for row in rows)
    unsent = sum(row["targets"] for row in rows if row["error_code"] == NOT_ATTEMPTED)
    return {"project_id": project, "total": total, "not_attempted": unsent, "causes": rows}


async def _of_status(connection: Connection, run: int, status: str) -> Sequence[int]:
    sql = "SELECT id FROM rule_targets WHERE rule_run_id = %s AND status = %s ORDER BY id"
    return await fetch_column(connection, sql, (run, status))


async def _insert(
    connection: Connection, sql: str, tenant: str, run: int, planned: Sequence[Planned | Excluded]
) -> list[int]:
    ids: list[int] = []
    for start in range(0, len(planned), CHUNK):
        rows = as_json([one._asdict() for one in planned[start : start + CHUNK]])
        given = {"tenant": tenant, "run": run, "rows": rows}
        cursor = await connection.execute(sql, given)
        ids += [row[0] for row in await cursor.fetchall()] if cursor.description else []
    return ids
