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

SCHEDULES = """
CREATE VIEW schedule_list AS
SELECT s.id, s.tenant_id, s.flow, s.name, s.cron, s.timezone, s.window_start, s.window_end, s.overlap, s.catch_up,
       s.enabled, s.next_due_at, coalesce(s.next_due_at < ecluse_now() - interval '1 minute', false) AS overdue,
       s.failures, s.error, h.id AS holding_run_id, s.last_run_id, r.state AS last_run_state, s.last_fired_at,
       s.created_at, s.updated_at
FROM schedules s LEFT JOIN runs h ON h.id = s.holding_run_id AND h.ended_at IS NULL
LEFT JOIN runs r ON r.id = s.last_run_id
WHERE s.deleted_at IS NULL
"""

# Without what depends on a knob: how long a run may take. Of a webhook only the origin is shown: its path is often a
# secret.
AUTOMATION_SCHEDULES = """
CREATE VIEW automation_schedule_list AS
SELECT s.id, s.tenant_id, s.name, s.is_active, s.schedule_type, s.cron_expression, s.timezone, s.time_of_day,
       s.day_of_week, s.day_of_month, s.catch_up, jsonb_build_object(
           'mode', s.fiche_selection_mode, 'date_range', s.fiche_selection_date_range,
           'start_date', s.fiche_selection_start_date, 'end_date', s.fiche_selection_end_date,
           'fiche_ids', s.fiche_selection_fiche_ids, 'groupes', s.fiche_selection_groupes,
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
       clock_stood(s.holding_run_id) AS clock_stood
FROM automation_schedules s JOIN schedule_list l ON l.id = s.id
"""

# An item's event id as `item_event_id` (base/ids.py) computes it.
RUNS = """

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

# Rows of no tenant (`system`) are shown to the tenant `default`, whose administrators administer the installation.
ACCESS = """
CREATE VIEW key_list AS
SELECT id, tenant_id, name, hint, role, scope, groupes, crm_user_id,
       CASE WHEN revoked_at IS NOT NULL THEN 'revoked' WHEN expires_at <= ecluse_now() THEN 'expired' ELSE 'valid' END
           AS state,
       created_at, expires_at, last_used_at, revoked_at
FROM api_keys;

CREATE VIEW tenant_list AS
SELECT t.id, t.name, t.created_at, t.disabled_at,
       (SELECT count(*)::int FROM api_keys k WHERE k.tenant_id = t.id AND k.revoked_at IS NULL) AS keys
FROM tenants t;

CREATE VIEW trail AS
SELECT a.id, CASE a.tenant_id WHEN 'system' THEN 'default' ELSE a.tenant_id END AS tenant_id, a.at, a.actor,
       k.name AS actor_name, a.action, a.subject, a.reason, a.request_id
FROM audit_trail a LEFT JOIN api_keys k ON a.actor LIKE 'key:%' AND k.id::text = substr(a.actor, 5);

CREATE VIEW event_list AS
SELECT id, tenant_id, event_key, event_type, aggregate, correlation_id, producer, occurred_at,
       CASE WHEN published_seq IS NOT NULL THEN 'published' WHEN tries > 0 THEN 'failing' ELSE 'waiting' END AS state,
       tries, nullif(try_at, '-infinity') AS try_at, error, published_at
FROM events_outbox;
"""

# What is known of a fiche follows from its rows.
# details: `not_found` wins over stored details, which are kept but no longer valid. Older versions stored the details
# in `raw_data`; a row of the sales list has no `information` object.
# groupe: the sales list may lack it or be outdated; once there are details, their value counts, even if it is empty.
# total_recordings: those removed in the CRM are not counted. Subqueries, so that a page counts its own rows only, and a
# statement that does not read the counts makes none.
FICHES = """
CREATE VIEW fiche_states AS
SELECT f.id AS fiche_cache_id, f.tenant_id, f.fiche_id,
       CASE WHEN i.fiche_cache_id IS NOT NULL THEN i.groupe
            WHEN l.legacy THEN f.raw_data -> 'information' ->> 'groupe' ELSE f.groupe END AS groupe,
       f.sales_date,
       CASE WHEN NOT f.details_success AND strpos(upper(f.details_message), 'NOT_FOUND') > 0 THEN 'not_found'
            WHEN i.fiche_cache_id IS NOT NULL OR l.legacy THEN 'ready' ELSE 'missing' END AS details,
       n.recordings_count, coalesce(f.has_recordings, n.recordings_count > 0) AS has_recordings,
       (SELECT count(*)::int FROM recordings r WHERE r.fiche_cache_id = f.id AND r.removed_at IS NULL)
           AS total_recordings,
       (SELECT count(*)::int FROM recordings r
        WHERE r.fiche_cache_id = f.id AND r.removed_at IS NULL AND r.has_transcription) AS transcribed,
       f.last_revalidated_at, f.fetched_at, f.created_at, f.updated_at, f.details_message,
       CASE WHEN i.fiche_cache_id IS NOT NULL THEN i.attribution_user_id
            WHEN l.legacy THEN f.raw_data -> 'information' ->> 'attribution_user_id' END AS attribution_user_id,
       coalesce(i.data, CASE WHEN l.legacy THEN f.raw_data -> 'information' END) AS information
FROM fiche_cache f LEFT JOIN fiche_cache_information i ON i.fiche_cache_id = f.id,
LATERAL (SELECT coalesce(jsonb_typeof(f.raw_data -> 'information') = 'object', false) AS legacy) l,
LATERAL (SELECT coalesce(f.recordings_count, CASE jsonb_typeof(f.raw_data -> 'recordings') WHEN 'array'
             THEN jsonb_array_length(f.raw_data -> 'recordings') END) AS recordings_count) n
"""

TRANSCRIPTION_LOGS = """
CREATE VIEW transcription_logs AS
SELECT id, tenant_id, entity_id AS fiche_id, created_at, level, message, data, run_id, trace_id, function_id,
       inngest_event_id
FROM workflow_logs WHERE entity_type = 'fiche' AND workflow = 'transcription'
"""

LEASES = """
CREATE VIEW lease_list AS
SELECT tenant_id, key, owner, run_id, replica_id, fence, attempt, left(token::text, 8) AS token, acquired_at,
       extract(epoch FROM expires_at - ecluse_now())::float8 AS remaining_seconds
FROM leases WHERE ended_at IS NULL
"""

# State, executions and errors are those of the delivery's run and its one item.
DELIVERIES = """
CREATE VIEW delivery_list AS
SELECT d.run_id AS id, d.tenant_id, d.endpoint_id, d.kind, d.recipient, d.event_key, d.event_type,
       d.about_run AS about_run_id,
       CASE WHEN r.state IN ('queued', 'running') THEN 'pending' WHEN r.state = 'succeeded' THEN 'delivered'
            ELSE 'failed' END AS state,
       coalesce(i.executions, 0) AS executions, coalesce(i.error_code, r.error_code) AS error_code,
       coalesce(i.error, r.reason) AS error, d.created_at,
       CASE WHEN i.status = 'open' AND r.ended_at IS NULL THEN i.due_at END AS next_attempt_at, r.ended_at, d.message,
       i.result
FROM deliveries d JOIN runs r ON r.id = d.run_id LEFT JOIN items i ON i.run_id = d.run_id
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    views = (AUDITS, SCHEDULES, AUTOMATION_SCHEDULES, RUNS, ACCESS, FICHES, TRANSCRIPTION_LOGS, LEASES, DELIVERIES)
    for view in views:
        connection.execute(view)  # type: ignore[union-attr]
