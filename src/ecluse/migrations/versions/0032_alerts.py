"""Alerts of pricing; endpoints of Slack and PagerDuty; figures of the executions of rule runs."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, validate

revision = "0032"
down_revision = "0030"

KINDS = "kind IN ('webhook', 'mail', 'slack', 'pagerduty')"
INDEXES = {
    "deliveries_incident": "deliveries (endpoint_id, dedup_key) WHERE dedup_key IS NOT NULL",
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


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(ENDPOINTS)  # type: ignore[union-attr]
    validate("deliveries", "deliveries_kind_check")
    build_indexes(INDEXES)
