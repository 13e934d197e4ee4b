"""Budgets: set and delete them, and refuse a start if a budget has no room left. A change of a budget wakes the items
that wait for it, and so does room that calls in flight leave."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_column, fetch_row, fetch_rows, fetch_value
from ecluse.engine.effects.reservations import lock_totals
from ecluse.engine.model.budget import AGAIN, Period, Scope, TotalKey, amount, budget_name, spent_of
from ecluse.engine.model.flow import Flow
from ecluse.engine.runs.stages import wake_workers

WOKEN = 200  # items
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
UPDATE spend_totals SET used_up = false, awaited = NULL, changed_at = ecluse_now()
WHERE tenant_id = %(tenant_id)s AND scope = %(scope)s AND subject_id = %(subject_id)s
  AND period = %(period)s AND starts_on = %(starts_on)s
"""
# All items of the tenant that wait for a budget: if another budget still has no room, they wait again after the next
# claim.
WAKE = """
UPDATE items SET due_at = ecluse_now(), postponed_cause = NULL, postponed_why = NULL
WHERE lane_id IN (SELECT id FROM lanes) AND tenant_id = ANY(%s) AND claim_id IS NULL AND postponed_cause = 'budget'
"""
JUST_CHANGED = "SELECT DISTINCT tenant_id FROM spend_totals WHERE changed_at > ecluse_now() - %s"
# The totals that calls wait for although calls in flight hold the rest no longer: there is room, or none will be left.
FREED = """
UPDATE spend_totals SET awaited = NULL FROM (
    SELECT t.tenant_id, t.scope, t.subject_id, t.period, t.starts_on FROM spend_totals t
    LEFT JOIN budgets b USING (tenant_id, scope, subject_id, period)
    WHERE t.awaited IS NOT NULL AND NOT coalesce(
        t.spent + t.awaited <= b.amount AND t.spent + t.reserved + t.awaited > b.amount, false)
    FOR UPDATE OF t SKIP LOCKED) k
WHERE (spend_totals.tenant_id, spend_totals.scope, spend_totals.subject_id, spend_totals.period, spend_totals.starts_on)
    = (k.tenant_id, k.scope, k.subject_id, k.period, k.starts_on)
RETURNING k.tenant_id
"""
# Of the items that are tried again soon, about as many as can be in flight.
WAKE_SOME = """
UPDATE items i SET due_at = ecluse_now(), postponed_cause = NULL, postponed_why = NULL FROM (
    SELECT id FROM items WHERE lane_id IN (SELECT id FROM lanes) AND tenant_id = ANY(%s) AND claim_id IS NULL
      AND postponed_cause = 'budget' AND due_at <= ecluse_now() + %s
    LIMIT %s FOR UPDATE SKIP LOCKED) s
WHERE i.id = s.id
"""
# An SQL condition: the run `root` and the runs that count against its budget have ended, or are deleted. The runs that
# a run has started may be open after its end.
RUN_IS_OVER = """NOT EXISTS (
    WITH RECURSIVE tree AS (
        SELECT id, ended_at FROM runs WHERE id = {root}
        UNION ALL SELECT r.id, r.ended_at FROM tree t JOIN runs r ON r.parent_run_id = t.id WHERE r.redrive_of IS NULL)
    SELECT 1 FROM tree WHERE ended_at IS NULL)"""
# The first day of the subject's present total; for a run that another run started, that other run; and whether the
# subject is a run that is over.
SUBJECT = {
    "tenant": "SELECT (ecluse_now() AT TIME ZONE 'UTC')::date, NULL, false",
    "schedule": """
SELECT (ecluse_now() AT TIME ZONE 'UTC')::date, NULL, false FROM schedules
WHERE tenant_id = %(tenant)s AND id = %(subject)s AND deleted_at IS NULL""",
    "run": f"""
SELECT (created_at AT TIME ZONE 'UTC')::date, CASE WHEN redrive_of IS NULL THEN parent_run_id END,
       {RUN_IS_OVER.format(root="%(subject)s")}
FROM runs WHERE tenant_id = %(tenant)s AND id = %(subject)s""",  # noqa: S608 - our own names
}
NOTHING_LEFT = """
SELECT scope, schedule_id, period, spent, amount, unknown, renews_at FROM budget_list
WHERE tenant_id = %(tenant)s AND (used_up OR spent >= amount) AND renews_at IS NOT NULL
  AND (schedule_id IS NULL OR schedule_id = %(schedule)s)
ORDER BY renews_at DESC, scope DESC, period
"""


