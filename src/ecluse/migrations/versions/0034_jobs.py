"""Jobs: server instances and their hosts, agents, schedules, the jobs they make and one run per attempt.

When a schedule is due is in its row of the engine's `schedules`; the view `job_schedule_list` shows both together, so
that each value is stored once.
"""

from __future__ import annotations

from alembic import op

revision = "0034"
down_revision = "0033"

PLACES = """
CREATE TABLE job_hosts (
    id         text PRIMARY KEY,
    tenant_id  text NOT NULL REFERENCES tenants,
    name       text NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    deleted_at timestamptz,
    CONSTRAINT job_hosts_tenant UNIQUE (tenant_id, id)
);
CREATE UNIQUE INDEX job_hosts_name ON job_hosts (tenant_id, name) WHERE deleted_at IS NULL;

CREATE TABLE job_servers (
    id         text PRIMARY KEY,
    tenant_id  text NOT NULL REFERENCES tenants,
    host_id    text NOT NULL,
    name       text NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    deleted_at timestamptz,
    CONSTRAINT job_servers_tenant UNIQUE (tenant_id, id),
    CONSTRAINT job_servers_host FOREIGN KEY (tenant_id, host_id) REFERENCES job_hosts (tenant_id, id)
);
CREATE UNIQUE INDEX job_servers_name ON job_servers (tenant_id, name) WHERE deleted_at IS NULL;
CREATE INDEX job_servers_of_host ON job_servers (tenant_id, host_id);
COMMENT ON TABLE job_servers IS 'server instances; the agent of its host executes the jobs of each';

CREATE TABLE job_agents (
    id                     text PRIMARY KEY,
    tenant_id              text NOT NULL REFERENCES tenants,
    host_id                text NOT NULL,
    hostname               text NOT NULL,
    platform               text NOT NULL,
    version                text NOT NULL,
    credential_hash        bytea NOT NULL,
    former_credential_hash bytea,
    enrolled_at            timestamptz NOT NULL,
    rotated_at             timestamptz,
    online_since           timestamptz,
    last_seen_at           timestamptz NOT NULL,
    revoked_at             timestamptz,
    CONSTRAINT job_agents_tenant UNIQUE (tenant_id, id),
    CONSTRAINT job_agents_host FOREIGN KEY (tenant_id, host_id) REFERENCES job_hosts (tenant_id, id)
);
CREATE UNIQUE INDEX job_agents_credential ON job_agents (credential_hash);
CREATE UNIQUE INDEX job_agents_former ON job_agents (former_credential_hash) WHERE former_credential_hash IS NOT NULL;
CREATE UNIQUE INDEX job_agents_one ON job_agents (host_id) WHERE revoked_at IS NULL;
CREATE INDEX job_agents_of_host ON job_agents (tenant_id, host_id);
COMMENT ON COLUMN job_agents.former_credential_hash IS 'still valid, until the credential after it is used';

CREATE TABLE enrolment_tokens (
    id         text PRIMARY KEY,
    tenant_id  text NOT NULL REFERENCES tenants,
    host_id    text NOT NULL,
    token_hash bytea NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    used_at    timestamptz,
    agent_id   text,
    CONSTRAINT enrolment_tokens_host FOREIGN KEY (tenant_id, host_id) REFERENCES job_hosts (tenant_id, id),
    CONSTRAINT enrolment_tokens_agent FOREIGN KEY (tenant_id, agent_id) REFERENCES job_agents (tenant_id, id),
    CONSTRAINT enrolment_tokens_used CHECK ((used_at IS NULL) = (agent_id IS NULL))
);
CREATE UNIQUE INDEX enrolment_tokens_hash ON enrolment_tokens (token_hash);
CREATE INDEX enrolment_tokens_of_host ON enrolment_tokens (tenant_id, host_id);
CREATE INDEX enrolment_tokens_of_agent ON enrolment_tokens (tenant_id, agent_id) WHERE agent_id IS NOT NULL;
"""

