"""Pricing: the pages of a catalogue that a preview has read so far, so that it goes on after an error where it was. And
the changes of a rule run itself are found without reading those of its targets."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes

revision = "0040"
down_revision = "0039"

INDEXES = {"rule_history_of_runs": "rule_history (rule_run_id, id) WHERE rule_target_id IS NULL"}
PAGES = """
CREATE TABLE IF NOT EXISTS rule_pages (
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
    build_indexes(INDEXES)
