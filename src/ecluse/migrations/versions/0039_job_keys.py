"""Attempts and logs of jobs refer to their job and attempt by its id alone, and are found by it. With a key of tenant
and id, PostgreSQL checks each new row by any index that begins with the tenant while it has no statistics: it read all
jobs of the tenant for each attempt. And a list of jobs read all attempts for each job."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import build_indexes, validate

revision = "0039"
down_revision = "0038"

INDEXES = {
    "job_runs_attempts": "UNIQUE job_runs (job_id, attempt)",
    "job_logs_parts": "UNIQUE job_logs (job_run_id, start)",
}
KEYS = """
ALTER TABLE job_logs
    DROP CONSTRAINT job_logs_run,
    DROP CONSTRAINT job_logs_pkey,
    ADD CONSTRAINT job_logs_pkey PRIMARY KEY USING INDEX job_logs_parts;
ALTER TABLE job_runs
    DROP CONSTRAINT job_runs_job,
    DROP CONSTRAINT IF EXISTS job_runs_tenant,
    DROP CONSTRAINT IF EXISTS job_runs_attempt;
ALTER TABLE job_runs
    ADD CONSTRAINT job_runs_job FOREIGN KEY (job_id) REFERENCES jobs ON DELETE CASCADE NOT VALID;
ALTER TABLE job_logs
    ADD CONSTRAINT job_logs_run FOREIGN KEY (job_run_id) REFERENCES job_runs ON DELETE CASCADE NOT VALID;
"""


def upgrade() -> None:
    build_indexes(INDEXES)
    op.get_bind().connection.driver_connection.execute(KEYS)  # type: ignore[union-attr]
    validate("job_runs", "job_runs_job")
    validate("job_logs", "job_logs_run")