# Jobs and their runs have no foreign key to the tables above: tens of them are inserted per second, and all of them
# at the same second of a minute. What they refer to is marked as deleted, never removed, while its tenant exists.
WORK = """
CREATE TABLE job_schedules (
    id                 text PRIMARY KEY,
    tenant_id          text NOT NULL REFERENCES tenants,
    schedule_id        bigint NOT NULL UNIQUE REFERENCES schedules ON DELETE CASCADE,
    server_instance_id text NOT NULL,
    description        text,
    job_type           text NOT NULL CHECK (job_type <> ''),
    payload            jsonb NOT NULL,
    payload_secret     text,
    timeout_seconds    integer CHECK (timeout_seconds > 0),
    max_retries        integer NOT NULL CHECK (max_retries BETWEEN 0 AND 100),
    backoff_ms         integer NOT NULL CHECK (backoff_ms >= 0),
    backoff_type       text NOT NULL CHECK (backoff_type IN ('fixed', 'exponential')),
    last_run_at        timestamptz,
    last_run_status    text CHECK (last_run_status IN ('success', 'failed', 'skipped', 'scheduler_failed')),
    last_run_job_id    text,
    run_count          integer NOT NULL DEFAULT 0,
    failure_count      integer NOT NULL DEFAULT 0,
    created_by_id      text NOT NULL,
    CONSTRAINT job_schedules_tenant UNIQUE (tenant_id, id),
    CONSTRAINT job_schedules_server FOREIGN KEY (tenant_id, server_instance_id) REFERENCES job_servers (tenant_id, id)
);
CREATE INDEX job_schedules_of_server ON job_schedules (tenant_id, server_instance_id);
CREATE INDEX job_schedules_secret ON job_schedules (payload_secret) WHERE payload_secret IS NOT NULL;
COMMENT ON TABLE job_schedules IS 'beside its row in schedules';
COMMENT ON COLUMN job_schedules.payload IS 'with its secrets hidden; they are sealed under the name payload_secret';
COMMENT ON COLUMN job_schedules.last_run_status IS 'success: a job was made; failed: its last attempt has failed';

CREATE TABLE jobs (
    id                  text PRIMARY KEY,
    tenant_id           text NOT NULL,
    key                 text NOT NULL,
    job_schedule_id     text NOT NULL,
    server_instance_id  text NOT NULL,
    host_id             text NOT NULL,
    type                text NOT NULL,
    payload             jsonb NOT NULL,
    payload_secret      text,
    timeout_seconds     integer,
    max_attempts        integer NOT NULL CHECK (max_attempts >= 1),
    backoff_ms          integer NOT NULL,
    backoff_type        text NOT NULL,
    status              text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'running', 'succeeded', 'failed')),
    due_at              timestamptz,
    created_by          text NOT NULL,
    created_at          timestamptz NOT NULL,
    cancel_requested_at timestamptz,
    cancel_requested_by text,
    ended_at            timestamptz,
    CONSTRAINT jobs_tenant UNIQUE (tenant_id, id),
    CONSTRAINT jobs_end CHECK ((status IN ('succeeded', 'failed')) = (ended_at IS NOT NULL)),
    CONSTRAINT jobs_cancel CHECK ((cancel_requested_at IS NULL) = (cancel_requested_by IS NULL))
);
CREATE UNIQUE INDEX jobs_key ON jobs (tenant_id, key);
CREATE INDEX jobs_of_schedule ON jobs (job_schedule_id, id);
CREATE INDEX jobs_open ON jobs (job_schedule_id) WHERE ended_at IS NULL;
CREATE INDEX jobs_secret ON jobs (payload_secret) WHERE payload_secret IS NOT NULL;
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
COMMENT ON COLUMN jobs.key IS 'schedule:<id of the job schedule>:<due instant in ms, manual-<uuid> or retry-<uuid>>';
COMMENT ON COLUMN jobs.payload_secret IS 'as in job_schedules, as it was when the job was made';
COMMENT ON COLUMN jobs.due_at IS 'of its slot; null: made by hand';
COMMENT ON COLUMN jobs.status IS 'pending also while a further attempt is to come';

CREATE TABLE job_runs (
    id            text PRIMARY KEY,
    tenant_id     text NOT NULL,
    job_id        text NOT NULL,
    host_id       text NOT NULL,
    attempt       integer NOT NULL CHECK (attempt >= 1),
    status        text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'running', 'succeeded', 'failed')),
    due_at        timestamptz NOT NULL,
    fence         bigint NOT NULL DEFAULT 0,
    agent_id      text,
    claim_key     uuid,
    lease_ends_at timestamptz,
    started_at    timestamptz,
    ended_at      timestamptz,
    exit_code     integer,
    error_code    text,
    error         text,
    output        jsonb,
    late_status   text CHECK (late_status IN ('succeeded', 'failed')),
    late_at       timestamptz,
    late_result   jsonb,
    log_length    integer NOT NULL DEFAULT 0 CHECK (log_length >= 0),
    log_capped    boolean NOT NULL DEFAULT false,
    CONSTRAINT job_runs_tenant UNIQUE (tenant_id, id),
    CONSTRAINT job_runs_job FOREIGN KEY (tenant_id, job_id) REFERENCES jobs (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT job_runs_attempt UNIQUE (tenant_id, job_id, attempt),
    CONSTRAINT job_runs_claimed CHECK (num_nulls(agent_id, claim_key, lease_ends_at, started_at) IN (0, 4)),
    CONSTRAINT job_runs_started CHECK (status NOT IN ('running', 'succeeded') OR started_at IS NOT NULL),
    CONSTRAINT job_runs_pending CHECK (status <> 'pending' OR started_at IS NULL),
    CONSTRAINT job_runs_end CHECK ((status IN ('succeeded', 'failed')) = (ended_at IS NOT NULL)),
    CONSTRAINT job_runs_error CHECK ((status = 'failed') = (error_code IS NOT NULL)),
    CONSTRAINT job_runs_late CHECK ((late_status IS NULL) = (late_at IS NULL) AND
        (late_status IS NULL OR ended_at IS NOT NULL))
);
CREATE UNIQUE INDEX job_runs_open ON job_runs (job_id) WHERE ended_at IS NULL;
CREATE INDEX job_runs_waiting ON job_runs (host_id, due_at, id) WHERE status = 'pending';
CREATE INDEX job_runs_due ON job_runs (due_at) WHERE status = 'pending';
CREATE INDEX job_runs_leased ON job_runs (lease_ends_at) WHERE status = 'running';
CREATE INDEX job_runs_claims ON job_runs (agent_id, claim_key) WHERE status = 'running';
COMMENT ON COLUMN job_runs.due_at IS 'when it may be claimed';
COMMENT ON COLUMN job_runs.fence IS 'raised by every claim; 0: never claimed';
COMMENT ON COLUMN job_runs.lease_ends_at IS 'of the last renewal; it stays when the attempt has ended';
COMMENT ON COLUMN job_runs.late_status IS 'what an agent reported after the attempt had ended; only evidence';

CREATE TABLE job_logs (
    job_run_id text NOT NULL,
    tenant_id  text NOT NULL,
    start      integer NOT NULL CHECK (start >= 0),
    text       text NOT NULL,
    at         timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, job_run_id, start),
    CONSTRAINT job_logs_run FOREIGN KEY (tenant_id, job_run_id) REFERENCES job_runs (tenant_id, id) ON DELETE CASCADE
);
COMMENT ON COLUMN job_logs.start IS 'offset of the chunk in the log of its run, in characters';
"""

