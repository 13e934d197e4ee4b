"""Connections of tenants to vendors. The settings of the environment are those of the tenant default from now on: other
tenants need connections of their own, which only they can give."""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"

CONNECTIONS = """
CREATE TABLE connections (
    tenant_id     text NOT NULL REFERENCES tenants,
    kind          text NOT NULL CHECK (kind IN ('crm', 'speech', 'llm')),
    base_url      text NOT NULL,
    model         text,
    max_in_flight integer CHECK (max_in_flight > 0),
    per_minute    double precision CHECK (per_minute > 0),
    api_key_ends  text,
    created_by    text NOT NULL,
    created_at    timestamptz NOT NULL,
    updated_by    text NOT NULL,
    updated_at    timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, kind),
    CONSTRAINT connections_model CHECK (model IS NULL OR kind = 'llm')
);
COMMENT ON TABLE connections IS 'the API key is sealed in secrets, as connection:<kind>';
COMMENT ON COLUMN connections.model IS 'for audits whose config names none';
COMMENT ON COLUMN connections.max_in_flight IS 'of each lane of the connection; NULL: as the lane of the flow';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(CONNECTIONS)  # type: ignore[union-attr]
