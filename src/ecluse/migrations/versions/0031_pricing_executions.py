"""Pricing: previews that are made by an execution, limits of an apply, progress of rollbacks, reconciliations."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, update_in_batches, validate

revision = "0031"
down_revision = "0030"

INDEXES = {
    "rule_runs_open": "rule_runs (id) WHERE status IN ('QUEUED', 'APPLYING')",
    "rule_targets_variant": "rule_targets (tenant_id, variant_id)",
    "rule_executions_run": "rule_executions (rule_run_id, run_id)",
}
CHECKS = {
    "rule_runs_canary_check": "canary > 0",
    "rule_runs_max_failure_rate_check": "max_failure_rate >= 0 AND max_failure_rate < 1",
    "rule_runs_planned": "status = 'PREVIEW' OR plan_hash IS NOT NULL",
}
COLUMNS = f"""
ALTER TABLE rule_runs ALTER plan_hash DROP NOT NULL, ALTER totals DROP NOT NULL,
    ADD COLUMN IF NOT EXISTS canary integer,
    ADD COLUMN IF NOT EXISTS max_failure_rate double precision,
    ADD COLUMN IF NOT EXISTS stopped_reason text,
    ADD COLUMN IF NOT EXISTS corrects_id bigint,
    {", ".join(f"DROP CONSTRAINT IF EXISTS {name}" for name in CHECKS)},
    {", ".join(f"ADD CONSTRAINT {name} CHECK ({condition}) NOT VALID" for name, condition in CHECKS.items())};
COMMENT ON COLUMN rule_runs.plan_hash IS 'null until the catalogue is read';
COMMENT ON COLUMN rule_runs.canary IS 'so many targets are applied first';
COMMENT ON COLUMN rule_runs.stopped_reason IS 'why nothing more is sent in this round';
COMMENT ON COLUMN rule_runs.corrects_id IS 'the run whose mismatches it corrects';

ALTER TABLE rule_targets
    ADD COLUMN IF NOT EXISTS begun_at timestamptz,
    ADD COLUMN IF NOT EXISTS rollback_error_code text,
    ADD COLUMN IF NOT EXISTS rollback_error text;
COMMENT ON COLUMN rule_targets.begun_at IS 'the end of its first execution in this round';
COMMENT ON COLUMN rule_targets.rollback_error_code IS 'of its last rollback that failed';

-- From here on servers of the former version cannot exclude targets: the column would be NULL.
ALTER TABLE rule_exclusions ADD COLUMN IF NOT EXISTS tenant_id text,
    DROP CONSTRAINT IF EXISTS rule_exclusions_tenant,
    ADD CONSTRAINT rule_exclusions_tenant CHECK (tenant_id IS NOT NULL) NOT VALID;
"""
OWNED = "tenant_id = (SELECT r.tenant_id FROM rule_runs r WHERE r.id = rule_run_id)"

RECONCILIATIONS = """
-- Two statements: in one, the constraint is dropped first, and all rows are read to find out what it had proved.
ALTER TABLE rule_exclusions ALTER tenant_id SET NOT NULL;
ALTER TABLE rule_exclusions DROP CONSTRAINT rule_exclusions_tenant;

CREATE TABLE rule_reconciliations (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   text NOT NULL,
    rule_run_id bigint NOT NULL REFERENCES rule_runs ON DELETE CASCADE,
    kind        text NOT NULL CHECK (kind IN ('immediate', 'delayed', 'daily', 'on_demand')),
    due_at      timestamptz NOT NULL,
    run_id      bigint,
    started_at  timestamptz,
    finished_at timestamptz,
    checked     integer NOT NULL DEFAULT 0,
    mismatches  integer NOT NULL DEFAULT 0,
    unverified  integer NOT NULL DEFAULT 0,
    superseded  integer NOT NULL DEFAULT 0,
    CONSTRAINT rule_reconciliations_started CHECK ((run_id IS NULL) = (started_at IS NULL)),
    CONSTRAINT rule_reconciliations_finished CHECK (finished_at IS NULL OR started_at IS NOT NULL)
);
CREATE INDEX rule_reconciliations_of_run ON rule_reconciliations (rule_run_id, id);
CREATE INDEX rule_reconciliations_due ON rule_reconciliations (due_at) WHERE started_at IS NULL;
CREATE UNIQUE INDEX rule_reconciliations_run ON rule_reconciliations (run_id) WHERE run_id IS NOT NULL;
COMMENT ON COLUMN rule_reconciliations.run_id IS 'the engine run; null until it is due';
COMMENT ON COLUMN rule_reconciliations.unverified IS 'targets whose price could not be read';
COMMENT ON COLUMN rule_reconciliations.superseded IS 'targets left out, because a later run has changed their price';

CREATE TABLE rule_mismatches (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id         text NOT NULL,
    reconciliation_id bigint NOT NULL REFERENCES rule_reconciliations ON DELETE CASCADE,
    rule_run_id       bigint NOT NULL,
    rule_target_id    bigint NOT NULL,
    expected          bigint NOT NULL,
    actual            bigint,
    difference        bigint GENERATED ALWAYS AS (actual - expected) STORED,
    CONSTRAINT rule_mismatches_once UNIQUE (reconciliation_id, rule_target_id)
);
CREATE INDEX rule_mismatches_run ON rule_mismatches (rule_run_id, id);
COMMENT ON COLUMN rule_mismatches.actual IS 'null: the shop does not have it any more';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(COLUMNS)  # type: ignore[union-attr]
    for name in CHECKS:
        validate("rule_runs", name)
    build_indexes(INDEXES)
    update_in_batches("rule_exclusions", OWNED, "tenant_id IS NULL", key="rule_run_id")
    validate("rule_exclusions", "rule_exclusions_tenant")
    connection.execute(RECONCILIATIONS)  # type: ignore[union-attr]
