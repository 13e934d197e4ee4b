"""Whoever claims from a lane with a cap takes the next turn there, so that one statement can tell whether it has seen
every claim before its own."""

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
