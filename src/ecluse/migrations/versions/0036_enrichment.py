"""Company enrichment: companies, requests, jobs with their sources, snapshots; leases of runs with a ttl."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, validate

revision = "0036"
down_revision = "0035"

LEASES = """
ALTER TABLE leases DROP CONSTRAINT leases_holder,
    ADD CONSTRAINT leases_holder CHECK
        (num_nonnulls(run_id, ttl) >= 1 AND (ttl IS NULL) = (expires_at IS NULL)) NOT VALID;
COMMENT ON COLUMN leases.run_id IS 'held by a run, for as long as it is open; with a ttl, its replica extends it';
"""
INDEXES = {"leases_of_replicas": "leases (replica_id) WHERE ended_at IS NULL AND replica_id IS NOT NULL"}

COMPANIES = """
DROP INDEX leases_of_processes;
ALTER TABLE tenants ADD COLUMN api_entreprise_recipient text CHECK (api_entreprise_recipient ~ '^[0-9]{14}$');
COMMENT ON COLUMN tenants.api_entreprise_recipient IS
    'the tenant may see what API Entreprise says, and asks it for this SIRET; null: neither';

CREATE TABLE companies (
    siren                         text PRIMARY KEY CHECK (siren ~ '^[0-9]{9}$'),
    enrichment_status             text NOT NULL CHECK (enrichment_status IN
                                      ('PENDING', 'RUNNING', 'SUCCESS', 'PARTIAL', 'FAILED', 'STALE')),
    enrichment_error              text CHECK (length(enrichment_error) <= 2000),
    core_identity_present         boolean NOT NULL DEFAULT false,
    sources_success_count         integer NOT NULL DEFAULT 0,
    required_sources_failed_count integer NOT NULL DEFAULT 0,
    optional_sources_failed_count integer NOT NULL DEFAULT 0,
    relaunchable                  boolean NOT NULL DEFAULT false,
    legal_name                    text,
    sources                       jsonb NOT NULL DEFAULT '{}',
    created_at                    timestamptz NOT NULL,
    updated_at                    timestamptz,
    status_at                     timestamptz NOT NULL,
    job_ended_at                  timestamptz,
    stale_since                   timestamptz,
    CONSTRAINT companies_success CHECK (enrichment_status <> 'SUCCESS' OR (core_identity_present
        AND required_sources_failed_count = 0 AND optional_sources_failed_count = 0 AND updated_at IS NOT NULL)),
    CONSTRAINT companies_partial CHECK (enrichment_status <> 'PARTIAL' OR (core_identity_present
        AND required_sources_failed_count = 0 AND optional_sources_failed_count > 0 AND updated_at IS NOT NULL)),
    CONSTRAINT companies_failed CHECK (enrichment_status <> 'FAILED' OR (enrichment_error <> ''
        AND enrichment_error IS NOT NULL AND (required_sources_failed_count > 0 OR NOT core_identity_present))),
    CONSTRAINT companies_stale CHECK (enrichment_status <> 'STALE'
        OR (updated_at IS NOT NULL AND stale_since IS NOT NULL AND stale_since <= status_at))
);
CREATE INDEX companies_by_age ON companies (updated_at) WHERE enrichment_status IN ('SUCCESS', 'PARTIAL');
CREATE INDEX companies_due ON companies (status_at) WHERE enrichment_status IN ('PENDING', 'STALE', 'PARTIAL');
COMMENT ON TABLE companies IS 'public registers, shared by all tenants; tenants read a company through their requests';
COMMENT ON COLUMN companies.sources IS 'by source: the instant of its answer, and its facts';
COMMENT ON COLUMN companies.updated_at IS 'the last merge (SUCCESS or PARTIAL): freshness counts from it';
COMMENT ON COLUMN companies.stale_since IS 'when its freshness window was over';

CREATE TABLE company_snapshots (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    siren             text NOT NULL,
    job_id            bigint NOT NULL,
    enrichment_status text NOT NULL,
    sources           jsonb NOT NULL,
    created_at        timestamptz NOT NULL
);
CREATE INDEX company_snapshots_siren ON company_snapshots (siren, id);

