"""Chains of redrives: an ended run, the runs that repeat targets of it, and the latest outcomes of its targets. A
redrive may be redriven, too: all of them belong to the first run of their chain."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_rows
from ecluse.engine.runs.outcomes import CANCELLED

CHAIN = """
WITH RECURSIVE chain AS (
    SELECT id AS root, id FROM unnest(%(runs)s::bigint[]) AS r(id)
    UNION ALL SELECT c.root, r.id FROM chain c JOIN runs r ON r.redrive_of = c.id)
"""
REDRIVES = f"{CHAIN} SELECT root, id FROM chain WHERE id <> root ORDER BY root, id"  # noqa: S608
# The latest outcome of a target counts, but a cancelled one does not replace any other.
STANDING = f"""
{CHAIN}
SELECT root, count(*)::int AS selected, (count(*) FILTER (WHERE outcome = 'successful'))::int AS successful,
       (count(*) FILTER (WHERE outcome = 'failed'))::int AS failed,
       (count(*) FILTER (WHERE outcome = 'ignored'))::int AS ignored,
       (count(*) FILTER (WHERE outcome = 'failed' AND error_code = %(cancelled)s))::int AS cancelled
FROM (SELECT DISTINCT ON (c.root, o.target) c.root, o.outcome, o.error_code
      FROM chain c JOIN outcomes o ON o.run_id = c.id WHERE o.outcome IS NOT NULL
      ORDER BY c.root, o.target, (o.outcome, o.error_code) IS NOT DISTINCT FROM ('failed', %(cancelled)s::text),
               c.id DESC) latest
GROUP BY root
"""  # noqa: S608 - the fragment above
FIRST = """
WITH RECURSIVE up AS (
    SELECT id AS start, id, redrive_of FROM runs WHERE id = ANY(%s)
    UNION ALL SELECT u.start, r.id, r.redrive_of FROM up u JOIN runs r ON r.id = u.redrive_of)
SELECT start, id FROM up WHERE redrive_of IS NULL
"""


async def redrives_of(connection: Connection, run_ids: Collection[int]) -> dict[int, list[int]]:
    """Return the redrives of each of these runs, by run id, the oldest first, including redrives of redrives. Runs
    without redrives are left out."""
    found: dict[int, list[int]] = {}
    if run_ids:
        for root, run_id in await fetch_rows(connection, REDRIVES, {"runs": list(run_ids)}):
            found.setdefault(root, []).append(run_id)
    return found


async def standing(connection: Connection, run_ids: Collection[int]) -> dict[int, dict[str, Any]]:
    """Count the targets of each of these runs by their latest outcome, over the run and its redrives; return the counts
    by run id. A cancelled outcome does not replace an earlier one."""
    if not run_ids:
        return {}
    rows = await fetch_all(connection, dict, STANDING, {"runs": list(run_ids), "cancelled": CANCELLED})
    return {row.pop("root"): row for row in rows}


async def first_of(connection: Connection, run_ids: Collection[int]) -> dict[int, int]:
    """Return the first run in the chain of each of these runs, by run id; for a run that is not a redrive, the run
    itself."""
    return dict(await fetch_rows(connection, FIRST, (list(run_ids),)))
