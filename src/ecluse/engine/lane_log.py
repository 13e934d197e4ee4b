"""What happens to a lane, in the log of every open run that needs it, itself or by a run that it waits for."""

from __future__ import annotations

from ecluse.base.text import storable
from ecluse.db.connect import Connection

# Set-based: a paused lane may have thousands of runs.
TELL = """
WITH RECURSIVE concerned AS (
    SELECT DISTINCT i.run_id AS id FROM lanes l JOIN items i ON i.lane_id = l.id AND i.claim_id IS NULL
    WHERE l.name = %(lane)s
    UNION
    SELECT w.waiter_run_id FROM concerned c JOIN run_waiters w ON w.run_id = c.id WHERE w.waiter_run_id IS NOT NULL)
INSERT INTO run_log (run_id, at, level, message, data)
SELECT r.id, ecluse_now(), 'warning', %(message)s, jsonb_build_object('lane', %(lane)s::text)
FROM concerned c JOIN runs r ON r.id = c.id AND r.ended_at IS NULL ORDER BY r.id
"""


async def tell_runs(connection: Connection, lane: str, message: str) -> None:
    """Tenants read it: no operator is named."""
    await connection.execute(TELL, {"lane": lane, "message": storable(message)})
