"""Leases, one row per holding, and the outbox of events."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

LEASES = """
CREATE TABLE leases (
    tenant_id   text NOT NULL,
    key         text NOT NULL,
    fence       bigint NOT NULL,
    token       uuid NOT NULL DEFAULT gen_random_uuid(),
    owner       text NOT NULL,
    run_id      bigint,
    replica_id  text,
    attempt     integer NOT NULL DEFAULT 1,
    ttl         interval CHECK (ttl > '0'),
    acquired_at timestamptz NOT NULL,
    expires_at  timestamptz,
    ended_at    timestamptz,
    end_cause   text CHECK (end_cause IN ('released', 'expired', 'forced', 'run ended')),
    reason      text,
    ended_by    text,
    PRIMARY KEY (tenant_id, key, fence),
    CONSTRAINT leases_holder CHECK (num_nonnulls(run_id, ttl) = 1 AND (ttl IS NULL) = (expires_at IS NULL)),
    CONSTRAINT leases_end CHECK ((ended_at IS NULL) = (end_cause IS NULL)),
    CONSTRAINT leases_forced CHECK (end_cause IS DISTINCT FROM 'forced' OR reason IS NOT NULL)
);
CREATE UNIQUE INDEX leases_held ON leases (tenant_id, key) WHERE ended_at IS NULL;
CREATE INDEX leases_of_runs ON leases (run_id) WHERE ended_at IS NULL AND run_id IS NOT NULL;
CREATE INDEX leases_of_processes ON leases (replica_id) WHERE ended_at IS NULL AND run_id IS NULL;
COMMENT ON TABLE leases IS 'one row per holding; at most one per key has no end, and that one holds';
COMMENT ON COLUMN leases.fence IS 'strictly growing per key: whoever holds an older number cannot write';
COMMENT ON COLUMN leases.run_id IS 'held by a run, for as long as it is open; otherwise by a process, for its ttl';
COMMENT ON COLUMN leases.attempt IS 'one more than before when the former holder expired without releasing';
"""

OUTBOX = """
CREATE SEQUENCE events_published;
CREATE TABLE events_outbox (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id      text NOT NULL,
    event_key      text NOT NULL,
    event_type     text NOT NULL,
    aggregate      text NOT NULL,
    correlation_id text NOT NULL,
    producer       text NOT NULL,
    occurred_at    timestamptz NOT NULL,
    payload        jsonb NOT NULL DEFAULT '{}',
    tries          integer NOT NULL DEFAULT 0,
    try_at         timestamptz NOT NULL DEFAULT '-infinity',
    error          text,
    published_seq  bigint UNIQUE,
    published_at   timestamptz,
    CONSTRAINT events_outbox_fields CHECK
        ('' NOT IN (tenant_id, event_key, event_type, aggregate, correlation_id, producer)),
    CONSTRAINT events_outbox_key UNIQUE (tenant_id, event_key),
    CONSTRAINT events_outbox_published CHECK ((published_seq IS NULL) = (published_at IS NULL))
);
CREATE INDEX events_outbox_unpublished ON events_outbox (id) WHERE published_seq IS NULL;
CREATE INDEX events_outbox_of_tenants ON events_outbox (tenant_id, published_seq) WHERE published_seq IS NOT NULL;
CREATE INDEX events_outbox_failing ON events_outbox (tenant_id, aggregate, id)
    WHERE published_seq IS NULL AND tries > 0;
COMMENT ON TABLE events_outbox IS 'what must be told, written in the transaction that made it true';
COMMENT ON COLUMN events_outbox.aggregate IS 'events of one aggregate are published in the order of their ids';
COMMENT ON COLUMN events_outbox.try_at IS 'not before, nor anything later of its aggregate: a sink did not take it';
COMMENT ON COLUMN events_outbox.published_seq IS 'drawn by the publisher: readers keep their place by it, not by id';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (LEASES, OUTBOX):
        connection.execute(part)  # type: ignore[union-attr]
