"""Schedules and their slots: one row per due time that was decided, with the decision."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

SCHEDULES = """
CREATE TABLE schedules (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id       text NOT NULL,
    flow            text NOT NULL,
    name            text NOT NULL,
    cron            text,
    timezone        text NOT NULL DEFAULT 'UTC',
    window_start    text,
    window_end      text,
    input           jsonb NOT NULL DEFAULT '{}',
    enabled         boolean NOT NULL DEFAULT true,
    overlap         text NOT NULL DEFAULT 'wait' CHECK (overlap IN ('wait', 'allow')),
    catch_up        text NOT NULL DEFAULT 'latest' CHECK (catch_up IN ('latest', 'skip')),
    next_due_at     timestamptz,
    zone_rules      text NOT NULL,
    handled_until   timestamptz NOT NULL,
    holding_run_id  bigint,
    last_run_id     bigint,
    last_fired_at   timestamptz,
    failures        integer NOT NULL DEFAULT 0,
    error           text,
    missed_uncounted bigint NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    deleted_at      timestamptz,
    CONSTRAINT schedules_window CHECK ((window_start IS NULL) = (window_end IS NULL))
);
CREATE UNIQUE INDEX schedules_name ON schedules (tenant_id, name) WHERE deleted_at IS NULL;
CREATE INDEX schedules_due ON schedules (next_due_at) WHERE next_due_at IS NOT NULL;
COMMENT ON COLUMN schedules.cron IS 'NULL: only by hand';
COMMENT ON COLUMN schedules.next_due_at IS 'when a tick has to decide something; NULL: disabled, deleted, by hand';
COMMENT ON COLUMN schedules.handled_until IS 'every due instant up to here is decided; first, its activation';
COMMENT ON COLUMN schedules.holding_run_id IS 'the run that keeps later slots waiting (overlap), while it is open';
COMMENT ON COLUMN schedules.zone_rules IS 'the release of the time zone database that next_due_at was computed with';
COMMENT ON COLUMN schedules.missed_uncounted IS 'missed instants beyond those that got a slot row of their own, '
    'counted by the calendar: where clocks changed in between, it is off by what that hour held';

CREATE TABLE schedule_slots (
    schedule_id bigint NOT NULL REFERENCES schedules,
    due_at      timestamptz NOT NULL,
    tenant_id   text NOT NULL,
    state       text NOT NULL CHECK (state IN ('fired', 'waiting', 'skipped', 'missed')),
    reason      text,
    run_id      bigint,
    decided_at  timestamptz NOT NULL,
    PRIMARY KEY (schedule_id, due_at),
    CONSTRAINT schedule_slots_run CHECK ((state = 'fired') = (run_id IS NOT NULL)),
    CONSTRAINT schedule_slots_reason CHECK (state = 'fired' OR reason IS NOT NULL)
);
CREATE INDEX schedule_slots_waiting ON schedule_slots (schedule_id) WHERE state = 'waiting';
COMMENT ON TABLE schedule_slots IS 'due = fired + waiting + skipped + missed; the key makes a double fire impossible';

ALTER TABLE runs ADD COLUMN schedule_id bigint;
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(SCHEDULES)  # type: ignore[union-attr]
