"""Batches of items in one call, and the pace of a lane: what its vendor has said of its budget, and a temporary
factor."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes

revision = "0029"
down_revision = "0028"

INDEXES = {
    "items_mates": "items (run_id, stage, group_key) WHERE claim_id IS NULL AND group_key IS NOT NULL",
}
BATCHES = """
ALTER TABLE claims ALTER COLUMN lane_id DROP NOT NULL;
COMMENT ON COLUMN claims.lane_id IS 'NULL: items written in the call of another claim, which counts for the caps';
"""

PACES = """
ALTER TABLE lanes
    ADD COLUMN vendor_per_second double precision CHECK (vendor_per_second > 0),
    ADD COLUMN slowed_to         double precision CHECK (slowed_to > 0 AND slowed_to < 1),
    ADD COLUMN slowed_until      timestamptz,
    ADD COLUMN slowed_reason     text,
    ADD CONSTRAINT lanes_slowed CHECK (num_nulls(slowed_to, slowed_until, slowed_reason) IN (0, 3));
COMMENT ON COLUMN lanes.vendor_per_second IS 'calls a second that the vendor''s budget pays for, as its answers say';
COMMENT ON COLUMN lanes.slowed_to IS 'share of the rate that is used until slowed_until';
"""

# As before, with the pace.
LISTED = """
CREATE OR REPLACE VIEW lane_list AS
SELECT t.id AS tenant_id, l.name, l.max_in_flight, l.max_per_key, l.per_second,
       coalesce(l.set_burst, l.declared_burst, l.burst) AS burst,
       jsonb_strip_nulls(jsonb_build_object('max_in_flight', l.set_max_in_flight, 'max_per_key', l.set_max_per_key,
           'per_second', l.set_per_second, 'burst', l.set_burst)) AS overrides,
       l.paused_at, CASE WHEN t.id IN ('default', l.tenant_id) THEN l.paused_by END AS paused_by, l.paused_reason,
       l.clock_stopped_at,
       CASE WHEN l.held_until > ecluse_now() THEN l.held_until END AS held_until,
       CASE WHEN l.held_until > ecluse_now() AND t.id IN ('default', l.tenant_id) THEN l.held_reason END AS held_reason,
       CASE WHEN l.trips > 0 THEN l.failing_since END AS down_since,
       CASE WHEN t.id IN ('default', l.tenant_id) THEN l.last_failure END AS last_failure,
       (SELECT coalesce(sum(c.in_flight), 0)::int FROM claims c JOIN runs r ON r.id = c.run_id
        WHERE c.lane_id = l.id AND c.in_flight > 0 AND r.tenant_id = t.id) AS in_flight,
       (SELECT count(*)::int FROM items i WHERE i.lane_id = l.id AND i.tenant_id = t.id AND i.claim_id IS NULL)
           AS waiting,
       EXISTS (SELECT 1 FROM items i WHERE i.lane_id = l.id AND i.tenant_id < t.id AND i.claim_id IS NULL)
       OR EXISTS (SELECT 1 FROM items i WHERE i.lane_id = l.id AND i.tenant_id > t.id AND i.claim_id IS NULL)
       OR EXISTS (SELECT 1 FROM claims c JOIN runs r ON r.id = c.run_id
                  WHERE c.lane_id = l.id AND c.in_flight > 0 AND r.tenant_id <> t.id) AS shared,
       l.tenant_id AS owner, l.vendor_per_second, l.slowed_to, l.slowed_until,
       CASE WHEN t.id IN ('default', l.tenant_id) THEN l.slowed_reason END AS slowed_reason
FROM tenants t JOIN lanes l ON l.tenant_id IS NULL OR l.tenant_id = t.id;
"""


def upgrade() -> None:
    build_indexes(INDEXES)
    connection = op.get_bind().connection.driver_connection
    for part in (BATCHES, PACES, LISTED):
        connection.execute(part)  # type: ignore[union-attr]
