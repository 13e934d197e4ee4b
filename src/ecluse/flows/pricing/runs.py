"""Rule runs: their creation from a plan, their queueing, the manual retry of failed targets, and the dead letters,
which are the failed targets. Each is a part of the caller's transaction; executions call the shop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from psycopg.types.json import Jsonb

from ecluse.access.envelope import Refused
from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_column, fetch_one, fetch_value
from ecluse.flows.pricing.rules import Plan
from ecluse.flows.pricing.states import (
    APPLYING,
    FAILED,
    NOT_ATTEMPTED,
    PREVIEW,
    QUEUED,
    By,
    Hop,
    TargetMove,
    move_runs,
    move_targets,
    record,
)

CHUNK = 5_000
INSERT_RUN = """
INSERT INTO rule_runs (tenant_id, project_id, rule_id, rule, currency, status, plan_hash, totals, actor, correlation_id,
                       source, created_at)
VALUES (%(tenant)s, %(project)s, %(rule_id)s, %(rule)s, %(currency)s, 'PREVIEW', %(hash)s, %(totals)s, %(actor)s,
        %(correlation_id)s, %(source)s, ecluse_now())
RETURNING id
"""
INSERT_TARGETS = """
INSERT INTO rule_targets (tenant_id, rule_run_id, variant_id, product_id, sku, title, status, before_amount,
                          after_amount)
SELECT %(tenant)s, %(run)s, t.variant, t.product, t.sku, t.title, 'PREVIEW', t.before, t.after
FROM jsonb_to_recordset(%(rows)s::jsonb)
    AS t(variant text, product text, sku text, title text, before bigint, after bigint)
ORDER BY t.product, t.variant RETURNING id
"""
INSERT_EXCLUSIONS = """
INSERT INTO rule_exclusions (rule_run_id, variant_id, sku, title, amount, reason)
SELECT %(run)s, t.variant, t.sku, t.title, t.amount, t.reason
FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(variant text, sku text, title text, amount bigint, reason text)
"""
LOCK = """
SELECT status, plan_hash FROM rule_runs WHERE tenant_id = %s AND id = %s FOR NO KEY UPDATE
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
    """A rule run to create: the rule as it is now, and its plan."""

    tenant: str
    project: int
    currency: str
    rule_id: int | None
    rule: Mapping[str, Any]
    plan: Plan
    status: Literal["PREVIEW", "QUEUED"] = "PREVIEW"


async def create_rule_run(connection: Connection, new: NewRun, by: By) -> int:
    """Create a run with its targets, as PREVIEW or, with both changes in its history, as QUEUED. Return its id. Raise
    InvalidInput for another status, and if the plan changes nothing."""
    if new.status not in (PREVIEW, QUEUED):
        raise InvalidInput(f"status: a run is created as PREVIEW or QUEUED, not as {new.status}")
    if not new.plan.targets:
        raise InvalidInput("rule: it changes no price: see the reasons of what it selects, or widen its selection")
    given = {
        "tenant": new.tenant,
        "project": new.project,
        "rule_id": new.rule_id,
        "rule": Jsonb(dict(new.rule)),
        "currency": new.currency,
        "hash": new.plan.hash,
        "totals": Jsonb(new.plan.totals),
        "actor": by.actor,
        "correlation_id": by.correlation_id,
        "source": by.source,
    }
    run: int = await fetch_value(connection, INSERT_RUN, given)
    targets = await _insert(connection, INSERT_TARGETS, new, run, _target_rows(new.plan))
    await _insert(connection, INSERT_EXCLUSIONS, new, run, _exclusion_rows(new.plan))
    await record(connection, [Hop(run, one, None, PREVIEW, 0) for one in (None, *targets)], by)
    if new.status == QUEUED:
        await queue_for_processing(connection, new.tenant, run, new.plan.hash, None, by)
    return run


async def queue_for_processing(
    connection: Connection, tenant: str, run: int, plan_hash: str, targets: Sequence[int] | None, by: By
) -> None:
    """Queue a run with all of its targets, or only these: exactly the plan with this hash. Raise Conflict for another
    hash, ForbiddenTransition for a run that is not a preview, NotFound for a target of another run."""
    found = await fetch_one(connection, dict, LOCK, (tenant, run))
    if found is None:
        raise NotFound(f"There is no rule run {run}.")
    if found["status"] == PREVIEW and found["plan_hash"] != plan_hash:
        raise Conflict(f"The plan of rule run {run} is another one: read its preview again, and queue that.")
    if targets is not None and not targets:
        raise InvalidInput("target_ids: name at least one target, or leave it out to queue all")
    await move_runs(connection, {run: QUEUED}, by)
    chosen = await _of_status(connection, run, PREVIEW) if targets is None else targets
    await move_targets(connection, [TargetMove(one, (QUEUED,)) for one in chosen], by, run=run)


async def retry_failed(
    connection: Connection, tenant: str, run: int, targets: Sequence[int] | None, by: By
) -> Sequence[int]:
    """Queue the failed targets of a run again, or only these, and begin its next round; return them. Nothing is changed
    if one of them is not failed (ForbiddenTransition) or of another run (NotFound), or none is failed (Refused
    NOTHING_FAILED)."""
    if await fetch_one(connection, dict, LOCK, (tenant, run)) is None:
        raise NotFound(f"There is no rule run {run}.")
    await move_runs(connection, {run: APPLYING}, by)
    chosen = await _of_status(connection, run, FAILED) if targets is None else sorted(set(targets))
    if not chosen:
        raise Refused(409, "NOTHING_FAILED", f"Rule run {run} has no failed targets to retry.")
    await move_targets(connection, [TargetMove(one, (QUEUED,)) for one in chosen], by, run=run)
    return chosen


async def drain_dlq(connection: Connection, tenant: str, project: int) -> Row:
    """Report the dead letters of a project by run and cause. Changes nothing."""
    rows = await fetch_all(connection, dict, DEAD_LETTERS, {"tenant": tenant, "project": project})
    total = sum(row["targets"] for row in rows)
    unsent = sum(row["targets"] for row in rows if row["error_code"] == NOT_ATTEMPTED)
    return {"project_id": project, "total": total, "not_attempted": unsent, "causes": rows}


async def _of_status(connection: Connection, run: int, status: str) -> Sequence[int]:
    sql = "SELECT id FROM rule_targets WHERE rule_run_id = %s AND status = %s ORDER BY id"
    return await fetch_column(connection, sql, (run, status))


async def _insert(connection: Connection, sql: str, new: NewRun, run: int, rows: Sequence[Row]) -> list[int]:
    ids: list[int] = []
    for start in range(0, len(rows), CHUNK):
        given = {"tenant": new.tenant, "run": run, "rows": as_json(rows[start : start + CHUNK])}
        cursor = await connection.execute(sql, given)
        ids += [row[0] for row in await cursor.fetchall()] if cursor.description else []
    return ids


def _target_rows(plan: Plan) -> list[Row]:
    return [
        {
            "variant": one.variant.id,
            "product": one.variant.product,
            "sku": one.variant.sku,
            "title": one.variant.title,
            "before": one.before,
            "after": one.after,
        }
        for one in plan.targets
    ]


def _exclusion_rows(plan: Plan) -> list[Row]:
    return [
        {
            "variant": one.variant.id,
            "sku": one.variant.sku,
            "title": one.variant.title,
            "amount": one.variant.price,
            "reason": one.reason,
        }
        for one in plan.excluded
    ]
