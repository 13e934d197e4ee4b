"""The list of job schedules says of a schedule whose server was deleted that it makes no jobs."""

from __future__ import annotations

from alembic import op

revision = "0043"
down_revision = "0042"

LIST = """
CREATE OR REPLACE VIEW job_schedule_list AS
SELECT j.id, j.tenant_id, j.tenant_id AS org_id, j.server_instance_id, v.host_id, s.name, j.description,
       s.cron AS cron_expression, s.timezone, j.job_type, j.payload, s.enabled,
       s.window_start AS execution_window_start, s.window_end AS execution_window_end, s.overlap, s.catch_up,
       j.timeout_seconds, jsonb_build_object('maxRetries', j.max_retries, 'backoffMs', j.backoff_ms, 'backoffType',
           j.backoff_type) AS retry_policy,
       j.last_run_at, CASE WHEN s.error IS NULL THEN s.next_due_at END AS next_run_at, j.last_run_status,
       j.last_run_job_id, l.status AS last_job_status, j.run_count, j.failure_count,
       coalesce(s.error, CASE WHEN v.deleted_at IS NOT NULL
           THEN 'Its server was deleted: no jobs are made until it names another one.' END) AS error,
       j.created_by_id, s.created_at, s.updated_at, j.schedule_id
FROM job_schedules j JOIN schedules s ON s.id = j.schedule_id AND s.deleted_at IS NULL
JOIN job_servers v ON v.id = j.server_instance_id LEFT JOIN jobs l ON l.id = j.last_run_job_id
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(LIST)  # type: ignore[union-attr]
