"""Lanes with rate, hold, breaker and pause; the order of waiting items, separate from their due time; roles, stages and
worker slots of a replica."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import update_in_batches, validate

revision = "0003"
down_revision = "0002"

LANES = """
ALTER TABLE lanes
    ADD COLUMN spacing        interval GENERATED ALWAYS AS (interval '1 second' / (per_second * 0.98)) STORED,
    ADD COLUMN break_after    integer CHECK (break_after > 0),
    ADD COLUMN break_for      interval,
    ADD COLUMN failures       integer NOT NULL DEFAULT 0,
    ADD COLUMN paused_at      timestamptz,
    ADD COLUMN paused_by      text,
    ADD COLUMN paused_reason  text,
    ADD CONSTRAINT lanes_breaker CHECK ((break_after IS NULL) = (break_for IS NULL)),
    ADD CONSTRAINT lanes_paused CHECK ((paused_at IS NULL) = (paused_reason IS NULL)),
    ADD CONSTRAINT lanes_held CHECK (held_until IS NULL OR held_reason IS NOT NULL);
COMMENT ON COLUMN lanes.spacing IS
    'between calls, 2 % under the rate: what leaves evenly arrives unevenly, and no window may overflow over there';
COMMENT ON COLUMN lanes.held_until IS 'nothing starts before: a Retry-After, or an open breaker';
COMMENT ON COLUMN lanes.failures IS 'calls in a row that failed in a way the breaker counts, over all replicas';
COMMENT ON COLUMN lanes.paused_reason IS 'an operator paused it: nothing starts until somebody resumes it';
"""

# A default in ADD COLUMN, and NOT NULL without a validated constraint, would lock the table for as long as all rows are
# rewritten, or read.
ORDER = """
ALTER TABLE items ADD COLUMN IF NOT EXISTS order_at timestamptz;
ALTER TABLE items ALTER COLUMN order_at SET DEFAULT ecluse_now();
"""
GIVEN = """
ALTER TABLE items DROP CONSTRAINT IF EXISTS items_order_given,
    ADD CONSTRAINT items_order_given CHECK (order_at IS NOT NULL) NOT VALID
"""
ORDERED = """
ALTER TABLE items ALTER COLUMN order_at SET NOT NULL, DROP CONSTRAINT items_order_given;
DROP INDEX items_waiting;
COMMENT ON COLUMN items.order_at IS 'place in line: the enqueue instant minus the priority bonus; a retry keeps it';
COMMENT ON COLUMN items.due_at IS 'not before';
"""

REPLICAS = """
ALTER TABLE replicas
    ADD COLUMN roles text[] NOT NULL DEFAULT '{}',
    ADD COLUMN work  text[] NOT NULL DEFAULT '{}',
    ADD COLUMN hands integer NOT NULL DEFAULT 0;
COMMENT ON COLUMN replicas.work IS 'flow/stage names that its worker can do';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(ORDER)  # type: ignore[union-attr]
    update_in_batches("items", "order_at = due_at")
    connection.execute(GIVEN)  # type: ignore[union-attr]
    validate("items", "items_order_given")
    for part in (ORDERED, LANES, REPLICAS):
        connection.execute(part)  # type: ignore[union-attr]
