"""Audits: configs and their versions (the questions to a fiche's transcripts), and the answers of a model."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"

AUDITS = """
CREATE TABLE audit_configs (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id         text NOT NULL REFERENCES tenants,
    name              text NOT NULL,
    description       text NOT NULL DEFAULT '',
    steps             jsonb NOT NULL,
    system_prompt     text NOT NULL DEFAULT '',
    model             text,
    run_automatically boolean NOT NULL DEFAULT false,
    is_active         boolean NOT NULL DEFAULT true,
    version           integer NOT NULL DEFAULT 1,
    created_at        timestamptz NOT NULL,
    updated_at        timestamptz NOT NULL,
    deleted_at        timestamptz
);
CREATE INDEX audit_configs_tenant ON audit_configs (tenant_id, id) WHERE deleted_at IS NULL;
COMMENT ON COLUMN audit_configs.model IS 'null: LLM_MODEL';

CREATE TABLE audit_config_versions (
    audit_config_id bigint NOT NULL REFERENCES audit_configs,
    version         integer NOT NULL,
    snapshot        jsonb NOT NULL,
    created_at      timestamptz NOT NULL,
    PRIMARY KEY (audit_config_id, version)
);
COMMENT ON TABLE audit_config_versions IS 'what was asked, word for word: never changed, an audit points at it';

CREATE TABLE audits (
    id                     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id              text NOT NULL,
    run_id                 bigint NOT NULL,
    fiche_cache_id         bigint NOT NULL REFERENCES fiche_cache ON DELETE CASCADE,
    fiche_id               text NOT NULL,
    audit_config_id        bigint NOT NULL,
    config_version         integer NOT NULL,
    automation_run_id      bigint,
    automation_schedule_id bigint,
    trigger_source         text NOT NULL CHECK (trigger_source IN ('automation', 'api')),
    use_rlm                boolean NOT NULL DEFAULT false,
    is_latest              boolean NOT NULL DEFAULT false,
    status                 text NOT NULL DEFAULT 'pending'
                           CHECK (status IN ('pending', 'running', 'completed', 'failed')),
    score                  numeric(5, 2) CHECK (score BETWEEN 0 AND 100),
    result                 jsonb,
    error_code             text,
    error                  text,
    model                  text,
    input_tokens           integer,
    output_tokens          integer,
    cost                   numeric(14, 6),
    created_at             timestamptz NOT NULL,
    started_at             timestamptz,
    finished_at            timestamptz,
    CONSTRAINT audits_once UNIQUE (run_id, fiche_cache_id, audit_config_id),
    CONSTRAINT audits_version FOREIGN KEY (audit_config_id, config_version) REFERENCES audit_config_versions,
    CONSTRAINT audits_finished CHECK ((status IN ('completed', 'failed')) = (finished_at IS NOT NULL)),
    CONSTRAINT audits_result CHECK ((status = 'completed') = (score IS NOT NULL AND result IS NOT NULL)),
    CONSTRAINT audits_error CHECK ((status = 'failed') = (error_code IS NOT NULL))
);
CREATE UNIQUE INDEX audits_latest ON audits (fiche_cache_id, audit_config_id) WHERE is_latest;
CREATE INDEX audits_automation ON audits (automation_run_id) WHERE automation_run_id IS NOT NULL;
CREATE INDEX audits_tenant ON audits (tenant_id, id);
CREATE INDEX audits_fiche ON audits (tenant_id, fiche_id, id);
COMMENT ON COLUMN audits.run_id IS 'the run that it is an item of; kept although the run may be deleted';
COMMENT ON COLUMN audits.is_latest IS 'the one of its fiche and config that ended last, well or not';
COMMENT ON COLUMN audits.use_rlm IS 'passed on as it was given';
COMMENT ON COLUMN audits.cost IS 'null: there is no price';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(AUDITS)  # type: ignore[union-attr]
