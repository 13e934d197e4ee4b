"""Alerts and counters of pricing; endpoints of Slack and PagerDuty."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, validate

revision = "0032"
down_revision = "0031"

KINDS = "kind IN ('webhook', 'mail', 'slack', 'pagerduty')"
INDEXES = {
    "deliveries_incident": "deliveries (endpoint_id, dedup_key) WHERE dedup_key IS NOT NULL",
    "rule_runs_finished": "rule_runs (finished_at)",
    "rule_executions_counted": "rule_executions (counted_at)",
}
ENDPOINTS = f"""
ALTER TABLE notification_endpoints
    DROP CONSTRAINT IF EXISTS notification_endpoints_kind_check,
    DROP CONSTRAINT IF EXISTS notification_endpoints_where,
    ADD CONSTRAINT notification_endpoints_kind_check CHECK ({KINDS}),
    ADD CONSTRAINT notification_endpoints_where
        CHECK ((kind = 'mail') = (url IS NULL) AND (kind = 'mail') = (cardinality(addresses) > 0));
COMMENT ON TABLE notification_endpoints IS 'sealed in secrets: the signing secret of a webhook or the routing key of '
    'PagerDuty, as webhook:<id>; the signing secret before it, as webhook:<id>:old';
ALTER TABLE deliveries ADD COLUMN IF NOT EXISTS dedup_key text,
    DROP CONSTRAINT IF EXISTS deliveries_kind_check,
    ADD CONSTRAINT deliveries_kind_check CHECK ({KINDS}) NOT VALID;
COMMENT ON COLUMN deliveries.dedup_key IS 'of an alert: the same in the events that raise and clear it';
"""

ALERTS = """
CREATE TABLE IF NOT EXISTS pricing_alerts (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id  text NOT NULL,
    project_id bigint NOT NULL REFERENCES pricing_projects ON DELETE CASCADE,
    alert      text NOT NULL,
    severity   text NOT NULL CHECK (severity IN ('warning', 'critical')),
    summary    text NOT NULL,
    action     text NOT NULL,
    raised_at  timestamptz NOT NULL,
    cleared_at timestamptz,
    CONSTRAINT pricing_alerts_order CHECK (raised_at <= cleared_at)
);
CREATE UNIQUE INDEX IF NOT EXISTS pricing_alerts_open ON pricing_alerts (project_id, alert) WHERE cleared_at IS NULL;
CREATE INDEX IF NOT EXISTS pricing_alerts_tenant ON pricing_alerts (tenant_id, id);
CREATE INDEX IF NOT EXISTS pricing_alerts_project ON pricing_alerts (project_id);
"""

# Engine rows and, later, rule runs are deleted: what is counted of an execution is added to the counters after its end.
# A call for several targets that is refused with 429 leaves an attempt per target, stored in one commit: one refusal.
COUNTERS = """
CREATE TABLE IF NOT EXISTS pricing_counters (
    project_id bigint NOT NULL REFERENCES pricing_projects ON DELETE CASCADE,
    name       text NOT NULL,
    value      bigint NOT NULL,
    PRIMARY KEY (project_id, name)
);
COMMENT ON TABLE pricing_counters IS 'totals of executions that have ended, by flows/pricing/metrics.py';
ALTER TABLE rule_executions ADD COLUMN IF NOT EXISTS counted_at timestamptz;
COMMENT ON COLUMN rule_executions.counted_at IS 'null: not in pricing_counters yet';
CREATE OR REPLACE VIEW rule_refusals AS
SELECT x.run_id, a.at, i.group_key
FROM rule_executions x JOIN attempts a ON a.run_id = x.run_id AND (a.error_code = 'THROTTLED' OR a.http_status = 429)
JOIN items i ON i.id = a.item_id
GROUP BY x.run_id, a.at, i.group_key;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (ENDPOINTS, ALERTS, COUNTERS):
        connection.execute(part)  # type: ignore[union-attr]
    validate("deliveries", "deliveries_kind_check")
    build_indexes(INDEXES)
