"""Release of claims whose holder is gone or never learned of them: their items are reopened, and the claims get a
higher fence, so that no result of the former holder is stored."""

from __future__ import annotations

from collections.abc import Sequence

from ecluse.db.connect import Connection

# Reopens the items claimed by replicas that are no longer live (`replica` NULL, for `cluster/take_over.py`), or by this
# replica under claims that are not `known`. A crash is counted if the holder died. Returns no row if no item was
# reopened; else the number of items, and the ids of items with at least `least` crashes whose holder died: they may be
# suspects.
RELEASE = """
WITH orphan AS (
    SELECT c.id, c.run_id, c.stage, c.apart, CASE r.state WHEN 'dead' THEN r.ended_at END AS died_at
    FROM claims c LEFT JOIN replicas r ON r.id = c.replica_id
    WHERE c.in_flight > 0 AND CASE WHEN %(replica)s::text IS NULL THEN r.state IS DISTINCT FROM 'live'
        ELSE r.state = 'live' AND c.replica_id = %(replica)s AND c.id <> ALL (%(known)s::bigint[]) END
    ORDER BY c.id FOR UPDATE OF c SKIP LOCKED),
opened AS (
    UPDATE items i SET claim_id = NULL, crashes = i.crashes + (o.died_at IS NOT NULL)::int,
        first_crash_at = coalesce(i.first_crash_at, o.died_at),
        group_deaths = i.group_deaths + (o.died_at IS NOT NULL AND o.apart IS NOT DISTINCT FROM 'group')::int,
        solo_deaths = i.solo_deaths + (o.died_at IS NOT NULL AND o.apart IS NOT DISTINCT FROM 'alone')::int
    FROM orphan o
    WHERE i.run_id = o.run_id AND i.stage = o.stage AND i.claim_id = o.id AND i.status = 'open'
    RETURNING o.id, i.id AS item_id, o.died_at IS NOT NULL AND i.crashes >= %(least)s AS suspicious),
fenced AS (
    UPDATE claims c SET fence = c.fence + 1,
        released = c.released + (SELECT count(*) FROM opened WHERE opened.id = c.id)
    FROM orphan o WHERE c.id = o.id)
SELECT count(*), pg_notify('ecluse_work', ''), array_agg(item_id) FILTER (WHERE suspicious)
FROM opened HAVING count(*) > 0
"""


async def release_unknown(connection: Connection, *, replica: str, known: Sequence[int]) -> None:
    """Release this replica's claims whose ids are not in `known`. `known`: the claims of the items that its worker
    holds; the response to any other claim was lost with its connection."""
    await connection.execute(RELEASE, {"replica": replica, "known": known, "least": 0})
