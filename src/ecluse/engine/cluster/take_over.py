"""Take-over: reopen the items that dead workers held, and mark the items that may have killed a worker
(`work/suspects.py` decides which)."""

from __future__ import annotations

from typing import Any

import psycopg
import structlog

from ecluse.engine.work.release import RELEASE
from ecluse.engine.work.suspects import POINTED_CRASHES, Evidence, judge

log = structlog.get_logger(__name__)

EVIDENCE = """
SELECT i.id, i.crashes, count(r.id), i.group_deaths, i.solo_deaths
FROM items i LEFT JOIN replicas r
  ON r.state = 'dead' AND r.ended_at >= i.first_crash_at AND i.flow || '/' || i.stage = ANY(r.work)
     AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.replica_id = r.id AND c.apart = 'alone' AND c.fence > 1)
WHERE i.id = ANY(%s) GROUP BY i.id
"""
MARK = """
UPDATE items i SET suspicion = t.suspicion FROM unnest(%s::bigint[], %s::smallint[]) AS t(id, suspicion)
WHERE i.id = t.id AND i.suspicion <> t.suspicion
"""


def take_over(connection: psycopg.Connection[tuple[Any, ...]]) -> int:
    """Reopen the items held by workers that are no longer live, and judge which of them are suspects, in one
    transaction, so that no suspect is claimed before it is marked. Return the number of reopened items. Blocks."""
    with connection.transaction():
        gone = {"replica": None, "known": None, "least": POINTED_CRASHES}
        released = connection.execute(RELEASE, gone).fetchone()
        if released is None:
            return 0
        items, _, to_judge = released
        if to_judge:
            rows = connection.execute(EVIDENCE, (to_judge,)).fetchall()
            verdicts = {item: judge(Evidence(*seen)) for item, *seen in rows}
            connection.execute(MARK, (list(verdicts), list(verdicts.values())))
            if suspected := {item: verdict.name.lower() for item, verdict in verdicts.items() if verdict}:
                log.warning("suspects: items marked that may crash workers", items=suspected)
    return int(items)
