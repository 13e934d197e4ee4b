"""Waiters: which run is waited for, and by whom: another run, for one of its targets, or a person. These rows are the
tree of a run: figures about a parent's work include the runs that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import as_json

PUT = """
INSERT INTO run_waiters (run_id, waiter_run_id, target)
SELECT run_id, waiter_run_id, target
FROM jsonb_to_recordset(%s::jsonb) AS w(run_id bigint, waiter_run_id bigint, target text)
ORDER BY run_id, waiter_run_id ON CONFLICT DO NOTHING
"""

# The open runs that `run` waits for, directly or through other open runs, and itself.
TREE = """
tree AS MATERIALIZED (
    SELECT %(run)s::bigint AS id
    UNION
    SELECT r.id FROM tree t JOIN run_waiters w ON w.waiter_run_id = t.id
    JOIN runs r ON r.id = w.run_id AND r.ended_at IS NULL)"""
# Calls in flight by run, and `above` each of these runs the runs that wait for it. Read from the busy runs upwards: few
# calls are in flight, however many runs there are. A claim without a lane holds items of another claim's calls.
IN_FLIGHT = """
busy AS MATERIALIZED (
    SELECT run_id, sum(in_flight)::int AS calls, min(taken_at) AS since FROM claims
    WHERE in_flight > 0 AND lane_id IS NOT NULL GROUP BY run_id),
above AS MATERIALIZED (
    SELECT run_id AS busy_run, run_id AS id FROM busy
    UNION
    SELECT a.busy_run, w.waiter_run_id FROM above a JOIN run_waiters w ON w.run_id = a.id
    WHERE w.waiter_run_id IS NOT NULL)"""


# Condition on a run `c`: no person and no open run waits for it.
ABANDONED = """
NOT EXISTS (
    SELECT 1 FROM run_waiters o LEFT JOIN runs r ON r.id = o.waiter_run_id WHERE o.run_id = c.id
    AND (o.waiter_run_id IS NULL OR (r.id IS NOT NULL AND r.ended_at IS NULL)))"""
# In the transaction that ends the waiting runs by force: after its commit, nothing more of the marked runs is claimed.
MARK_ABANDONED = f"""
UPDATE runs SET ending = true WHERE id IN (
    SELECT c.id FROM runs c WHERE c.id IN (SELECT w.run_id FROM run_waiters w WHERE w.waiter_run_id = ANY(%s))
      AND c.ended_at IS NULL AND {ABANDONED} ORDER BY c.id FOR NO KEY UPDATE)
"""  # noqa: S608 - the fragment above


class Waiter(NamedTuple):
    """A run that is waited for, and its waiter. `waiter_run_id` None: a person waits. `target`: the target of the
    waiting run for which it waits."""

    run_id: int
    waiter_run_id: int | None
    target: str = ""


async def put_waiters(connection: Connection, waiters: Sequence[Waiter]) -> None:
    """Insert waiters, in the transaction that starts the awaited runs or finds them running. Waiters that exist already
    are left unchanged."""
    if waiters:
        await connection.execute(PUT, (as_json([one._asdict() for one in waiters]),))
