"""Lanes made at run time, one per credential: beneath which declared lane, whose, and whether still wanted."""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"

MADE = """
ALTER TABLE lanes
    ADD COLUMN base       text NOT NULL GENERATED ALWAYS AS (split_part(name, '/', 1)) STORED,
    ADD COLUMN tenant_id  text,
    ADD COLUMN retired_at timestamptz,
    ADD CONSTRAINT lanes_made CHECK (name <> split_part(name, '/', 1) OR num_nonnulls(tenant_id, retired_at) = 0);
COMMENT ON COLUMN lanes.base IS 'name of the declared lane that it is beneath; its own, if it is declared';
COMMENT ON COLUMN lanes.tenant_id IS 'owner; NULL: shared by all tenants';
COMMENT ON COLUMN lanes.retired_at IS 'no longer wanted: removed once no item points at it';
"""

# As before, and a lane of a tenant is listed for that tenant only, with all that is known of it.
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
       l.tenant_id AS owner
FROM tenants t JOIN lanes l ON l.tenant_id IS NULL OR l.tenant_id = t.id;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (MADE, LISTED):
        connection.execute(part)  # type: ignore[union-attr]
