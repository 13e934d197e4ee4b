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
    for view in (AUDITS, FICHES, TRANSCRIPTION_LOGS, LEASES, DELIVERIES):
        op.execute(view)
