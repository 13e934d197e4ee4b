"""Cancelled runs: a state of their own, the person or run that ended them, and the number of unfinished targets; marks
for the runs that only a cancelled run waited for; `redrive_of`. The phase of ended runs is cleared."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import update_in_batches, validate

revision = "0015"
down_revision = "0014"

CHECKS = {
    "runs_state_check": "state IN ('draft', 'queued', 'running', 'succeeded', 'partial', 'failed', 'cancelled',"
    " 'skipped', 'reverted', 'expired')",
    "runs_end_cause_check": "end_cause IN ('normal', 'operator', 'parent', 'stale', 'catastrophic')",
    "runs_cancelled": "cancelled >= 0 AND cancelled <= coalesce(failed, 0)",
    "runs_cancelled_by": "state <> 'cancelled' OR (ended_by IS NOT NULL AND end_cause IN ('operator', 'parent'))",
}
RUNS = f"""
ALTER TABLE runs
    ADD COLUMN IF NOT EXISTS cancelled integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS ended_by text,
    ADD COLUMN IF NOT EXISTS ends_waited_for boolean NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS ending boolean NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS redrive_of bigint;
ALTER TABLE runs
    {", ".join(f"DROP CONSTRAINT IF EXISTS {name}" for name in CHECKS)},
    {", ".join(f"ADD CONSTRAINT {name} CHECK ({condition}) NOT VALID" for name, condition in CHECKS.items())};
COMMENT ON COLUMN runs.cancelled IS 'of `failed`, the targets that were never finished because the run was cancelled';
COMMENT ON COLUMN runs.ended_by IS 'of a cancelled run: the person, or the run that it ended with';
COMMENT ON COLUMN runs.ends_waited_for IS 'ended by force: the runs that only it waited for are still to be ended';
COMMENT ON COLUMN runs.ending IS 'open, but only runs that were ended by force waited for it: '
    'nothing of it is claimed, and a sweep ends it';
COMMENT ON COLUMN runs.redrive_of IS 'the run whose targets this one takes once more';
"""

STAGES = """
ALTER TABLE stages ADD COLUMN units_failed integer;
COMMENT ON COLUMN stages.units_failed IS 'of `units`, how many had failed when they were last counted';
"""

AUTOMATION = """
ALTER TABLE automation_settings ADD COLUMN cancelled_runs integer NOT NULL DEFAULT 0,
    DROP CONSTRAINT automation_settings_last_run_status_check,
    ADD CONSTRAINT automation_settings_last_run_status_check
        CHECK (last_run_status IN ('success', 'partial', 'failed', 'cancelled'));
COMMENT ON COLUMN automation_settings.last_run_status IS 'of the run that ended last and is no redrive, as its targets '
    'stand after redrives; that one is `running` is to be seen in the view';

CREATE OR REPLACE VIEW automation_schedules AS
SELECT s.id, s.tenant_id, s.name, s.enabled AS is_active, a.schedule_type, a.cron_expression, s.timezone,
       a.time_of_day, a.day_of_week, a.day_of_month, a.fiche_selection_mode, a.fiche_selection_date_range,
       a.fiche_selection_start_date, a.fiche_selection_end_date, a.fiche_selection_fiche_ids,
       a.fiche_selection_groupes, a.fiche_selection_only_with_recordings, a.fiche_selection_only_unaudited,
       a.fiche_selection_use_rlm, a.fiche_selection_max_fiches, a.fiche_selection_max_recordings_per_fiche,
       a.run_transcription, a.skip_if_transcribed, a.transcription_priority, a.run_audits, a.use_automatic_audits,
       a.specific_audit_configs, a.continue_on_error, a.retry_failed, a.max_retries, a.webhook_url, a.notify_emails,
       a.notify_on_complete, a.notify_on_error, a.has_external_api_key,
       greatest(a.last_run_at, s.last_fired_at) AS last_run_at,
       CASE WHEN EXISTS (SELECT FROM runs h WHERE h.id IN (s.holding_run_id, s.last_run_id) AND h.ended_at IS NULL)
           THEN 'running' ELSE a.last_run_status END AS last_run_status,
       a.total_runs, a.successful_runs, a.partial_runs, a.failed_runs, s.catch_up, s.next_due_at, s.holding_run_id,
       s.last_run_id, s.created_at, s.updated_at, s.deleted_at, a.cancelled_runs
FROM automation_settings a JOIN schedules s ON s.id = a.id;

CREATE OR REPLACE VIEW automation_runs AS
SELECT r.id, r.tenant_id, r.schedule_id, CASE r.status WHEN 'queued' THEN 'running' ELSE r.status END AS status,
       r.phase, coalesce(r.successful + r.failed, r.selected - c.ignored, 0) AS total_fiches,
       coalesce(r.successful, c.successful) AS successful_fiches, coalesce(r.failed, c.failed) AS failed_fiches,
       coalesce(r.ignored, c.ignored) AS ignored_fiches,
       coalesce(f.transcriptions_run, 0) AS transcriptions_run, coalesce(f.audits_run, 0) AS audits_run,
       coalesce(f.config_snapshot, '{}'::jsonb) AS config_snapshot, f.result_summary, r.error_code, r.error_message,
       r.error_details, r.end_cause, r.event_key AS event_id, r.parent_run_id, r.created_at,
       coalesce(r.started_at, r.created_at) AS started_at, r.ended_at AS completed_at,
       (extract(epoch FROM r.ended_at - coalesce(r.started_at, r.created_at)) * 1000)::bigint AS duration_ms,
       r.state, r.selected, r.cancelled AS cancelled_fiches, r.ended_by
FROM runs r LEFT JOIN automation_run_facts f ON f.run_id = r.id
-- counted once, and only while it goes on
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE o.outcome = 'successful')::int AS successful,
           count(*) FILTER (WHERE o.outcome = 'failed')::int AS failed,
           count(*) FILTER (WHERE o.outcome = 'ignored')::int AS ignored
    FROM outcomes o WHERE o.run_id = r.id AND r.ended_at IS NULL) c
WHERE r.flow = 'automation';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(RUNS)  # type: ignore[union-attr]
    # The trigger `runs_conserve` counts the outcomes of each ended run once more. It stays enabled: to disable it
    # between the batches would disable it for the servers, too.
    update_in_batches("runs", "phase = NULL", "ended_at IS NOT NULL AND phase IS NOT NULL")
    update_in_batches("runs", "redrive_of = parent_run_id", "flow = 'automation' AND parent_run_id IS NOT NULL")
    for name in CHECKS:
        validate("runs", name)
    for part in (STAGES, AUTOMATION):
        connection.execute(part)  # type: ignore[union-attr]
