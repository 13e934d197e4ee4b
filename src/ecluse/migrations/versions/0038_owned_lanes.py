"""A declared lane may have an owner: the lanes of the environment's connections are those of the tenant `default`."""

from __future__ import annotations

from alembic import op

revision = "0038"
down_revision = "0037"

OWNED = """
ALTER TABLE lanes DROP CONSTRAINT lanes_made,
    ADD CONSTRAINT lanes_made CHECK (name <> split_part(name, '/', 1) OR retired_at IS NULL);
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(OWNED)  # type: ignore[union-attr]
