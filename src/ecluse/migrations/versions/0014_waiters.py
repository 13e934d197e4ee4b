"""Which run waits for which run: a run that another run or a person waits for is not ended with its parent."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"

WAITERS = """
CREATE TABLE run_waiters (
    run_id        bigint NOT NULL,
    waiter_run_id bigint,
    target        text NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX run_waiters_once ON run_waiters (run_id, coalesce(waiter_run_id, 0));
CREATE INDEX run_waiters_target ON run_waiters (waiter_run_id, target, run_id) WHERE waiter_run_id IS NOT NULL;
COMMENT ON TABLE run_waiters IS 'run_id is waited for by waiter_run_id (NULL: a person) for a target of that run';

INSERT INTO run_waiters (run_id, waiter_run_id, target)
SELECT id, parent_run_id, coalesce(input ->> 'fiche_id', '') FROM runs
WHERE flow = 'transcription' AND ended_at IS NULL
UNION
SELECT f.transcription_run_id, f.run_id, f.fiche_id
FROM automation_run_fiches f JOIN runs c ON c.id = f.transcription_run_id AND c.ended_at IS NULL
JOIN runs p ON p.id = f.run_id AND p.ended_at IS NULL
ON CONFLICT DO NOTHING;
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(WAITERS)  # type: ignore[union-attr]
