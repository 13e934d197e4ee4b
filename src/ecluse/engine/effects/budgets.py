"""Budgets: set, delete, and refuse a start for which none is left. What waits for a budget is woken when it changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_column, fetch_row, fetch_rows, fetch_value
from ecluse.engine.effects.reservations import lock_totals
from ecluse.engine.model.budget import Period, Scope, TotalKey, amount, budget_name
from ecluse.engine.model.flow import Flow
from ecluse.engine.runs.stages import wake_workers

LONGEST_COMMIT = timedelta(seconds=30)  # from the refusal of a call until its item is stored as waiting

PUT = """
INSERT INTO budgets AS b (tenant_id, scope, subject_id, period, amount, created_at, updated_at)
VALUES (%(tenant_id)s, %(scope)s, %(subject_id)s, %(period)s, %(amount)s, ecluse_now(), ecluse_now())
ON CONFLICT ON CONSTRAINT budgets_once DO UPDATE SET amount = excluded.amount, updated_at = excluded.updated_at
RETURNING id
"""
ONE = """
SELECT b.scope, b.subject_id, b.period, CASE b.period
    WHEN 'day' THEN today WHEN 'month' THEN date_trunc('month', today::timestamp)::date
    ELSE coalesce((SELECT (created_at AT TIME ZONE 'UTC')::date FROM runs WHERE id = b.subject_id), today) END
FROM budgets b, (SELECT (ecluse_now() AT TIME ZONE 'UTC')::date AS today) d WHERE b.tenant_id = %s AND b.id = %s
"""
CHANGED = """
UPDATE spend_totals SET used_up = false, changed_at = ecluse_now()
WHERE tenant_id = %(tenant_id)s AND scope = %(scope)s AND subject_id = %(subject_id)s
  AND period = %(period)s AND starts_on = %(starts_on)s
"""
# All of the tenant's: whether another budget still has no room is found out at the next claim.
WAKE = """
UPDATE items SET due_at = ecluse_now(), postponed_cause = NULL, postponed_why = NULL
WHERE lane_id IN (SELECT id FROM lanes) AND tenant_id = ANY(%s) AND claim_id IS NULL AND postponed_cause = 'budget'
"""
JUST_CHANGED = "SELECT DISTINCT tenant_id FROM spend_totals WHERE changed_at > ecluse_now() - %s"
# The day in which the present total of the subject begins, and the run that a run counts against.
SUBJECT = {
    "tenant": "SELECT (ecluse_now() AT TIME ZONE 'UTC')::date, NULL",
    "schedule": """
SELECT (ecluse_now() AT TIME ZONE 'UTC')::date, NULL FROM schedules
WHERE tenant_id = %(tenant)s AND id = %(subject)s AND deleted_at IS NULL""",
    "run": """
SELECT (created_at AT TIME ZONE 'UTC')::date, CASE WHEN redrive_of IS NULL THEN parent_run_id END FROM runs
WHERE tenant_id = %(tenant)s AND id = %(subject)s""",
}
NOTHING_LEFT = """
SELECT scope, schedule_id, period, spent, amount, renews_at FROM budget_list
WHERE tenant_id = %(tenant)s AND (used_up OR spent >= amount) AND renews_at IS NOT NULL
  AND (schedule_id IS NULL OR schedule_id = %(schedule)s)
ORDER BY renews_at DESC LIMIT 1
"""


@dataclass(frozen=True)
class Budget:
    """A limit on the cost of a tenant or one of its schedules per day or month, or of one of its runs in all.
    `subject_id` is the schedule or the run, 0 for the tenant."""

    tenant_id: str
    scope: Scope
    subject_id: int
    period: Period
    amount: Decimal


async def set_budget(connection: Connection, new: Budget) -> int:
    """Set a budget, new or changed, in the caller's transaction, and return its id. Raises NotFound for a schedule or a
    run that is not the tenant's, Conflict for an amount below what is spent."""
    key = await _key(connection, new.tenant_id, new.scope, new.subject_id, new.period)
    total = (await lock_totals(connection, [key]))[key]
    if total.spent + total.reserved > new.amount:
        figures = f"{amount(total.spent)} is spent and {amount(total.reserved)} reserved by calls in flight"
        why = f"The {key} cannot be {amount(new.amount)}: {figures}. Set at least that much, or wait."
        raise Conflict(why, code="BUDGET_BELOW_SPENT")
    number: int = await fetch_value(connection, PUT, vars(new))
    await _changed(connection, key)
    return number


async def delete_budget(connection: Connection, tenant: str, budget_id: int) -> None:
    """Delete a budget of the tenant, in the caller's transaction. Raises NotFound."""
    row = await fetch_row(connection, ONE, (tenant, budget_id))
    if row is None:
        raise NotFound(f"There is no budget {budget_id}.")
    key = TotalKey(tenant, *row)
    await lock_totals(connection, [key])  # before the budget, as in `set_budget`
    await connection.execute("DELETE FROM budgets WHERE id = %s", (budget_id,))
    await _changed(connection, key)


async def require_budget(connection: Connection, flow: Flow, tenant: str, schedule_id: int | None = None) -> None:
    """Raise Conflict if the runs of the flow make paid calls, and a budget of the tenant or of the schedule is spent,
    or a call did not fit into its last tenth. For starts that a caller waits for: other runs start, and their calls
    wait."""
    if not any(stage.paid for stage in flow.stages):
        return
    given = {"tenant": tenant, "schedule": schedule_id}
    for scope, subject, period, spent, limit, renewed in await fetch_rows(connection, NOTHING_LEFT, given):
        name = budget_name(tenant, scope, subject, period)
        is_so = "is used up" if spent >= limit else f"has {amount(limit - spent)} left, too little for the next call"
        why = f"The {name} {is_so}: {amount(spent)} of {amount(limit)} spent. Nothing was started."
        raise Conflict(
            f"{why} Start again at {renewed:%Y-%m-%d %H:%M:%S}Z, or raise the budget.", code="BUDGET_EXCEEDED"
        )


async def _key(connection: Connection, tenant: str, scope: Scope, subject_id: int, period: Period) -> TotalKey:
    """Return the present total that a budget limits. Raises NotFound for a schedule or a run that is not the tenant's,
    and InvalidInput for a run that counts against the budget of another one."""
    row = await fetch_row(connection, SUBJECT[scope], {"tenant": tenant, "subject": subject_id})
    if row is None:
        raise NotFound(f"There is no {scope} {subject_id}.")
    day, parent = row
    if parent is not None:
        raise InvalidInput(
            f"run {subject_id} was started by run {parent}: set the budget of that run, which includes it"
        )
    return TotalKey(tenant, scope, subject_id, period, day.replace(day=1) if period == "month" else day)


async def _changed(connection: Connection, key: TotalKey) -> None:
    """Wake what waits for the budget, when the caller's transaction is committed."""
    await connection.execute(CHANGED, key._asdict())
    await connection.execute(WAKE, ([key.tenant_id],))
    await wake_workers(connection)


async def wake_after_changes(pool: Pool) -> None:
    """Wake what waits for budgets of tenants that have just changed one: a call that was refused right before may have
    been stored as waiting right after."""
    async with pool.connection() as connection:
        if tenants := await fetch_column(connection, JUST_CHANGED, (LONGEST_COMMIT,)):
            async with connection.transaction():
                await connection.execute(WAKE, (tenants,))
                await wake_workers(connection)
