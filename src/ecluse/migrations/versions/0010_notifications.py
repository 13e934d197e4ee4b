"""Who wants to be told what, by webhook or mail, and what became of each telling."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"

NOTIFICATIONS = """
CREATE TABLE notification_endpoints (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    kind        text NOT NULL CHECK (kind IN ('webhook', 'mail')),
    url         text,
    addresses   text[] NOT NULL DEFAULT '{}',
    events      text[] NOT NULL,
    description text,
    is_active   boolean NOT NULL DEFAULT true,
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    CONSTRAINT notification_endpoints_where CHECK ((kind = 'webhook') = (url IS NOT NULL))
);
CREATE INDEX notification_endpoints_tenant ON notification_endpoints (tenant_id, id);
COMMENT ON TABLE notification_endpoints IS 'the signing secret of a webhook is sealed in secrets, as webhook:<id>';

CREATE TABLE deliveries (
    run_id      bigint PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    tenant_id   text NOT NULL,
    endpoint_id bigint REFERENCES notification_endpoints ON DELETE SET NULL,
    kind        text NOT NULL CHECK (kind IN ('webhook', 'mail')),
    recipient   text NOT NULL,
    event_key   text NOT NULL,
    event_type  text NOT NULL,
    about_run   bigint,
    message     jsonb NOT NULL,
    created_at  timestamptz NOT NULL
);
CREATE INDEX deliveries_tenant ON deliveries (tenant_id, run_id);
COMMENT ON TABLE deliveries IS 'one run of the notifications flow each: its state, attempts and errors are the run''s';
COMMENT ON COLUMN deliveries.event_key IS 'of what is told: the id a receiver sees, the same on every attempt';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(NOTIFICATIONS)  # type: ignore[union-attr]
