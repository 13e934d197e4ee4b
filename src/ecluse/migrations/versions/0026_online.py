"""Indexes of tables with many rows, built while servers work on them; how many steps of an audit rest on quotes that no
transcript has."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes

revision = "0026"
down_revision = "0025"

# Revisions before this one made these indexes in their transactions, and tables were locked for as long.
INDEXES = {
    "items_waiting": "items (lane_id, tenant_id, order_at, id, due_at) WHERE claim_id IS NULL",
    "items_of_run_waiting": "items (run_id, stage) WHERE claim_id IS NULL",
    "items_suspect": "items (suspicion) WHERE claim_id IS NULL AND suspicion > 0",
    "items_first_crash": "items (first_crash_at) WHERE first_crash_at IS NOT NULL",
    "claims_failed": "claims (run_id, stage) WHERE failed > 0",
    "claims_alone": "claims (replica_id) WHERE apart = 'alone'",
    "outcomes_target": "outcomes (target, run_id)",
    "run_log_fold": "UNIQUE run_log (run_id, fold) WHERE fold IS NOT NULL",
    "runs_of_tenant": "runs (tenant_id, id)",
    "runs_of_flow": "runs (tenant_id, flow, id)",
    "runs_not_deliveries": "runs (tenant_id, id) WHERE flow <> 'notifications'",
    "runs_automation": "runs (tenant_id, id) WHERE flow = 'automation'",
    "runs_schedule": "runs (schedule_id, id) WHERE schedule_id IS NOT NULL",
    "runs_children": "runs (parent_run_id, ended_at) WHERE parent_run_id IS NOT NULL",
    "runs_of_parent": "runs (parent_run_id, id) WHERE parent_run_id IS NOT NULL",
    "runs_listed": "runs (tenant_id, id)"
    " WHERE (parent_run_id IS NULL OR schedule_id IS NOT NULL) AND flow <> 'notifications'",
    "runs_ending_others": "runs (id) WHERE ends_waited_for",
    "runs_redrives": "runs (redrive_of, id) WHERE redrive_of IS NOT NULL",
    "runs_over": "runs (flow, ended_at, id) WHERE parent_run_id IS NULL AND ended_at IS NOT NULL",
    "events_outbox_aggregate": "events_outbox (aggregate)",
    "schedule_slots_run": "schedule_slots (run_id) WHERE run_id IS NOT NULL",
    "schedule_slots_idle": "schedule_slots (decided_at) WHERE state IN ('skipped', 'missed')",
    "leases_over": "leases (ended_at) WHERE ended_at IS NOT NULL",
    "speech_results_age": "speech_results (created_at)",
    "transcription_requests_age": "transcription_requests (minute)",
    "audits_of_fiche": "audits (fiche_cache_id)",
    "audits_of_version": "audits (audit_config_id, config_version)",
}
SAID = """
COMMENT ON INDEX runs_listed IS 'what people look for: a run may have ten thousand children, and as many deliveries';
COMMENT ON INDEX runs_over IS 'roots of families, for retention; the other runs of a family are found from its root';
COMMENT ON INDEX audits_of_fiche IS 'for the foreign key: deleting a fiche deletes its audits';
COMMENT ON INDEX audits_of_version IS 'for the foreign key: deleting a version looks for audits that were made with it';
"""

AUDITS = """
CREATE OR REPLACE VIEW audit_list AS
SELECT a.id, a.tenant_id, a.fiche_id, a.fiche_cache_id, a.audit_config_id, a.config_version,
       v.snapshot ->> 'name' AS config_name, a.status, a.score, a.is_latest, a.use_rlm, a.trigger_source, a.run_id,
       a.automation_run_id, a.automation_schedule_id, a.error_code, a.error, a.model, a.input_tokens, a.output_tokens,
       a.cost, a.created_at, a.started_at, a.finished_at,
       jsonb_array_length(jsonb_path_query_array(a.result, '$.steps[*] ? (@.unverified == true)')) AS unverified_steps
FROM audits a JOIN audit_config_versions v ON v.audit_config_id = a.audit_config_id AND v.version = a.config_version
"""


def upgrade() -> None:
    build_indexes(INDEXES)
    connection = op.get_bind().connection.driver_connection
    for part in (SAID, AUDITS):
        connection.execute(part)  # type: ignore[union-attr]
