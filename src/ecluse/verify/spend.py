"""I-22, money: the amounts spent and reserved in a period or a run equal its paid calls, and exceed the budget at most
by the amount that calls have cost beyond their reservation; nothing stays reserved for a call that is over."""

from __future__ import annotations

from ecluse.verify.database import Check
from ecluse.verify.stuck import CARE

MONTH = "date_trunc('month', c.day::timestamp)::date"
CALLS = f"""
WITH calls AS MATERIALIZED (
    SELECT c.tenant_id, k.*, c.run_id, c.reserved, c.cost, c.state FROM paid_calls c CROSS JOIN LATERAL (VALUES
        ('tenant', 0::bigint, 'day', c.day), ('tenant', 0, 'month', {MONTH}),
        ('schedule', c.schedule_id, 'day', c.day), ('schedule', c.schedule_id, 'month', {MONTH}),
        ('run', c.root_run_id, 'all', c.root_day)) AS k(scope, subject_id, period, starts_on)
    WHERE k.subject_id IS NOT NULL),
sums AS MATERIALIZED (
    SELECT tenant_id, scope, subject_id, period, starts_on, max(run_id) AS run_id,
           coalesce(sum(coalesce(cost, reserved)) FILTER (WHERE state <> 'reserved'), 0) AS spent,
           coalesce(sum(reserved) FILTER (WHERE state = 'reserved'), 0) AS reserved,
           coalesce(sum(greatest(cost - reserved, 0)), 0) AS excess
    FROM calls GROUP BY 1, 2, 3, 4, 5)
"""  # noqa: S608 - the fragment above
SUBJECT = "format('%s %s of %s %s from %s', t.scope, t.subject_id, t.tenant_id, t.period, t.starts_on) AS subject"
OF_TOTAL = "tenant_id, scope, subject_id, period, starts_on"

TOTALS = f"""
{CALLS}
SELECT {SUBJECT}, s.run_id, format('counts %s spent and %s reserved, but its calls are %s and %s', t.spent, t.reserved,
       coalesce(s.spent, 0), coalesce(s.reserved, 0)) AS message
FROM spend_totals t LEFT JOIN sums s USING ({OF_TOTAL})
WHERE t.spent <> coalesce(s.spent, 0) OR t.reserved <> coalesce(s.reserved, 0) ORDER BY 1
"""  # noqa: S608 - the fragments above
# A budget counts for the period in which it was set last and for later ones.
ABOVE = f"""
{CALLS}
SELECT {SUBJECT}, s.run_id, format('%s spent and %s reserved of a budget of %s, and calls have cost only %s more than '
       'was reserved', t.spent, t.reserved, b.amount, coalesce(s.excess, 0)) AS message
FROM spend_totals t JOIN budgets b USING (tenant_id, scope, subject_id, period) LEFT JOIN sums s USING ({OF_TOTAL})
WHERE t.spent + t.reserved > b.amount + coalesce(s.excess, 0) AND (
    t.period = 'all' OR t.starts_on >= date_trunc(t.period, b.updated_at AT TIME ZONE 'UTC')::date) ORDER BY 1
"""  # noqa: S608 - the fragments above
KEPT = f"""
{CARE}
SELECT 'item ' || p.item_id AS subject, p.run_id, p.item_id,
       format('%s is reserved since %s for a call that is over', p.reserved, p.at) AS message
FROM care, paid_calls p JOIN items i ON i.id = p.item_id
WHERE NOT care.moved AND p.state = 'reserved' AND i.finished_at IS NOT NULL
  AND greatest(i.finished_at, care.since) < now() - interval '60 seconds' ORDER BY p.item_id
"""  # noqa: S608 - the fragment above

I_22_MONEY = Check("I-22", "SELECT count(*) AS n FROM spend_totals", (TOTALS, ABOVE, KEPT))