CREATE TABLE enrichment_jobs (
    run_id                        bigint PRIMARY KEY,
    tenant_id                     text NOT NULL REFERENCES tenants,
    siren                         text NOT NULL,
    trigger                       text NOT NULL CHECK
                                  (trigger IN ('REQUEST_CREATED', 'REQUEST_OPENED', 'MANUAL_REFRESH', 'SWEEP')),
    request_id                    bigint,
    correlation_id                text NOT NULL,
    idempotency_key               text NOT NULL,
    status                        text NOT NULL CHECK (status IN
                                      ('PENDING', 'RUNNING', 'SUCCESS', 'PARTIAL', 'FAILED')),
    attempt                       integer NOT NULL DEFAULT 0,
    asked                         text[] NOT NULL,
    enrichment_error              text,
    sources_success_count         integer,
    required_sources_failed_count integer,
    optional_sources_failed_count integer,
    core_identity_present         boolean,
    created_at                    timestamptz NOT NULL,
    started_at                    timestamptz,
    ended_at                      timestamptz,
    CONSTRAINT enrichment_jobs_end CHECK ((ended_at IS NULL) = (status IN ('PENDING', 'RUNNING')))
);
CREATE UNIQUE INDEX enrichment_jobs_open ON enrichment_jobs (siren) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX enrichment_jobs_key ON enrichment_jobs (idempotency_key)
    WHERE trigger IN ('REQUEST_CREATED', 'REQUEST_OPENED') AND status IN ('PENDING', 'RUNNING', 'SUCCESS');
CREATE INDEX enrichment_jobs_siren ON enrichment_jobs (siren, run_id);
CREATE INDEX enrichment_jobs_tenant ON enrichment_jobs (tenant_id);
COMMENT ON TABLE enrichment_jobs IS 'a job is a run; its tenant is the one whose request began it';
COMMENT ON COLUMN enrichment_jobs.attempt IS 'that of its lock: one more each time that the lock was lost';

CREATE TABLE enrichment_sources (
    run_id      bigint NOT NULL,
    source_api  text NOT NULL CHECK (source_api IN ('API_RECHERCHE_ENTREPRISES', 'INPI_RNE', 'API_ENTREPRISE_RCS')),
    started_at  timestamptz NOT NULL,
    ended_at    timestamptz,
    status      text CHECK (status IN ('SUCCESS', 'FAILED')),
    http_status integer,
    error_code  text,
    message     text,
    executions  integer,
    facts       jsonb,
    PRIMARY KEY (run_id, source_api),
    CONSTRAINT enrichment_sources_end CHECK ((ended_at IS NULL) = (status IS NULL)),
    CONSTRAINT enrichment_sources_error CHECK ((status IS NOT DISTINCT FROM 'FAILED') = (error_code IS NOT NULL))
);
COMMENT ON COLUMN enrichment_sources.facts IS 'only until the job ends: the merge takes them into companies';

CREATE TABLE requests (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id      text NOT NULL REFERENCES tenants,
    company_siren  text NOT NULL,
    company_siret  text,
    job_id         bigint,
    correlation_id text NOT NULL,
    created_by     text NOT NULL,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL
);
CREATE INDEX requests_tenant ON requests (tenant_id, id);
CREATE INDEX requests_siren ON requests (company_siren, tenant_id);
COMMENT ON COLUMN requests.job_id IS 'the job that it is attached to, or the last one of its company';

CREATE VIEW request_list AS
SELECT r.id, r.tenant_id, r.company_siren, r.company_siret, c.legal_name, c.enrichment_status, c.enrichment_error,
       c.updated_at AS company_updated_at, r.job_id, r.created_by, r.created_at, r.updated_at
FROM requests r JOIN companies c ON c.siren = r.company_siren;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(LEASES)  # type: ignore[union-attr]
    validate("leases", "leases_holder")
    build_indexes(INDEXES)
    connection.execute(COMPANIES)  # type: ignore[union-attr]
