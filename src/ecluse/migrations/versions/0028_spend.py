"""Budgets of tenants, schedules and runs; the paid calls, each with what it has cost; and what they cost together per
day, month and run.

A call is reserved before it is made and settled in the commit that stores its result. `spend_totals` has the sums that
budgets are compared with, in the same transactions: the row lock on a total is what keeps two replicas from spending
the same money.
"""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"

BUDGETS = """
CREATE TABLE budgets (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id  text NOT NULL,
    scope      text NOT NULL CHECK (scope IN ('tenant', 'schedule', 'run')),
    subject_id bigint NOT NULL,
    period     text NOT NULL CHECK (period IN ('day', 'month', 'all')),
    amount     numeric NOT NULL CHECK (amount >= 0),
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT budgets_once UNIQUE (tenant_id, scope, subject_id, period),
    CONSTRAINT budgets_of_runs CHECK ((scope = 'run') = (period = 'all')),
    CONSTRAINT budgets_subject CHECK ((scope = 'tenant') = (subject_id = 0))
);
COMMENT ON COLUMN budgets.subject_id IS 'the schedule or the run; 0 for the tenant';

CREATE TABLE spend_totals (
    tenant_id  text NOT NULL,
    scope      text NOT NULL,
    subject_id bigint NOT NULL,
    period     text NOT NULL,
    starts_on  date NOT NULL,
    spent      numeric NOT NULL DEFAULT 0,
    reserved   numeric NOT NULL DEFAULT 0,
    used_up    boolean NOT NULL DEFAULT false,
    changed_at timestamptz,
    PRIMARY KEY (tenant_id, scope, subject_id, period, starts_on)
) WITH (fillfactor = 50);
CREATE INDEX spend_totals_age ON spend_totals (starts_on);
CREATE INDEX spend_totals_changed ON spend_totals (changed_at) WHERE changed_at IS NOT NULL;
COMMENT ON TABLE spend_totals IS 'the sums of paid_calls that budgets are compared with; days and months are of UTC';
COMMENT ON COLUMN spend_totals.starts_on IS 'of a run: the day on which it was created';
COMMENT ON COLUMN spend_totals.changed_at IS 'when its budget was last set or deleted';
COMMENT ON COLUMN spend_totals.used_up IS 'a call did not fit into the budget any more, which was not raised since';

CREATE TABLE paid_calls (
    item_id     bigint NOT NULL,
    claim_id    bigint NOT NULL,
    tenant_id   text NOT NULL,
    run_id      bigint NOT NULL,
    root_run_id bigint NOT NULL,
    root_day    date NOT NULL,
    schedule_id bigint,
    day         date NOT NULL,
    vendor      text NOT NULL,
    model       text NOT NULL,
    priced      boolean NOT NULL,
    reserved    numeric NOT NULL CHECK (reserved >= 0),
    cost        numeric CHECK (cost >= 0),
    state       text NOT NULL DEFAULT 'reserved' CHECK (state IN ('reserved', 'settled', 'unknown')),
    at          timestamptz NOT NULL,
    PRIMARY KEY (item_id, claim_id),
    CONSTRAINT paid_calls_cost CHECK ((state = 'settled') = (cost IS NOT NULL))
) WITH (fillfactor = 70);
CREATE INDEX paid_calls_listed ON paid_calls (tenant_id, day);
CREATE INDEX paid_calls_of_root ON paid_calls (root_run_id);
CREATE INDEX paid_calls_of_run ON paid_calls (run_id);
CREATE INDEX paid_calls_reserved ON paid_calls (item_id) WHERE state = 'reserved';
CREATE INDEX paid_calls_age ON paid_calls (at);
COMMENT ON TABLE paid_calls IS 'one row per claim of an item under which a paid call was, or may have been, made';
COMMENT ON COLUMN paid_calls.root_run_id IS 'the run that its run was started by, directly or not, or itself';
COMMENT ON COLUMN paid_calls.priced IS 'false: no price is configured for the model, and it counts as 0';
COMMENT ON COLUMN paid_calls.state IS 'unknown: the call may have been made, and counts with what was reserved for it';
"""

LISTED = """
CREATE VIEW budget_list AS
SELECT b.id, b.tenant_id, b.scope, CASE b.scope WHEN 'schedule' THEN b.subject_id END AS schedule_id,
       CASE b.scope WHEN 'run' THEN b.subject_id END AS run_id, b.period, trim_scale(b.amount) AS amount,
       trim_scale(coalesce(t.spent, 0)) AS spent, trim_scale(coalesce(t.reserved, 0)) AS reserved,
       trim_scale(greatest(b.amount - coalesce(t.spent + t.reserved, 0), 0)) AS available,
       coalesce(t.used_up, false) AS used_up,
       CASE b.period WHEN 'day' THEN ((d.today + 1)::timestamp AT TIME ZONE 'UTC')
                     WHEN 'month' THEN ((d.month + interval '1 month') AT TIME ZONE 'UTC') END AS renews_at,
       b.created_at, b.updated_at
FROM budgets b
CROSS JOIN (SELECT today, date_trunc('month', today::timestamp) AS month
            FROM (SELECT (ecluse_now() AT TIME ZONE 'UTC')::date AS today) n) d
LEFT JOIN spend_totals t ON t.tenant_id = b.tenant_id AND t.scope = b.scope AND t.subject_id = b.subject_id
    AND t.period = b.period
    AND (b.period = 'all' OR t.starts_on = CASE b.period WHEN 'day' THEN d.today ELSE d.month::date END);

CREATE VIEW spend_list AS
SELECT tenant_id, day, schedule_id, vendor, model, count(*)::int AS calls,
       trim_scale(coalesce(sum(cost), 0)) AS cost,
       trim_scale(coalesce(sum(reserved) FILTER (WHERE state = 'reserved'), 0)) AS reserved,
       trim_scale(coalesce(sum(reserved) FILTER (WHERE state = 'unknown'), 0)) AS unknown,
       (count(*) FILTER (WHERE NOT priced))::int AS unpriced,
       concat_ws('/', day, coalesce(schedule_id::text, '-'), vendor, model) AS id
FROM paid_calls GROUP BY tenant_id, day, schedule_id, vendor, model;
"""

# Not validated: every row fulfils the former condition, which is narrower, and a check of a large table would hold its
# lock for as long.
WAITING = """
ALTER TABLE items DROP CONSTRAINT items_postponed_cause_check,
    ADD CONSTRAINT items_postponed_cause_check CHECK (postponed_cause IN ('lease', 'postponed', 'budget')) NOT VALID;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (BUDGETS, LISTED, WAITING):
        connection.execute(part)  # type: ignore[union-attr]
