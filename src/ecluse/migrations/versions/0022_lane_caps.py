"""Caps of lanes that an operator sets at run time: they replace what the flows declare until they are cleared. The
columns that claims read stay the caps in force. And what administrators have asked a scheduler to do."""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"

CAPS = """
ALTER TABLE lanes
    ADD COLUMN declared_max_in_flight integer,
    ADD COLUMN declared_max_per_key   integer,
    ADD COLUMN declared_per_second    double precision,
    ADD COLUMN declared_burst         integer,
    ADD COLUMN heaviest               integer NOT NULL DEFAULT 1 CHECK (heaviest > 0),
    ADD COLUMN set_max_in_flight      integer CHECK (set_max_in_flight > 0),
    ADD COLUMN set_max_per_key        integer CHECK (set_max_per_key > 0),
    ADD COLUMN set_per_second         double precision CHECK (set_per_second > 0),
    ADD COLUMN set_burst              integer CHECK (set_burst > 0);
UPDATE lanes SET declared_max_in_flight = max_in_flight, declared_max_per_key = max_per_key,
    declared_per_second = per_second, declared_burst = burst;
COMMENT ON COLUMN lanes.max_in_flight IS 'in force: what an operator has set, or else what the flows declare';
COMMENT ON COLUMN lanes.set_max_in_flight IS 'set by an operator; NULL: as the flows declare';
COMMENT ON COLUMN lanes.heaviest IS 'weight of the heaviest call; the burst in force is lowered by it';
"""

# A row per tenant and lane: a tenant sees how many items of its own wait, and of others only that they share the lane.
# The default tenant is the operators': the other tenants see neither the operator nor the vendor's words.
LISTED = """
CREATE VIEW lane_list AS
SELECT t.id AS tenant_id, l.name, l.max_in_flight, l.max_per_key, l.per_second,
       coalesce(l.set_burst, l.declared_burst, l.burst) AS burst,
       jsonb_strip_nulls(jsonb_build_object('max_in_flight', l.set_max_in_flight, 'max_per_key', l.set_max_per_key,
           'per_second', l.set_per_second, 'burst', l.set_burst)) AS overrides,
       l.paused_at, CASE WHEN t.id = 'default' THEN l.paused_by END AS paused_by, l.paused_reason, l.clock_stopped_at,
       CASE WHEN l.held_until > ecluse_now() THEN l.held_until END AS held_until,
       CASE WHEN l.held_until > ecluse_now() AND t.id = 'default' THEN l.held_reason END AS held_reason,
       CASE WHEN l.trips > 0 THEN l.failing_since END AS down_since,
       CASE WHEN t.id = 'default' THEN l.last_failure END AS last_failure,
       (SELECT coalesce(sum(c.in_flight), 0)::int FROM claims c JOIN runs r ON r.id = c.run_id
        WHERE c.lane_id = l.id AND c.in_flight > 0 AND r.tenant_id = t.id) AS in_flight,
       (SELECT count(*)::int FROM items i WHERE i.lane_id = l.id AND i.tenant_id = t.id AND i.claim_id IS NULL)
           AS waiting,
       EXISTS (SELECT 1 FROM items i WHERE i.lane_id = l.id AND i.tenant_id < t.id AND i.claim_id IS NULL)
       OR EXISTS (SELECT 1 FROM items i WHERE i.lane_id = l.id AND i.tenant_id > t.id AND i.claim_id IS NULL)
       OR EXISTS (SELECT 1 FROM claims c JOIN runs r ON r.id = c.run_id
                  WHERE c.lane_id = l.id AND c.in_flight > 0 AND r.tenant_id <> t.id) AS shared
FROM tenants t CROSS JOIN lanes l;
"""

MAINTENANCE = """
CREATE TABLE maintenance (
    what     text NOT NULL CHECK (what IN ('prune', 'erase tenant')),
    subject  text NOT NULL,
    asked_by text NOT NULL,
    asked_at timestamptz NOT NULL,
    PRIMARY KEY (what, subject)
);
COMMENT ON TABLE maintenance IS 'asked for over HTTP, done by a scheduler in batches; a row is deleted once it is done';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (CAPS, LISTED, MAINTENANCE):
        connection.execute(part)  # type: ignore[union-attr]
