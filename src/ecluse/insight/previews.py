"""Preview of the effects of ending a run, for the person who is about to end it."""

from __future__ import annotations

from typing import Any

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all
from ecluse.engine.model.flow import Flow, Run

# A target is finished if `outcomes.SETTLE` will find it so: it has its outcome, an item of it has failed or is ignored,
# or it has been through a last stage. A target that another run works on is in flight if that run has calls in flight.
# A claim without a lane holds items of another claim's calls.
PREVIEW = """
WITH children AS MATERIALIZED (
    SELECT c.id, w.target, EXISTS (
        SELECT 1 FROM run_waiters o LEFT JOIN runs r ON r.id = o.waiter_run_id
        WHERE o.run_id = c.id AND o.waiter_run_id IS DISTINCT FROM %(run)s
          AND (o.waiter_run_id IS NULL OR (r.id IS NOT NULL AND r.ended_at IS NULL))) AS goes_on
    FROM run_waiters w JOIN runs c ON c.id = w.run_id AND c.ended_at IS NULL WHERE w.waiter_run_id = %(run)s),
in_hand AS MATERIALIZED (
    SELECT run_id, coalesce(sum(in_flight) FILTER (WHERE lane_id IS NOT NULL), 0)::int AS calls FROM claims
    WHERE in_flight > 0 AND (run_id = %(run)s OR run_id IN (SELECT id FROM children)) GROUP BY run_id),
items_of AS (
    SELECT target, bool_or(status IN ('failed', 'ignored'))
               OR (bool_and(status = 'succeeded') AND bool_or(stage = ANY(%(last)s))) AS finished,
           bool_or(status = 'open' AND claim_id IS NOT NULL) AS in_hand
    FROM items WHERE run_id = %(run)s AND target <> '' GROUP BY target),
targets AS (
    SELECT o.outcome IS NOT NULL OR coalesce(i.finished, false) AS finished,
           coalesce(i.in_hand, false) OR EXISTS (
               SELECT 1 FROM children c JOIN in_hand h ON h.run_id = c.id WHERE c.target = o.target) AS in_hand
    FROM outcomes o LEFT JOIN items_of i ON i.target = o.target WHERE o.run_id = %(run)s)
SELECT r.status, r.state, r.ended_at IS NOT NULL AS ended, r.selected,
       (SELECT count(*) FROM targets WHERE finished)::int AS finished,
       (SELECT count(*) FROM targets WHERE NOT finished AND in_hand)::int AS in_flight,
       (SELECT count(*) FROM targets WHERE NOT finished AND NOT in_hand)::int AS waiting,
       (SELECT count(*) FROM children WHERE NOT goes_on)::int AS children_that_end,
       (SELECT count(*) FROM children WHERE goes_on)::int AS children_that_go_on,
       coalesce((SELECT sum(calls) FROM in_hand WHERE run_id NOT IN (SELECT id FROM children WHERE goes_on)), 0)::int
           AS calls_in_flight
FROM runs r WHERE r.id = %(run)s
"""


async def preview_end(connection: Connection, flow: Flow, run: Run) -> dict[str, Any]:
    """Return the effects of ending the run now, as counts: targets that keep their outcome (`finished`); targets that
    would be cancelled (`in_flight`, `waiting`); runs that would end with this one (`children_that_end`), and runs that
    would continue because other runs or callers wait for them (`children_that_go_on`); calls in flight. Ends nothing.
    """
    (row,) = await fetch_all(connection, dict, PREVIEW, {"run": run.id, "last": flow.last_stages})
    return {"run_id": str(run.id), "flow": run.flow, **row}
