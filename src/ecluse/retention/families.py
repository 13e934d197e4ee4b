"""Deletion of runs: find the runs that are no longer needed, delete each in one commit and its rows in batches.

Related runs form a family and are deleted together: a run, the runs it started and its redrives. A family is kept while
one of its runs is open, too young or has something unsettled, or while a run that waited for one of them is open or too
young. Any other reason to keep that waiting run does not count: otherwise runs that overlap would keep each other for
ever.

The row of a run is deleted first, and its id is inserted into `pruning` in the same commit: no read finds the run any
more, and after a crash the next sweep continues with the ids in `pruning`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from ecluse.base.crash import crashpoint
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_column, fetch_rows
from ecluse.retention import workflows

SEEDS = 50  # families read in one statement

LIMITS = "unnest(%(flows)s::text[], %(befores)s::timestamptz[])"
# Why run `r` is kept, given the limit `k` of its flow; NULL: it may be deleted. A family gets its alphabetically first
# reason: the last branch, which only repeats that another run is kept, sorts last.
REASON = f"""CASE
    WHEN r.ended_at IS NULL THEN 'open'
    WHEN k.before IS NULL OR r.ended_at >= k.before THEN 'not old enough'
    WHEN EXISTS (SELECT 1 FROM effects e WHERE e.run_id = r.id AND e.state IN ('sending', 'unknown'))
        THEN 'a write in doubt'
    WHEN EXISTS (SELECT 1 FROM events_outbox e WHERE e.aggregate = 'run:' || r.id AND e.published_seq IS NULL)
        THEN 'an event not published yet'
    WHEN EXISTS (
        SELECT 1 FROM schedules s WHERE s.id = r.schedule_id AND s.last_run_id = r.id AND s.deleted_at IS NULL)
        THEN 'the last run of its schedule'
    WHEN r.orchestrated AND EXISTS (
        SELECT 1 FROM dbos.workflow_status w WHERE w.workflow_uuid = r.tenant_id || '/' || r.event_key
          AND w.status IN {workflows.NOT_OVER}) THEN 'its workflow is not over'
    -- REPETITIONS (engine/runs/start.py) finds the open repetition of a key by walking up from the key's first run
    WHEN (r.tenant_id, regexp_replace(r.event_key, '-retry-[0-9]+$', '')) IN (
        SELECT o.tenant_id, regexp_replace(o.event_key, '-retry-[0-9]+$', '') FROM runs o
        WHERE o.ended_at IS NULL AND o.event_key ~ '-retry-[0-9]+$') THEN 'a repetition of it is open'
    WHEN EXISTS (
        SELECT 1 FROM run_waiters w JOIN runs x ON x.id = w.waiter_run_id
        LEFT JOIN {LIMITS} AS j(flow, before) ON j.flow = x.flow
        WHERE w.run_id = r.id AND (x.ended_at IS NULL OR j.before IS NULL OR x.ended_at >= j.before))
        THEN 'waited for by a run that is kept'
    END"""  # noqa: S608 - our own words

ROOTS = """
SELECT id, ended_at FROM runs
WHERE flow = %(flow)s AND parent_run_id IS NULL AND ended_at < %(before)s AND (ended_at, id) > (%(after)s, %(id)s)
ORDER BY ended_at, id LIMIT %(limit)s
"""
FAMILIES = f"""
WITH RECURSIVE family AS (
    SELECT seed, seed AS id FROM unnest(%(seeds)s::bigint[]) AS t(seed)
    UNION
    SELECT f.seed, c.id FROM family f CROSS JOIN LATERAL (
        SELECT c.id FROM runs c WHERE c.parent_run_id = f.id OFFSET 0) c)
