"""Views that lists of the API read: the joins that a list needs, so that a list is one table or view everywhere."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"

AUDITS = """
CREATE VIEW audit_list AS
SELECT a.id, a.tenant_id, a.fiche_id, a.fiche_cache_id, a.audit_config_id, a.config_version,
       v.snapshot ->> 'name' AS config_name, a.status, a.score, a.is_latest, a.use_rlm, a.trigger_source, a.run_id,
       a.automation_run_id, a.automation_schedule_id, a.error_code, a.error, a.model, a.input_tokens, a.output_tokens,
       a.cost, a.created_at, a.started_at, a.finished_at
FROM audits a JOIN audit_config_versions v ON v.audit_config_id = a.audit_config_id AND v.version = a.config_version
"""


# An item's event id as `item_event_id` (base/ids.py) computes it.
RUNS = """
CREATE INDEX runs_of_flow ON runs (tenant_id, flow, id);
CREATE INDEX runs_not_deliveries ON runs (tenant_id, id) WHERE flow <> 'notifications';
CREATE INDEX runs_created ON runs (tenant_id, created_at);
CREATE INDEX outcomes_target ON outcomes (target, run_id);

CREATE VIEW run_items AS
SELECT i.id, i.tenant_id, i.run_id, i.stage, i.key, i.target, l.name AS lane, i.status,
       i.status = 'open' AND i.claim_id IS NOT NULL AS in_flight, i.permanent, i.round, i.executions, i.crashes,
       i.error_code, i.error, i.result, i.due_at, i.finished_at,
       i.flow || '-' || i.run_id || '-' || i.stage || '-' || i.key
           || CASE WHEN i.round = 0 THEN '' ELSE '-retry-' || i.round END AS event_id
FROM items i JOIN lanes l ON l.id = i.lane_id;

CREATE VIEW run_targets AS
SELECT r.tenant_id, o.run_id, o.target, o.outcome, o.error_code, o.reason, o.effect_may_exist,
       r.flow, r.schedule_id, r.status, r.state, r.created_at, r.ended_at
FROM outcomes o JOIN runs r ON r.id = o.run_id;
"""


def upgrade() -> None:
    op.execute(AUDITS)
    op.get_bind().connection.driver_connection.execute(RUNS)  # type: ignore[union-attr]
