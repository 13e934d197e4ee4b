"""Pricing: the pages of a catalogue that a preview has read so far, so that it goes on after an error where it was."""

from __future__ import annotations

from alembic import op

revision = "0040"
down_revision = "0037"

PAGES = """
CREATE TABLE rule_pages (
    rule_run_id bigint NOT NULL REFERENCES rule_runs ON DELETE CASCADE,
    number      integer NOT NULL CHECK (number >= 0),
    tag         integer NOT NULL CHECK (tag >= 0),
    cursor      text,
    variants    json NOT NULL,
    PRIMARY KEY (rule_run_id, number)
);
COMMENT ON TABLE rule_pages IS 'deleted when the preview has ended';
COMMENT ON COLUMN rule_pages.tag IS 'of the page after this one: the place of its tag in the rule, and its cursor';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(PAGES)  # type: ignore[union-attr]
