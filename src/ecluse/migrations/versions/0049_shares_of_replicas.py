"""Replicas say which share of their worker slots, and of the runs that they lead, one tenant may use: why a call or a
run waits is computed from it."""

from __future__ import annotations

from alembic import op

revision = "0049"
down_revision = "0048"

SHARES = """
ALTER TABLE replicas ADD COLUMN tenant_share float8;
COMMENT ON COLUMN replicas.tenant_share IS 'one tenant''s share of its slots and of the runs that it leads; NULL: 1';
CREATE FUNCTION share_left(share float8, most bigint, held bigint, others bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(1, floor(coalesce(share, 1) * (most - others))::bigint) - held
$$;
COMMENT ON FUNCTION share_left IS 'how many more of `most` a tenant may take that holds `held` of them, while '
    'all others hold `others` (engine/model/shares.py)';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(SHARES)  # type: ignore[union-attr]
