"""Lists do not carry the fiche ids of a schedule, of which there may be fifty thousand: they are counted when they are
stored, and the list reads the count."""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0023"

COUNTED = """
ALTER TABLE automation_settings ADD COLUMN fiche_ids_given integer NOT NULL
    GENERATED ALWAYS AS (cardinality(fiche_selection_fiche_ids)) STORED;
COMMENT ON COLUMN automation_settings.fiche_ids_given IS 'so that a list need not read the ids';
"""

# As before, but with the count in place of the ids, which are a column of their own.
AUTOMATION_SCHEDULES = """
CREATE OR REPLACE VIEW automation_schedule_list AS
SELECT s.id, s.tenant_id, s.name, s.is_active, s.schedule_type, s.cron_expression, s.timezone, s.time_of_day,
       s.day_of_week, s.day_of_month, s.catch_up, jsonb_build_object(
           'mode', s.fiche_selection_mode, 'date_range', s.fiche_selection_date_range,
           'start_date', s.fiche_selection_start_date, 'end_date', s.fiche_selection_end_date,
           'fiche_ids_given', a.fiche_ids_given, 'groupes', s.fiche_selection_groupes,
           'only_with_recordings', s.fiche_selection_only_with_recordings,
           'only_unaudited', s.fiche_selection_only_unaudited, 'use_rlm', s.fiche_selection_use_rlm,
           'max_fiches', s.fiche_selection_max_fiches,
           'max_recordings_per_fiche', s.fiche_selection_max_recordings_per_fiche) AS fiche_selection,
       s.run_transcription, s.skip_if_transcribed, s.transcription_priority, s.run_audits, s.use_automatic_audits,
       s.specific_audit_configs::text[] AS specific_audit_configs, s.continue_on_error, s.retry_failed, s.max_retries,
       lower(substring(s.webhook_url FROM '^([^:/?#]+)://')) || '://'
           || substring(s.webhook_url FROM '^[^:/?#]+://(?:[^/?#]*@)?([^/?#]*)') || '/…' AS webhook_url,
       s.webhook_url IS NOT NULL AND EXISTS (SELECT FROM secrets k WHERE k.tenant_id = s.tenant_id
           AND k.name = 'schedule:' || s.id || ':webhook') AS webhook_signed,
       s.notify_emails, s.notify_on_complete, s.notify_on_error, s.has_external_api_key, s.last_run_at,
       s.last_run_status, s.total_runs, s.successful_runs, s.partial_runs, s.failed_runs, s.cancelled_runs, l.cron,
       l.window_start, l.window_end, s.next_due_at, l.overdue, l.failures, l.error, l.holding_run_id, s.last_run_id,
       s.created_at, s.updated_at, CASE s.last_run_status WHEN 'running' THEN s.last_run_at END AS running_since,
       clock_stood(s.holding_run_id) AS clock_stood, s.fiche_selection_fiche_ids AS fiche_ids
FROM automation_schedules s JOIN schedule_list l ON l.id = s.id JOIN automation_settings a ON a.id = s.id
"""

FICHE_IDS = """
CREATE VIEW automation_schedule_fiche_ids AS
SELECT s.tenant_id, s.id AS schedule_id, f.place, f.fiche_id
FROM automation_settings a JOIN schedules s ON s.id = a.id AND s.deleted_at IS NULL
CROSS JOIN LATERAL unnest(a.fiche_selection_fiche_ids) WITH ORDINALITY AS f(fiche_id, place)
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (COUNTED, AUTOMATION_SCHEDULES, FICHE_IDS):
        connection.execute(part)  # type: ignore[union-attr]
