"""The log of a run for people: dispatches, progress, stalls, status changes and failures; never a row per succeeded
item."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Literal

from psycopg.types.json import Jsonb

from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_value

# Equal failures of a run are one row. `stage`, `code` and `message` must be in scope where it is used.
FOLD = "sha256(convert_to(concat_ws(chr(10), stage, code, message), 'UTF8'))"
ADD_UP = """
ON CONFLICT (run_id, fold) WHERE fold IS NOT NULL DO UPDATE SET count = l.count + excluded.count,
    last_at = excluded.last_at, targets = CASE WHEN cardinality(l.targets) >= 5 THEN l.targets ELSE
        ARRAY(SELECT u.target FROM unnest(l.targets || excluded.targets) WITH ORDINALITY AS u(target, n)
              GROUP BY u.target ORDER BY min(u.n) LIMIT 5) END
"""
LINE = """
INSERT INTO run_log (run_id, at, level, message, event_id, data, fold)
VALUES (%s, ecluse_now(), %s, %s, %s, %s, %s)
ON CONFLICT (run_id, fold) WHERE fold IS NOT NULL DO NOTHING RETURNING id
"""
FAILURE = f"""
INSERT INTO run_log AS l (run_id, at, last_at, level, message, event_id, data, targets, fold)
SELECT run_id, now, now, 'error', message, event_id, jsonb_build_object('code', code), ARRAY[target], {FOLD}
FROM (SELECT %s::bigint AS run_id, %s::text AS stage, %s::text AS code, %s::text AS message, %s::text AS target,
             %s::text AS event_id, ecluse_now() AS now) failure {ADD_UP}
"""  # noqa: S608 - our own words


async def write(
    connection: Connection,
    run_id: int,
    message: str,
    *,
    level: Literal["info", "warning", "error"] = "info",
    event_id: str | None = None,
    once: str | None = None,
    **data: Any,
) -> bool:
    """Write a line to the run's log, with `data` as its fields. `once`: a key; if the run has a line with that key
    already, nothing is written. Return whether the line was written."""
    fold = None if once is None else sha256(f"once {once}".encode(errors="replace")).digest()
    line = (run_id, level, storable(message), event_id, Jsonb(data) if data else None, fold)
    return await fetch_value(connection, LINE, line) is not None


async def write_failure(
    connection: Connection, run_id: int, stage: str, code: str, message: str, target: str, event_id: str
) -> None:
    """Write the failure of one item to the run's log, or count it in the row of an equal failure (same stage, code and
    message)."""
    await connection.execute(FAILURE, (run_id, stage, code, storable(message), target, event_id))
