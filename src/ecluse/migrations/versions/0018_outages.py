"""Vendors that are down: since when, shown by which items, and attempts that do not count as executions; paused lanes
that stop the clock of the stages that need them."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"

LANES = """
ALTER TABLE lanes
    DROP COLUMN break_for,  -- pauses grow: the program knows by how much
    ADD COLUMN trips            integer NOT NULL DEFAULT 0,
    ADD COLUMN failing_since    timestamptz,
    ADD COLUMN failing          bigint[] NOT NULL DEFAULT '{}',
    ADD COLUMN last_failure     text,
    ADD COLUMN clock_stopped_at timestamptz,
    ADD CONSTRAINT lanes_clock CHECK (clock_stopped_at IS NULL OR paused_at IS NOT NULL);
UPDATE lanes SET failures = 0 WHERE failures > 0;
COMMENT ON COLUMN lanes.trips IS 'how often the breaker has opened in this row of failures; above 0 the vendor is down';
COMMENT ON COLUMN lanes.failing_since IS 'the first failure of this row';
COMMENT ON COLUMN lanes.failing IS 'different items that failed in this row, up to one more than break_after';
COMMENT ON COLUMN lanes.last_failure IS 'what the vendor said, or did not say, the last time';
COMMENT ON COLUMN lanes.clock_stopped_at IS 'paused, and since then the time of the stages that need it stands still';
"""

STAGES = """
ALTER TABLE stages
    ADD COLUMN clock_stopped  interval NOT NULL DEFAULT '0',
    ADD COLUMN clock_moved_at timestamptz;
COMMENT ON COLUMN stages.clock_stopped IS 'by how much its deadline was moved: its clock stood still for so long';
COMMENT ON COLUMN stages.clock_moved_at IS 'when its deadline was last moved';

CREATE VIEW stage_lanes AS
SELECT s.run_id, s.stage, i.lane_id
FROM stages s JOIN items i ON i.run_id = s.run_id AND i.stage = s.stage AND i.claim_id IS NULL
WHERE s.ended_at IS NULL
UNION ALL
SELECT s.run_id, s.stage, i.lane_id
FROM stages s JOIN run_waiters w ON w.waiter_run_id = s.run_id
JOIN items i ON i.run_id = w.run_id AND i.claim_id IS NULL
WHERE s.ended_at IS NULL AND s.units IS NOT NULL;
COMMENT ON VIEW stage_lanes IS
    'open stages and the lanes they need, a row per waiting item: their own, or of the runs that they wait for';

-- while no lane is paused that way, nothing else is read
CREATE FUNCTION clock_stopped(run bigint, stage_name text) RETURNS boolean LANGUAGE sql STABLE AS
$$ SELECT CASE WHEN EXISTS (SELECT 1 FROM public.lanes WHERE clock_stopped_at IS NOT NULL) THEN EXISTS (
       SELECT 1 FROM public.stage_lanes n JOIN public.lanes l ON l.id = n.lane_id AND l.clock_stopped_at IS NOT NULL
       WHERE n.run_id = run AND n.stage = stage_name) ELSE false END $$;
CREATE FUNCTION clock_stood(run bigint) RETURNS interval LANGUAGE sql STABLE AS
$$ SELECT coalesce(sum(s.clock_stopped + coalesce((
       SELECT max(public.ecluse_now() - greatest(l.clock_stopped_at, s.started_at, s.clock_moved_at))
       FROM public.lanes l WHERE l.clock_stopped_at IS NOT NULL AND s.ended_at IS NULL AND EXISTS (
           SELECT 1 FROM public.stage_lanes n
           WHERE n.lane_id = l.id AND n.run_id = s.run_id AND n.stage = s.stage)), '0')), '0')
   FROM public.stages s WHERE s.run_id = run $$;
COMMENT ON FUNCTION clock_stood IS 'for how long the clocks of the run''s stages have stood still, up to now';
COMMENT ON FUNCTION clock_stopped IS 'a lane that the stage needs is paused, and its time with it';
"""

ATTEMPTS = """
ALTER TABLE attempts ADD COLUMN outage boolean;
COMMENT ON COLUMN attempts.outage IS 'the vendor was down: it is no execution, and the budget is as before';
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (LANES, STAGES, ATTEMPTS):
        connection.execute(part)  # type: ignore[union-attr]
