"""Pricing: connected shops, rules, rule runs with their targets, and the history of both."""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"

PRICING = """
CREATE TABLE pricing_projects (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id    text NOT NULL REFERENCES tenants,
    name         text NOT NULL,
    connector    text NOT NULL CHECK (connector IN ('shopify', 'price_list')),
    base_url     text NOT NULL,
    currency     text NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
    token_ends   text,
    created_by   text NOT NULL,
    created_at   timestamptz NOT NULL,
    updated_by   text NOT NULL,
    updated_at   timestamptz NOT NULL,
    deleted_at   timestamptz
);
CREATE UNIQUE INDEX pricing_projects_name ON pricing_projects (tenant_id, name) WHERE deleted_at IS NULL;
COMMENT ON TABLE pricing_projects IS 'the access token is sealed in secrets, as pricing-project:<id>';

CREATE TABLE pricing_rules (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    project_id  bigint NOT NULL REFERENCES pricing_projects,
    name        text NOT NULL,
    selection   jsonb NOT NULL,
    change      jsonb NOT NULL,
    ending      text CHECK (ending ~ '^[0-9]{1,4}$'),
    floor       bigint CHECK (floor >= 0),
    cap         bigint CHECK (cap >= floor AND cap >= 0),
    allow_free  boolean NOT NULL,
    version     integer NOT NULL DEFAULT 1,
    created_by  text NOT NULL,
    created_at  timestamptz NOT NULL,
    updated_by  text NOT NULL,
    updated_at  timestamptz NOT NULL,
    deleted_at  timestamptz
);
CREATE UNIQUE INDEX pricing_rules_name ON pricing_rules (project_id, name) WHERE deleted_at IS NULL;
CREATE INDEX pricing_rules_tenant ON pricing_rules (tenant_id, id) WHERE deleted_at IS NULL;
CREATE INDEX pricing_rules_project ON pricing_rules (project_id);
COMMENT ON COLUMN pricing_rules.floor IS 'in minor units of the project''s currency, as cap and every amount';

CREATE TABLE rule_runs (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id      text NOT NULL REFERENCES tenants,
    project_id     bigint NOT NULL REFERENCES pricing_projects,
    rule_id        bigint,
    rule           jsonb NOT NULL,
    currency       text NOT NULL,
    status         text NOT NULL CHECK
                   (status IN ('PREVIEW', 'QUEUED', 'APPLYING', 'APPLIED', 'PARTIAL', 'FAILED', 'ROLLED_BACK')),
    round          integer NOT NULL DEFAULT 0 CHECK (round >= 0),
    plan_hash      text NOT NULL,
    totals         jsonb NOT NULL,
    actor          text NOT NULL,
    correlation_id text NOT NULL,
    source         text NOT NULL,
    created_at     timestamptz NOT NULL,
    queued_at      timestamptz,
    started_at     timestamptz,
    finished_at    timestamptz,
    rolled_back_at timestamptz,
    CONSTRAINT rule_runs_order CHECK (queued_at <= started_at AND started_at <= finished_at),
    CONSTRAINT rule_runs_queued CHECK ((status = 'PREVIEW') = (queued_at IS NULL)),
    CONSTRAINT rule_runs_started CHECK ((status IN ('PREVIEW', 'QUEUED')) = (started_at IS NULL)),
    CONSTRAINT rule_runs_finished CHECK ((status IN ('PREVIEW', 'QUEUED', 'APPLYING')) = (finished_at IS NULL)),
    CONSTRAINT rule_runs_rolled_back CHECK ((status = 'ROLLED_BACK') = (rolled_back_at IS NOT NULL))
);
CREATE INDEX rule_runs_tenant ON rule_runs (tenant_id, id);
CREATE INDEX rule_runs_project ON rule_runs (project_id, id);
COMMENT ON COLUMN rule_runs.rule IS 'the rule as it was when the plan was made';
COMMENT ON COLUMN rule_runs.round IS 'how often failed targets were retried by hand';

CREATE TABLE rule_targets (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id       text NOT NULL,
    rule_run_id     bigint NOT NULL REFERENCES rule_runs ON DELETE CASCADE,
    variant_id      text NOT NULL,
    product_id      text NOT NULL,
    sku             text NOT NULL,
    title           text NOT NULL,
    status          text NOT NULL CHECK
                    (status IN ('PREVIEW', 'QUEUED', 'APPLYING', 'APPLIED', 'FAILED', 'ROLLED_BACK')),
    before_amount   bigint NOT NULL CHECK (before_amount >= 0),
    after_amount    bigint NOT NULL CHECK (after_amount >= 0),
    attempts        integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    round           integer NOT NULL DEFAULT 0,
    applied_at      timestamptz,
    next_attempt_at timestamptz,
    error_code      text,
    error           text,
    CONSTRAINT rule_targets_once UNIQUE (rule_run_id, variant_id),
    CONSTRAINT rule_targets_attempts CHECK (attempts <= 3 OR status = 'FAILED'),
    CONSTRAINT rule_targets_applied CHECK ((status IN ('APPLIED', 'ROLLED_BACK')) = (applied_at IS NOT NULL)),
    CONSTRAINT rule_targets_failed CHECK (status <> 'FAILED' OR error_code IS NOT NULL)
);
CREATE INDEX rule_targets_status ON rule_targets (rule_run_id, status, id);
CREATE INDEX rule_targets_dead ON rule_targets (tenant_id, id) WHERE status = 'FAILED';
COMMENT ON COLUMN rule_targets.attempts IS 'retries scheduled so far in this round';
COMMENT ON COLUMN rule_targets.error IS 'of the last failed attempt; also while a retry is waiting';

CREATE TABLE rule_exclusions (
    rule_run_id bigint NOT NULL REFERENCES rule_runs ON DELETE CASCADE,
    variant_id  text NOT NULL,
    sku         text NOT NULL,
    title       text NOT NULL,
    amount      bigint NOT NULL,
    reason      text NOT NULL,
    PRIMARY KEY (rule_run_id, variant_id)
);

CREATE TABLE rule_history (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id      text NOT NULL,
    rule_run_id    bigint NOT NULL REFERENCES rule_runs ON DELETE CASCADE,
    rule_target_id bigint,
    from_status    text,
    to_status      text NOT NULL,
    round          integer NOT NULL,
    actor          text NOT NULL,
    source         text NOT NULL,
    correlation_id text NOT NULL,
    at             timestamptz NOT NULL
);
CREATE INDEX rule_history_run ON rule_history (rule_run_id, id);
COMMENT ON COLUMN rule_history.rule_target_id IS 'null: a change of the run';
COMMENT ON COLUMN rule_history.from_status IS 'null: it was created';

CREATE TABLE rule_executions (
    run_id      bigint PRIMARY KEY,
    rule_run_id bigint NOT NULL REFERENCES rule_runs ON DELETE CASCADE,
    kind        text NOT NULL CHECK (kind IN ('preview', 'apply', 'rollback', 'reconcile')),
    number      integer NOT NULL CHECK (number >= 0),
    CONSTRAINT rule_executions_once UNIQUE (rule_run_id, kind, number)
);
COMMENT ON TABLE rule_executions IS 'the engine runs of a rule run; their rows may be deleted earlier';

CREATE FUNCTION rule_runs_all_applied() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM rule_runs r JOIN rule_targets t ON t.rule_run_id = r.id
               WHERE r.id = NEW.id AND r.status = 'APPLIED' AND t.status IN ('QUEUED', 'APPLYING', 'FAILED')) THEN
        RAISE EXCEPTION 'Run marked APPLIED but has failed targets (rule run %)', NEW.id
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER rule_runs_all_applied AFTER INSERT OR UPDATE OF status ON rule_runs
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.status = 'APPLIED') EXECUTE FUNCTION rule_runs_all_applied();

CREATE FUNCTION rule_targets_of_applied() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM changed t JOIN rule_runs r ON r.id = t.rule_run_id AND r.status = 'APPLIED'
               WHERE t.status IN ('QUEUED', 'APPLYING', 'FAILED')) THEN
        RAISE EXCEPTION 'Run marked APPLIED but has failed targets' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER rule_targets_inserted AFTER INSERT ON rule_targets REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION rule_targets_of_applied();
CREATE TRIGGER rule_targets_updated AFTER UPDATE ON rule_targets REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION rule_targets_of_applied();
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(PRICING)  # type: ignore[union-attr]
