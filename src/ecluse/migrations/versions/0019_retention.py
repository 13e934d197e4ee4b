"""Retention and erasure: records of what was deleted, indexes that find old rows, reasons that may be erased."""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"

MARKS = """
CREATE TABLE pruned (
    kind    text PRIMARY KEY,
    before  timestamptz NOT NULL,
    highest bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE pruned IS 'rows of this kind that are older than `before` may have been deleted by retention';
COMMENT ON COLUMN pruned.highest IS 'of leases: the highest number among those deleted; the next number of a key that '
    'without a row is higher';

CREATE TABLE pruned_runs (
    schedule_id bigint NOT NULL,
    status      text NOT NULL,
    runs        bigint NOT NULL,
    PRIMARY KEY (schedule_id, status)
);
COMMENT ON TABLE pruned_runs IS 'runs of a schedule that retention has deleted, by how they ended';

CREATE TABLE pruning (
    run_id bigint PRIMARY KEY
);
COMMENT ON TABLE pruning IS 'deleted runs whose items, claims, outcomes … are being deleted in batches';
"""

ERASURE = """
ALTER TABLE transcription_runs ADD COLUMN erased_at timestamptz;
ALTER TABLE automation_run_fiches ADD COLUMN erased_at timestamptz, ADD COLUMN erased_audits integer;
COMMENT ON COLUMN transcription_runs.erased_at IS 'when the recordings and transcripts of its fiche were erased';
COMMENT ON COLUMN automation_run_fiches.erased_at IS 'when the fiche was erased, with as many audits of this run as '
    '`erased_audits` says';

-- The outcomes of an ended run are final; only a reason may be replaced by '[erased]'.
CREATE OR REPLACE FUNCTION outcomes_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    affected bigint[] := (SELECT array_agg(DISTINCT run_id) FROM touched);
    ended bigint;
BEGIN
    PERFORM 1 FROM runs WHERE id = ANY(affected) ORDER BY id FOR SHARE;
    SELECT id INTO ended FROM runs WHERE id = ANY(affected) AND ended_at IS NOT NULL LIMIT 1;
    IF FOUND AND NOT (TG_OP = 'UPDATE' AND current_setting('ecluse.erasing', true) = 'on' AND NOT EXISTS (
        SELECT 1 FROM touched WHERE reason IS DISTINCT FROM '[erased]'))
    THEN
        RAISE EXCEPTION 'outcomes of run % are final: it has ended', ended
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (MARKS, ERASURE):
        connection.execute(part)  # type: ignore[union-attr]
