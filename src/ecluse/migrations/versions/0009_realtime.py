"""Realtime: an app of the Pusher protocol per tenant, and the channels that have subscribers at each replica."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"

# Subscriptions are only of use while they last: unlogged tables, which replicas fill again after a database crash.
REALTIME = """
CREATE TABLE realtime_apps (
    tenant_id  text PRIMARY KEY REFERENCES tenants,
    app_id     bigint GENERATED ALWAYS AS IDENTITY (START WITH 1001) UNIQUE,
    key        text NOT NULL UNIQUE,
    created_at timestamptz NOT NULL
);
COMMENT ON TABLE realtime_apps IS 'its secret is sealed in secrets, under the name pusher';

CREATE UNLOGGED TABLE realtime_replicas (
    replica_id text PRIMARY KEY,
    seen_at    timestamptz NOT NULL
);
COMMENT ON TABLE realtime_replicas IS 'processes to listen at; the table replicas has no row of those that only answer';

CREATE UNLOGGED TABLE realtime_interests (
    replica_id text NOT NULL REFERENCES realtime_replicas ON DELETE CASCADE,
    tenant_id  text NOT NULL,
    channel    text NOT NULL,
    listeners  integer NOT NULL,
    PRIMARY KEY (replica_id, tenant_id, channel)
);
CREATE INDEX realtime_interests_of_tenants ON realtime_interests (tenant_id, channel);
COMMENT ON TABLE realtime_interests IS 'ephemeral events are passed on to other replicas only where somebody listens';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(REALTIME)  # type: ignore[union-attr]
