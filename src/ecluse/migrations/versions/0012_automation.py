"""Automation: settings of fiche schedules, facts about their runs, and views under the names that operators know.

Name, time zone and `enabled` of a schedule are columns of the engine's `schedules`: the view `automation_schedules`
shows them beside the settings, so that each value is stored once.
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

TABLES = """
CREATE TABLE automation_settings (
    id                                       bigint PRIMARY KEY REFERENCES schedules ON DELETE CASCADE,
    schedule_type                            text NOT NULL
        CHECK (schedule_type IN ('MANUAL', 'DAILY', 'WEEKLY', 'MONTHLY', 'CRON')),
    cron_expression                          text,
    time_of_day                              text,
    day_of_week                              smallint CHECK (day_of_week BETWEEN 0 AND 6),
    day_of_month                             smallint CHECK (day_of_month BETWEEN 1 AND 31),
    fiche_selection_mode                     text NOT NULL
        CHECK (fiche_selection_mode IN ('date_range', 'manual', 'filter')),
    fiche_selection_date_range               text CHECK (fiche_selection_date_range IN ('today', 'yesterday',
        'last_7_days', 'last_30_days', 'this_month', 'last_month', 'custom')),
    fiche_selection_start_date               date,
    fiche_selection_end_date                 date,
    fiche_selection_fiche_ids                text[] NOT NULL DEFAULT '{}',
    fiche_selection_groupes                  text[] NOT NULL DEFAULT '{}',
    fiche_selection_only_with_recordings     boolean NOT NULL DEFAULT false,
    fiche_selection_only_unaudited           boolean NOT NULL DEFAULT false,
    fiche_selection_use_rlm                  boolean NOT NULL DEFAULT false,
    fiche_selection_max_fiches               integer CHECK (fiche_selection_max_fiches > 0),
    fiche_selection_max_recordings_per_fiche integer CHECK (fiche_selection_max_recordings_per_fiche > 0),
    run_transcription                        boolean NOT NULL DEFAULT true,
    skip_if_transcribed                      boolean NOT NULL DEFAULT true,
    transcription_priority                   text NOT NULL DEFAULT 'normal'
        CHECK (transcription_priority IN ('low', 'normal', 'high')),
    run_audits                               boolean NOT NULL DEFAULT true,
    use_automatic_audits                     boolean NOT NULL DEFAULT true,
    specific_audit_configs                   bigint[] NOT NULL DEFAULT '{}',
    continue_on_error                        boolean NOT NULL DEFAULT true,
    retry_failed                             boolean NOT NULL DEFAULT false,
    max_retries                              smallint NOT NULL DEFAULT 0 CHECK (max_retries BETWEEN 0 AND 10),
    webhook_url                              text,
    notify_emails                            text[] NOT NULL DEFAULT '{}',
    notify_on_complete                       boolean NOT NULL DEFAULT false,
    notify_on_error                          boolean NOT NULL DEFAULT true,
    has_external_api_key                     boolean NOT NULL DEFAULT false,
    last_run_at                              timestamptz,
    last_run_status                          text CHECK (last_run_status IN ('success', 'partial', 'failed')),
    total_runs                               integer NOT NULL DEFAULT 0,
    successful_runs                          integer NOT NULL DEFAULT 0,
    partial_runs                             integer NOT NULL DEFAULT 0,
    failed_runs                              integer NOT NULL DEFAULT 0
);
COMMENT ON TABLE automation_settings IS 'beside its row in schedules; the key of its CRM is sealed in secrets, as '
    'schedule:<id>';
COMMENT ON COLUMN automation_settings.last_run_status IS 'of the run that ended last; that one is `running` is to be '
    'seen in the view';

CREATE TABLE automation_run_facts (
    run_id             bigint PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    schedule_id        bigint NOT NULL,
    config_snapshot    jsonb NOT NULL,
    fiche_ids          text[] NOT NULL DEFAULT '{}',
    result_summary     jsonb,
    transcriptions_run integer NOT NULL DEFAULT 0,
    audits_run         integer NOT NULL DEFAULT 0
);
COMMENT ON COLUMN automation_run_facts.config_snapshot IS 'the schedule as it was when the run began; '
    'selection_summary is added to it as the run goes on';