SELECT array_agg(r.id) AS runs, min({REASON}) AS kept
FROM family f CROSS JOIN LATERAL (SELECT * FROM runs r WHERE r.id = f.id OFFSET 0) r
LEFT JOIN {LIMITS} AS k(flow, before) ON k.flow = r.flow GROUP BY f.seed
"""  # noqa: S608 - the fragments above
# The reason is evaluated again under the lock: a redrive or a waiter may have been added since the family was read.
LOCK = f"""
SELECT r.id FROM runs r LEFT JOIN {LIMITS} AS k(flow, before) ON k.flow = r.flow
WHERE r.id = ANY(%(runs)s) AND r.ended_at IS NOT NULL AND (%(needed_too)s OR {REASON} IS NULL)
ORDER BY r.id FOR UPDATE OF r SKIP LOCKED
"""  # noqa: S608 - the fragments above
# A statement after the lock sees every child: the lock keeps further ones from being inserted.
PARENTS = "SELECT DISTINCT parent_run_id FROM runs WHERE parent_run_id = ANY(%(runs)s) AND id <> ALL(%(runs)s)"
NOTE = "INSERT INTO pruning (run_id) SELECT unnest(%(runs)s::bigint[])"
TALLY = """
INSERT INTO pruned_runs AS p (schedule_id, status, runs)
SELECT schedule_id, CASE state WHEN 'cancelled' THEN state ELSE status END, count(*) FROM runs
WHERE id = ANY(%(runs)s) AND schedule_id IS NOT NULL GROUP BY 1, 2
ON CONFLICT (schedule_id, status) DO UPDATE SET runs = p.runs + excluded.runs
"""
# Rows with a foreign key to the run, and rows that would contradict its absence. Flow tables with a key cascade.
WITH_THE_RUN = {
    "dbos.workflow_status": workflows.OF_RUNS,
    "schedule_slots": "DELETE FROM schedule_slots WHERE run_id = ANY(%(runs)s)",
    "events_outbox": "DELETE FROM events_outbox WHERE aggregate = ANY(%(aggregates)s)",
    "stages": "DELETE FROM stages WHERE run_id = ANY(%(runs)s)",
    "runs": "DELETE FROM runs WHERE id = ANY(%(runs)s)",
}
LEFT_BEHIND = (
    "items",
    "claims",
    "attempts",
    "effects",
    "outcomes",
    "run_log",
    "workflow_logs",
    "run_waiters",
)
BATCH = """
DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {column} = ANY(%(runs)s) LIMIT %(limit)s))
"""
NOTED = "SELECT run_id FROM pruning ORDER BY run_id LIMIT %s"
DONE = "DELETE FROM pruning WHERE run_id = ANY(%s)"


@dataclass(frozen=True)
class Limits:
    """Per flow, the instant before which a run must have ended to be deleted. Runs of other flows are kept."""

    before: Mapping[str, datetime]

    def given(self) -> dict[str, list[object]]:
        """Return the limits as query parameters of the fragment LIMITS."""
        return {"flows": list(self.before), "befores": list(self.before.values())}


class Family(NamedTuple):
    """The ids of the runs of a family, and the reason why it is kept; None: it may be deleted."""

    runs: list[int]
    kept: str | None


async def families(connection: Connection, flows: Sequence[str], limits: Limits) -> AsyncIterator[list[Family]]:
    """Yield pages of the families whose first run is of one of these flows and ended before the flow's limit, flow by
    flow, in the order in which the first runs ended. Families that are kept are included."""
    for flow in flows:
        place: dict[str, Any] = {"after": "-infinity", "id": 0}
        more = True
        while more:
            given = {"flow": flow, "before": limits.before[flow], "limit": SEEDS, **place}
            roots = await fetch_rows(connection, ROOTS, given)
            seeds = [run_id for run_id, _ in roots]
            yield await fetch_all(connection, Family, FAMILIES, {"seeds": seeds, **limits.given()}) if seeds else []
            if more := len(roots) == SEEDS:
                place = {"after": roots[-1][1], "id": roots[-1][0]}


async def delete_runs(
    connection: Connection, run_ids: Collection[int], limits: Limits, *, needed_too: bool = False
) -> tuple[list[int], Counter[str]]:
    """Delete, in one commit, the runs among `run_ids` that still may be deleted, and record them in `pruning`. Return
    their ids, and the number of deleted rows by table. Runs that another session has locked, and parents of runs that
    stay, are not deleted. `needed_too`: delete every run that has ended, whatever its age and whatever still needs
    it."""
    async with connection.transaction():
        given = {"runs": list(run_ids), "needed_too": needed_too, **limits.given()}
        locked = await fetch_column(connection, LOCK, given)
        going = sorted(set(locked).difference(await fetch_column(connection, PARENTS, {"runs": locked})))
        rows: Counter[str] = Counter()
        if going:
            these = {"runs": going, "aggregates": [f"run:{run}" for run in going]}
            await connection.execute(NOTE, these)
            await connection.execute(TALLY, these)
            for table, statement in WITH_THE_RUN.items():
                rows[table] = (await connection.execute(statement, these)).rowcount
        crashpoint("in prune")
    crashpoint("after prune")
    return going, rows


async def noted(connection: Connection, limit: int) -> list[int]:
    """Return the ids of at most `limit` deleted runs of which rows may be left (those recorded in `pruning`)."""
    return await fetch_column(connection, NOTED, (limit,))


def left_behind(tables: Sequence[str]) -> list[tuple[str, str]]:
    """Return the tables that may have rows of a deleted run, each with its column of run ids, in the order of deletion.
    `tables`: the flows' own tables."""
    return [*((table, "run_id") for table in (*LEFT_BEHIND, *tables)), ("run_waiters", "waiter_run_id")]


async def delete_left_behind(
    connection: Connection, run_ids: Sequence[int], table: str, column: str, limit: int
) -> int:
    """Delete at most `limit` rows of deleted runs from one table, found by the run ids in `column`; return the number
    of deleted rows."""
    cursor = await connection.execute(
        BATCH.format(table=table, column=column),  # type: ignore[arg-type, unused-ignore]
        {"runs": list(run_ids), "limit": limit},
    )
    return cursor.rowcount


async def done(connection: Connection, run_ids: Sequence[int]) -> None:
    """Remove these deleted runs from `pruning`. The caller has made sure that none of their rows is left."""
    await connection.execute(DONE, (list(run_ids),))
