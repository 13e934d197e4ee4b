"""The audit trail says from which address a request came."""

from __future__ import annotations

from alembic import op

revision = "0046"
down_revision = "0045"

TRAIL = """
ALTER TABLE audit_trail ADD COLUMN address text;
COMMENT ON COLUMN audit_trail.address IS 'of the client, as a trusted proxy says it; NULL: not over HTTP, or older';

CREATE OR REPLACE VIEW trail AS
SELECT a.id, CASE a.tenant_id WHEN 'system' THEN 'default' ELSE a.tenant_id END AS tenant_id, a.at, a.actor,
       k.name AS actor_name, a.action, a.subject, a.reason, a.request_id, a.times, a.address
FROM audit_trail a LEFT JOIN api_keys k ON a.actor LIKE 'key:%' AND k.id::text = substr(a.actor, 5);
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(TRAIL)  # type: ignore[union-attr]
