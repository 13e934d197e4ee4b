"""Log lines of all flows as rows, written if WORKFLOW_LOG_DB_ENABLED is set."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

LOGS = """
CREATE TABLE workflow_logs (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at       timestamptz NOT NULL,
    tenant_id        text NOT NULL,
    workflow         text NOT NULL,
    entity_type      text NOT NULL,
    entity_id        text NOT NULL,
    run_id           bigint,
    trace_id         text,
    level            text NOT NULL CHECK (level IN ('debug', 'info', 'warning', 'error')),
    inngest_event_id text,
    function_id      text,
    message          text NOT NULL,
    data             jsonb
);
CREATE INDEX workflow_logs_entity ON workflow_logs (entity_type, entity_id, created_at);
CREATE INDEX workflow_logs_run ON workflow_logs (run_id, created_at);
COMMENT ON TABLE workflow_logs IS 'WORKFLOW_LOG_DB_ENABLED: the story of each run as its log lines tell it';
"""


def upgrade() -> None:
    op.get_bind().connection.driver_connection.execute(LOGS)  # type: ignore[union-attr]
