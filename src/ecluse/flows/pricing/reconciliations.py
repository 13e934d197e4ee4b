"""Reconciliation: the prices of applied targets are read from the shop again, soon after the apply, after an hour,
daily for 30 days, and on demand. A pass is a row that is due at an instant. A target whose price a later run has
changed, or is about to change, is left out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ecluse.base.errors import Conflict
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_all, fetch_rows
from ecluse.engine import Event, Flow, ItemEnd, Lane, NewItem, Run, write_events
from ecluse.flows.pricing import executions, runs
from ecluse.flows.pricing.rules import Plan, Planned, plan_hash
from ecluse.flows.pricing.runs import NewRun, create_rule_run
from ecluse.flows.pricing.states import SCHEDULER, By
from ecluse.vendors.connectors import CONNECTORS
from ecluse.vendors.shops import Variant

AT_ONCE = 20  # passes that one look starts
PLAN = """
WITH former AS (DELETE FROM rule_reconciliations WHERE rule_run_id = ANY(%(runs)s) AND started_at IS NULL)
INSERT INTO rule_reconciliations (tenant_id, rule_run_id, kind, due_at)
SELECT r.tenant_id, r.id, p.kind, ecluse_now() + p.after
FROM rule_runs r, (SELECT 'immediate' AS kind, %(soon)s::interval AS after UNION ALL SELECT 'delayed', interval '1 hour'
                   UNION ALL SELECT 'daily', n * interval '1 day' FROM generate_series(1, 30) AS n) AS p
WHERE r.id = ANY(%(runs)s) AND r.status IN ('APPLIED', 'PARTIAL') ORDER BY p.after
"""
DUE = f"""
SELECT c.id, c.tenant_id, c.rule_run_id
FROM rule_reconciliations c JOIN rule_runs r ON r.id = c.rule_run_id JOIN pricing_projects p ON p.id = r.project_id
JOIN tenants t ON t.id = c.tenant_id AND t.disabled_at IS NULL
WHERE c.started_at IS NULL AND c.due_at <= ecluse_now() AND r.status IN ('APPLIED', 'PARTIAL') AND p.deleted_at IS NULL
ORDER BY c.due_at LIMIT {AT_ONCE} FOR NO KEY UPDATE OF c, r SKIP LOCKED
"""  # noqa: S608 - our own names
ON_DEMAND = """
INSERT INTO rule_reconciliations (tenant_id, rule_run_id, run_id, kind, due_at, started_at)
VALUES (%s, %s, %s, 'on_demand', ecluse_now(), ecluse_now())
"""
BEGIN = "UPDATE rule_reconciliations SET run_id = %s, started_at = ecluse_now() WHERE id = %s"
TO_CHECK = """
SELECT t.id, t.variant_id, t.project_id, t.connector, t.superseded
FROM rule_executions x JOIN rule_target_list t ON t.rule_run_id = x.rule_run_id AND t.status = 'APPLIED'
WHERE x.run_id = %s ORDER BY t.id
"""
FOUND = """
WITH seen AS MATERIALIZED (
    SELECT c.id AS pass, s.target, s.actual FROM jsonb_to_recordset(%s::jsonb) AS s(run bigint, target bigint,
        actual bigint) JOIN rule_reconciliations c ON c.run_id = s.run),
found AS (
    INSERT INTO rule_mismatches (tenant_id, reconciliation_id, rule_run_id, rule_target_id, expected, actual)
    SELECT t.tenant_id, seen.pass, t.rule_run_id, t.id, t.after_amount, seen.actual
    FROM seen JOIN rule_target_list t ON t.id = seen.target
    WHERE t.status = 'APPLIED' AND t.after_amount IS DISTINCT FROM seen.actual AND NOT t.superseded
    ON CONFLICT DO NOTHING RETURNING *),
counted AS (
    UPDATE rule_reconciliations c SET checked = c.checked + n.checked, mismatches = c.mismatches
        + (SELECT count(*) FROM found WHERE found.reconciliation_id = c.id)
    FROM (SELECT pass, count(*) AS checked FROM seen GROUP BY pass) AS n WHERE c.id = n.pass)
SELECT f.tenant_id, f.rule_run_id, f.rule_target_id, f.expected, f.actual, r.correlation_id
FROM found f JOIN rule_runs r ON r.id = f.rule_run_id
"""
FINISH = """
UPDATE rule_reconciliations c SET finished_at = ecluse_now(), unverified = coalesce((
    SELECT sum((i.payload ->> 'count')::int) FROM items i WHERE i.run_id = c.run_id AND i.status <> 'succeeded'), 0)
