"""The table of notes."""

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.execute("CREATE TABLE notes (id bigserial PRIMARY KEY, tenant_id text NOT NULL, text text NOT NULL)")