@dataclass(frozen=True)
class Budget:
    """A limit on the cost of a tenant or one of its schedules per day or month, or of one of its runs as a whole.
    `subject_id` is the schedule or the run, 0 for the tenant."""

    tenant_id: str
    scope: Scope
    subject_id: int
    period: Period
    amount: Decimal


async def set_budget(connection: Connection, new: Budget) -> int:
    """Create a budget or change its amount, in the caller's transaction, and return its id. Raise NotFound if the
    tenant has no such schedule or run, InvalidInput if the run was started by another run (that run's budget includes
    it), and Conflict if that run and those that it started have ended, or the amount is below the cost that is spent
    and reserved."""
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
    """Delete a budget of the tenant, in the caller's transaction. Raise NotFound if the tenant has no such budget."""
    row = await fetch_row(connection, ONE, (tenant, budget_id))
    if row is None:
        raise NotFound(f"There is no budget {budget_id}.")
    key = TotalKey(tenant, *row)
    await lock_totals(connection, [key])  # before the budget, as in `set_budget`
    await connection.execute("DELETE FROM budgets WHERE id = %s", (budget_id,))
    await _changed(connection, key)


async def require_budget(connection: Connection, flow: Flow, tenant: str, schedule_id: int | None = None) -> None:
    """Raise Conflict if the runs of the flow make paid calls and a budget of the tenant or of the schedule has nothing
    left: it is spent, or the last tenth of it was too little for a call. For starts that a caller waits for; other runs
    are started, and their calls wait."""
    if not any(stage.paid for stage in flow.stages):
        return
    given = {"tenant": tenant, "schedule": schedule_id}
    parts, again = [], []
    for scope, subject, period, spent, limit, unknown, renewed in await fetch_rows(connection, NOTHING_LEFT, given):
        name = budget_name(tenant, scope, subject, period)
        is_so = "is used up" if spent >= limit else f"has {amount(limit - spent)} left, too little for the next call"
        parts.append(f"the {name} {is_so}: {spent_of(spent, limit, unknown)}")
        again.append(renewed)
    if parts:
        said, raised = "; ".join(parts), "the budget" if len(parts) == 1 else "these budgets"
        raise Conflict(
            f"{said[0].upper()}{said[1:]}. Nothing was started. Start again at {again[0]:%Y-%m-%d %H:%M:%S}Z, or raise"
            f" {raised}.",
            code="BUDGET_EXCEEDED",
        )


async def _key(connection: Connection, tenant: str, scope: Scope, subject_id: int, period: Period) -> TotalKey:
    """Return the key of the present total that a budget limits. Raise NotFound if the tenant has no such schedule or
    run, InvalidInput if the run was started by another run and counts against that one's budget, and Conflict if no
    call can count against the budget any more."""
    row = await fetch_row(connection, SUBJECT[scope], {"tenant": tenant, "subject": subject_id})
    if row is None:
        raise NotFound(f"There is no {scope} {subject_id}.")
    day, parent, over = row
    if parent is not None:
        raise InvalidInput(
            f"Run {subject_id} was started by run {parent}: set the budget of that run, which includes it"
        )
    if over:
        raise Conflict(
            f"Run {subject_id} has ended, with the runs that it started: a budget of it would limit nothing. A redrive"
            " of it is a run of its own, without this budget.",
            code="ALREADY_ENDED",
        )
    return TotalKey(tenant, scope, subject_id, period, day.replace(day=1) if period == "month" else day)


async def _changed(connection: Connection, key: TotalKey) -> None:
    """Mark the budget's total as changed, and wake the items of the tenant that wait for a budget, when the caller's
    transaction is committed."""
    await connection.execute(CHANGED, key._asdict())
    await connection.execute(WAKE, ([key.tenant_id],))
    await wake_workers(connection)


async def wake_after_changes(pool: Pool) -> None:
    """Wake the items that wait for a budget in tenants that have changed one within LONGEST_COMMIT: a call that was
    refused just before the change may have been stored as waiting just after it. A periodic job."""
    async with pool.connection() as connection:
        if tenants := await fetch_column(connection, JUST_CHANGED, (LONGEST_COMMIT,)):
            async with connection.transaction():
                await connection.execute(WAKE, (tenants,))
                await wake_workers(connection)


async def wake_after_calls(pool: Pool) -> None:
    """Wake items that wait for a budget whose rest was held by calls in flight, as soon as those leave room for one of
    them: WOKEN at a time, so that few of them are refused again. A periodic job."""
    async with pool.connection() as connection:
        if tenants := await fetch_column(connection, FREED):  # committed: no total is locked while items are sought
            async with connection.transaction():
                await connection.execute(WAKE_SOME, (tenants, AGAIN, WOKEN))
                await wake_workers(connection)
