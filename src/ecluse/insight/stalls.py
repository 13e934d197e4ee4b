"""Search for open runs that make no progress, for lists of runs: cheaper and less exact than `waiting.why_run`."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows

# A run that has done nothing for this time makes no progress, in lists as on its page. Gates poll at least once a
# minute, and then store the progress that other runs have made for their run.
QUIET = timedelta(minutes=2)
LOOKED_AT = 10_000  # waiting items that are read per closed lane, at most

# When run `r` itself last made progress.
PROGRESS = """
greatest(r.created_at, r.started_at, (SELECT greatest(max(p.progress_at), max(p.ended_at)) FROM stages p
                                      WHERE p.run_id = r.id),
         (SELECT max(p.done_at) FROM claims p WHERE p.run_id = r.id))"""
# Only runs with a workflow: runs that are only items have no gate, and an item queued in a lane that moves is not
# stalled.
LATEST = f"""
SELECT r.id, {PROGRESS}, ecluse_now() FROM runs r WHERE r.id = ANY(%(runs)s) AND r.ended_at IS NULL AND r.orchestrated
"""  # noqa: S608 - the fragment above
# Starts from the closed lanes, of which there are few or none, and goes up to the runs in question.
CLOSED = """
WITH RECURSIVE lane AS MATERIALIZED (
    SELECT id, name, paused_reason, held_until, CASE WHEN trips > 0 THEN failing_since END AS down_since
    FROM lanes, (SELECT ecluse_now() AS now) clock
    WHERE paused_at IS NOT NULL OR held_until > now),
waiting AS (
    SELECT DISTINCT l.id AS lane_id, i.run_id AS id FROM lane l CROSS JOIN LATERAL (
        SELECT run_id FROM items WHERE lane_id = l.id AND tenant_id = %(tenant)s AND claim_id IS NULL
        LIMIT %(most)s) i
    UNION
    SELECT c.lane_id, w.waiter_run_id FROM waiting c JOIN run_waiters w ON w.run_id = c.id
    WHERE w.waiter_run_id IS NOT NULL)
SELECT DISTINCT ON (w.id) w.id, l.name, l.paused_reason, l.held_until, l.down_since
FROM waiting w JOIN lane l ON l.id = w.lane_id
WHERE w.id = ANY(%(runs)s) ORDER BY w.id, l.paused_reason IS NULL, l.name
"""


NOT_CLOSED = (None, None, None, None)


class Stall(NamedTuple):
    """Why a run makes no progress. `quiet_since`: its last progress, if that is QUIET or more ago. `lane`: a closed
    lane in which items of the run, or of a run that it waits for, are waiting; `paused_reason` or `held_until` say why
    it is closed."""

    quiet_since: datetime | None
    lane: str | None
    paused_reason: str | None
    held_until: datetime | None
    down_since: datetime | None = None  # of the vendor: no call has been answered since


def is_quiet(progress_at: datetime, now: datetime) -> bool:
    """Return True if the last progress of a run was QUIET or longer ago, so that it counts as making none."""
    return now - progress_at >= QUIET


async def stalls(connection: Connection, tenant: str, run_ids: Collection[int]) -> dict[int, Stall]:
    """Return, by run id, the open runs among these that have done nothing for QUIET, or that have items waiting in a
    closed lane, their own or of a run they wait for (LOOKED_AT items are read per lane). Other runs are left out."""
    if not run_ids:
        return {}
    given = {"runs": list(run_ids), "tenant": tenant, "most": LOOKED_AT}
    progress = await fetch_rows(connection, LATEST, given)
    quiet = {run_id: at for run_id, at, now in progress if is_quiet(at, now)}
    closed = {row[0]: row[1:] for row in await fetch_rows(connection, CLOSED, given)}
    return {run_id: Stall(quiet.get(run_id), *closed.get(run_id, NOT_CLOSED)) for run_id in {*quiet, *closed}}
