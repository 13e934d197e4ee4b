"""Batches of items in one call, and the pace of a lane: what its vendor has said of its budget, and a temporary
factor."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0026"

BATCHES = """
ALTER TABLE claims ALTER COLUMN lane_id DROP NOT NULL;
COMMENT ON COLUMN claims.lane_id IS 'NULL: items written in the call of another claim, which counts for the caps';
CREATE INDEX items_mates ON items (run_id, stage, group_key) WHERE claim_id IS NULL AND group_key IS NOT NULL;
"""

PACES = """
ALTER TABLE lanes
    ADD COLUMN vendor_cost       double precision CHECK (vendor_cost > 0),
    ADD COLUMN vendor_per_second double precision CHECK (vendor_per_second > 0),
    ADD COLUMN slowed_to         double precision CHECK (slowed_to > 0 AND slowed_to < 1),
    ADD COLUMN slowed_until      timestamptz,
    ADD COLUMN slowed_reason     text,
    ADD CONSTRAINT lanes_slowed CHECK (num_nulls(slowed_to, slowed_until, slowed_reason) IN (0, 3));
COMMENT ON COLUMN lanes.vendor_cost IS 'mean cost of a call, in the units of the vendor''s budget, as its answers say';
COMMENT ON COLUMN lanes.vendor_per_second IS 'calls a second that the vendor''s budget pays for, as its answers say';
COMMENT ON COLUMN lanes.slowed_to IS 'share of the rate that is used until slowed_until';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (BATCHES, PACES):
        connection.execute(part)  # type: ignore[union-attr]
