"""Turn counter of lanes with a cap: each claim increments it, so that a claim statement can tell whether its snapshot
includes every earlier claim."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"

TURNS = """
ALTER TABLE lanes ADD COLUMN turn bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN lanes.turn IS 'of a lane with a cap: how often it was claimed from';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(TURNS)  # type: ignore[union-attr]
