"""Sealed webhook URLs, confirmed mail addresses with a daily count of mails, and refusals in the audit trail."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, validate

revision = "0027"
down_revision = "0026"

# Rows of refusals are dated by the minute: the index makes them one row per minute, actor and subject.
INDEXES = {
    "audit_trail_refusals": "UNIQUE audit_trail (tenant_id, actor, action, subject, at) WHERE times IS NOT NULL",
}
TRAIL = """
ALTER TABLE audit_trail
    ADD COLUMN IF NOT EXISTS times integer,
    DROP CONSTRAINT IF EXISTS audit_trail_times_check,
    ADD CONSTRAINT audit_trail_times_check CHECK (times > 0) NOT VALID;
COMMENT ON COLUMN audit_trail.times IS 'of refusals: how many within the minute that begins at `at`; NULL: one action';

CREATE OR REPLACE VIEW trail AS
SELECT a.id, CASE a.tenant_id WHEN 'system' THEN 'default' ELSE a.tenant_id END AS tenant_id, a.at, a.actor,
       k.name AS actor_name, a.action, a.subject, a.reason, a.request_id, a.times
FROM audit_trail a LEFT JOIN api_keys k ON a.actor LIKE 'key:%' AND k.id::text = substr(a.actor, 5);
"""

# Addresses that were written to before count as confirmed: an upgrade must not silence alarms.
MAILS = """
CREATE TABLE mail_addresses (
    tenant_id    text NOT NULL REFERENCES tenants,
    address      text NOT NULL CHECK (address = lower(address)),
    asked_at     timestamptz NOT NULL,
    token_hash   bytea UNIQUE,
    expires_at   timestamptz,
    confirmed_at timestamptz,
    PRIMARY KEY (tenant_id, address)
);
COMMENT ON TABLE mail_addresses IS 'recipients of mails, in lower case; no other mail is sent before it is confirmed';
COMMENT ON COLUMN mail_addresses.token_hash IS 'SHA-256 of the token in the link; the token itself is in the mail only';
INSERT INTO mail_addresses (tenant_id, address, asked_at, confirmed_at)
SELECT DISTINCT tenant_id, lower(address), ecluse_now(), ecluse_now() FROM (
    SELECT tenant_id, unnest(addresses) AS address FROM notification_endpoints
    UNION ALL
    SELECT s.tenant_id, unnest(a.notify_emails) FROM automation_settings a JOIN schedules s ON s.id = a.id
    WHERE s.deleted_at IS NULL) known
WHERE tenant_id IN (SELECT id FROM tenants);

CREATE VIEW mail_address_list AS
SELECT tenant_id, address, CASE WHEN confirmed_at IS NOT NULL THEN 'confirmed' ELSE 'asked' END AS state, asked_at,
       CASE WHEN confirmed_at IS NULL THEN expires_at END AS link_expires_at, confirmed_at
FROM mail_addresses;

CREATE TABLE mail_counts (
    tenant_id text PRIMARY KEY,
    day       date NOT NULL,
    sent      integer NOT NULL
);
COMMENT ON TABLE mail_counts IS 'mails handed to the server for the tenant on its latest day with mails, in UTC';
"""

# The URLs themselves are sealed by a scheduler, which has the key. Deliveries are read before their table is locked.
URLS = """
COMMENT ON COLUMN notification_endpoints.url IS 'of a webhook the origin; its URL is sealed as webhook:<id>:url';
COMMENT ON COLUMN automation_settings.webhook_url IS 'the origin; the URL is sealed as schedule:<id>:webhook:url';
ALTER TABLE maintenance DROP CONSTRAINT maintenance_what_check,
    ADD CONSTRAINT maintenance_what_check CHECK (what IN ('prune', 'erase tenant', 'seal urls'));
INSERT INTO maintenance (what, subject, asked_by, asked_at)
SELECT 'seal urls', '', 'migration:0027', ecluse_now() FROM clock_offset
WHERE EXISTS (SELECT FROM notification_endpoints WHERE kind = 'webhook')
   OR EXISTS (SELECT FROM automation_settings WHERE webhook_url IS NOT NULL)
   OR EXISTS (SELECT FROM deliveries WHERE kind = 'webhook');
ALTER TABLE deliveries ADD COLUMN url_name text;
COMMENT ON COLUMN deliveries.recipient IS 'a mail address; of a webhook the origin, its URL is sealed';
COMMENT ON COLUMN deliveries.url_name IS 'of a webhook without an endpoint: the name that its URL is sealed under';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(TRAIL)  # type: ignore[union-attr]
    validate("audit_trail", "audit_trail_times_check")
    build_indexes(INDEXES)
    for part in (MAILS, URLS):
        connection.execute(part)  # type: ignore[union-attr]
