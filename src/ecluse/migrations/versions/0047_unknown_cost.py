"""How much of what is spent is the cost of calls that may have been made, in the list of budgets."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes

revision = "0047"
down_revision = "0046"

UNKNOWN = """
CREATE OR REPLACE FUNCTION spend_unknown(tenant text, of_scope text, subject bigint, of_period text, since date)
RETURNS numeric LANGUAGE plpgsql STABLE AS $$
DECLARE
    till date := CASE of_period WHEN 'day' THEN since + 1 ELSE (since + interval '1 month')::date END;
BEGIN
    -- A statement per index: one for all scopes would read all these calls of the tenant.
    IF of_scope = 'run' THEN
        RETURN (SELECT trim_scale(coalesce(sum(c.reserved), 0)) FROM public.paid_calls c
                WHERE c.root_run_id = subject AND c.state = 'unknown');
    END IF;
    RETURN (SELECT trim_scale(coalesce(sum(c.reserved), 0)) FROM public.paid_calls c
            WHERE c.tenant_id = tenant AND c.state = 'unknown' AND c.day >= since AND c.day < till
              AND (of_scope = 'tenant' OR c.schedule_id = subject));
END $$;
"""
# As in 0037, and the last column.
LISTED = """
CREATE OR REPLACE VIEW budget_list AS
SELECT b.id, b.tenant_id, b.scope, CASE b.scope WHEN 'schedule' THEN b.subject_id END AS schedule_id,
       CASE b.scope WHEN 'run' THEN b.subject_id END AS run_id, b.period, trim_scale(b.amount) AS amount,
       trim_scale(coalesce(t.spent, 0)) AS spent, trim_scale(coalesce(t.reserved, 0)) AS reserved,
       trim_scale(greatest(b.amount - coalesce(t.spent + t.reserved, 0), 0)) AS available,
       coalesce(t.used_up, false) AS used_up,
       CASE b.period WHEN 'day' THEN ((d.today + 1)::timestamp AT TIME ZONE 'UTC')
                     WHEN 'month' THEN ((d.month + interval '1 month') AT TIME ZONE 'UTC') END AS renews_at,
       b.created_at, b.updated_at,
       CASE WHEN t.spent > 0 THEN spend_unknown(t.tenant_id, t.scope, t.subject_id, t.period, t.starts_on)
            ELSE 0 END AS unknown
FROM budgets b
CROSS JOIN (SELECT today, date_trunc('month', today::timestamp) AS month
            FROM (SELECT (ecluse_now() AT TIME ZONE 'UTC')::date AS today) n) d
LEFT JOIN spend_totals t ON t.tenant_id = b.tenant_id AND t.scope = b.scope AND t.subject_id = b.subject_id
    AND t.period = b.period
    AND (b.period = 'all' OR t.starts_on = CASE b.period WHEN 'day' THEN d.today ELSE d.month::date END)
WHERE b.scope <> 'schedule' OR EXISTS (
    SELECT 1 FROM schedules s WHERE s.id = b.subject_id AND (s.deleted_at IS NULL OR EXISTS (
        SELECT 1 FROM runs r WHERE r.id IN (s.holding_run_id, s.last_run_id) AND r.ended_at IS NULL)));
"""
INDEXES = {
    "paid_calls_unknown": "paid_calls (tenant_id, day) WHERE state = 'unknown'",
    "paid_calls_unknown_of_root": "paid_calls (root_run_id) WHERE state = 'unknown'",
}


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (UNKNOWN, LISTED):
        connection.execute(part)  # type: ignore[union-attr]
    build_indexes(INDEXES)
