"""Notification endpoints (webhook or mail) with their events, and the deliveries to them."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"

NOTIFICATIONS = """
CREATE TABLE notification_endpoints (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id       text NOT NULL REFERENCES tenants,
    kind            text NOT NULL CHECK (kind IN ('webhook', 'mail')),
    url             text,
    addresses       text[] NOT NULL DEFAULT '{}',
    events          text[] NOT NULL,
    description     text,
    is_active       boolean NOT NULL DEFAULT true,
    disabled_reason text,
    rotated_at      timestamptz,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    CONSTRAINT notification_endpoints_where CHECK ((kind = 'webhook') = (url IS NOT NULL)
        AND (kind = 'mail') = (cardinality(addresses) > 0)),
    CONSTRAINT notification_endpoints_disabled CHECK (disabled_reason IS NULL OR NOT is_active)
);
CREATE INDEX notification_endpoints_tenant ON notification_endpoints (tenant_id, id);
COMMENT ON TABLE notification_endpoints IS
    'the signing secret of a webhook is sealed in secrets, as webhook:<id>; the one before it as webhook:<id>:old';
COMMENT ON COLUMN notification_endpoints.disabled_reason IS 'why we switched it off ourselves; NULL if people did';
COMMENT ON COLUMN notification_endpoints.rotated_at IS 'for a day after this, the old secret signs as well';

CREATE TABLE deliveries (
    run_id      bigint PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    tenant_id   text NOT NULL,
    endpoint_id bigint,
    kind        text NOT NULL CHECK (kind IN ('webhook', 'mail')),
    recipient   text NOT NULL,
    secret_name text,
    event_key   text NOT NULL,
    event_type  text NOT NULL,
    about_run   bigint,
    message     jsonb NOT NULL,
    created_at  timestamptz NOT NULL,
    sending_at  timestamptz,
    sent_at     timestamptz
);
CREATE INDEX deliveries_tenant ON deliveries (tenant_id, run_id);
CREATE INDEX deliveries_endpoint ON deliveries (endpoint_id, run_id);
COMMENT ON TABLE deliveries IS 'one run of the notifications flow each: its state, attempts and errors are the run''s';
COMMENT ON COLUMN deliveries.endpoint_id IS 'stays when the endpoint is deleted; NULL: told to a recipient directly';
COMMENT ON COLUMN deliveries.event_key IS 'of what is told: the id a receiver sees is made of it, once and for all';
COMMENT ON COLUMN deliveries.sending_at IS
    'of a mail: its text has been handed to the server, which has not refused it for sure; never handed over again';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(NOTIFICATIONS)  # type: ignore[union-attr]