COMMENT ON COLUMN automation_run_facts.fiche_ids IS 'of a manual selection, as they were given';

CREATE TABLE automation_run_fiches (
    run_id               bigint NOT NULL,
    fiche_id             text NOT NULL,
    fiche_cache_id       bigint,
    recordings_count     integer,
    transcription_run_id bigint,
    transcription_round  smallint,
    PRIMARY KEY (run_id, fiche_id)
);
COMMENT ON TABLE automation_run_fiches IS 'what a run knows of each of its fiches once the details are fetched';
COMMENT ON COLUMN automation_run_fiches.transcription_run_id IS 'the run that transcribes it: ours, or one that was '
    'already at it';

ALTER TABLE stages ADD COLUMN units integer;
COMMENT ON COLUMN stages.units IS 'of a stage whose work is done by other runs: how many there are, of which '
    '`progress` are done; it has no items';

ALTER TABLE attempts ADD COLUMN http_status smallint;
COMMENT ON COLUMN attempts.http_status IS 'of an HTTP answer, for people to read';

"""

VIEWS = """
CREATE VIEW automation_schedules AS
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
       s.last_run_id, s.created_at, s.updated_at, s.deleted_at
FROM automation_settings a JOIN schedules s ON s.id = a.id;

CREATE VIEW automation_runs AS
SELECT r.id, r.tenant_id, r.schedule_id, CASE r.status WHEN 'queued' THEN 'running' ELSE r.status END AS status,
       r.phase, coalesce(r.successful + r.failed, r.selected - c.ignored, 0) AS total_fiches,
       coalesce(r.successful, c.successful) AS successful_fiches, coalesce(r.failed, c.failed) AS failed_fiches,
       coalesce(r.ignored, c.ignored) AS ignored_fiches,
       coalesce(f.transcriptions_run, 0) AS transcriptions_run, coalesce(f.audits_run, 0) AS audits_run,
       coalesce(f.config_snapshot, '{}'::jsonb) AS config_snapshot, f.result_summary, r.error_code, r.error_message,
       r.error_details, r.end_cause, r.event_key AS event_id, r.parent_run_id, r.created_at,
       coalesce(r.started_at, r.created_at) AS started_at, r.ended_at AS completed_at,
       (extract(epoch FROM r.ended_at - coalesce(r.started_at, r.created_at)) * 1000)::bigint AS duration_ms
FROM runs r LEFT JOIN automation_run_facts f ON f.run_id = r.id
-- counted once, and only while it goes on
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE o.outcome = 'successful')::int AS successful,
           count(*) FILTER (WHERE o.outcome = 'failed')::int AS failed,
           count(*) FILTER (WHERE o.outcome = 'ignored')::int AS ignored
    FROM outcomes o WHERE o.run_id = r.id AND r.ended_at IS NULL) c
WHERE r.flow = 'automation';

CREATE VIEW automation_run_fiche_results AS
SELECT o.run_id, o.target AS fiche_id, o.outcome AS status,
       CASE o.outcome WHEN 'failed' THEN o.reason END AS error,
       CASE o.outcome WHEN 'failed' THEN o.error_code END AS error_code,
       CASE o.outcome WHEN 'ignored' THEN o.reason END AS ignore_reason,
       f.recordings_count, r.tenant_id
FROM outcomes o JOIN runs r ON r.id = o.run_id AND r.flow = 'automation'
LEFT JOIN automation_run_fiches f ON f.run_id = o.run_id AND f.fiche_id = o.target
WHERE o.outcome IS NOT NULL;

CREATE VIEW automation_logs AS
SELECT l.id, l.run_id, l.at AS "timestamp", l.level, l.message, l.data AS metadata, l.event_id, r.tenant_id
FROM run_log l JOIN runs r ON r.id = l.run_id AND r.flow = 'automation';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (TABLES, VIEWS):
        connection.execute(part)  # type: ignore[union-attr]
