"""Replicas say what a call of each of their stages is: how many items it carries, and how many permits it takes."""

from __future__ import annotations

from alembic import op

revision = "0044"
down_revision = "0043"

CALLS = """
ALTER TABLE replicas
    ADD COLUMN batches integer[],
    ADD COLUMN permits integer[];
COMMENT ON COLUMN replicas.batches IS 'per entry of work: the most items of one call; NULL: 1 each';
COMMENT ON COLUMN replicas.permits IS 'per entry of work: permits that a call takes of its lane; NULL: 1 each';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(CALLS)  # type: ignore[union-attr]
