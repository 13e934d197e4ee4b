"""Columns that explain why a run waits: why an item was postponed, when a claim last finished an item, when a gate
opens its next round; and an index of the waiting items of a run."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import validate

revision = "0016"
down_revision = "0015"

ITEMS = """
ALTER TABLE items
    ADD COLUMN IF NOT EXISTS postponed_cause text,
    ADD COLUMN IF NOT EXISTS postponed_why   text,
    DROP CONSTRAINT IF EXISTS items_postponed_cause_check,
    DROP CONSTRAINT IF EXISTS items_postponed,
    ADD CONSTRAINT items_postponed_cause_check CHECK (postponed_cause IN ('lease', 'postponed')) NOT VALID,
    ADD CONSTRAINT items_postponed CHECK ((postponed_cause IS NULL) = (postponed_why IS NULL)) NOT VALID;
-- `items_waiting` says the same of a lane; what a claim takes leaves both, and finishing an item touches neither
COMMENT ON COLUMN items.postponed_why IS 'what its last execution waits for until due_at; NULL once it has run';
"""

WAITING = """
ALTER TABLE claims ADD COLUMN done_at timestamptz;
COMMENT ON COLUMN claims.done_at IS 'when one of its items was last done or ignored';

ALTER TABLE stages ADD COLUMN next_round_at timestamptz;
COMMENT ON COLUMN stages.next_round_at IS 'the gate opens another round then for what failed, unless something is done';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(ITEMS)  # type: ignore[union-attr]
    for name in ("items_postponed_cause_check", "items_postponed"):
        validate("items", name)
    connection.execute(WAITING)  # type: ignore[union-attr]
