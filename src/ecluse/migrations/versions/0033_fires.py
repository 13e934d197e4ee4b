"""Schedules of flows that fire their due instants themselves: a slot names a run or the flow's reference, or has
failed; names are unique per flow, or not at all; due schedules are found tenant by tenant."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, validate

revision = "0033"
down_revision = "0032"

COLUMNS = """
ALTER TABLE schedules ADD COLUMN IF NOT EXISTS unique_name boolean NOT NULL DEFAULT true;
ALTER TABLE schedules DROP CONSTRAINT IF EXISTS schedules_overlap_check;
ALTER TABLE schedules ADD CONSTRAINT schedules_overlap_check CHECK (overlap IN ('wait', 'allow', 'skip'));
COMMENT ON COLUMN schedules.unique_name IS 'false: other schedules of its tenant and flow may have the same name';

ALTER TABLE schedule_slots ADD COLUMN IF NOT EXISTS reference text;
ALTER TABLE schedule_slots DROP CONSTRAINT IF EXISTS schedule_slots_state_check;
ALTER TABLE schedule_slots ADD CONSTRAINT schedule_slots_state_check
    CHECK (state IN ('fired', 'waiting', 'skipped', 'missed', 'failed')) NOT VALID;
ALTER TABLE schedule_slots DROP CONSTRAINT IF EXISTS schedule_slots_run;
ALTER TABLE schedule_slots ADD CONSTRAINT schedule_slots_run
    CHECK (num_nonnulls(run_id, reference) = CASE WHEN state = 'fired' THEN 1 ELSE 0 END) NOT VALID;
COMMENT ON COLUMN schedule_slots.reference IS 'what a flow that fires without runs made for it: the id of a job';
COMMENT ON TABLE schedule_slots IS 'due = fired + waiting + skipped + missed + failed; the key makes a double fire '
    'impossible';
"""
INDEXES = {
    "schedules_own_name": "UNIQUE schedules (tenant_id, flow, name) WHERE deleted_at IS NULL AND unique_name",
    "schedules_by_name": "schedules (tenant_id, name, id) WHERE deleted_at IS NULL",
    "schedules_due_by_tenant": "schedules (tenant_id, next_due_at) WHERE next_due_at IS NOT NULL",
    "schedule_slots_aged": "schedule_slots (decided_at) WHERE run_id IS NULL AND state <> 'waiting'",
}


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(COLUMNS)  # type: ignore[union-attr]
    build_indexes(INDEXES)
    validate("schedule_slots", "schedule_slots_state_check")
    validate("schedule_slots", "schedule_slots_run")
    op.execute("DROP INDEX IF EXISTS schedules_name")
    op.execute("DROP INDEX IF EXISTS schedule_slots_idle")
