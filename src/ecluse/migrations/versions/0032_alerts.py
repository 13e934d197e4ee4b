"""Alerts of pricing; endpoints of Slack and PagerDuty; figures of the executions of rule runs."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, validate

revision = "0032"
down_revision = "0031"

KINDS = "kind IN ('webhook', 'mail', 'slack', 'pagerduty')"
INDEXES = {
    "deliveries_incident": "deliveries (endpoint_id, dedup_key) WHERE dedup_key IS NOT NULL",
    "rule_runs_finished": "rule_runs (finished_at)",
    "rule_executions_measured": "rule_executions (measured_at)",
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

# Engine rows are deleted earlier than rule runs, so what is counted in them is stored after the end of an execution.
# A call for several targets that is refused with 429 leaves an attempt per target, stored in one commit: one refusal.
FIGURES = """
ALTER TABLE rule_executions
    ADD COLUMN IF NOT EXISTS applies     bigint,
    ADD COLUMN IF NOT EXISTS retries     bigint,
    ADD COLUMN IF NOT EXISTS throttled   bigint,
    ADD COLUMN IF NOT EXISTS duration_ms bigint,
    ADD COLUMN IF NOT EXISTS measured_at timestamptz;
COMMENT ON COLUMN rule_executions.measured_at IS 'null: its figures are those of the engine run';
CREATE OR REPLACE VIEW rule_refusals AS
SELECT x.run_id, a.at, i.group_key
FROM rule_executions x JOIN attempts a ON a.run_id = x.run_id AND (a.error_code = 'THROTTLED' OR a.http_status = 429)
JOIN items i ON i.id = a.item_id
GROUP BY x.run_id, a.at, i.group_key;
CREATE OR REPLACE VIEW rule_execution_figures AS
SELECT x.run_id, r.project_id, x.applies, x.retries, x.throttled, x.duration_ms, true AS is_final
FROM rule_executions x JOIN rule_runs r ON r.id = x.rule_run_id WHERE x.measured_at IS NOT NULL
UNION ALL
SELECT x.run_id, r.project_id, sent.applies, sent.retries,
       (SELECT count(*) FROM rule_refusals f WHERE f.run_id = x.run_id) AS throttled,
       CASE x.kind WHEN 'apply' THEN floor(extract(epoch FROM e.ended_at - e.created_at) * 1000)::bigint END,
       e.id IS NULL OR e.ended_at IS NOT NULL
FROM rule_executions x JOIN rule_runs r ON r.id = x.rule_run_id LEFT JOIN runs e ON e.id = x.run_id
CROSS JOIN LATERAL (
    SELECT coalesce(sum(i.executions), 0) AS applies, coalesce(sum(greatest(i.executions - 1, 0)), 0) AS retries
    FROM items i WHERE i.run_id = x.run_id AND x.kind = 'apply') sent
WHERE x.measured_at IS NULL;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (ENDPOINTS, ALERTS, FIGURES):
        connection.execute(part)  # type: ignore[union-attr]
    validate("deliveries", "deliveries_kind_check")
    build_indexes(INDEXES)
