"""A total says whether calls wait for what calls in flight hold of its budget: they are woken when there is room."""

from __future__ import annotations

from alembic import op

revision = "0050"
down_revision = "0049"

AWAITED = """
ALTER TABLE spend_totals ADD COLUMN awaited numeric;
COMMENT ON COLUMN spend_totals.awaited IS 'the least that a refused call may cost that waits for what calls in flight '
    'hold of the budget; NULL: none waits';
CREATE INDEX spend_totals_awaited ON spend_totals (tenant_id) WHERE awaited IS NOT NULL;
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(AWAITED)  # type: ignore[union-attr]