WHERE c.run_id = ANY(%s) AND c.finished_at IS NULL
"""
LATEST = """
SELECT t.variant_id AS id, t.product_id AS product, t.sku, t.title, m.expected, m.actual
FROM rule_mismatches m JOIN rule_targets t ON t.id = m.rule_target_id AND t.status = 'APPLIED'
WHERE m.actual IS NOT NULL AND m.reconciliation_id = (
    SELECT max(id) FROM rule_reconciliations WHERE rule_run_id = %s AND finished_at IS NOT NULL)
"""


async def ended(connection: Connection, execution_ids: Sequence[int], run_ids: Sequence[int], soon: timedelta) -> None:
    """Close the passes whose engine runs have ended: what was not read is unverified. Plan those of rule runs whose
    apply or rollback has ended, instead of the ones that were planned before."""
    await connection.execute(FINISH, (list(execution_ids),))
    await connection.execute(PLAN, {"runs": list(run_ids), "soon": soon})


async def start_due(connection: Connection, flow: Flow) -> None:
    """Start the passes that are due."""
    async with connection.transaction():
        for number, tenant, run in await fetch_rows(connection, DUE):
            started = await executions.start(connection, flow, tenant, run, "reconcile", SCHEDULER)
            await connection.execute(BEGIN, (started, number))


async def reconcile_run(connection: Connection, flow: Flow, tenant: str, run: int, by: By) -> int:
    """Start a pass now; return the id of the engine run. Raise Conflict if nothing of the run is applied."""
    if (await runs.require_run(connection, tenant, run, lock=True))["status"] not in ("APPLIED", "PARTIAL"):
        raise Conflict(f"Rule run {run} has no applied prices to compare: apply it first.")
    started = await executions.start(connection, flow, tenant, run, "reconcile", by)
    await connection.execute(ON_DEMAND, (tenant, run, started))
    return started


async def parts(lane: Lane, connection: Connection, run: Run) -> Sequence[NewItem]:
    """Return the items of a pass, each with as many targets as one call reads."""
    rows = await fetch_rows(connection, TO_CHECK, (run.id,))
    wanted = [(target, variant) for target, variant, _, _, superseded in rows if not superseded]
    sql = "UPDATE rule_reconciliations SET superseded = %s WHERE run_id = %s"
    await connection.execute(sql, (len(rows) - len(wanted), run.id))
    if not wanted:
        return []
    most, project = CONNECTORS[rows[0][3]].most_read, rows[0][2]
    groups = [dict(wanted[start : start + most]) for start in range(0, len(wanted), most)]
    return [
        NewItem(f"part {n}", None, {"project": project, "count": len(one), "variants": one}, lane=lane)
        for n, one in enumerate(groups)
    ]


async def compared(connection: Connection, ends: Sequence[ItemEnd]) -> None:
    """Store the mismatches that were found; one event for each target and value. `on_end` of the reconcile stage."""
    seen = [
        {"run": one.item.run_id, "target": target, "actual": actual}
        for one in ends
        if one.status == "succeeded"
        for target, actual in one.kept.items()
    ]
    events = []
    for tenant, run, target, expected, actual, correlation_id in await fetch_rows(connection, FOUND, (as_json(seen),)):
        payload = {"targetId": str(target), "runId": str(run), "expected": expected, "actual": actual}
        payload["difference"] = None if actual is None else actual - expected
        key, name = f"{run}:{target}:mismatch:{actual}", "automation.reconciliation.mismatch"
        events.append(Event(tenant, key, name, f"rule_run:{run}", payload, correlation_id))
    await write_events(connection, events)


async def correct_run(connection: Connection, tenant: str, run: int, by: By) -> int:
    """Create a run that restores the applied prices which the latest pass found changed; return its id. It is a
    preview: success is final, so that the run itself is not applied again. Raise Conflict if nothing was found."""
    known = await runs.require_run(connection, tenant, run, lock=True)
    planned = [
        Planned(Variant(currency=known["currency"], price=actual, **row), actual, expected)
        for row in await fetch_all(connection, dict, LATEST, (run,))
        for expected, actual in [(row.pop("expected"), row.pop("actual"))]
    ]
    if not planned:
        raise Conflict(f"No reconciliation of rule run {run} has found a price to correct. Reconcile it first.")
    plan = Plan(planned, [], plan_hash(known["currency"], planned))
    new = NewRun(tenant, known["project_id"], known["currency"], known["rule_id"], known["rule"], plan, corrects=run)
    return await create_rule_run(connection, new, by)
