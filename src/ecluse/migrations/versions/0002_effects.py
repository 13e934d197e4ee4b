"""Effects: one row per intended write at a vendor, committed before it is sent; outcomes whose write may exist although
they failed; the execution budget of a stage; a view of unclaimed work by event name."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

EFFECTS = """
CREATE TABLE effects (
    id            uuid PRIMARY KEY,
    tenant_id     text NOT NULL,
    run_id        bigint NOT NULL,
    item_id       bigint NOT NULL,
    stage         text NOT NULL,
    key           text NOT NULL,
    target        text NOT NULL,
    round         smallint NOT NULL,
    class         text NOT NULL CHECK (class IN ('C1', 'C2')),
    state         text NOT NULL CHECK (state IN
                  ('planned', 'sending', 'unknown', 'applied', 'rejected', 'not_applied', 'conflict')),
    wanted        jsonb NOT NULL,
    before        jsonb,
    result        jsonb,
    error         text,
    sends         smallint NOT NULL,
    claim_id      bigint NOT NULL,
    quiet         interval NOT NULL,
    first_send_at timestamptz,
    last_send_at  timestamptz,
    settled_at    timestamptz,
    probe_at      timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT effects_sent CHECK ((sends = 0) = (last_send_at IS NULL) AND (state <> 'sending' OR sends > 0)),
    CONSTRAINT effects_settled CHECK ((state IN ('planned', 'sending', 'unknown')) = (settled_at IS NULL))
);
CREATE INDEX effects_run ON effects (run_id);
CREATE INDEX effects_open ON effects (probe_at) WHERE state IN ('sending', 'unknown') AND class = 'C2';
COMMENT ON TABLE effects IS 'wanted writes at vendors: the intent is committed before every send';
COMMENT ON COLUMN effects.id IS 'computed from tenant, event key, stage, key and round; the vendor''s idempotency key';
COMMENT ON COLUMN effects.class IS 'C1: the vendor honours the key; C2: absolute write that can be read back';
COMMENT ON COLUMN effects.state IS
    'planned: nothing is under way; sending: may be applied; unknown: sent, without a definite answer';
COMMENT ON COLUMN effects.quiet IS 'from the last send: until then nothing may be concluded from looking';

ALTER TABLE outcomes ADD COLUMN effect_may_exist boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN outcomes.effect_may_exist IS 'failed, but a write of it has or may have been applied: see effects';
"""

WORK = """
ALTER TABLE stages ADD COLUMN budget smallint;
COMMENT ON COLUMN stages.budget IS 'executions of one item and round at most';

CREATE VIEW unclaimed AS
SELECT i.flow || '/' || i.stage AS event, l.name AS lane, count(*) AS items, min(i.due_at) AS oldest_due_at,
       ecluse_now() - min(i.due_at) AS age
FROM items i JOIN lanes l ON l.id = i.lane_id WHERE i.claim_id IS NULL AND i.due_at <= ecluse_now() GROUP BY 1, 2;
COMMENT ON VIEW unclaimed IS 'dispatched work that is due and that nobody has picked up, by event name';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (EFFECTS, WORK):
        connection.execute(part)  # type: ignore[union-attr]
