"""Access: tenants, API keys, encrypted secrets, the audit trail, and stored answers by idempotency key."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"

ACCESS = """
CREATE TABLE tenants (
    id          text PRIMARY KEY CHECK (id ~ '^[A-Za-z0-9._-]{1,100}$'),
    name        text NOT NULL,
    created_at  timestamptz NOT NULL,
    disabled_at timestamptz
);
INSERT INTO tenants (id, name, created_at) VALUES ('default', 'Default', clock_timestamp());

CREATE TABLE api_keys (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id    text NOT NULL REFERENCES tenants,
    name         text NOT NULL,
    hint         text NOT NULL,
    hash         bytea NOT NULL UNIQUE,
    role         text NOT NULL CHECK (role IN ('viewer', 'operator', 'admin')),
    scope        text NOT NULL DEFAULT 'ALL' CHECK (scope IN ('ALL', 'GROUP', 'SELF')),
    groupes      text[] NOT NULL DEFAULT '{}',
    crm_user_id  text,
    created_at   timestamptz NOT NULL,
    expires_at   timestamptz,
    last_used_at timestamptz,
    revoked_at   timestamptz
);
CREATE INDEX api_keys_tenant ON api_keys (tenant_id);
COMMENT ON COLUMN api_keys.hash IS 'SHA-256 of a random key: the key itself is shown once and stored nowhere';
COMMENT ON COLUMN api_keys.hint IS 'its first characters, so that people can tell keys apart';

CREATE TABLE secrets (
    tenant_id  text NOT NULL REFERENCES tenants,
    name       text NOT NULL,
    key_id     text NOT NULL,
    nonce      bytea NOT NULL,
    ciphertext bytea NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, name)
);
COMMENT ON TABLE secrets IS 'AES-GCM, bound to tenant and name; the key is never in the database';

CREATE TABLE audit_trail (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id  text NOT NULL,
    at         timestamptz NOT NULL,
    actor      text NOT NULL,
    action     text NOT NULL,
    subject    text NOT NULL,
    reason     text,
    request_id text
);
CREATE INDEX audit_trail_tenant ON audit_trail (tenant_id, id);

CREATE TABLE idempotency_keys (
    tenant_id  text NOT NULL,
    key        text NOT NULL,
    request    bytea NOT NULL,
    status     smallint,
    answer     jsonb,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, key)
);
CREATE INDEX idempotency_keys_age ON idempotency_keys (created_at);
COMMENT ON COLUMN idempotency_keys.request IS 'SHA-256 of method, path and body: a key is not for something else';

"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(ACCESS)  # type: ignore[union-attr]
