"""Evidence against an item that may kill its workers: when the first worker died with it in flight (deaths are compared
from then on), deaths while it ran in a small group, and while it ran alone. Endpoints lose `rotated_at`: the old secret
has that time itself."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import validate

revision = "0020"
down_revision = "0019"

SUSPECTS = """
ALTER TABLE items
    ADD COLUMN first_crash_at timestamptz,
    ADD COLUMN group_deaths   smallint NOT NULL DEFAULT 0,
    ADD COLUMN solo_deaths    smallint NOT NULL DEFAULT 0,
    ADD COLUMN suspicion      smallint NOT NULL DEFAULT 0;
DROP INDEX IF EXISTS items_suspect;
COMMENT ON COLUMN items.crashes IS 'workers that died with it in hand, whatever else they had in hand';
COMMENT ON COLUMN items.first_crash_at IS 'when the first of them was declared dead: deaths are compared from then on';
COMMENT ON COLUMN items.group_deaths IS 'workers that died while it ran in a small group of suspects';
COMMENT ON COLUMN items.solo_deaths IS 'workers that died while it ran alone';
COMMENT ON COLUMN items.suspicion IS '0: none; 1, 2: runs in small groups; 3: runs alone; 4, 5: is not run again';
"""

APART = """
ALTER TABLE claims
    ADD COLUMN IF NOT EXISTS apart text,
    DROP CONSTRAINT IF EXISTS claims_apart_check,
    ADD CONSTRAINT claims_apart_check CHECK (apart IN ('group', 'alone')) NOT VALID;
COMMENT ON COLUMN claims.apart IS 'taken to find out which item kills its workers: a group of suspects, or one alone';
"""

ENDPOINTS = "ALTER TABLE notification_endpoints DROP COLUMN rotated_at"


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(APART)  # type: ignore[union-attr]
    validate("claims", "claims_apart_check")
    for part in (SUSPECTS, ENDPOINTS):
        connection.execute(part)  # type: ignore[union-attr]
