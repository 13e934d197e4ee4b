"""SQL fragments that exempt rows deleted by retention. Rows of a run in `pruning` are being deleted; rows that are
older than `pruned.before` of their kind may be deleted. All other rows are checked."""

from __future__ import annotations

from typing import Any

import psycopg


def before(kind: str) -> str:
    """Return an SQL expression for the instant before which retention may have deleted rows of this kind."""
    return f"coalesce((SELECT before FROM pruned WHERE kind = '{kind}'), '-infinity')"  # noqa: S608 - our own words


def remains(run_id: str) -> str:
    """Return an SQL condition that is true if the rows of this run are not being deleted."""
    return f"NOT EXISTS (SELECT 1 FROM pruning p WHERE p.run_id = {run_id})"  # noqa: S608 - our own words


def runs_before(connection: psycopg.Connection[dict[str, Any]]) -> float:
    """Return the instant, in seconds since the epoch, before which ended runs may have been deleted, with their writes;
    minus infinity if retention has deleted none."""
    row = connection.execute(
        "SELECT extract(epoch FROM before)::float8 AS at FROM pruned WHERE kind = 'runs'"
    ).fetchone()
    return float("-inf") if row is None else float(row["at"])
