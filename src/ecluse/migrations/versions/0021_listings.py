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


def upgrade() -> None:
    op.execute(AUDITS)
