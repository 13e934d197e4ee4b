"""Agents: their credentials are found beside API keys, a repeated claim is found after its jobs have ended, too, and
views show jobs, logs, hosts, server instances and agents as they are listed."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes

revision = "0035"
down_revision = "0034"

CREDENTIALS = """
DROP INDEX job_runs_claims;
ALTER INDEX job_runs_claims_of_agents RENAME TO job_runs_claims;

CREATE VIEW credentials AS
SELECT hash, id AS key_id, name, tenant_id, role, scope, groupes, crm_user_id, expires_at,
       NULL::text AS agent_id, NULL::text AS host_id
FROM api_keys WHERE revoked_at IS NULL
UNION ALL
SELECT credential_hash, 0, hostname, tenant_id, 'agent', 'ALL', '{}'::text[], NULL, NULL, id, host_id
FROM job_agents WHERE revoked_at IS NULL
UNION ALL
SELECT former_credential_hash, 0, hostname, tenant_id, 'agent', 'ALL', '{}'::text[], NULL, NULL, id, host_id
FROM job_agents WHERE revoked_at IS NULL AND former_credential_hash IS NOT NULL;
COMMENT ON VIEW credentials IS 'what a request may authenticate with: keys of people and programs, and of agents';
"""
# Instead of the one for open attempts, which serves until it is dropped.
CLAIMS = {"job_runs_claims_of_agents": "job_runs (agent_id, claim_key) WHERE claim_key IS NOT NULL"}

VIEWS = """
CREATE VIEW job_list AS
SELECT j.id, j.tenant_id, j.tenant_id AS org_id, 'jobs:' || j.tenant_id AS queue, j.job_schedule_id AS schedule_id,
       j.server_instance_id, j.host_id, j.type, j.payload, j.timeout_seconds, j.status, r.attempt AS attempts,
       j.max_attempts, r.error_code, r.error, j.due_at, j.created_by, j.created_at, j.cancel_requested_at,
       j.cancel_requested_by, j.ended_at
FROM jobs j CROSS JOIN LATERAL (
    SELECT attempt, error_code, error FROM job_runs WHERE job_id = j.id ORDER BY attempt DESC LIMIT 1) AS r;

CREATE VIEW job_log_list AS
SELECT l.tenant_id, r.job_id, r.attempt, l.start, l.text, l.at
FROM job_logs l JOIN job_runs r ON r.id = l.job_run_id;

CREATE VIEW job_host_list AS
SELECT id, tenant_id, tenant_id AS org_id, name, created_by, created_at, updated_at
FROM job_hosts WHERE deleted_at IS NULL;

CREATE VIEW job_server_list AS
SELECT s.id, s.tenant_id, s.tenant_id AS org_id, s.name, s.host_id, h.name AS host, s.created_by, s.created_at,
       s.updated_at
FROM job_servers s JOIN job_hosts h ON h.id = s.host_id WHERE s.deleted_at IS NULL;

CREATE VIEW job_agent_list AS
SELECT a.id, a.tenant_id, a.tenant_id AS org_id, a.host_id, h.name AS host, a.hostname, a.platform, a.version,
       a.revoked_at IS NULL AND a.online_since IS NOT NULL AND a.last_seen_at > ecluse_now() - interval '1 minute'
           AS online,
       a.online_since, a.last_seen_at, a.enrolled_at, a.rotated_at, a.revoked_at,
       (SELECT count(*)::int FROM job_runs r WHERE r.agent_id = a.id AND r.status = 'running') AS running
FROM job_agents a JOIN job_hosts h ON h.id = a.host_id;
"""


def upgrade() -> None:
    build_indexes(CLAIMS)
    for part in (CREDENTIALS, VIEWS):
        op.get_bind().connection.driver_connection.execute(part)  # type: ignore[union-attr]