VIEWS = """
CREATE VIEW job_schedule_list AS
SELECT j.id, j.tenant_id, j.tenant_id AS org_id, j.server_instance_id, v.host_id, s.name, j.description,
       s.cron AS cron_expression, s.timezone, j.job_type, j.payload, s.enabled,
       s.window_start AS execution_window_start, s.window_end AS execution_window_end, s.overlap, s.catch_up,
       j.timeout_seconds, jsonb_build_object('maxRetries', j.max_retries, 'backoffMs', j.backoff_ms, 'backoffType',
           j.backoff_type) AS retry_policy,
       j.last_run_at, CASE WHEN s.error IS NULL THEN s.next_due_at END AS next_run_at, j.last_run_status,
       j.last_run_job_id, l.status AS last_job_status, j.run_count, j.failure_count, s.error, j.created_by_id,
       s.created_at, s.updated_at, j.schedule_id
FROM job_schedules j JOIN schedules s ON s.id = j.schedule_id AND s.deleted_at IS NULL
JOIN job_servers v ON v.id = j.server_instance_id LEFT JOIN jobs l ON l.id = j.last_run_job_id;

CREATE VIEW job_slots AS
SELECT j.tenant_id, j.id AS job_schedule_id, s.due_at, s.state, s.reason, s.reference AS job_id, l.status AS job_status,
       s.decided_at
FROM job_schedules j JOIN schedule_slots s ON s.schedule_id = j.schedule_id LEFT JOIN jobs l ON l.id = s.reference;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (PLACES, WORK, VIEWS):
        connection.execute(part)  # type: ignore[union-attr]
