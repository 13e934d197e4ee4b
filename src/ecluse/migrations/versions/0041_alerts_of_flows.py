"""Alerts of every flow in one table, which was the one of pricing: of a record and measure at most one is open."""

from __future__ import annotations

from alembic import op

revision = "0041"
down_revision = "0040"

# A view takes the place of the table: servers of the version before list alerts until they are replaced.
ALERTS = """
ALTER TABLE pricing_alerts RENAME TO alerts;
ALTER TABLE alerts RENAME CONSTRAINT pricing_alerts_order TO alerts_order;
ALTER INDEX pricing_alerts_pkey RENAME TO alerts_pkey;
ALTER INDEX pricing_alerts_tenant RENAME TO alerts_tenant;
ALTER TABLE alerts ADD COLUMN flow text, ADD COLUMN record_id text, ADD COLUMN measure text;
UPDATE alerts SET flow = 'pricing', record_id = project_id::text, measure = CASE
    WHEN alert LIKE '%%Success Rate' THEN 'success rate' WHEN alert LIKE 'DLQ %%' THEN 'dead letters'
    WHEN alert = '429 Burst' THEN 'refusals' ELSE 'breaker' END;
ALTER TABLE alerts ALTER COLUMN flow SET NOT NULL, ALTER COLUMN record_id SET NOT NULL,
    ALTER COLUMN measure SET NOT NULL, DROP COLUMN project_id;
CREATE UNIQUE INDEX alerts_open ON alerts (flow, tenant_id, record_id, measure) WHERE cleared_at IS NULL;
CREATE INDEX alerts_record ON alerts (flow, tenant_id, record_id);
CREATE VIEW pricing_alerts AS
SELECT a.*, a.record_id::bigint AS project_id FROM alerts a WHERE a.flow = 'pricing';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(ALERTS.replace("%%", "%"))  # type: ignore[union-attr]
