"""Log lines about a lane, written to every open run that needs it, directly or through a run that it waits for."""

from __future__ import annotations

from typing import Literal

from ecluse.base.text import storable
from ecluse.db.connect import Connection

# Reads every waiting item of the lane, possibly a million: no commit of results may wait for it.
LOG = """
WITH RECURSIVE concerned AS (
    SELECT n.run_id AS id FROM lanes l CROSS JOIN LATERAL (
        SELECT i.run_id FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL
        UNION SELECT c.run_id FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0) n
    WHERE l.name = %(lane)s
    UNION
    SELECT w.waiter_run_id FROM concerned c JOIN run_waiters w ON w.run_id = c.id WHERE w.waiter_run_id IS NOT NULL)
INSERT INTO run_log (run_id, at, level, message, data)
SELECT r.id, ecluse_now(), %(level)s,
       CASE WHEN %(tenant)s::text <> r.tenant_id THEN %(others)s ELSE %(message)s END,
       jsonb_build_object('lane', %(lane)s::text)
FROM concerned c JOIN runs r ON r.id = c.id AND r.ended_at IS NULL ORDER BY r.id
"""


async def log_to_runs(
    connection: Connection,
    lane: str,
    level: Literal["info", "warning", "error"],
    message: str,
    tenant: str | None = None,
    others: str | None = None,
) -> None:
    """Write the message to the log of each open run that has items in the lane, or waits for a run that has. Tenants
    read it: it must not name an operator. A message that quotes a vendor's answer is for the `tenant` of that call;
    runs of other tenants get `others` instead."""
    given = {"lane": lane, "level": level, "message": storable(message), "tenant": tenant, "others": others}
    await connection.execute(LOG, given)
